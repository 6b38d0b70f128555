"""What `hilgate history show` prints: tables for 80 columns, with a line of bars where values have a course."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hilgate import escape, shown
from hilgate.magnitude import shortest
from hilgate.model import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hilgate.history.queries import Metric, Row

BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 8
NOTHING = {
    "accuracy": "no check of these builds has an exact_match with its interval",
    "kernels": "no check of these builds has a time (a number named ..._us or ..._ms)",
    "flakes": "no check failed in these builds",
    "minutes": "no step of these builds was run",
}


def show(out: Console, metric: Metric, rows: Sequence[Row], *, limit: int) -> None:
    """One table, or the reason why there is none."""
    if not rows:
        out.print(Text(f"{metric}: {NOTHING[metric]}", "dim"))
        return
    {"accuracy": _accuracy, "kernels": _kernels, "flakes": _flakes, "minutes": _minutes}[metric](out, rows, limit)


def bars(values: Sequence[float | None]) -> str:
    """The last `MOST_BARS` values, lowest to highest of them; a dot where there is none."""
    last = [value if value is not None and math.isfinite(value) else None for value in values[-MOST_BARS:]]
    known = [value for value in last if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if high == low:
        return "".join("·" if value is None else BARS[3] for value in last)
    top = len(BARS) - 1
    return "".join("·" if value is None else BARS[round((value - low) / (high - low) * top)] for value in last)


def _accuracy(out: Console, rows: Sequence[Row], limit: int) -> None:
    table = _table("accuracy", ("match", "[interval]", "n", "base", "builds", "course"))
    device = ""
    for row in rows[:limit]:
        if row["device"] != device:
            device = row["device"]
            table.add_row(Text(escape.line(f"on {device}"), "dim"))
        before = row["baseline"][-1]
        table.add_row(
            Text(escape.line(row["id"])),
            f"{row['score'][-1]:.1%}",
            Text(f"[{row['low'][-1]:.1%}, {row['high'][-1]:.1%}]"),
            f"{row['n'][-1]:g}" if row["n"][-1] is not None else "?",
            "none" if before is None else f"{before:.1%}",
            str(row["builds"]),
            bars(row["score"]),
        )
    out.print(table)
    _rest(out, rows, limit)


def _kernels(out: Console, rows: Sequence[Row], limit: int) -> None:
    """The largest changes first; a change is the newest value against the median of those before."""
    table = _table("kernel time", ("newest", "before", "change", "builds", "course"))
    device = ""
    for row in rows[:limit]:
        unit = row["number"].rsplit("_", 1)[-1]
        name = "" if row["number"] in {f"ours_{unit}", unit} else f" {row['number']}"
        if row["device"] != device:
            device = row["device"]
            table.add_row(Text(escape.line(f"on {device}"), "dim"))
        change = "new" if row["change"] is None else f"{row['change']:+.1%}"
        before = "" if row["before"] is None else _time(row["before"])
        table.add_row(
            Text(escape.line(row["id"] + name)),
            f"{_time(row['last'])} {unit}",
            before,
            change,
            str(row["builds"]),
            bars(row["value"]),
        )
    out.print(table)
    _rest(out, rows, limit)


def _flakes(out: Console, rows: Sequence[Row], limit: int) -> None:
    table = _table("did not always pass", ("flaky", "failed", "of builds", "last"))
    for row in rows[:limit]:
        values = (f"{row['flaky']} ({row['rate']:.0%})", str(row["failed"]), str(row["builds"]))
        table.add_row(Text(escape.line(f"{row['key']}  {row['id']}")), *values, f"{row['last']:%m-%d %H:%M}")
    out.print(table)
    _rest(out, rows, limit)


def _minutes(out: Console, rows: Sequence[Row], limit: int) -> None:
    """Newest last, as a log."""
    of_step = "key" in rows[0]
    table = _table("began (UTC)", ("commit", "outcome", *(("step",) if of_step else ("steps", "wall")), "run", "GPU",
                                   "queue"))  # fmt: skip
    for row in rows[-limit:]:
        outcome = Outcome(row["outcome"])
        size = (row["key"],) if of_step else (str(row["steps"]), f"{row['wall_minutes']:.1f}")
        minutes = (f"{row[name]:.1f}" for name in ("step_minutes", "gpu_minutes", "queue_minutes"))
        table.add_row(
            f"{row['time']:%Y-%m-%d %H:%M}", row["commit"][:10] or "none", Text(shown.marked(outcome),
            shown.STYLES[outcome]), *size, *minutes
        )  # fmt: skip
    out.print(table)
    if len(rows) > limit:
        out.print(Text(f"and {len(rows) - limit} earlier (--rows)", "dim"))
    courses = ", ".join(
        f"{words} {bars([row[name] for row in rows])}"
        for name, words in (("step_minutes", "run"), ("gpu_minutes", "GPU"), ("queue_minutes", "queue"))
    )
    out.print(Text(f"minutes of {len(rows)} builds: {courses}", "dim"))


def _time(value: float) -> str:
    return shortest(float(value)) if value < 1000 else f"{value:.0f}"


def _rest(out: Console, rows: Sequence[Row], limit: int) -> None:
    if len(rows) > limit:
        out.print(Text(f"and {len(rows) - limit} more (--rows, --step, --json)", "dim"))


def _table(first: str, others: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold", ratio=1)
    for name in others:
        words = name in {"course", "commit", "outcome", "step", "last"}
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    return table
