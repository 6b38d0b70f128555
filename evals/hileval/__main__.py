# SPDX-License-Identifier: Apache-2.0
"""`hileval` and `python -m hileval`. `compare` works where SciPy is and nothing else of ours."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    if sys.argv[1:2] == ["compare"]:
        from hileval import compare

        sys.exit(compare.main(sys.argv[2:]))
    try:
        from hileval.cli import app
        from hileval.command import run
    except ModuleNotFoundError as error:
        sys.exit(_only_compare(str(error.name)))
    run(app)


def _only_compare(missing: str) -> int:
    """Tell a user that the gates' packages are not installed; returns the exit status."""
    asked_for_help = sys.argv[1:] in ([], ["--help"])
    stream = sys.stdout if asked_for_help else sys.stderr
    stream.write(
        f"{'' if asked_for_help else 'error: '}without {missing} there is one command: hileval compare BEFORE AFTER\n"
        "  to do: hileval compare --help, or pip install 'hileval[gates]' for the others\n"
    )
    return 0 if asked_for_help else 5


if __name__ == "__main__":
    main()
