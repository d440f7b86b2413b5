"""The process itself, also ``python -m moretta.edge``; its parent uses `moretta.engines.child`."""

import sys

from moretta.errors import MissingExtra


def main() -> None:
    """Run one silo on standard input and output, until they end."""
    try:
        from moretta.protocols.baffle.edge.host import main as serve
    except MissingExtra as error:
        sys.exit(f"moretta.edge: {error}")
    serve()


if __name__ == "__main__":
    main()
