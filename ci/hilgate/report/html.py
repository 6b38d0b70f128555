# SPDX-License-Identifier: Apache-2.0
"""The report and the history, each one HTML file without script or network, below 1 MiB, light and dark, printable.

The templates hold the looks; this file decides what is shown: the verdict, what broke, what changed, then everything.
"""

from __future__ import annotations

import functools
import html
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jinja2

from hilgate import text
from hilgate.report import problems, tables
from hilgate.report.merge_base import NOTHING, MergeBase
from hilgate.report.problems import Detail, fit

if TYPE_CHECKING:
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

    def page(detail: Detail) -> str:
        return template.render(
            plan=plan,
            verdict=verdict,
            headline=problems.headline(plan, verdict, recorded),
            step_counts=problems.step_counts(verdict),
            problems=problems.problems(plan, recorded, verdict, limit=detail.failures_per_step, facts=facts),
            rulings=problems.RULINGS,
            named=problems.named(verdict, recorded),
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


MOST_PLOTS, MOST_ROWS = 8, 200
"""Of one kind: a plot is about 8 KiB. The tables below them hold more, --json everything."""


def render_history(answers: Mapping[Metric, Sequence[Row]], *, step: str) -> str:
    """The page of the history, below 1 MiB; `answers` are the rows of every metric.

    Plots are SVG in the colours of the page around it, light, dark and printed: matplotlib knows fixed colours only,
    so it draws in stand-ins that are replaced by CSS variables. The same values give the same bytes.
    """
    builds = list(answers["minutes"])
    template = environment().get_template("history.html.j2")
    return template.render(
        step=step,
        builds=builds[::-1][:MOST_ROWS],
        earlier=max(0, len(builds) - MOST_ROWS),
        times=[build["time"] for build in builds],
        minutes=_minutes_plot(builds, step),
        accuracy=[_accuracy(row) for row in answers["accuracy"][:MOST_ROWS]],
        accuracy_plots=[_accuracy_plot(row) for row in answers["accuracy"][:MOST_PLOTS]],
        kernels=answers["kernels"][:MOST_ROWS],
        kernel_plots=[_kernel_plot(row) for row in answers["kernels"] if row["builds"] > 1][:MOST_PLOTS],
        flakes=answers["flakes"][:MOST_ROWS],
        more={name: max(0, len(rows) - MOST_ROWS) for name, rows in answers.items()},
        percent=lambda value: "none" if value is None else f"{value:.1%}",
        number=lambda value: "none" if value is None else problems.shortest(float(value)),
        duration=lambda minutes: text.duration(minutes * 60 or None),
    )


def _accuracy(row: Row) -> dict[str, object]:
    newest = {name: row[name][-1] for name in ("score", "low", "high", "n", "baseline", "outcome")}
    return newest | {"id": row["id"], "device": row["device"], "builds": row["builds"]}


INK, QUIET, LINE, TONE, OTHER = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES: Final = {INK: "ink", QUIET: "quiet", LINE: "line", TONE: "plot", OTHER: "plot-other"}
_HEAD = re.compile(r"(?s)^.*?(?=<svg)")
_METADATA = re.compile(r"(?s)\s*<metadata>.*?</metadata>")
_NAMESPACES = re.compile(r'\s+(?:xmlns(?::xlink)?="[^"]*"|version="[^"]*")')
_NAMES = re.compile(
    r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis|PolyCollection|FillBetween'
    r'PolyCollection|LineCollection|PathCollection|legend)_\d+"'
)
_FONTS = re.compile(r" font-family: [^;\"]*;")
_STYLE = re.compile(r"(?s)\s*<defs>\s*<style.*?</style>\s*</defs>")
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"| height="[\d.]+pt"')

WIDE, SMALL = (7.2, 1.9), (3.5, 1.5)
"""Inches, at 72 points: over the whole page, and two beside each other."""


def _minutes_plot(builds: Sequence[Row], step: str) -> str:
    """Minutes on GPUs and in queues; where no build used a GPU, minutes of the steps instead."""
    if not builds:
        return ""
    gpu = any(build["gpu_minutes"] for build in builds)
    words, name = ("GPU minutes", "gpu_minutes") if gpu else ("minutes of all steps", "step_minutes")
    figure, axes = _figure(WIDE)
    series = ((name, words, "-", TONE), ("queue_minutes", "queue minutes", "--", OTHER))
    for column, label, style, colour in series:
        values = [build[column] for build in builds]
        axes.plot(values, style, color=colour, marker="o", markersize=2.6, linewidth=1.2, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    what = f"{words} and queue minutes of {step or 'each build'}"
    return _svg(figure, axes, [build["commit"] for build in builds], what)


def _accuracy_plot(row: Row) -> tuple[str, str, str]:
    """A score over builds inside its interval, with the baseline that it was held against."""
    figure, axes = _figure(SMALL)
    places = range(row["builds"])
    axes.fill_between(places, row["low"], row["high"], color=TONE, alpha=0.16, linewidth=0)
    axes.vlines(places, row["low"], row["high"], color=TONE, linewidth=0.8)
    axes.plot(places, row["score"], color=TONE, marker="o", markersize=2.8, linewidth=1.2)
    known = [(place, value) for place, value in zip(places, row["baseline"], strict=True) if value is not None]
    if known:
        axes.plot([place for place, _ in known], [value for _, value in known], "--", color=OTHER, linewidth=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    drawn = _svg(figure, axes, row["commit"], f"accuracy of {row['id']} on {row['device']} over builds")
    return row["id"], row["device"], drawn


def _kernel_plot(row: Row) -> tuple[str, str, str]:
    """A time over builds; the axis begins at 0, so that a change looks as large as it is."""
    unit = row["number"].rsplit("_", 1)[-1]
    figure, axes = _figure(SMALL)
    axes.plot(row["value"], color=TONE, marker="o", markersize=2.8, linewidth=1.2)
    axes.set_ylim(0, max(row["value"]) * 1.15 or 1)
    drawn = _svg(figure, axes, row["commit"], f"{row['id']} on {row['device']} in {unit} over builds")
    return row["id"], f"{unit}, {row['device']}", drawn


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "font.size": 7.5, "font.family": "sans-serif"}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)
    axes.tick_params(colors=QUIET, labelcolor=INK, length=2.5)
    axes.grid(visible=True, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any, axes: Any, commits: Sequence[str], label: str) -> str:
    """The figure as SVG for inside a page: no prologue, no fixed size, no colours of its own.

    Builds stand at equal distances; at most six are named.
    """
    import matplotlib as mpl

    every = max(1, -(-len(commits) // 6))
    shown = list(range(len(commits)))[::-1][::every][::-1]
    axes.set_xticks(shown, [commits[place][:7] or "none" for place in shown])
    axes.margins(x=0.06)
    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _NAMES.sub("", _NAMESPACES.sub("", _METADATA.sub("", _HEAD.sub("", drawn.getvalue()))))
    svg = _SIZE.sub(r"\1", _STYLE.sub("", _FONTS.sub("", svg)))  # the page has fonts and styles of its own
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
