# SPDX-License-Identifier: Apache-2.0
"""`python -m hileval`."""

from hileval.cli import app
from hileval.command import run

run(app)
