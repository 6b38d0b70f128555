# SPDX-License-Identifier: Apache-2.0
"""Run a command line of this package, and end it with its message and status."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from hileval.errors import RunsError
from hilgate.errors import (
    HilgateError,
    RunInterruptedError,
    bug,
    drop_what_cannot_be_written,
    of_system,
    run_typer,
)

if TYPE_CHECKING:
    import typer

stderr = Console(stderr=True)


def run(command: typer.Typer) -> NoReturn:
    """Run a command line; every mistake is a few lines and an exit status of `hilgate.errors.Exit`."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # answers may hold half of a character, and a locale may know few
            stream.reconfigure(errors="backslashreplace")
    try:
        run_typer(command)
    except (HilgateError, RunsError) as error:
        _end(error)
    except KeyboardInterrupt:
        what = "give the same command again: it goes on from the answers so far"
        _end(RunInterruptedError("interrupted", remedy=what))
    except Exception as error:  # noqa: BLE001 - Python's own status for it is 1, which means fail
        trouble = of_system(error) if isinstance(error, OSError) else None
        if isinstance(error, OSError):
            drop_what_cannot_be_written()
        _end(trouble or bug("hileval", error))


def _end(error: HilgateError | RunsError) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {error}\n")
    sys.exit(error.exit_status)
