"""`hilgate` and `python -m hilgate`."""

from __future__ import annotations

from hilgate.cli.app import run


def main() -> None:
    """Run the command line and exit with one of the statuses of `hilgate.errors.Exit`."""
    run()


if __name__ == "__main__":
    main()
