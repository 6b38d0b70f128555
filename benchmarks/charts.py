# SPDX-License-Identifier: Apache-2.0
"""The two bar charts of a recorded run as SVG, drawn with matplotlib. The same records give the same bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Op
    from .record import BenchmarkRow

GOALS = (80, 85, 90)
"""Percent of the measured bandwidth that the goals of `cases.py` ask for."""

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
    "gdn": "#a0527d",
    "gdn decode": "#b0577f",
    "prefill": "#8a5aa8",
    "gather": "#2a8c7c",
    "write": "#c9852b",
}
MISSED = "#b42318"
GOAL = "#1f2328"

WIDTH, ROW, MARGIN = 8.6, 0.25, 1.05
"""Inches: of a chart, of one bar with its gap, of axis and title of a bar chart."""


@dataclass(frozen=True)
class Bar:
    """One case in a bar chart."""

    name: str
    op: Op
    value: float | None
    """None where a side did not run or was wrong."""
    goal: float | None
    """None where the case sets none of its own."""

    @property
    def missed(self) -> bool:
        """Whether the case has a goal and is below it."""
        return self.goal is not None and (self.value is None or self.value < self.goal)


def ratios(rows: Sequence[BenchmarkRow]) -> list[Bar]:
    """Return the peer's time over ours, per case."""
    return [Bar(row.case.name, row.case.op, row.record.ratio, row.case.goal.ratio) for row in rows]


def bandwidths(rows: Sequence[BenchmarkRow]) -> list[Bar]:
    """Return percent of the measured read or copy rate, per case that such a rate alone bounds."""
    return [
        Bar(row.case.name, row.case.op, _percent(row.record.fraction), _percent(row.case.goal.fraction))
        for row in rows
        if row.case.op != "mixed" and row.case.yardstick in {"read", "copy"}
    ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


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
