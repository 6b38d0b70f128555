# SPDX-License-Identifier: Apache-2.0
"""How a command line of this package ends."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from hilgate.errors import Exit, HilgateError, RunInterruptedError, of_system

if TYPE_CHECKING:
    import typer

stderr = Console(stderr=True)


def run(command: typer.Typer) -> NoReturn:
    """Run a command line; every mistake is a few lines and an exit status of `hilgate.errors.Exit`.

    A bug alone prints its traceback first, which the log of a step then has.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        command()
    except HilgateError as error:
        _end(error)
    except SystemExit as ended:
        # typer ends on Ctrl-C without a word, and takes a closed pipe for a failure (1).
        if isinstance(ended.__context__, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's last flush ends with 120
            _end(of_system(ended.__context__) or _bug(ended.__context__))
        if ended.code == Exit.INTERRUPTED:
            _end(_interrupted())
        raise
    except KeyboardInterrupt:
        _end(_interrupted())
    except Exception as error:  # noqa: BLE001 - Python's own status for it is 1, which means fail
        _end((of_system(error) if isinstance(error, OSError) else None) or _bug(error))
    sys.exit(Exit.PASS)


def _end(error: HilgateError) -> NoReturn:
    stderr.print("[red]error[/]: ", end="", highlight=False)
    stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
    sys.exit(error.exit_status)


def _interrupted() -> HilgateError:
    return RunInterruptedError("interrupted", remedy="give the same command again: it goes on from the answers so far")


def _bug(error: BaseException) -> HilgateError:
    traceback.print_exception(error)
    return HilgateError(f"a bug in hileval: {type(error).__name__}: {error}", remedy="report it with what is above")
