"""The command line `hilgate`: the program that commands add themselves to, and the options that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hilgate.errors import EXIT_MEANINGS

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Decides whether a change to the ROCm attention kernels may merge: plan, run, judge, report."

# \b keeps the line breaks of a paragraph.
program = typer.Typer(
    name="hilgate",
    help=SUMMARY,
    epilog="\b\nExit status:\n"
    + "\n".join(f"{status.value:>5}  {meaning}" for status, meaning in EXIT_MEANINGS.items()),
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
