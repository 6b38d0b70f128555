# SPDX-License-Identifier: Apache-2.0
"""The command line `hilgate`: the program that commands add themselves to, and the options that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from hilgate.errors import EXIT_MEANINGS, MisuseError

SUMMARY = "Decides whether a change to the ROCm attention kernels may merge: plan, run, judge, report."

SECTIONS = {
    "Test a change": ("gate", "run", "judge", "plan"),
    "Find the cause": ("recheck", "history"),
    "Kernels and models": ("fit", "explain-kernel"),
    "Declare": ("init", "doctor", "selftest"),
    "Buildkite": ("pipeline", "earlier", "rerun", "end-waiting"),
    "Release": ("bundle", "verify-bundle"),
}
"""The commands as help lists them."""


class Sections(TyperGroup):
    """A program whose help lists its commands in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer keeps click's types to itself
        """Write each section, its commands in their order."""
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            rows = [(name.ljust(width), self.commands[name].get_short_help_str(200)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)


# \b keeps the line breaks of a paragraph.
program = typer.Typer(
    name="hilgate",
    cls=Sections,
    help=SUMMARY,
    epilog="\b\nExit status:\n"
    + "\n".join(f"{status.value:>5}  {meaning}" for status, meaning in EXIT_MEANINGS.items()),
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def declared(*kinds: Literal["areas", "steps", "models", "bugs"]) -> Callable[[typer.Context, str], list[str]]:
    """Completion of names that the repository declares; a step is followed by its keys on each device."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from hilgate.cli import planted_bugs
        from hilgate.declare.load import find_root, load
        from hilgate.model.plan import planned_key

        names: list[str] = []
        with contextlib.suppress(Exception):  # a shell has no place for an error
            root = find_root(ctx.find_root().params.get("root") or Path.cwd())
            names += [bug.id for bug in planted_bugs.load_bugs(root, ())] if "bugs" in kinds else []
            if declarations := load(root) if {"areas", "steps", "models"} & set(kinds) else None:
                names += [area.area for area in declarations.areas] if "areas" in kinds else []
                names += declarations.models() if "models" in kinds else []
                for _, step in declarations.steps() if "steps" in kinds else ():
                    names.append(step.key)
                    names += [planned_key(step, d) for d in step.devices] if incomplete.startswith(step.key) else []
        return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]

    return complete


Base = Annotated[
    str | None,
    typer.Option(
        metavar="REF",
        envvar="HILGATE_BASE",
        help="Compare against the merge base with this branch or commit. Locally the default is the default branch.",
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="Take every step, whatever changed.")]
History = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="HILGATE_HISTORY",
        help="History of judged builds (default: results/history.sqlite).",
    ),
]


def no_file(jobs: Path | None) -> Path | None:
    """Refuse a file. A missing folder is of a build of which no job left anything, and its verdict says so."""
    if jobs and not jobs.is_dir() and (jobs.exists() or any(parent.is_file() for parent in jobs.parents)):
        raise MisuseError("this is no folder", where=f"--jobs {jobs}", remedy="name the folder of the jobs' results")
    return jobs


JobsFolder = Annotated[
    Path | None,
    typer.Option(
        "--jobs",
        metavar="DIR",
        callback=no_file,
        help="Read results from this folder of CI jobs instead of the local run.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _of_ours(results: Path | None) -> Path | None:
    """Refuse a folder of the repository: a run empties it and leaves its own files in it."""
    from hilgate import git

    if results and git.tracks(results):
        raise MisuseError(
            "there are tracked files in it", where=f"--results {results}", remedy="name a folder for results alone"
        )
    return results


Results = Annotated[
    Path | None,
    typer.Option(
        "--results", metavar="DIR", callback=_of_ours, help="Folder for results (default: a folder in results/)."
    ),
]


@dataclass
class Settings:
    """Options of the whole program, shared with commands as `ctx.obj`."""

    root: Path | None = None
    debug: bool = False


def repository(ctx: typer.Context) -> Path:
    """The repository to work on: `--root`, else the one around the current folder.

    Raises:
        MisuseError: There is none.
    """
    from hilgate.declare.load import find_root

    settings: Settings = ctx.obj
    return find_root(settings.root or Path.cwd())
