"""Random schedules: whoever else is there, a request gets what it would get alone. Failures are shrunk by Hypothesis."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample
from models.families.judge import difference
from models.families.schedule import schedules, told

if TYPE_CHECKING:
    from collections.abc import Callable

    from models.families.running import Answer
    from models.families.schedule import Limits, Request, Schedule

SHRINK_SECONDS = 40.0
"""After this long the smallest failing schedule so far is good enough to read."""


class CompanyError(Exception):
    """An answer depends on the other requests; the message has the smallest schedule that shows it."""


@dataclass(frozen=True)
class Searched:
    """A search that found nothing."""

    schedules: int
    requests: int


def search(
    limits: Limits,
    *,
    seed: int,
    examples: int,
    ask: Callable[[Schedule], list[Answer]],
    alone: Callable[[Request], Answer],
    tie: float,
) -> Searched:
    """Draw schedules and look for one whose answers depend on company.

    Args:
        limits: What schedules may hold.
        seed: The same seed draws the same schedules.
        examples: How many to draw.
        ask: Drives a schedule.
        alone: The answer to a request that has the engine to itself.
        tie: Nats within which rounding decides between two tokens.

    Raises:
        CompanyError: One does.
    """
    drawn: list[int] = []
    found: dict[Schedule, str] = {}
    deadline: list[float] = []

    def fails(schedule: Schedule) -> bool:
        if schedule in found:
            return bool(found[schedule])
        if deadline and time.monotonic() > deadline[0]:
            return False
        drawn.append(len(schedule))
        found[schedule] = difference(schedule, ask(schedule), [alone(request) for request in schedule], tie)
        if found[schedule] and not deadline:
            deadline.append(time.monotonic() + SHRINK_SECONDS)
        return bool(found[schedule])

    how = settings(max_examples=examples, database=None, deadline=None, phases=(Phase.generate, Phase.shrink))
    try:
        smallest = find(schedules(limits), fails, settings=how, random=Random(seed))  # noqa: S311 - no secret
    except NoSuchExample:
        return Searched(len(drawn), sum(drawn))
    raise CompanyError(f"{found[smallest]}; smallest schedule of seed {seed}: {told(smallest)}")
