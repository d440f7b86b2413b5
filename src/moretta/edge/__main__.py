"""``python -m moretta.edge``: one silo that only runs its model forward; who runs it speaks `moretta.edge.wire`."""

import sys

from moretta.errors import MissingExtra

if __name__ == "__main__":
    try:
        from moretta.edge.host import main
    except MissingExtra as error:
        sys.exit(f"moretta.edge: {error}")
    main()
