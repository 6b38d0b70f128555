"""The commands of the history: add a build, show what the builds say, write the page of plots.

What `hilgate history show` prints: tables for 80 columns, with a line of bars where values have a course.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from hilgate import text
from hilgate.cli import program
from hilgate.errors import MisuseError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hilgate.cli import Settings
    from hilgate.history.queries import Metric, Row


Folder = Annotated[
    Path | None,
    typer.Option(
        "--history", metavar="DIR", envvar="HILGATE_HISTORY", file_okay=False, help="By default results/history/."
    ),
]
Step = Annotated[str, typer.Option("--step", metavar="KEY", help="Only this step, on one device or on all.")]
Since = Annotated[
    dt.datetime | None,
    typer.Option(
        "--since", metavar="DATE", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="Builds from then on, UTC."
    ),
]


builds = typer.Typer(help="What builds have said so far: accuracy, kernel times, flakes, minutes.")
program.add_typer(builds, name="history", no_args_is_help=True)


@builds.command()
def add(
    ctx: typer.Context,
    results: Annotated[Path | None, typer.Option("--results", metavar="DIR", help="By default results/.")] = None,
    jobs: Annotated[
        Path | None, typer.Option("--jobs", metavar="DIR", help="Results of agents, one folder per job, instead.")
    ] = None,
    branch: Annotated[str, typer.Option("--branch", envvar="BUILDKITE_BRANCH", help="Noted with the build.")] = "",
    folder: Folder = None,
) -> None:
    """Add one judged build to the history. Adding it again changes nothing."""
    from hilgate.history import store
    from hilgate.judge.verdict import VERDICT_FILE, read_verdict
    from hilgate.plan.make import plan_digest, read_plan
    from hilgate.run.results import read_all

    source = results or _results(ctx)
    plan = read_plan(source / "plan.json")
    verdict = read_verdict(source / VERDICT_FILE)
    if verdict.plan_digest != plan_digest(plan):
        raise RecordsError(
            "the verdict is of another plan than plan.json", where=str(source), remedy="run `hilgate judge` again"
        )
    recorded = read_all(source, jobs, plan, plan_digest(plan))
    build, added = store.add(_folder(ctx, folder), plan, recorded, verdict, branch=branch)
    if added:
        sys.stdout.write(f"added build {build.name}: {len(plan.steps)} steps to {build.parent}\n")
    else:
        sys.stdout.write(f"build {build.name} is already in {build.parent}\n")


@builds.command()
def show(
    ctx: typer.Context,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="accuracy, kernels, flakes or minutes; by default all.")
    ] = "",
    step: Step = "",
    since: Since = None,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Lines of each table.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, every row.")] = False,
    folder: Folder = None,
) -> None:
    """Tables over builds, the newest value last in each line of bars."""
    import json

    from hilgate.history import queries

    chosen = tuple(one for one in queries.METRICS if metric in {"", one})
    if not chosen:
        remedy = text.suggest(metric, queries.METRICS)
        raise MisuseError(f"no metric is called {metric!r}", where="--metric", remedy=remedy)
    answers = queries.ask(_folder(ctx, folder), chosen, step=step, since=_utc(since))
    if as_json:
        sys.stdout.write(json.dumps(answers, indent=1, default=queries.plain) + "\n")
        return
    settings: Settings = ctx.obj
    out = settings.out()
    for number, (name, found) in enumerate(answers.items()):
        if number:
            out.print()
        show_history_tables(out, name, found, limit=rows)


@builds.command()
def report(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="By default history.html beside it.")
    ] = None,
    step: Step = "",
    since: Since = None,
    folder: Folder = None,
) -> None:
    """One HTML page with small plots, which opens anywhere; prints its path."""
    from hilgate.history import queries
    from hilgate.report.history import render

    history = _folder(ctx, folder)
    page = render(queries.ask(history, step=step, since=_utc(since)), step=step)
    path = out or history / "history.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise MisuseError(
            f"the page cannot be written: {error.strerror}", where=str(path), remedy="--out FILE"
        ) from None
    sys.stdout.write(f"{path}\n")


def _folder(ctx: typer.Context, named: Path | None) -> Path:
    from hilgate.history.store import FOLDER

    return named or _results(ctx) / FOLDER


def _utc(moment: dt.datetime | None) -> dt.datetime | None:
    return moment.replace(tzinfo=dt.UTC) if moment else None


def _results(ctx: typer.Context) -> Path:
    settings: Settings = ctx.obj
    if settings.no_color:
        os.environ["NO_COLOR"] = "1"
    return settings.repository() / "results"


BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 8
NOTHING = {
    "accuracy": "no check of these builds has an exact_match with its interval",
    "kernels": "no check of these builds has a time (a number named ..._us or ..._ms)",
    "flakes": "no check failed in these builds",
    "minutes": "no step of these builds was run",
}


def show_history_tables(out: Console, metric: Metric, rows: Sequence[Row], *, limit: int) -> None:
    """One table, or the reason why there is none."""
    if not rows:
        out.print(Text(f"{metric}: {NOTHING[metric]}", "dim"))
        return
    {"accuracy": _accuracy, "kernels": _kernels, "flakes": _flakes, "minutes": _minutes}[metric](out, rows, limit)


def bars(values: Sequence[float | None]) -> str:
    """The last `MOST_BARS` values, lowest to highest of them; a dot where there is none."""
    last = [value if value is not None and math.isfinite(value) else None for value in values[-MOST_BARS:]]
    known = [value for value in last if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if high == low:
        return "".join("·" if value is None else BARS[3] for value in last)
    top = len(BARS) - 1
    return "".join("·" if value is None else BARS[round((value - low) / (high - low) * top)] for value in last)


def _accuracy(out: Console, rows: Sequence[Row], limit: int) -> None:
    table = _table("accuracy", ("match", "[interval]", "n", "base", "builds", "course"))
    device = ""
    for row in rows[:limit]:
        if row["device"] != device:
            device = row["device"]
            table.add_row(Text(text.line(f"on {device}"), "dim"))
        before = row["baseline"][-1]
        table.add_row(
            Text(text.line(row["id"])),
            f"{row['score'][-1]:.1%}",
            Text(f"[{row['low'][-1]:.1%}, {row['high'][-1]:.1%}]"),
            f"{row['n'][-1]:g}" if row["n"][-1] is not None else "?",
            "none" if before is None else f"{before:.1%}",
            str(row["builds"]),
            bars(row["score"]),
        )
    out.print(table)
    _rest(out, rows, limit)


def _kernels(out: Console, rows: Sequence[Row], limit: int) -> None:
    """The largest changes first; a change is the newest value against the median of those before."""
    table = _table("kernel time", ("newest", "before", "change", "builds", "course"))
    device = ""
    for row in rows[:limit]:
        unit = row["number"].rsplit("_", 1)[-1]
        name = "" if row["number"] in {f"ours_{unit}", unit} else f" {row['number']}"
        if row["device"] != device:
            device = row["device"]
            table.add_row(Text(text.line(f"on {device}"), "dim"))
        change = "new" if row["change"] is None else f"{row['change']:+.1%}"
        before = "" if row["before"] is None else _time(row["before"])
        table.add_row(
            Text(text.line(row["id"] + name)),
            f"{_time(row['last'])} {unit}",
            before,
            change,
            str(row["builds"]),
            bars(row["value"]),
        )
    out.print(table)
    _rest(out, rows, limit)


def _flakes(out: Console, rows: Sequence[Row], limit: int) -> None:
    table = _table("did not always pass", ("flaky", "failed", "of builds", "last"))
    for row in rows[:limit]:
        values = (f"{row['flaky']} ({row['rate']:.0%})", str(row["failed"]), str(row["builds"]))
        table.add_row(Text(text.line(f"{row['key']}  {row['id']}")), *values, f"{row['last']:%m-%d %H:%M}")
    out.print(table)
    _rest(out, rows, limit)


def _minutes(out: Console, rows: Sequence[Row], limit: int) -> None:
    """Newest last, as a log."""
    of_step = "key" in rows[0]
    table = _table("began (UTC)", ("commit", "outcome", *(("step",) if of_step else ("steps", "wall")), "run", "GPU",
                                   "queue"))  # fmt: skip
    for row in rows[-limit:]:
        from hilgate.model import Outcome

        outcome = Outcome(row["outcome"])
        size = (row["key"],) if of_step else (str(row["steps"]), f"{row['wall_minutes']:.1f}")
        minutes = (f"{row[name]:.1f}" for name in ("step_minutes", "gpu_minutes", "queue_minutes"))
        table.add_row(
            f"{row['time']:%Y-%m-%d %H:%M}", row["commit"][:10] or "none", Text(text.marked(outcome),
            text.STYLES[outcome]), *size, *minutes
        )  # fmt: skip
    out.print(table)
    if len(rows) > limit:
        out.print(Text(f"and {len(rows) - limit} earlier (--rows)", "dim"))
    courses = ", ".join(
        f"{words} {bars([row[name] for row in rows])}"
        for name, words in (("step_minutes", "run"), ("gpu_minutes", "GPU"), ("queue_minutes", "queue"))
    )
    out.print(Text(f"minutes of {len(rows)} builds: {courses}", "dim"))


def _time(value: float) -> str:
    from hilgate.report.problems import shortest

    return shortest(float(value)) if value < 1000 else f"{value:.0f}"


def _rest(out: Console, rows: Sequence[Row], limit: int) -> None:
    if len(rows) > limit:
        out.print(Text(f"and {len(rows) - limit} more (--rows, --step, --json)", "dim"))


def _table(first: str, others: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold", ratio=1)
    for name in others:
        words = name in {"course", "commit", "outcome", "step", "last"}
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    return table
