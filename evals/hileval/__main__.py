"""`python -m hileval`."""

from hileval.cli import main

main()
