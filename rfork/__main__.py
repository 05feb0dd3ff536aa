"""``python -m rfork`` is the `rfork` command."""

from rfork.cli.app import main

if __name__ == "__main__":
    main()
