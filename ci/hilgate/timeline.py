"""When each step ran, as bars: positions for the SVG in the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import shown

if TYPE_CHECKING:
    from hilgate.model import Outcome, Plan, Verdict
    from hilgate.results import Recorded

TICK_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)
MOST_TICKS = 8


@dataclass(frozen=True)
class Bar:
    """One step; `left` and `width` in percent of the whole time."""

    key: str
    outcome: Outcome
    left: float
    width: float
    words: str


@dataclass(frozen=True)
class Tick:
    """A mark on the axis; `left` in percent."""

    left: float
    words: str


@dataclass(frozen=True)
class Timeline:
    """All bars in the order in which they started."""

    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]


def timeline(plan: Plan, recorded: Recorded, verdict: Verdict) -> Timeline:
    """Bars of the last attempt of every step that was started; steps that never started have no bar."""
    outcomes = {step.key: step.outcome for step in verdict.steps}
    records = [attempt.record for step in plan.steps if (attempt := recorded.last(step.key))]
    records = sorted((record for record in records if record.seconds > 0), key=lambda record: record.started)
    if not records:
        return Timeline((), ())
    began = records[0].started
    starts = [(record.started - began).total_seconds() for record in records]
    whole = max(start + record.seconds for start, record in zip(starts, records, strict=True))
    bars = tuple(
        Bar(
            record.key,
            outcomes[record.key],
            100 * start / whole,
            max(0.3, 100 * record.seconds / whole),  # a bar one can see
            shown.duration(record.seconds),
        )
        for start, record in zip(starts, records, strict=True)
    )
    step = next((seconds for seconds in TICK_SECONDS if whole / seconds <= MOST_TICKS), whole)
    ticks = tuple(Tick(100 * n * step / whole, _tick(n * step)) for n in range(int(whole / step) + 1))
    return Timeline(bars, ticks)


def _tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else f"{seconds / 60:g} min"
