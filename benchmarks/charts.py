# SPDX-License-Identifier: Apache-2.0
"""The two bar charts of a recorded run as SVG, an element a line. The same records give the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .cases import Op
    from .record import BenchmarkRow

GOALS = (80, 85, 90)
"""Percent of the measured bandwidth that the goals of `cases.py` ask for."""

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
GRID = "#d8dde2"

WIDTH, ROW, TOP, BOTTOM, LETTER = 860, 20, 34, 44, 6.8
"""Pixels: of a chart, of one bar with its gap, above and below the bars, of a letter on average."""


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
    values = [bar.value for bar in bars if bar.value is not None]
    low, high = min([0.85, *(0.8 * value for value in values)]), 1.7 * max([2.0, *values])
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]

    def share(value: float) -> float:
        return math.log(value / low) / math.log(high / low)

    chart = _Chart(bars, share, base=1)
    for tick in ticks:
        chart.tick(tick, f"{tick:g}x")
    for place, bar in enumerate(bars):
        chart.bar(place, bar, "{:.2f}")
    chart.line(1, GOAL)
    return chart.svg("vLLM's time / our time, same run (log scale)", "goal, where above 1")


def bandwidth_chart(bars: Sequence[Bar]) -> str:
    """Return the bar chart of percent of the measured bandwidth, with a line at each value that goals ask for."""

    def share(value: float) -> float:
        return value / 108

    chart = _Chart(bars, share, base=0)
    for tick in (0, 20, 40, 60, *GOALS, 100):
        chart.tick(tick, f"{tick}")
    for goal in GOALS:
        chart.line(goal, "#6e7781", dashes="4 3")
    for place, bar in enumerate(bars):
        chart.bar(place, bar, "{:.1f}" if bar.missed else "{:.0f}")
    return chart.svg("percent of the bandwidth measured in the same run", "goal of the case")


class _Chart:
    """Lines of SVG: bars below each other, each with its name on the left and its figure at its end."""

    def __init__(self, bars: Sequence[Bar], share: Callable[[float], float], base: float) -> None:
        """Begin a chart.

        Args:
            bars: All that will be drawn.
            share: Returns where a value lies on the axis, as a share of its length.
            base: Value at which bars begin.
        """
        self._ops = list(dict.fromkeys(bar.op for bar in bars))
        self._left = 14 + LETTER * max((len(bar.name) for bar in bars), default=0)
        self._bottom = TOP + ROW * len(bars)
        self._share, self._base = share, base
        self._lines: list[str] = []

    def _x(self, value: float) -> float:
        return round(self._left + self._share(value) * (WIDTH - self._left - 10), 2)

    def line(self, value: float, colour: str, dashes: str = "") -> None:
        """Draw a line through all bars."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._lines.append(f'<path d="M{self._x(value)} {TOP}V{self._bottom}" stroke="{colour}"{dashed}/>')

    def tick(self, value: float, label: str) -> None:
        """Draw a line of the grid with its label below."""
        self.line(value, GRID)
        self._text(self._x(value), self._bottom + 16, label, 'text-anchor="middle"')

    def bar(self, place: int, bar: Bar, form: str) -> None:
        """Draw a bar with its name, its figure, and a mark at a goal of its own."""
        top, value = TOP + ROW * place, bar.value
        begin = end = self._x(self._base)
        self._text(self._left - 8, top + 14, bar.name, 'text-anchor="end"')
        if value is not None:
            begin, end = sorted((begin, self._x(value)))
            box = f'x="{begin}" y="{top + 3}" width="{end - begin:.2f}" height="{ROW - 6}"'
            self._lines.append(f'<rect {box} fill="{COLOURS[bar.op]}"/>')
        if bar.goal is not None and bar.goal != self._base:
            goal = self._x(bar.goal)
            self._lines.append(f'<path d="M{goal} {top + 2}v{ROW - 4}" stroke="{GOAL}" stroke-width="3"/>')
            end = max(end, goal) if bar.missed else end
        text = "not measured" if value is None else form.format(value) + (" missed" if bar.missed else "")
        colour = MISSED if bar.missed or value is None else GOAL
        # Outlined in white, so that lines of the grid do not cross the figure.
        halo = f'fill="{colour}" stroke="white" stroke-width="3" paint-order="stroke"'
        self._text(end + 5, top + 14, text, halo)

    def _text(self, x: float, y: float, words: str, attributes: str = "") -> None:
        spaced = f" {attributes}" if attributes else ""
        self._lines.append(f'<text x="{x:.2f}" y="{y}"{spaced}>{escape(words)}</text>')

    def svg(self, axis: str, goal: str) -> str:
        """Return the picture, with what the axis shows and what colours and marks mean."""
        self._text((self._left + WIDTH) / 2, self._bottom + 36, axis, 'text-anchor="middle"')
        x = 12.0
        for words, colour, width in [*((op, COLOURS[op], 14) for op in self._ops), (goal, GOAL, 3)]:
            self._lines.append(f'<rect x="{x:.2f}" y="9" width="{width}" height="12" fill="{colour}"/>')
            self._text(x + width + 5, 19, words)
            x += width + 22 + LETTER * len(words)
        size = f'width="{WIDTH}" height="{self._bottom + BOTTOM}"'
        fonts = 'font-family="DejaVu Sans, Verdana, sans-serif" font-size="12"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts} fill="{GOAL}">'
        white = '<rect width="100%" height="100%" fill="white"/>'  # read on a dark page too
        return "\n".join([head, white, *self._lines, "</svg>"]) + "\n"
