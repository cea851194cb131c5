"""`python -m draftmill`, which is what torchrun starts."""

from draftmill.cli import main

if __name__ == "__main__":
    main()
