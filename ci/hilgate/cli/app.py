"""Builds the command line, and turns every way in which a command can end into a message and an exit status.

Results go to standard output, narration and errors to standard error.
"""

from __future__ import annotations

import datetime as dt
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hilgate import text
from hilgate.errors import EXIT_MEANINGS, Exit, HilgateError

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Decides whether a change to the ROCm attention kernels may merge: plan, run, judge, report."


@dataclass
class Settings:
    """Options of the whole program, shared with commands as `ctx.obj`."""

    root: Path | None = None
    debug: bool = False
    no_color: bool = False

    def repository(self) -> Path:
        """The repository to work on: `--root`, else the one around the current folder.

        Raises:
            MisuseError: There is none.
        """
        from hilgate.declare.load import find_root

        return find_root(self.root or Path.cwd())

    def out(self) -> Console:
        """Console for results."""
        from rich.console import Console

        return Console(no_color=self.no_color or None, highlight=False, soft_wrap=False)


def build_app() -> typer.Typer:
    """The `hilgate` command line: what planning, running and kernels register."""
    from hilgate.cli import buildkite, history, plan, release, simulate
    from hilgate.cli import run as rechecking

    # \\b keeps the line breaks of a paragraph.
    statuses = "\n".join(f"{status.value:>5}  {meaning}" for status, meaning in EXIT_MEANINGS.items())
    app = typer.Typer(
        name="hilgate",
        help=SUMMARY,
        epilog=f"\b\nExit status:\n{statuses}",
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def options(
        ctx: typer.Context,
        root: Annotated[
            Path | None,
            typer.Option(help="Repository to work on.", envvar="HILGATE_ROOT", file_okay=False, exists=True),
        ] = None,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", envvar="HILGATE_DEBUG")] = False,
        no_color: Annotated[bool, typer.Option("--no-color", help="As NO_COLOR=1.")] = False,
        version: Annotated[bool, typer.Option("--version", help="Show the version and this machine.")] = False,
    ) -> None:
        settings: Settings = ctx.obj
        settings.root, settings.debug, settings.no_color = root, debug, no_color
        if version:
            plan.show_version(settings)
            raise typer.Exit
        if ctx.invoked_subcommand is None:
            plan.show_home(settings)

    plan.register(app)
    plan.register_replaying(app)
    rechecking.register(app)
    rechecking.register_rechecking(app)
    plan.register_kernels(app)
    buildkite.register(app)
    release.register(app)
    history.register(app)
    simulate.register(app)
    return app


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; every end is a `SystemExit` with a documented status."""
    settings = Settings()
    try:
        build_app()(args=arguments, prog_name="hilgate", obj=settings)
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
        _complain(
            f"a bug in hilgate: {type(error).__name__}: {_first_line(error)}\n  where: {_log(error)}\n"
            "  to do: report it with that file, or run again with --debug"
        )
        sys.exit(Exit.BUG)
    sys.exit(Exit.PASS)


def _complain(message: str) -> None:
    sys.stderr.write(f"error: {text.log(message)}\n")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


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
