# SPDX-License-Identifier: Apache-2.0
"""Plots of values over builds: their geometry. `templates/plot.svg.j2` draws it in the colours of its page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hilgate.report.view import shortest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hilgate.history.queries import Row

WIDE, SMALL = (520, 138), (252, 108)
"""Width and height in points, over the whole page and two beside each other."""
LEFT, RIGHT, TOP, BOTTOM = 36, 8, 14, 16
"""Room around the values, for their axes and the legend."""
MOST_COMMITS, MOST_STEPS = 6, 5
"""Commits that the lower axis names, and steps of the left one at most."""

Values = list[float | None]


@dataclass(frozen=True)
class Line:
    """Values over builds as the drawing takes them: points of a polyline, and its style."""

    style: str
    """`one`, or `other`: another colour, dashed."""
    points: tuple[tuple[float, float], ...]
    words: str
    """Of the legend; empty for none."""


@dataclass(frozen=True)
class Plot:
    """A drawing; its places count from the upper left corner.

    Attributes:
        label: What it shows, for those who do not see it.
        steps: Of the left axis: how far down, and the words there.
        commits: Of the lower axis: how far right, and the words there.
        band: For each build how far right it is, and how far down its lowest and highest value are.
    """

    label: str
    width: int
    height: int
    lines: tuple[Line, ...]
    steps: tuple[tuple[float, str], ...]
    commits: tuple[tuple[float, str], ...]
    band: tuple[tuple[float, float, float], ...] = ()


def minutes_plot(builds: Sequence[Row], step: str) -> Plot | None:
    """Minutes on GPUs and in queues; where no build used a GPU, minutes of the steps instead. None without builds."""
    if not builds:
        return None
    gpu = any(build["gpu_minutes"] for build in builds)
    words, name = ("GPU minutes", "gpu_minutes") if gpu else ("minutes of all steps", "step_minutes")
    series: list[tuple[str, Values, str]] = [
        ("one", [build[name] for build in builds], words),
        ("other", [build["queue_minutes"] for build in builds], "queue minutes"),
    ]
    label = f"{words} and queue minutes of {step or 'each build'}"
    return _plot(label, WIDE, [build["commit"] for build in builds], series, begin=0.0)


def accuracy_plot(row: Row) -> Plot:
    """A score over builds inside its interval, with the baseline that it was held against."""
    series: list[tuple[str, Values, str]] = [("one", list(row["score"]), ""), ("other", list(row["baseline"]), "")]
    label = f"accuracy of {row['id']} on {row['device']} over builds"
    limits = list(zip(row["low"], row["high"], strict=True))
    return _plot(label, SMALL, row["commit"], series, limits=limits, words=lambda value: f"{100 * value:.4g}%")


def kernel_plot(row: Row) -> Plot:
    """A time over builds; the axis begins at 0, so that a change looks as large as it is."""
    label = f"{row['id']} on {row['device']} in {unit_of(row)} over builds"
    return _plot(label, SMALL, row["commit"], [("one", list(row["value"]), "")], begin=0.0)


def unit_of(row: Row) -> str:
    """Unit of a measured number, the last word of its name."""
    return str(row["number"]).rsplit("_", 1)[-1]


def _plot(
    label: str,
    size: tuple[int, int],
    commits: Sequence[str],
    series: Sequence[tuple[str, Values, str]],
    *,
    begin: float | None = None,
    limits: Sequence[tuple[Any, Any]] = (),
    words: Callable[[float], str] = shortest,
) -> Plot:
    """Place values: builds at equal distances, and the left axis over all of them, from `begin` where that is given."""
    width, height = size
    known = [value for _, values, _ in series for value in values if value is not None]
    known += [float(value) for pair in limits for value in pair if value is not None]
    known += [] if begin is None else [begin]
    low, high, every = _axis(min(known, default=0.0), max(known, default=0.0))
    distance = (width - LEFT - RIGHT) / max(len(commits), 1)

    def right(build: int) -> float:
        return round(LEFT + distance * (build + 0.5), 1)

    def down(value: float) -> float:
        return round(TOP + (height - TOP - BOTTOM) * (high - value) / (high - low), 1)

    shown = list(range(len(commits)))[:: -max(1, -(-len(commits) // MOST_COMMITS))][::-1]
    lines = [
        Line(style, tuple((right(n), down(value)) for n, value in enumerate(values) if value is not None), text)
        for style, values, text in series
    ]
    count = round((high - low) / every)
    return Plot(
        label,
        width,
        height,
        tuple(line for line in lines if line.points),
        tuple((down(low + n * every), words(round(low + n * every, 12))) for n in range(count + 1)),
        tuple((right(n), commits[n][:7] or "none") for n in shown),
        tuple((right(n), down(one), down(two)) for n, (one, two) in enumerate(limits) if None not in {one, two}),
    )


def _axis(least: float, most: float) -> tuple[float, float, float]:
    """Where an axis over these values begins and ends, and its steps: 1, 2 or 5 times a power of ten."""
    spread = most - least or abs(most) or 1.0
    power = 10.0 ** math.floor(math.log10(spread / MOST_STEPS))
    every = next(power * times for times in (1, 2, 5, 10) if spread / (power * times) <= MOST_STEPS)
    low, high = math.floor(least / every) * every, math.ceil(most / every) * every
    return low, max(high, low + every), every
