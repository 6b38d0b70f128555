"""The page of the history: one HTML file without script or network, small plots and the figures behind them.

The plots are SVG that takes its colours from the page around it: light, dark and printed alike. matplotlib knows fixed
colours only, so it draws in stand-ins that are then replaced by the page's CSS variables. The same values give the same
bytes.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

from hilgate import text
from hilgate.report.html import environment
from hilgate.report.problems import shortest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hilgate.history.queries import Metric, Row


MOST_PLOTS = 8
"""Of one kind: a plot is about 8 KiB. The tables below them hold more, --json everything."""
MOST_ROWS = 200


def render(answers: Mapping[Metric, Sequence[Row]], *, step: str) -> str:
    """The page as HTML, below 1 MiB; `answers` are the rows of every metric."""
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
        number=lambda value: "none" if value is None else shortest(float(value)),
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
_NAMES = re.compile(r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis|PolyCollection|FillBetween'
                    r'PolyCollection|LineCollection|PathCollection|legend)_\d+"')  # fmt: skip
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
    import html

    import matplotlib as mpl

    every = max(1, -(-len(commits) // 6))
    shown = list(range(len(commits)))[::-1][::every][::-1]
    axes.set_xticks(shown, [commits[place][:7] or "none" for place in shown])
    axes.margins(x=0.06)
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _NAMES.sub("", _NAMESPACES.sub("", _METADATA.sub("", _HEAD.sub("", text.getvalue()))))
    svg = _SIZE.sub(r"\1", _STYLE.sub("", _FONTS.sub("", svg)))  # the page has fonts and styles of its own
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
