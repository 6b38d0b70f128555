# SPDX-License-Identifier: Apache-2.0
"""`python -m hileval.pocket`."""

from hileval.command import run
from hileval.pocket.cli import app

run(app)
