# SPDX-License-Identifier: Apache-2.0
"""Draw the charts as SVG with matplotlib; the same numbers give the same bytes."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from .series import GOALS, LEAST, OURS, OURS_NATIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Op
    from .series import Bar, ChartLine

STYLE = {
    "svg.hashsalt": "hilgate",
    "svg.fonttype": "none",  # letters stay letters: small files, and a reader can search and copy them
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # bundled, so that text is measured alike everywhere; its like
    "font.size": 9.5,
    "axes.edgecolor": "#b8c0c8",
    "axes.labelcolor": "#30363d",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e8ec",
    "grid.linewidth": 0.8,
    "xtick.color": "#30363d",
    "ytick.color": "#30363d",
    "text.color": "#1f2328",
    "figure.facecolor": "white",  # read on a dark page too
}
COLOURS: dict[Op, str] = {
    "decode": "#2f6fb0",
    "mla": "#3f9ac2",
    "mixed": "#5b7083",
    "scan": "#8a6fb0",
    "prefill": "#8a5aa8",
    "gather": "#2a8c7c",
    "write": "#c9852b",
}
LINES = {OURS: ("#2f6fb0", "o", "-"), OURS_NATIVE: ("#7aa6d6", "D", "--"), LEAST: ("#8b949e", "", ":")}
PEER_LINES = (("#c8553d", "s", "-"), ("#9a6510", "^", "-"))
MISSED = "#b42318"
GOAL = "#1f2328"

WIDTH, ROW, MARGIN = 8.6, 0.25, 1.05
"""Inches: of a chart, of one bar with its gap, of axis and title of a bar chart."""


def ratio_chart(bars: Sequence[Bar]) -> str:
    """Return the bar chart of peer time over ours; bars begin at the line where both take the same time."""
    with mpl.rc_context(STYLE):
        figure, axes = _bar_axes(bars, "vLLM's time / our time, same run (log scale)")
        values = [bar.value for bar in bars if bar.value is not None]
        axes.set_xscale("log")
        axes.set_xlim(min(0.85, *(0.8 * v for v in values)), 1.7 * max(2.0, *values))
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100) if axes.get_xlim()[0] <= t]
        ticks = [t for t in ticks if t <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        for place, bar in enumerate(bars):
            _bar(axes, bar, place, 1, "{:.2f}")
        axes.axvline(1, color=GOAL, linewidth=1.2)
        _legend(figure, bars, "goal, where above 1")
        return _svg(figure)


def bandwidth_chart(bars: Sequence[Bar]) -> str:
    """Return the bar chart of percent of the measured bandwidth, with a line at each value that goals ask for."""
    with mpl.rc_context(STYLE):
        figure, axes = _bar_axes(bars, "percent of the bandwidth measured in the same run")
        axes.set_xlim(0, 108)
        axes.set_xticks([0, 20, 40, 60, *GOALS, 100])
        for goal in GOALS:
            axes.axvline(goal, color="#6e7781", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        for place, bar in enumerate(bars):
            _bar(axes, bar, place, 0, "{:.1f}" if bar.missed else "{:.0f}")
        _legend(figure, bars, "goal of the case")
        return _svg(figure)


def line_chart(lines: Sequence[ChartLine], label: str, *, thousands: bool = False) -> str:
    """Return time (log scale) against `label`; `thousands` writes 8192 as 8k."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=True, axis="y")
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        places = sorted({x for line in lines for x, _ in line.points})
        axes.set_xticks(places, [f"{x // 1024}k" if thousands else f"{x:,}" for x in places])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_xlabel(label)
        axes.set_ylabel("us a call, median (log scale)")
        peers = itertools.cycle(PEER_LINES)
        above = any(line.name == LEAST for line in lines)  # what ours must keep clear of lies below it, else above
        for line in lines:
            colour, marker, dash = LINES.get(line.name) or next(peers)
            axes.plot(*zip(*line.points, strict=True), dash, color=colour, marker=marker, linewidth=2, label=line.name)
            if line.name not in {LEAST, OURS_NATIVE}:  # the second lies on ours
                _point_labels(axes, line, colour, below=line.name == OURS and not above)
        axes.set_ylim(axes.get_ylim()[0] / 1.35, axes.get_ylim()[1] * 1.35)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return _svg(figure)


def _point_labels(axes: Any, line: ChartLine, colour: str, *, below: bool) -> None:
    for x, time in line.points:
        axes.annotate(
            f"{time:,.0f}" if time >= 100 else f"{time:.1f}",
            (x, time),
            (0, -14 if below else 8),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontsize=8.5,
        )


def _bar_axes(bars: Sequence[Bar], label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, MARGIN + ROW * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(label)
    return figure, axes


def _bar(axes: Any, bar: Bar, place: int, base: float, form: str) -> None:
    """Draw a bar that begins at `base`, its figure, and a mark at a goal of its own."""
    end = base if bar.value is None else max(bar.value, base)
    if bar.value is not None:
        axes.barh(place, bar.value - base, left=base, height=0.66, color=COLOURS[bar.op])
    text = "not measured" if bar.value is None else form.format(bar.value) + ("  missed" if bar.missed else "")
    axes.annotate(
        text,
        (max(end, bar.goal or 0) if bar.missed else end, place),
        (4, 0),
        textcoords="offset points",
        va="center",
        color=MISSED if bar.missed or bar.value is None else GOAL,
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )
    if bar.goal not in {None, base}:
        axes.plot([bar.goal] * 2, [place - 0.42, place + 0.42], color=GOAL, linewidth=2.2, solid_capstyle="butt")


def _legend(figure: Figure, bars: Sequence[Bar], goal: str) -> None:
    ops = list(dict.fromkeys(bar.op for bar in bars))
    handles: list[Any] = [Patch(color=COLOURS[op], label=op) for op in ops]
    handles.append(Line2D([], [], color=GOAL, linewidth=2.2, marker="|", linestyle="", markersize=9, label=goal))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)


def _svg(figure: Figure) -> str:
    """Return the figure without the date and the version that matplotlib would write into it."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().decode().splitlines()) + "\n"
