"""``python -m moretta.edge``: one silo that only runs its model forward (`moretta.protocols.baffle.edge`)."""

from moretta.protocols.baffle.edge.__main__ import main

if __name__ == "__main__":
    main()
