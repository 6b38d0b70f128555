"""The page of the history: one HTML file without script or network, small plots and the figures behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate import shown
from hilgate.magnitude import shortest
from hilgate.pages import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hilgate.history.queries import Metric, Row

MOST_PLOTS = 8
"""Of one kind: a plot is about 8 KiB. The tables below them hold more, --json everything."""
MOST_ROWS = 200


def render(answers: Mapping[Metric, Sequence[Row]], *, step: str, notes: Sequence[str]) -> str:
    """The page as HTML, below 1 MiB; `answers` are the rows of every metric."""
    builds = list(answers["minutes"])
    template = environment().get_template("history.html.j2")
    return template.render(
        step=step,
        notes=notes,
        builds=builds[::-1][:MOST_ROWS],
        earlier=max(0, len(builds) - MOST_ROWS),
        times=[build["time"] for build in builds],
        minutes=_minutes(builds, step),
        accuracy=[_accuracy(row) for row in answers["accuracy"][:MOST_ROWS]],
        accuracy_plots=[_accuracy_plot(row) for row in answers["accuracy"][:MOST_PLOTS]],
        kernels=answers["kernels"][:MOST_ROWS],
        kernel_plots=[_kernel_plot(row) for row in answers["kernels"] if row["builds"] > 1][:MOST_PLOTS],
        flakes=answers["flakes"][:MOST_ROWS],
        more={name: max(0, len(rows) - MOST_ROWS) for name, rows in answers.items()},
        percent=lambda value: "none" if value is None else f"{value:.1%}",
        number=lambda value: "none" if value is None else shortest(float(value)),
        duration=lambda minutes: shown.duration(minutes * 60 or None),
    )


def _minutes(builds: Sequence[Row], step: str) -> str:
    """Minutes on GPUs and in queues; where no build used a GPU, minutes of the steps instead."""
    from hilgate.history import plots

    if not builds:
        return ""
    gpu = any(build["gpu_minutes"] for build in builds)
    first = ("GPU minutes", "gpu_minutes") if gpu else ("minutes of all steps", "step_minutes")
    series = [(words, [build[name] for build in builds]) for words, name in (first, ("queue minutes", "queue_minutes"))]
    label = f"{first[0]} and queue minutes of {step or 'each build'}"
    return plots.minutes([_commit(build["commit"]) for build in builds], series, label=label)


def _accuracy(row: Row) -> dict[str, object]:
    newest = {name: row[name][-1] for name in ("score", "low", "high", "n", "baseline", "outcome")}
    return newest | {"id": row["id"], "device": row["device"], "builds": row["builds"]}


def _accuracy_plot(row: Row) -> tuple[str, str, str]:
    from hilgate.history import plots

    label = f"accuracy of {row['id']} on {row['device']} over builds"
    rows = (row["score"], row["low"], row["high"])
    drawn = plots.interval([_commit(one) for one in row["commit"]], rows, baseline=row["baseline"], label=label)
    return f"{row['id']}", row["device"], drawn


def _kernel_plot(row: Row) -> tuple[str, str, str]:
    from hilgate.history import plots

    unit = row["number"].rsplit("_", 1)[-1]
    label = f"{row['id']} on {row['device']} in {unit} over builds"
    drawn = plots.course([_commit(one) for one in row["commit"]], row["value"], label=label)
    return row["id"], f"{unit}, {row['device']}", drawn


def _commit(commit: str) -> str:
    return commit[:7] or "none"
