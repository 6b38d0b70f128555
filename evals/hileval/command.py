# SPDX-License-Identifier: Apache-2.0
"""How a command line of this package ends."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from hilgate.errors import Exit, HilgateError

if TYPE_CHECKING:
    import typer

stderr = Console(stderr=True)


def run(command: typer.Typer) -> NoReturn:
    """Run a command line; every mistake is a few lines and an exit status, never a traceback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        command()
    except HilgateError as error:
        stderr.print(f"[red]{type(error).__name__}[/]: ", end="", highlight=False)
        stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        stderr.print("interrupted; the answers so far are kept, and the same command goes on from them")
        sys.exit(Exit.INTERRUPTED)
    sys.exit(Exit.PASS)
