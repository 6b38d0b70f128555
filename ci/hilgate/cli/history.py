"""The commands of the history: add a build, show what the builds say, write the page of plots."""

from __future__ import annotations

import datetime as dt
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilgate.errors import MisuseError, RecordsError

if TYPE_CHECKING:
    from hilgate.cli.app import Settings
    from hilgate.history.queries import Metric

HISTORY_VARIABLE = "HILGATE_HISTORY"

Folder = Annotated[
    Path | None,
    typer.Option(
        "--history", metavar="DIR", envvar=HISTORY_VARIABLE, file_okay=False, help="By default results/history/."
    ),
]
Step = Annotated[str, typer.Option("--step", metavar="KEY", help="Only this step, on one device or on all.")]
Since = Annotated[
    dt.datetime | None,
    typer.Option(
        "--since", metavar="DATE", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="Builds from then on, UTC."
    ),
]


def register(app: typer.Typer) -> None:
    """Add `hilgate history`."""
    history = typer.Typer(help="What builds have said so far: accuracy, kernel times, flakes, minutes.")
    history.command("add")(add)
    history.command("show")(show)
    history.command("report")(report)
    app.add_typer(history, name="history", no_args_is_help=True)


def add(
    ctx: typer.Context,
    results: Annotated[Path | None, typer.Option("--results", metavar="DIR", help="By default results/.")] = None,
    jobs: Annotated[
        Path | None, typer.Option("--jobs", metavar="DIR", help="Results of agents, one folder per job, instead.")
    ] = None,
    benchmarks: Annotated[
        Path | None, typer.Option("--benchmarks", metavar="FILE", help="A recorded run of benchmarks, instead.")
    ] = None,
    measured: Annotated[
        dt.datetime | None,
        typer.Option("--measured", formats=["%Y-%m-%dT%H:%M:%S"], help="When the benchmarks ran, UTC."),
    ] = None,
    branch: Annotated[str, typer.Option("--branch", envvar="BUILDKITE_BRANCH", help="Noted with the build.")] = "",
    folder: Folder = None,
) -> None:
    """Append one judged build to the history. Adding it again changes nothing."""
    from hilgate.history import benchmarks as recorded_run
    from hilgate.history import collect, store
    from hilgate.judge import VERDICT_FILE, read_verdict
    from hilgate.plan import plan_digest, read_plan
    from hilgate.results import read_all

    if benchmarks is not None:
        if measured is None or results is not None or jobs is not None:
            what = "goes without --results and --jobs" if measured else "needs --measured: the file does not say when"
            raise MisuseError(f"--benchmarks {what}", remedy="hilgate history add --benchmarks FILE --measured TIME")
        moment = measured.replace(tzinfo=dt.UTC)
        entry = recorded_run.of_benchmarks(benchmarks, measured=moment, branch=branch)
    else:
        source = results or _results(ctx)
        plan = read_plan(source / "plan.json")
        recorded = read_all(source, jobs, plan, plan_digest(plan))
        verdict = read_verdict(source / VERDICT_FILE)
        if verdict.plan_digest != plan_digest(plan):
            raise RecordsError(
                "the verdict is of another plan than plan.json", where=str(source), remedy="run `hilgate judge` again"
            )
        entry = collect.of_build(plan, recorded, verdict, branch=branch)
    place = folder or _results(ctx) / store.FOLDER
    added, notes = store.append(place, entry)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    what = f"build {entry.build.build} of {entry.build.commit[:12] or '(no commit)'}"
    if added:
        sys.stdout.write(f"added {what}: {len(entry.steps)} steps, {len(entry.checks)} checks to {place}\n")
    else:
        sys.stdout.write(f"{what} is already in {place}\n")


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

    from hilgate.cli import history_tables
    from hilgate.history import queries, store

    chosen = _metrics(metric)
    settings: Settings = ctx.obj
    with store.opened(folder or _results(ctx) / store.FOLDER) as history:
        _narrate(history.notes)
        _require_step(step, frozenset(name for line in history.steps for name in (line.key, line.step)))
        questions = queries.Questions(folder or _results(ctx) / store.FOLDER, step=step, since=_utc(since))
        answers = {one: questions.ask(one) for one in chosen}
    if as_json:
        sys.stdout.write(json.dumps(answers, indent=1, default=queries.plain) + "\n")
        return
    out = settings.out()
    for number, (name, found) in enumerate(answers.items()):
        if number:
            out.print()
        history_tables.show(out, name, found, limit=rows)


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
    from hilgate.history import page, queries, store

    place = folder or _results(ctx) / store.FOLDER
    with store.opened(place) as history:
        _narrate(history.notes)
        _require_step(step, frozenset(name for line in history.steps for name in (line.key, line.step)))
        questions = queries.Questions(place, step=step, since=_utc(since))
        text = page.render({one: questions.ask(one) for one in queries.METRICS}, step=step, notes=history.notes)
    path = out or place / "history.html"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MisuseError(
            f"the page cannot be written: {error.strerror}", where=str(path), remedy="--out FILE"
        ) from None
    sys.stdout.write(f"{path}\n")


def folder_of(root: Path) -> Path:
    """Where a command that takes no --history looks for one."""
    from hilgate.history import store

    named = os.environ.get(HISTORY_VARIABLE)
    return Path(named) if named else root / "results" / store.FOLDER


def _metrics(name: str) -> tuple[Metric, ...]:
    from hilgate.history.queries import METRICS
    from hilgate.suggest import suggest

    chosen = tuple(one for one in METRICS if name in {"", one})
    if not chosen:
        raise MisuseError(f"no metric is called {name!r}", where="--metric", remedy=suggest(name, frozenset(METRICS)))
    return chosen


def _require_step(step: str, known: frozenset[str]) -> None:
    from hilgate.suggest import suggest

    if step and step not in known:
        raise MisuseError(f"no build in this history has a step {step!r}", where="--step", remedy=suggest(step, known))


def _narrate(notes: tuple[str, ...]) -> None:
    for note in notes:
        sys.stderr.write(f"note: {note}\n")


def _utc(moment: dt.datetime | None) -> dt.datetime | None:
    return moment.replace(tzinfo=dt.UTC) if moment else None


def _results(ctx: typer.Context) -> Path:
    settings: Settings = ctx.obj
    if settings.no_color:
        os.environ["NO_COLOR"] = "1"
    return settings.repository() / "results"
