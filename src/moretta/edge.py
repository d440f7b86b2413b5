"""``python -m moretta.edge``: one silo that only runs its model forward; who runs it speaks `moretta.engines.pipe`."""

import sys

from moretta.errors import MissingExtra

if __name__ == "__main__":
    try:
        from moretta.protocols.baffle.edge.host import main
    except MissingExtra as error:
        sys.exit(f"moretta.edge: {error}")
    main()
