"""``python -m fullrank``: the command line."""

from fullrank.cli import main

if __name__ == "__main__":
    main()
