"""What can go wrong in a build: the kinds of fault, where each can strike, and the seeded draw."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.model import CPU
from hilgate.run.evidence import kind_of

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from hilgate.model import Plan, PlannedStep


class Kind(enum.StrEnum):
    """A fault, in the words of the report."""

    AGENT_LOST = "agent lost mid-step"
    AGENT_STOPPED = "agent stopped"
    HANG = "hang, ended by the inner timeout"
    HANG_HARD = "hang, ended by Buildkite"
    OUT_OF_MEMORY = "step killed, out of memory"
    OUT_OF_MEMORY_HARD = "job killed, out of memory"
    SICK_NODE = "sick node, found by preflight"
    HIDDEN_SICK_NODE = "sick node, preflight passed, tests fail"
    SICK_AFTERWARDS = "node sick by the end, tests pass"
    NETWORK_LOSS = "network lost at upload"
    LATE = "results later than the verdict"
    DISK_FULL = "disk full while writing"
    DUPLICATED = "results twice"
    FLIPPED_BIT = "flipped bit"
    TRUNCATED = "truncated line"
    NOT_A_NUMBER = "NaN"
    LINE_REMOVED = "removed line"
    LINES_REORDERED = "reordered lines"
    WRONG_TYPE = "wrong JSON type"
    OTHER_COMMIT = "results of another commit"
    OTHER_PLAN = "results of another plan"
    OTHER_TREE = "results of another tree"
    OTHER_IMAGE = "results of another image"
    OTHER_COMMAND = "results of another command"
    OTHER_STEP = "results of another step"
    FALSE_CLAIM = "record claims more than it shows"
    NO_EVIDENCE = "exit 0 without evidence"
    ZERO_TESTS = "zero tests"
    ALL_SKIPPED = "everything skipped"
    BELOW_MINIMUM = "fewer than the minimum"
    SOFT_FAILED = "soft-failed job"
    SKIPPED = "unplanned skip"
    CANCELLED = "cancelled by a person"
    FLAKY = "flaky test"
    REGRESSION = "regression"
    QUARANTINED_FAILURE = "quarantined failure"
    QUARANTINED_ELSEWHERE = "failure quarantined for another device"
    UNEXPECTED_PASS = "unexpected pass"  # noqa: S105 - words of a report
    QUARANTINE_EXPIRED = "expired quarantine"
    HEALTH_MISSING = "health file missing"
    HEALTH_CORRUPT = "health file corrupt"
    HEALTH_OF_OTHER_NODE = "health of another node"
    PREFLIGHT_MISSING = "preflight missing"
    PREFLIGHT_IGNORED = "unfit by preflight, and ran"
    GPU_LOST = "GPU gone by the end"
    IMAGE_OTHER_CONTENT = "image of other content"
    IMAGE_NOT_RECORDED = "image not recorded"
    IMAGE_IMPOSTOR = "image recorded by its user"
    RECHECK_SAME_NODE = "recheck on the same node"
    PLAN_FAILED = "plan job failed"
    PLAN_ALTERED = "plan altered after the jobs began"
    PLAN_AGENT_LOST = "agent of the plan lost"
    VERDICT_AGENT_LOST = "agent of the verdict lost"
    LOOSENED = "loosened gate, no approval"
    LOOSENED_APPROVED = "loosened gate, approved"


OF_THE_BUILD = frozenset(
    {
        Kind.PLAN_FAILED,
        Kind.PLAN_ALTERED,
        Kind.PLAN_AGENT_LOST,
        Kind.VERDICT_AGENT_LOST,
        Kind.LOOSENED,
        Kind.LOOSENED_APPROVED,
    }
)
"""Faults that strike no single step."""

FIRST_ATTEMPT_ONLY = frozenset({Kind.AGENT_LOST, Kind.AGENT_STOPPED, Kind.SICK_NODE})
"""Faults that Buildkite answers with another attempt, which then goes well; every other kind strikes each attempt."""

DEFAULT_RATE = 0.03
"""Probability of each kind in a build: 55 kinds make 1.6 faults a build on average, and one build in five has none."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        step: The planned step that it strikes; empty for a fault of the build.
        number: Decides the details (which line, which byte, which check), so that dropping another fault changes none.
    """

    kind: Kind
    step: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind.value} [{self.step or 'build'}, {self.number}]"


def draw(rng: random.Random, plan: Plan, rate: float, kinds: frozenset[Kind] = frozenset(Kind)) -> tuple[Fault, ...]:
    """Draw the faults of a build.

    Args:
        rng: Seeded; the same numbers are drawn whatever the rate.
        plan: Offers the steps to strike.
        rate: Probability of each kind, 0 to 1.
        kinds: Kinds that may strike.
    """
    drawn = []
    for kind in Kind:
        strikes, place, number = rng.random() < rate, rng.random(), rng.randrange(1 << 30)
        places = _places(kind, plan.steps)
        if strikes and places and kind in kinds:
            drawn.append(Fault(kind, places[int(place * len(places))], number))
    return tuple(drawn)


def possible(kind: Kind, plan: Plan) -> tuple[str, ...]:
    """Where a kind can strike in a plan; empty when it cannot."""
    return _places(kind, plan.steps)


def _places(kind: Kind, steps: Iterable[PlannedStep]) -> tuple[str, ...]:
    if kind in OF_THE_BUILD:
        return ("",)
    return tuple(step.key for step in steps if _fits(kind, step))


def _fits(kind: Kind, step: PlannedStep) -> bool:
    if kind in {Kind.IMAGE_OTHER_CONTENT, Kind.IMAGE_NOT_RECORDED}:
        return step.step.provides is not None
    if kind in {Kind.OTHER_IMAGE, Kind.IMAGE_IMPOSTOR}:
        return step.image is not None
    if kind in {Kind.SICK_AFTERWARDS, Kind.PREFLIGHT_IGNORED, Kind.GPU_LOST, Kind.HEALTH_OF_OTHER_NODE}:
        return step.device != CPU
    if kind is Kind.RECHECK_SAME_NODE:
        return bool(kind_of(step).selector(f"tests/{step.step.key}.py::test_0"))
    return True
