"""The command that measures the selection: replay."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hilgate.cli.planning import History, Json  # noqa: TC001 - typer reads the annotations
from hilgate.errors import Exit, MisuseError

if TYPE_CHECKING:
    from hilgate.cli.app import Settings
    from hilgate.model import Check
    from hilgate.replay import Replay, Replayed


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("replay")(replay)


def replay(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One list of changed files per line [=> STEP...].")],
    profile: Annotated[Literal["pr", "nightly", "release"], typer.Option(help="Whose plans.")] = "pr",
    history: History = None,
    as_json: Json = False,
) -> None:
    """Measure the selection on changes that happened: GPU-minutes saved, steps missed. Exit status 1 when one is."""
    from hilgate import imports, reads_file
    from hilgate.declare import load
    from hilgate.durations import measured
    from hilgate.evidence import write_findings
    from hilgate.replay import Replayer, parse

    settings: Settings = ctx.obj
    root = settings.repository()
    declarations = load(root)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MisuseError(f"cannot be read: {error}", where=str(file), remedy="name a text file") from error
    cases = parse(text, str(file), [step.key for _, step in declarations.steps()])
    recorded = root / reads_file.READS_FILE
    found = Replayer(
        declarations=declarations,
        graph=imports.build(root),
        reads=reads_file.read(recorded) if recorded.exists() else {},
        history=measured(root, history),
        profile=profile,
    ).replay(cases)
    if out := os.environ.get("HILGATE_OUT"):  # set when the replay is itself a step of a gate
        write_findings(Path(out), tuple(_check(line) for line in found.lines))
    if as_json:
        sys.stdout.write(json.dumps(_plain(found), indent=1) + "\n")
    else:
        _show(settings, found)
    if found.missed:
        raise typer.Exit(Exit.FAIL)


def _check(line: Replayed) -> Check:
    from hilgate.model import Check, Outcome

    more = f" and {len(line.case.files) - 1} more" if len(line.case.files) > 1 else ""
    return Check(
        id=f"line {line.case.line}: {line.case.files[0]}{more}",
        outcome=Outcome.FAIL if line.missed else Outcome.PASS,
        message="; ".join(f"{missed.step} was not selected, and {missed.why}" for missed in line.missed),
        numbers={"steps": line.steps, "gpu_minutes": line.gpu_minutes},
    )


def _plain(found: Replay) -> dict[str, object]:
    return {
        "profile": found.profile,
        "run_all": {"steps": found.of, "gpu_minutes": found.everything.gpu_minutes},
        "changes": len(found.lines),
        "gpu_minutes": found.gpu_minutes,
        "gpu_minutes_saved": found.run_all_gpu_minutes - found.gpu_minutes,
        "missed": found.missed,
        "lines": [
            {
                "line": line.case.line,
                "files": line.case.files,
                "broke": line.case.broke,
                "steps": line.steps,
                "gpu_minutes": line.gpu_minutes,
                "gpu_minutes_saved": found.everything.gpu_minutes - line.gpu_minutes,
                "missed": [{"step": missed.step, "why": missed.why} for missed in line.missed],
            }
            for line in found.lines
        ],
    }


def _show(settings: Settings, found: Replay) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = settings.out()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("line", "steps", "GPU min", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("changed", overflow="fold", ratio=1)
    everything = found.everything.gpu_minutes
    for line in found.lines:
        more = f" and {len(line.case.files) - 1} more" if len(line.case.files) > 1 else ""
        table.add_row(
            str(line.case.line),
            f"{line.steps}/{found.of}",
            f"{line.gpu_minutes:.1f}",
            f"{everything - line.gpu_minutes:.1f}",
            escape(line.case.files[0] + more),
        )
    out.print(table)
    for line in found.lines:
        for missed in line.missed:
            out.print(f"[red]missed[/] line {line.case.line}: {escape(missed.step)}, and {escape(missed.why)}")
    saved = found.run_all_gpu_minutes - found.gpu_minutes
    share = f" ({saved / found.run_all_gpu_minutes:.0%})" if found.run_all_gpu_minutes else ""
    average = sum(line.steps for line in found.lines) / len(found.lines)
    out.print(
        f"\n{len(found.lines)} changes, on average {average:.1f} of {found.of} steps, {found.missed} steps missed\n"
        f"{found.gpu_minutes:.0f} GPU-minutes instead of {found.run_all_gpu_minutes:.0f}: {saved:.0f} saved{share}"
    )
    if not found.readers:
        out.print("No reads are recorded: only steps that are known to break can be missed (python -m hilgate.reads)")
