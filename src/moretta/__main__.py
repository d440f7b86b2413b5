"""`python -m moretta` is `moretta`."""

from moretta.commands.main import main

if __name__ == "__main__":
    main()
