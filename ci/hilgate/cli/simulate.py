"""`hilgate simulate`: whole builds without Buildkite and GPUs, and whether their verdicts are true."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path  # noqa: TC003 - typer evaluates the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from hilgate.errors import Exit, MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hilgate.cli.app import Settings
    from hilgate.simulate.campaign import Failing, Tally

_SEED = re.compile(r"(?P<seed>[A-Za-z0-9_.-]+)(?::(?P<number>\d+))?")
SHOWN = 10
"""Failing builds that are printed; `--json` has all."""

_MEANINGS = {
    "false_passes": "passed and must not",
    "lost_results": "arrived and are not in the verdict",
    "false_blames": "infrastructure ruled a regression",
    "needless_blocks": "deserved to pass and did not",
    "unseen_failures": "of attempts that were retried, in builds that passed",
}


def register(app: typer.Typer) -> None:
    """Add the simulator's command."""
    app.command("simulate")(simulate)


def simulate(
    ctx: typer.Context,
    builds: Annotated[int, typer.Option(min=1, help="How many builds.")] = 1000,
    seed: Annotated[str, typer.Option(help="Seed of the series; S:17 is build 17 of series S.")] = "1",
    rate: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Probability of each kind of fault in a build.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep every build's files here.", file_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, on standard output.")] = False,
) -> None:
    """Replay whole builds with faults, and compare each verdict with what really happened.

    Exit status 1 when a build passed that must not, or when a result was lost.
    """
    from hilgate.simulate.campaign import Campaign
    from hilgate.simulate.faults import DEFAULT_RATE

    settings: Settings = ctx.obj
    match = _SEED.fullmatch(seed)
    if match is None:
        raise MisuseError(
            f"{seed!r} is no seed", where="--seed", remedy="use letters, digits, '.', '_', '-'; S:17 is one build"
        )
    number = None if match["number"] is None else int(match["number"])
    if number is not None and builds != 1:
        raise MisuseError(
            "a seed with a number is one build",
            where=f"--seed {seed}",
            remedy="add --builds 1, or leave out the number",
        )
    campaign = Campaign(
        settings.repository(),
        builds,
        match["seed"],
        DEFAULT_RATE if rate is None else rate,
        only=number,
        keep=keep,
    )
    tally = campaign.run(_heartbeat(builds))
    if as_json:
        sys.stdout.write(json.dumps(tally.as_json(), indent=1) + "\n")
    else:
        _print(tally)
    raise typer.Exit(Exit.PASS if tally.sound else Exit.FAIL)


def _heartbeat(builds: int) -> Callable[[int], None]:
    """A line on standard error every tenth of the way, so that a long series is not silent."""
    from hilgate.report import terminal

    console = terminal.stderr()
    every = max(1, builds // 10)

    def tick(done: int) -> None:
        if done % every == 0 and done < builds and builds >= 200:
            console.print(f"{done} of {builds} builds", style="dim", highlight=False)

    return tick


def _print(tally: Tally) -> None:
    from rich.columns import Columns
    from rich.table import Table

    from hilgate.report import terminal

    console = terminal.stdout()
    total = sum(tally.faults.values())
    console.print(
        f"{tally.builds} builds, {tally.steps} steps, {total} faults of {len(tally.faults)} kinds, "
        f"{tally.seconds:.1f} s",
        highlight=False,
    )
    console.print()
    console.print(Columns([f"{count:5} {kind}" for kind, count in tally.faults.most_common()], column_first=True))
    for title, counts in (("deserved", tally.deserved), ("verdicts", tally.verdicts), ("rulings", tally.rulings)):
        words = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        console.print(f"\n{title}: {words}", highlight=False)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    told = tally.as_json()
    for name, meaning in _MEANINGS.items():
        bad = told[name] and name in {"false_passes", "lost_results"}
        table.add_row(str(told[name]), name.replace("_", " "), meaning, style="red" if bad else "")
    console.print(table)
    for failing in tally.failing[:SHOWN]:
        _print_failing(failing)
    if len(tally.failing) > SHOWN:
        console.print(f"\nand {len(tally.failing) - SHOWN} more", highlight=False)


def _print_failing(failing: Failing) -> None:
    from rich.text import Text

    from hilgate.report import terminal

    console = terminal.stdout()
    console.print()
    console.print(Text(f"{failing.problem.kind.value}: {failing.problem.why.splitlines()[0]}", "bold"), soft_wrap=True)
    for fault in failing.shrunk:
        console.print(Text(f"  {fault}"), soft_wrap=True)
    console.print(Text(f"  reproduce: {failing.reproduce}"), soft_wrap=True)
