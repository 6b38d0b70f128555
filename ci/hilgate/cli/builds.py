# SPDX-License-Identifier: Apache-2.0
"""Commands about judged builds: history (add, show, report), bundles of evidence (bundle, attest, verify-bundle)."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilgate import text
from hilgate.cli import History, JobsFolder, Json, Results, declared, program, repository
from hilgate.errors import Exit, MisuseError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from hilgate.history.queries import Metric, Row
    from hilgate.release.verify import BundleAnswer


METRICS = "grid, accuracy, kernels, flakes, waiting, hours, minutes"
Step = Annotated[
    str,
    typer.Option(
        "--step",
        metavar="KEY",
        autocompletion=declared("steps"),
        help="Only this step: its name, or its key with the device (kernels-cache-cpu).",
    ),
]
Since = Annotated[
    dt.datetime | None,
    typer.Option(
        "--since", metavar="DATE", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="Only builds since this date (UTC)."
    ),
]


builds = typer.Typer(help="Show accuracy, kernel times and flaky checks over builds.")
program.add_typer(builds, name="history", no_args_is_help=True)


@builds.command()
def add(
    ctx: typer.Context,
    results: Results = None,
    jobs: JobsFolder = None,
    branch: Annotated[
        str,
        typer.Option("--branch", metavar="NAME", envvar="BUILDKITE_BRANCH", help="Branch to record with the build."),
    ] = "",
    history: History = None,
) -> None:
    """Add one judged build to the history. Adding it again changes nothing."""
    from hilgate.history import store
    from hilgate.judge.verdict import read_verdict
    from hilgate.model import PLAN_FILE, VERDICT_FILE
    from hilgate.plan.make import plan_digest, read_plan
    from hilgate.run.results import read_all

    source = results or repository(ctx) / "results"
    plan = read_plan(source / PLAN_FILE)
    plan.require_whole(str(source / PLAN_FILE))
    verdict = read_verdict(source / VERDICT_FILE)
    if verdict.plan_digest != plan_digest(plan):
        raise RecordsError(
            "the verdict is of another plan than plan.json", where=str(source), remedy="run `hilgate judge` again"
        )
    recorded = read_all(source, jobs, plan, plan_digest(plan))
    build, added = store.add(history or store.folder_of(repository(ctx)), plan, recorded, verdict, branch=branch)
    words = f"added {build.name}: {text.count(len(plan.steps), 'step')} to" if added else f"{build.name} is already in"
    sys.stdout.write(f"{words} {build.parent}\n")


@builds.command()
def show(
    ctx: typer.Context,
    metric: Annotated[
        str,
        typer.Option("--metric", metavar="NAME", help=f"One of {METRICS} (default: all)."),
    ] = "",
    step: Step = "",
    since: Since = None,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Number of lines of each table.")] = 20,
    as_json: Json = False,
    history: History = None,
) -> None:
    """Print tables over builds. Bars run from the oldest to the newest build."""
    from hilgate.history import queries, store
    from hilgate.report.terminal import stdout

    chosen = tuple(one for one in queries.METRICS if metric in {"", one})
    if not chosen:
        remedy = text.suggest(metric, queries.METRICS)
        raise MisuseError(f"no metric is called {metric!r}", where="--metric", remedy=remedy)
    folder = history or store.folder_of(repository(ctx))
    answers = queries.ask(folder, chosen, step=step, since=since)
    if as_json:
        sys.stdout.write(json.dumps(answers, indent=1, default=dt.datetime.isoformat) + "\n")
        return
    out = stdout()
    for number, (name, found) in enumerate(answers.items()):
        if number:
            out.print()
        show_history_tables(out, name, found, limit=rows)


@builds.command()
def report(
    ctx: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Page to write (default: history.html beside the history)."),
    ] = None,
    step: Step = "",
    since: Since = None,
    history: History = None,
) -> None:
    """Write the history as one HTML page with small plots."""
    from hilgate.history import queries, store
    from hilgate.report.history import render_history

    folder = history or store.folder_of(repository(ctx))
    page = render_history(queries.ask(folder, step=step, since=since), step=step)
    path = out or folder / "history.html"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise MisuseError(
            f"the page cannot be written: {error.strerror}", where=str(path), remedy="--out FILE"
        ) from None
    sys.stdout.write(f"{path}\n")


@builds.command()
def culprit(
    ctx: typer.Context,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Planned key, for example kernels-cache-gfx942.")],
    check: Annotated[str, typer.Argument(metavar="CHECK", help="Id of the check, as the report names it.")],
    good: Annotated[
        str, typer.Option(metavar="SHA", help="Commit before the range (default: the newest pass before a failure).")
    ] = "",
    bad: Annotated[
        str, typer.Option(metavar="SHA", help="Last commit of the range (default: the newest failure).")
    ] = "",
    saw: Annotated[
        list[str] | None,
        typer.Option(metavar="SHA=pass|fail", help="A run that is not in the history; may be repeated."),
    ] = None,
    branch: Annotated[str, typer.Option(metavar="NAME", help="Branch whose builds are read.")] = "main",
    history: History = None,
) -> None:
    """Name the commit that broke a check, or the one to run next.

    Knows how often the check is flaky. Exit status 6 while no commit is 95 % likely; 0 when one is named.
    """
    from hilgate import git
    from hilgate.history import culprit as search
    from hilgate.history import store

    root = repository(ctx)
    seen = search.observed(history or store.folder_of(root), step, check, branch)
    commits = git.between(root, *search.red_range(seen.runs, good, bad))
    runs = [*seen.runs, *(_seen(one, commits) for one in saw or ())]
    state = search.Search(len(commits), seen.flake_rate)
    search.weigh(state, commits, runs)
    flaky = f"flaky in {seen.flaky} of {text.count(seen.builds, 'build')}"
    sys.stdout.write(f"{text.count(len(commits), 'commit')} in the range; {text.line(check)} was {flaky}\n")
    place, sure = state.best
    name = commits[place] if place < len(commits) else ""
    likely = f"{name[:12]} broke it" if name else "no commit broke it: it is a flake"
    if sure >= search.SURE:
        sys.stdout.write(f"{likely} ({100 * sure:.0f} % sure)\n")
        raise typer.Exit(Exit.PASS)
    sys.stdout.write(f"not sure yet; likeliest: {likely} ({100 * sure:.0f} %)\n")
    following = commits[state.next_place]
    sys.stdout.write(f"next: run {step} at {following}, then repeat this with --saw {following[:12]}=pass or =fail\n")
    raise typer.Exit(Exit.INCONCLUSIVE)


def _seen(words: str, commits: Sequence[str]) -> tuple[str, bool]:
    """(commit, failed) of `SHA=pass` or `SHA=fail`.

    Raises:
        MisuseError: It is neither, or names no commit of the range.
    """
    name, _, outcome = words.partition("=")
    found = [commit for commit in commits if name and commit.startswith(name)]
    if outcome not in {"pass", "fail"} or len(found) != 1:
        raise MisuseError(
            f"--saw {words!r} says nothing about a commit of the range",
            where="--saw",
            remedy=f"write e.g. --saw {commits[0][:12]}=pass; the range is {commits[0][:12]} to {commits[-1][:12]}",
        )
    return found[0], outcome == "fail"


BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 8
NOTHING = {
    "grid": "no step of these builds was planned",
    "hours": "no step of these builds was run",
    "accuracy": "no check of these builds has an exact_match with its interval",
    "kernels": "no check of these builds has a time (a number named ..._us or ..._ms)",
    "flakes": "no check failed in these builds",
    "waiting": "no step of these builds was planned for a queue",
    "minutes": "no step of these builds was run",
}


def bars(values: Sequence[float | None]) -> str:
    """The last `MOST_BARS` values, lowest to highest of them; a dot where there is none."""
    last = [value if value is not None and math.isfinite(value) else None for value in values[-MOST_BARS:]]
    known = [value for value in last if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if high == low:
        return "".join("·" if value is None else BARS[3] for value in last)
    top = len(BARS) - 1
    return "".join("·" if value is None else BARS[round((value - low) / (high - low) * top)] for value in last)


def _unit(row: Row) -> str:
    return str(row["number"]).rsplit("_", 1)[-1]


def _case(row: Row) -> str:
    """Of several times of a check, the name of the one that is not simply ours."""
    usual = {f"ours_{_unit(row)}", _unit(row)}
    return str(row["id"]) if row["number"] in usual else f"{row['id']} {row['number']}"


def _time(value: float) -> str:
    from hilgate.report.view import shortest

    return shortest(float(value)) if value < 1000 else f"{value:.0f}"


def _minutes(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _not_passed(row: Row) -> str:
    return ", ".join(key for key, outcome in row["cells"].items() if outcome != "pass") or "nothing"


def _passed(row: Row) -> str:
    outcomes = list(row["cells"].values())
    return f"{outcomes.count('pass')} of {len(outcomes)}"


COLUMNS: dict[str, dict[str, Callable[[Row], str]]] = {
    "grid": {
        "steps that did not pass": _not_passed,
        "commit": lambda row: row["commit"][:10] or "none",
        "began (UTC)": lambda row: f"{row['time']:%Y-%m-%d %H:%M}",
        "passed": _passed,
    },
    "accuracy": {
        "accuracy": lambda row: row["id"],
        "match": lambda row: f"{row['score'][-1]:.1%}",
        "[interval]": lambda row: f"[{row['low'][-1]:.1%}, {row['high'][-1]:.1%}]",
        "n": lambda row: f"{row['n'][-1]:g}" if row["n"][-1] is not None else "?",
        "base": lambda row: "none" if row["baseline"][-1] is None else f"{row['baseline'][-1]:.1%}",
        "builds": lambda row: str(row["builds"]),
        "course": lambda row: bars(row["score"]),
    },
    # The largest changes first; a change is the newest value against the median of those before.
    "kernels": {
        "kernel time": _case,
        "newest": lambda row: f"{_time(row['last'])} {_unit(row)}",
        "before": lambda row: "" if row["before"] is None else _time(row["before"]),
        "change": lambda row: "new" if row["change"] is None else f"{row['change']:+.1%}",
        "builds": lambda row: str(row["builds"]),
        "course": lambda row: bars(row["value"]),
    },
    "flakes": {
        "did not always pass": lambda row: f"{row['key']}  {row['id']}",
        "flaky": lambda row: f"{row['flaky']} of {row['builds']}",
        "95 %": lambda row: f"{100 * row['low']:.0f} to {row['high']:.0%}",
        "failed": lambda row: str(row["failed"]),
        "last": lambda row: f"{row['last']:%m-%d %H:%M}",
    },
    "waiting": {
        "waiting for": lambda row: row["queue"],
        "jobs": lambda row: str(row["jobs"]),
        "half (min)": lambda row: _minutes(row["half"]),
        "9 of 10": lambda row: _minutes(row["nine_of_ten"]),
        "longest": lambda row: _minutes(row["longest"]),
        "never began": lambda row: str(row["never"] or ""),
        "course": lambda row: bars(row["course"] or []),
    },
    "hours": {
        "hours of": lambda row: row["key"],
        "week of": lambda row: f"{row['week']:%Y-%m-%d}",
        "runs": lambda row: str(row["runs"]),
        "minutes": lambda row: _minutes(row["minutes"]),
        "GPU-hours": lambda row: _minutes(row["gpu_hours"]),
    },
    "minutes": {
        "began (UTC)": lambda row: f"{row['time']:%Y-%m-%d %H:%M}",
        "commit": lambda row: row["commit"][:10] or "none",
        "outcome": lambda row: text.marked(row["outcome"]),
        "step": lambda row: row.get("key", ""),
        "steps": lambda row: str(row.get("steps", "")),
        "wall": lambda row: f"{row['wall_minutes']:.1f}" if "wall_minutes" in row else "",
        "run": lambda row: f"{row['step_minutes']:.1f}",
        "GPU": lambda row: f"{row['gpu_minutes']:.1f}",
        "queue": lambda row: f"{row['queue_minutes']:.1f}",
    },
}
"""What each metric shows of a row, by the name of the column; a column without a value in any row is left out."""

WORDS = frozenset({"course", "commit", "outcome", "step", "last", "began (UTC)", "week of"})
"""Columns that are read, not compared: set flush left."""


def show_history_tables(out: Console, metric: Metric, rows: Sequence[Row], *, limit: int) -> None:
    """One table of a metric, or the reason why there is none; minutes are a log, newest last."""
    from hilgate.report.terminal import cell, say, table_of

    if not rows:
        say(out, f"{metric}: {NOTHING[metric]}", "dim")
        return
    log = metric == "minutes"
    shown = rows[-limit:] if log else rows[:limit]
    columns = {name: [value(row) for row in shown] for name, value in COLUMNS[metric].items()}
    columns = {name: values for name, values in columns.items() if any(values)}
    table, device = table_of(tuple(columns), ()), None
    for number, column in enumerate(table.columns):
        column.no_wrap, column.ratio = number > 0, None if number else 1
        column.justify = "left" if number == 0 or column.header in WORDS else "right"
    for row, values in zip(shown, zip(*columns.values(), strict=True), strict=True):
        if metric in {"accuracy", "kernels"} and row["device"] != device:
            device = row["device"]
            table.add_row(cell(f"on {device}", "dim"))
        styles = [text.STYLES[row["outcome"]] if name == "outcome" else "" for name in columns]
        table.add_row(*(cell(value, style) for value, style in zip(values, styles, strict=True)))
    out.print(table)
    if len(rows) > limit:
        say(out, f"and {len(rows) - limit} {'earlier (--rows)' if log else 'more (--rows, --step, --json)'}", "dim")
    if log:
        names = {"run": "step_minutes", "GPU": "gpu_minutes", "queue": "queue_minutes"}
        courses = ", ".join(f"{words} {bars([row[name] for row in rows])}" for words, name in names.items())
        say(out, f"minutes of {text.count(len(rows), 'build')}: {courses}", "dim")


@program.command()
def bundle(
    ctx: typer.Context,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Tar file to write.")],
    results: Results = None,
) -> None:
    """Write all evidence of a judged build to one file.

    Plan, records, verdict, wheels, lock files, pins, bill of materials and checksums.
    """
    from hilgate.cli.run import require_commit
    from hilgate.git import commit_time
    from hilgate.model import PLAN_FILE
    from hilgate.plan.make import read_plan
    from hilgate.release.bundle import write_bundle
    from hilgate.release.verify import Asked, verify

    root = repository(ctx)
    folder = results or root / "results"
    plan = read_plan(folder / PLAN_FILE)
    require_commit(plan, root)  # its lock files and pins go into the bundle
    manifest = write_bundle(root, folder, out, committed=commit_time(root, plan.commit))
    try:
        answer = verify(out, Asked(root=root if plan.profile == "release" else None, unsigned=True))
    except BaseException:
        out.unlink()
        raise
    if not answer.sound:
        out.unlink()
        _print(answer, sys.stderr.write)
        raise RecordsError(
            "what would be bundled is not sound", where=str(folder), remedy="see above; then judge again"
        )
    sys.stdout.write(f"{out}\n")
    words = f"{manifest.outcome.value}, commit {manifest.commit[:12]}, plan {manifest.plan_digest[:12]}"
    sys.stderr.write(f"{words}, profile {manifest.profile}\n")


Bundle = Annotated[Path, typer.Argument(metavar="FILE", help="File that `hilgate bundle` wrote.")]


@program.command()
def attest(
    ctx: typer.Context,
    file: Bundle,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Statement to write.")],
) -> None:
    """Write the statement that a release signs.

    The bundle is verified first. The statement is in-toto with SLSA provenance and names commit, plan, wheels and
    images; `ssh-keygen -Y sign` signs it.
    """
    from hilgate.model.record import Outcome
    from hilgate.release.provenance import built_by
    from hilgate.release.verify import Asked, statement_of

    asked = Asked(demanded={"profile": "release"}, root=repository(ctx), unsigned=True)
    answer, statement = statement_of(file, asked, *built_by(os.environ))
    if statement is None or answer.verdict is None:
        _print(answer, sys.stderr.write)
        raise RecordsError("no statement is made of it", where=str(file), remedy="see above")
    if answer.verdict.outcome is not Outcome.PASS:
        what = f"it is no release: its verdict is {answer.verdict.outcome.value}"
        raise RecordsError(what, where=str(file), remedy="see its report")
    out.write_text(statement.text(), encoding="utf-8")
    sys.stdout.write(f"{out}\n")


@program.command()
def verify_bundle(
    file: Bundle,
    *,
    as_json: Json = False,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="NAME", help="Fail unless the bundle is of this profile, for example release."
        ),
    ] = None,
    commit: Annotated[
        str | None, typer.Option("--commit", metavar="SHA", help="Fail unless the bundle is of this commit.")
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            "--root", metavar="CLONE", help="Clone that has the commit of the bundle; a release is compared with it."
        ),
    ] = None,
    statement: Annotated[
        Path | None,
        typer.Option("--statement", metavar="FILE", help="Signed statement of a release, with FILE.sig beside it."),
    ] = None,
    signers: Annotated[
        Path | None,
        typer.Option(
            "--signers", metavar="FILE", help="Keys that may sign (default: ci/allowed_signers of the clone)."
        ),
    ] = None,
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Accept a release without a statement, to check it before it is signed.")
    ] = False,
    wheels: Annotated[
        list[Path] | None,
        typer.Option("--wheel", metavar="FILE", help="Fail unless this wheel is in the bundle; may be repeated."),
    ] = None,
) -> None:
    """Check a bundle and judge its results again. Exit status 3 when it is not sound, else that of its verdict."""
    from hilgate.judge.verdict import exit_status
    from hilgate.release.verify import Asked, verify

    if unsigned and statement:
        raise MisuseError("--unsigned and --statement exclude each other", remedy="leave out --unsigned")
    demanded = {"profile": profile, "commit": commit}
    asked = Asked(
        demanded={name: value for name, value in demanded.items() if value is not None},
        root=root,
        statement=statement,
        signers=signers,
        unsigned=unsigned,
        wheels=tuple(wheels or ()),
    )
    answer = verify(file, asked)
    verdict = answer.verdict
    if as_json:
        found = [finding.model_dump(mode="json") for finding in answer.findings]
        shown = {"sound": answer.sound, "findings": found, "outcome": verdict.outcome.value if verdict else None}
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    else:
        _print(answer, sys.stdout.write)
    if verdict is None or answer.plan is None:
        raise typer.Exit(Exit.INVALID_DECLARATION)
    raise typer.Exit(exit_status(verdict, answer.plan))


def _print(answer: BundleAnswer, write: Callable[[str], object]) -> None:
    marks = {True: "✓", False: "✗", None: "○"}
    for finding in answer.findings:
        start = f"{marks[finding.sound]} {finding.check:<10} "
        for line in text.visible(finding.words).splitlines():
            for part in textwrap.wrap(line.strip(), 80 - len(start), break_long_words=False, break_on_hyphens=False):
                write(f"{start}{part}\n")
                start = " " * len(start)
    if answer.verdict is None or answer.plan is None:
        write("NOT SOUND: nothing that it says counts\n")
        return
    asked_for = [one for one in answer.plan.omissions if one.cause == "not asked for"]
    what = f", of a part: {text.count(len(asked_for), 'step')} were not asked for" if asked_for else ""
    signed = answer.findings[-1].sound
    write(f"sound{' and signed' if signed else ''}; its verdict: {answer.verdict.outcome.value}{what}\n")
