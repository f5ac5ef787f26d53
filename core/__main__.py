"""``python -m draftpair``: the command line."""

from draftpair.cli import main

if __name__ == "__main__":
    main()
