"""Run the command line, and turn every way in which a command can end into a message and an exit status.

Results go to standard output, narration and errors to standard error. Commands import what they need when they run.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hilgate.cli import Settings, program

# Each module adds its commands to `program`; help lists them in this order.
# isort: off
from hilgate.cli import plan, run as running, buildkite, builds  # noqa: F401

# isort: on
from hilgate.errors import Exit, HilgateError


@program.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    root: Annotated[
        Path | None,
        typer.Option(help="Repository to work on.", envvar="HILGATE_ROOT", file_okay=False, exists=True),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", envvar="HILGATE_DEBUG")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="As NO_COLOR=1.")] = False,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version and this machine.")] = False,
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


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; every end is a `SystemExit` with a documented status."""
    settings, arguments = Settings(), sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        program(args=arguments, prog_name="hilgate", obj=settings)
    except HilgateError as error:
        if settings.debug:
            traceback.print_exc()
        _complain(str(error))
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(Exit.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last resort: one line, a log, and status 70
        if settings.debug:
            traceback.print_exc()
        what = (str(error).splitlines() or [""])[0]
        _complain(
            f"a bug in hilgate: {type(error).__name__}: {what}\n  where: {_log(error)}\n"
            "  to do: report it with that file, or run again with --debug"
        )
        sys.exit(Exit.BUG)
    sys.exit(Exit.PASS)


def _complain(message: str) -> None:
    from hilgate import text

    sys.stderr.write(f"error: {text.log(message)}\n")


def _log(error: Exception) -> str:
    """Write the traceback to a file of its own and return its path."""
    try:
        stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"hilgate-{stamp}-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            file.write(f"{sys.argv}\n" + "".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"(no log: {problem})"
    return file.name
