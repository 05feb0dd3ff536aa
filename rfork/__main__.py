"""Entry point of ``python -m rfork``: the `rfork` command."""

from rfork.cli.app import main

if __name__ == "__main__":
    main()
