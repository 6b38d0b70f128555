# SPDX-License-Identifier: Apache-2.0
"""`hileval` and `python -m hileval`."""

from typing import NoReturn

from hileval.cli import app
from hileval.command import run


def main() -> NoReturn:
    """Run the command line."""
    run(app)


if __name__ == "__main__":
    main()
