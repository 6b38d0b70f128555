# SPDX-License-Identifier: Apache-2.0
"""Run the command line, and turn every way in which a command can end into a message and an exit status.

Results go to standard output, narration and errors to standard error. Commands import what they need when they run.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hilgate import text
from hilgate.cli import Settings, program

# Each module adds its commands to `program`; help lists them in this order.
# isort: off
from hilgate.cli import plan, run as running, buildkite, builds  # noqa: F401

# isort: on
from hilgate.errors import (
    HilgateError,
    RunInterruptedError,
    bug,
    drop_what_cannot_be_written,
    of_system,
    run_typer,
)


@program.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Repository to work on (default: the one around the current folder).",
            envvar="HILGATE_ROOT",
            file_okay=False,
            exists=True,
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show Python tracebacks of errors.", envvar="HILGATE_DEBUG")
    ] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Print no colors, as with NO_COLOR=1.")] = False,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and what this machine has.")
    ] = False,
) -> None:
    """Decides whether a change to the ROCm attention kernels may merge: plan, run, judge, report."""
    settings: Settings = ctx.obj
    settings.root, settings.debug = root, debug
    if no_color:  # for the steps that this process starts, too
        os.environ["NO_COLOR"] = "1"
    if version:
        plan.show_version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        plan.show_home(ctx)


_interrupts: list[int] = []


def interrupt(number: int, _: object) -> NoReturn:
    """Handler of SIGINT which remembers it: native code may turn a KeyboardInterrupt into an error or an answer."""
    _interrupts.append(number)
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; every end is a `SystemExit` with a documented status."""
    settings, arguments = Settings(), sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        _prepare_streams()
        try:
            run_typer(program, prog_name="hilgate", args=arguments, obj=settings)
        except SystemExit:
            if _interrupts:
                raise KeyboardInterrupt from None
            raise
    except HilgateError as error:
        _end(error, settings)
    except KeyboardInterrupt:
        _end(RunInterruptedError("interrupted"), settings)
    except Exception as error:  # noqa: BLE001 - the last resort: one line, a log, and status 70
        trouble = of_system(error) if isinstance(error, OSError) else None
        if _interrupts:
            trouble = RunInterruptedError("interrupted")  # what an interrupt breaks is no bug, and leaves no log
        if isinstance(error, OSError):
            drop_what_cannot_be_written()
        _end(trouble or bug("hilgate", error), settings)


def _prepare_streams() -> None:
    """Let every character be printed in every locale, and give a stream that was closed before the start a place."""
    codecs.register_error("hilgate", text.plain)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - as long as the process
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="hilgate")


def _end(error: HilgateError, settings: Settings) -> NoReturn:
    if _interrupts and not isinstance(error, RunInterruptedError):
        error = RunInterruptedError("interrupted")
    if settings.debug:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {text.log(str(error))}\n")
        sys.stderr.flush()
    sys.exit(error.exit_status)
