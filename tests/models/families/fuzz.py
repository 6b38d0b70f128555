"""Random schedules: whoever else is there, a request gets what it gets alone. Pure but for whom it asks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from models.families.judge import difference
from models.families.schedule import draw, smaller, told

if TYPE_CHECKING:
    from collections.abc import Callable

    from models.families.answers import Answer
    from models.families.schedule import Limits, Request, Schedule

SHRINK_SECONDS = 30.0
"""After this long the smallest failing schedule so far is small enough to read."""


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

    def fails(schedule: Schedule) -> str:
        return difference(schedule, ask(schedule), [alone(request) for request in schedule], tie)

    rng = Random(seed)
    requests = 0
    for number in range(examples):
        schedule = draw(limits, rng)
        requests += len(schedule)
        if why := fails(schedule):
            smallest, why = shrink(schedule, why, fails)
            raise CompanyError(f"{why}; schedule {number} of seed {seed}, shrunk to: {told(smallest)}")
    return Searched(examples, requests)


def shrink(
    schedule: Schedule, why: str, fails: Callable[[Schedule], str], seconds: float = SHRINK_SECONDS
) -> tuple[Schedule, str]:
    """Simplify a failing schedule while it fails, and while there is time.

    Args:
        schedule: It fails.
        why: How.
        fails: How a schedule fails; empty when it does not.
        seconds: When to be content.

    Returns:
        The simplest failing schedule found, and how it fails.
    """
    deadline = time.monotonic() + seconds
    shrinking = True
    while shrinking:
        shrinking = False
        for candidate in smaller(schedule):
            if time.monotonic() > deadline:
                break
            if found := fails(candidate):
                schedule, why, shrinking = candidate, found, True
                break
    return schedule, why
