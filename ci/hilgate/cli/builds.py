# SPDX-License-Identifier: Apache-2.0
"""Commands about judged builds: history (add, show), bundles of evidence (bundle, verify-bundle)."""

from __future__ import annotations

import datetime as dt
import json
import math
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

    from hilgate.release.verify import BundleAnswer
    from hilgate.report.history import Metric, Row, Steadiness


METRICS = "flakes, times, accuracy, kernels"
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
    """Add one judged build to the history. Adding it again changes nothing.

    The project says how many builds are kept (`history_builds`).
    """
    from hilgate.declare.load import load_project
    from hilgate.judge.verdict import read_verdict
    from hilgate.model import PLAN_FILE, VERDICT_FILE
    from hilgate.model.plan import plan_digest
    from hilgate.plan.make import read_plan
    from hilgate.report import history as store
    from hilgate.run.results import read_all

    source = results or repository(ctx) / "results"
    plan = read_plan(source / PLAN_FILE)
    plan.require_whole(str(source / PLAN_FILE))
    verdict = read_verdict(source / VERDICT_FILE)
    if verdict.plan_digest != plan_digest(plan):
        raise RecordsError(
            "the verdict is of another plan than plan.json", where=str(source), remedy="run `hilgate judge` again"
        )
    recorded = read_all(source, jobs, plan, plan_digest(plan), approved=bool(verdict.approved_by))
    path = history or store.path_of(repository(ctx))
    keep = load_project(repository(ctx)).history_builds
    build, added = store.add(path, plan, recorded, verdict, branch=branch, keep=keep)
    words = f"added {build}: {text.count(len(plan.steps), 'step')} to" if added else f"{build} is already in"
    sys.stdout.write(f"{words} {path}\n")


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
    from hilgate.report import history as store
    from hilgate.report.terminal import stdout

    chosen = tuple(one for one in store.METRICS if metric in {"", one})
    if not chosen:
        remedy = text.suggest(metric, store.METRICS)
        raise MisuseError(f"no metric is called {metric!r}", where="--metric", remedy=remedy)
    answers = store.ask(_named(history) or store.path_of(repository(ctx)), chosen, step=step, since=since)
    if as_json:
        sys.stdout.write(json.dumps(answers, indent=1, default=dt.datetime.isoformat) + "\n")
        return
    out = stdout()
    for number, (name, found) in enumerate(answers.items()):
        if number:
            out.print()
        show_history_tables(out, name, found, limit=rows)


@builds.command()
def promote(ctx: typer.Context, since: Since = None, as_json: Json = False, history: History = None) -> None:
    """Say which steps that are only reported are steady enough to count, and which that count are too flaky."""
    from hilgate.declare.load import load
    from hilgate.report import history as store
    from hilgate.report.terminal import say, stdout, table_of

    root = repository(ctx)
    reported = load(root).report_only()
    rows, others = [], 0
    for step in store.steadiness(_named(history) or store.path_of(root), since=since):
        advice = _advice(step, reported=step.key in reported)
        others += not advice
        if advice:
            low, high = step.interval
            about = {"key": step.key, "report_only": step.key in reported, "builds": step.builds, "flaky": step.flaky}
            rows.append({**about, "low": low, "high": high, "newest": step.newest, "advice": advice})
    if as_json:
        sys.stdout.write(json.dumps({"bound": store.STEADY, "steps": rows, "others": others}, indent=1) + "\n")
        return
    out = stdout()
    cells = [
        (row["key"], f"{row['flaky']} of {row['builds']}", f"{row['low']:.2%} to {row['high']:.2%}", row["advice"])
        for row in rows
    ]
    if cells:
        out.print(table_of(("step", "flaky", "95 %", f"against {store.STEADY:.1%}"), cells))
    say(out, f"{text.count(others, 'step')} more, which count and are not known to exceed {store.STEADY:.1%}", "dim")


def _named(history: Path | None) -> Path | None:
    """The history that was named, if one was.

    Raises:
        MisuseError: It is not there.
    """
    if history and not history.exists():
        remedy = "name a history of builds, or add one: `hilgate history add`"
        raise MisuseError("there is no such file", where=f"--history {history}", remedy=remedy)
    return history


def _advice(step: Steadiness, *, reported: bool) -> str:
    """What to do about a step; empty for one that counts and is not known to be too flaky."""
    from hilgate.report.history import STEADY

    low, high = step.interval
    if not reported:
        return "counts, and exceeds it: mend it" if low > STEADY else ""
    if high >= STEADY:
        return f"only reported: {text.count(step.missing, 'build')} to go"
    if step.newest != "pass":
        return f"only reported: steady, and now {step.newest}"
    return "steady: remove report_only"


BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 8
NOTHING = {
    "flakes": "no check failed in these builds",
    "times": "no step of these builds was run",
    "accuracy": "no check of these builds has an exact_match with its interval",
    "kernels": "no check of these builds has a time (a number named ..._us or ..._ms)",
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
    """Name of the time that a row shows, where a check has several times and this is not simply ours."""
    usual = {f"ours_{_unit(row)}", _unit(row)}
    return str(row["id"]) if row["number"] in usual else f"{row['id']} {row['number']}"


def _time(value: float) -> str:
    from hilgate.report.view import shortest

    return shortest(float(value)) if value < 1000 else f"{value:.0f}"


def _change(row: Row) -> str:
    """By how much the newest value differs from the median of those before."""
    return "new" if row["change"] is None else f"{row['change']:+.1%}"


def _flake_cells(row: Row) -> dict[str, str]:
    return {
        "did not always pass": f"{row['key']}  {row['id']}",
        "flaky": f"{row['flaky']} of {row['builds']}",
        "95 %": f"{100 * row['low']:.0f} to {row['high']:.0%}",
        "failed": str(row["failed"]),
        "last": f"{row['last']:%m-%d %H:%M}",
    }


def _time_cells(row: Row) -> dict[str, str]:
    return {
        "minutes of": row["key"],
        "newest": f"{row['last']:.1f}",
        "before": "" if row["before"] is None else f"{row['before']:.1f}",
        "change": _change(row),
        "runs": str(row["builds"]),
        "GPU-hours": f"{row['gpu_hours']:.1f}" if row["gpu_hours"] else "",
        "course": bars(row["value"]),
    }


def _accuracy_cells(row: Row) -> dict[str, str]:
    n, baseline = row["n"][-1], row["baseline"][-1]
    return {
        "accuracy": row["id"],
        "match": f"{row['score'][-1]:.1%}",
        "[interval]": f"[{row['low'][-1]:.1%}, {row['high'][-1]:.1%}]",
        "n": "?" if n is None else f"{n:g}",
        "base": "none" if baseline is None else f"{baseline:.1%}",
        "builds": str(row["builds"]),
        "course": bars(row["score"]),
    }


def _kernel_cells(row: Row) -> dict[str, str]:
    return {
        "kernel time": _case(row),
        "newest": f"{_time(row['last'])} {_unit(row)}",
        "before": "" if row["before"] is None else _time(row["before"]),
        "change": _change(row),
        "builds": str(row["builds"]),
        "course": bars(row["value"]),
    }


CELLS = {"flakes": _flake_cells, "times": _time_cells, "accuracy": _accuracy_cells, "kernels": _kernel_cells}
"""What each metric shows of a row, by the name of the column; a column without a value in any row is left out."""

WORDS = frozenset({"course", "last"})
"""Columns that are read, not compared: set flush left."""


def show_history_tables(out: Console, metric: Metric, rows: Sequence[Row], *, limit: int) -> None:
    """One table of a metric, or the reason why there is none."""
    from hilgate.report.terminal import cell, say, table_of

    if not rows:
        say(out, f"{metric}: {NOTHING[metric]}", "dim")
        return
    shown = rows[:limit]
    cells = [CELLS[metric](row) for row in shown]
    columns = [name for name in cells[0] if any(of_row[name] for of_row in cells)]
    table, device = table_of(tuple(columns), ()), None
    for number, column in enumerate(table.columns):
        column.no_wrap, column.ratio = number > 0, None if number else 1
        column.justify = "left" if number == 0 or column.header in WORDS else "right"
    for row, of_row in zip(shown, cells, strict=True):
        if metric in {"accuracy", "kernels"} and row["device"] != device:
            device = row["device"]
            table.add_row(cell(f"on {device}", "dim"))
        table.add_row(*(cell(of_row[name]) for name in columns))
    out.print(table)
    if len(rows) > limit:
        say(out, f"and {len(rows) - limit} more (--rows, --step, --json)", "dim")


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
    signature: Annotated[
        Path | None,
        typer.Option("--signature", metavar="FILE", help="Signature of a release: SHA256SUMS.sig, by `ssh-keygen`."),
    ] = None,
    signers: Annotated[
        Path | None,
        typer.Option(
            "--signers", metavar="FILE", help="Keys that may sign (default: ci/allowed_signers of the clone)."
        ),
    ] = None,
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Accept a release without a signature, to check it before it is signed.")
    ] = False,
    wheels: Annotated[
        list[Path] | None,
        typer.Option("--wheel", metavar="FILE", help="Fail unless this wheel is in the bundle; may be repeated."),
    ] = None,
) -> None:
    """Check a bundle and judge its results again. Exit status 3 when it is not sound, else that of its verdict."""
    from hilgate.judge.verdict import exit_status
    from hilgate.release.verify import Asked, verify

    if unsigned and signature:
        raise MisuseError("--unsigned and --signature exclude each other", remedy="leave out --unsigned")
    demanded = {"profile": profile, "commit": commit}
    asked = Asked(
        demanded={name: value for name, value in demanded.items() if value is not None},
        root=root,
        signature=signature,
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
        write("invalid bundle: nothing in it counts\n")
        return
    asked_for = [omission for omission in answer.plan.omissions if omission.cause == "not asked for"]
    what = f", of a part: {text.count(len(asked_for), 'step')} were not asked for" if asked_for else ""
    signed = answer.findings[-1].sound
    write(f"sound{' and signed' if signed else ''}; its verdict: {answer.verdict.outcome.value}{what}\n")
