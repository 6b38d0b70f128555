"""`python -m hileval`."""

from hileval.cli import app, run

run(app)
