# SPDX-License-Identifier: Apache-2.0
"""The report and the history, each one HTML file without script or network, below 1 MiB, light and dark, printable.

The templates hold the looks; this file decides what is shown: the verdict, what broke, what changed, then everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2

from hilgate import text
from hilgate.report import problems, tables
from hilgate.report.causes import causes
from hilgate.report.merge_base import NOTHING, MergeBase, whose
from hilgate.report.plots import accuracy_plot, kernel_plot, minutes_plot, unit_of
from hilgate.report.problems import Detail, fit
from hilgate.report.reservations import TITLE, reservations

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping, Sequence

    from hilgate.history.queries import Metric, Row
    from hilgate.model.plan import Plan
    from hilgate.model.record import Outcome
    from hilgate.model.verdict import Verdict
    from hilgate.run.results import Recorded


REPORT_FILE = "report.html"
TABLE_COLUMNS = 60
"""Of a table; more would not fit a page, and the others are counted."""

FOLDED_ROWS = 30
"""A longer table would push what follows off the reader's screen."""


def render(
    plan: Plan, recorded: Recorded, verdict: Verdict, logs: dict[str, str] | None = None, *, facts: MergeBase = NOTHING
) -> str:
    """The report as HTML, below `LIMIT_BYTES`.

    `logs` has the address of a step's log, relative to the report.
    """
    template = environment().get_template("report.html.j2")
    bars, ticks = timeline(plan, recorded, verdict)
    found = causes(plan, recorded, verdict)

    def page(detail: Detail) -> str:
        return template.render(
            plan=plan,
            verdict=verdict,
            whose=whose(found, facts, recorded, local=plan.local),
            headline=problems.headline(plan, verdict, recorded),
            step_counts=problems.step_counts(verdict),
            problems=problems.problems(plan, recorded, verdict, found, limit=detail.failures_per_step, facts=facts),
            beside=problems.beside,
            more=problems.more,
            others_limit=detail.table_rows,
            rulings=problems.RULINGS,
            reservations=reservations(plan, recorded, verdict),
            reservations_title=TITLE,
            named_limit=problems.NAMED_IDS,
            evidence_limit=problems.EVIDENCE_LINES,
            approval=problems.approval(verdict),
            reasons={step.key: step.reason for step in plan.steps},
            peaks={s.key: a.record.peak_memory_mib for s in plan.steps if (a := recorded.last(s.key))},
            tables=tables.tables(plan, recorded, verdict) + tables.value_tables(plan, recorded, verdict),
            table_rows=detail.table_rows,
            table_columns=TABLE_COLUMNS,
            folded_rows=FOLDED_ROWS,
            notes=tables.notes,
            bars=bars,
            ticks=ticks,
            environments=environments(recorded),
            characters=detail.message_characters,
            logs=logs or {},
        )

    return fit(page)


def environments(recorded: Recorded) -> tuple[tuple[str, str], ...]:
    """(where, what) of every distinct environment that a build record names."""
    distinct = {build.environment.model_dump_json(): build.environment for build in recorded.builds}
    found = []
    for where in distinct.values():
        versions = ", ".join(f"{name} {version}" for name, version in sorted(where.versions.items()))
        image = f", image {where.image}" if where.image else ""
        machine = f"{where.device}, {where.cores} cores, {where.memory_gib:g} GiB"
        found.append((where.host, f"{machine}; Python {where.python}, {versions}{image}"))
    return tuple(found)


TICK_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)
MOST_TICKS = 8


@dataclass(frozen=True)
class HistoryBar:
    """One step; `left` and `width` in percent of the whole time."""

    key: str
    outcome: Outcome
    left: float
    width: float
    words: str


def timeline(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[list[HistoryBar], list[tuple[float, str]]]:
    """Bars of the attempts that ran and count, in the order in which they started, and (percent, words) of ticks."""
    outcomes = {step.key: step.outcome for step in verdict.steps}
    records = [attempt.record for step in plan.steps if (attempt := recorded.last(step.key))]
    records = sorted((one for one in records if one.seconds > 0 and not one.reused), key=lambda record: record.started)
    if not records:
        return [], []
    began = records[0].started
    starts = [(record.started - began).total_seconds() for record in records]
    whole = max(start + record.seconds for start, record in zip(starts, records, strict=True))
    bars = [
        HistoryBar(
            record.key,
            outcomes[record.key],
            100 * start / whole,
            max(0.3, 100 * record.seconds / whole),  # a bar one can see
            text.duration(record.seconds),
        )
        for start, record in zip(starts, records, strict=True)
    ]
    step = next((seconds for seconds in TICK_SECONDS if whole / seconds <= MOST_TICKS), whole)
    times = [n * step for n in range(int(whole / step) + 1)]
    return bars, [
        (100 * at / whole, f"{at:g} s" if at < 60 else text.duration(at).removesuffix(" 00 s")) for at in times
    ]


@functools.cache
def environment() -> jinja2.Environment:
    """Templates in which every value is escaped as HTML and an unknown name is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("hilgate.report"),
        autoescape=True,
        finalize=text.finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "mark": lambda outcome: text.MARKS[outcome],
        "slug": lambda word: str(word).replace(" ", "-"),
        "duration": text.duration,
        "time_of": problems.time_of,
        "shorten": text.shorten,
        "at_most": problems.at_most,
    }
    return made


LETTERS = {"pass": "P", "fail": "F", "inconclusive": "I", "did not run": "N", "mixed": "M"}
"""What stands in a cell of the grid, beside its colour."""
MOST_COMMITS, MOST_STEPS = 40, 120
"""Of the grid; the terminal and --json have the others."""
MOST_PLOTS, MOST_ROWS = 8, 200
"""Of one kind: a plot of 200 builds has about 20 KiB. The tables below them hold more, --json everything."""


def render_history(answers: Mapping[Metric, Sequence[Row]], *, step: str) -> str:
    """The page of the history, below 1 MiB; `answers` are the rows of every metric."""
    builds = list(answers["minutes"])
    template = environment().get_template("history.html.j2")
    return template.render(
        step=step,
        grid=_grid(answers["grid"]),
        letters=LETTERS,
        hours=answers["hours"][:MOST_ROWS],
        builds=builds[::-1][:MOST_ROWS],
        earlier=max(0, len(builds) - MOST_ROWS),
        times=[build["time"] for build in builds],
        minutes=minutes_plot(builds, step),
        accuracy=[_accuracy(row) for row in answers["accuracy"][:MOST_ROWS]],
        accuracy_plots=[(row["id"], row["device"], accuracy_plot(row)) for row in answers["accuracy"][:MOST_PLOTS]],
        kernels=answers["kernels"][:MOST_ROWS],
        kernel_plots=[
            (row["id"], f"{unit_of(row)}, {row['device']}", kernel_plot(row))
            for row in answers["kernels"]
            if row["builds"] > 1
        ][:MOST_PLOTS],
        flakes=answers["flakes"][:MOST_ROWS],
        waiting=answers["waiting"][:MOST_ROWS],
        more={name: max(0, len(rows) - MOST_ROWS) for name, rows in answers.items()},
        percent=lambda value: "none" if value is None else f"{value:.1%}",
        number=lambda value: "none" if value is None else problems.shortest(float(value)),
        duration=lambda minutes: text.duration(minutes * 60 or None),
    )


@dataclass(frozen=True)
class Grid:
    """Commits by steps.

    Attributes:
        steps: Planned keys, those that did not always pass first.
        rows: (commit, when its newest build began, outcome of each step or None: not planned), newest first.
        more: In words, how much is left out.
    """

    steps: tuple[str, ...]
    rows: tuple[tuple[str, dt.datetime, tuple[str | None, ...]], ...]
    more: str


def _grid(rows: Sequence[Row]) -> Grid:
    """The newest commits and the steps that were planned at them."""
    newest = rows[:MOST_COMMITS]
    steps = sorted({key for row in newest for key in row["cells"]})
    steps.sort(key=lambda key: all(row["cells"].get(key, "pass") == "pass" for row in newest))
    left = {"commit": len(rows) - len(newest), "step": len(steps[MOST_STEPS:])}
    shown = tuple(steps[:MOST_STEPS])
    return Grid(
        shown,
        tuple((row["commit"], row["time"], tuple(row["cells"].get(key) for key in shown)) for row in newest),
        ", ".join(f"{text.count(number, word)}" for word, number in left.items() if number),
    )


def _accuracy(row: Row) -> dict[str, object]:
    newest = {name: row[name][-1] for name in ("score", "low", "high", "n", "baseline", "outcome")}
    return newest | {"id": row["id"], "device": row["device"], "builds": row["builds"]}
