# SPDX-License-Identifier: Apache-2.0
"""The page of the history: one HTML file without script or network, below 1 MiB, light and dark, printable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import text
from hilgate.report.plots import accuracy_plot, kernel_plot, minutes_plot, unit_of
from hilgate.report.templating import pages
from hilgate.report.view import shortest

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping, Sequence

    from hilgate.history.queries import Metric, Row

LETTERS = {"pass": "P", "fail": "F", "inconclusive": "I", "did not run": "N", "mixed": "M"}
"""What stands in a cell of the grid, beside its colour."""
MOST_COMMITS, MOST_STEPS = 40, 120
"""Of the grid; the terminal and --json have the others."""
MOST_PLOTS, MOST_ROWS = 8, 200
"""Of one kind: a plot of 200 builds has about 20 KiB. The tables below them hold more, --json everything."""


def render_history(answers: Mapping[Metric, Sequence[Row]], *, step: str) -> str:
    """The page of the history, below 1 MiB; `answers` are the rows of every metric."""
    builds = list(answers["minutes"])
    template = pages().get_template("history.html.j2")
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
        number=lambda value: "none" if value is None else shortest(float(value)),
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
