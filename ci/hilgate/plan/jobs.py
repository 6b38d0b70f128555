# SPDX-License-Identifier: Apache-2.0
"""Lay a plan's steps out over Buildkite jobs, by what they usually take. Pure.

A job costs its agent about a minute besides its step (checkout, image, health of the node, uploads), so small steps
that are alike share one. Each still has a container, a time-out, results and a verdict of its own. The tests of a long
step are split into several jobs, which are steps of their own, and only together the whole one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence  # noqa: TC003 - dataclasses resolve it
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.model.plan import Shard

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from hilgate.model import Key
    from hilgate.model.plan import PlannedStep

SMALL_MINUTES = 3.0
"""Steps that usually take less than this share jobs."""

JOB_MINUTES = 12.0
"""Minutes of steps that a shared job is filled with: longer ones would keep people waiting for their first result."""


MOST_SHARDS = 16
SPLITTER = "pytest-split"
"""The distribution that deals tests."""

LEAST_PASSES = 10
"""Passes after which a step's time-out follows their times."""

TIMES_AS_LONG, LEAST_TIMEOUT = 4, 10
"""A step is ended after so many times what 95 % of its passes took, but not before so many minutes (a node that has not
read the image yet, a first compilation), and never later than it is declared."""


@dataclass(frozen=True)
class Times:
    """What steps took on the default branch, by their planned key; shards count together.

    Attributes:
        passes: Minutes of the latest passes.
        tests: Seconds of each test in the last pass.
    """

    passes: Mapping[Key, Sequence[float]] = field(default_factory=dict)
    tests: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)

    def usual(self, step: PlannedStep) -> float:
        """Minutes that a whole step usually takes: the median, else as declared."""
        return statistics.median(self.passes[step.whole]) if self.passes.get(step.whole) else step.step.minutes


UNMEASURED = Times()


def lay_out(
    steps: Sequence[PlannedStep], times: Times = UNMEASURED, pods: Container[Key | None] = ()
) -> tuple[PlannedStep, ...]:
    """The steps with shards, time-outs and jobs (`shared`). What needs a step with shards needs each of them."""
    split = {step.key: tuple(_shards(step, times)) for step in steps}
    found = []
    for step in itertools.chain.from_iterable(split.values()):
        needs = tuple(shard.key for need in step.depends_on for shard in split[need])
        found.append(_ended_in_time(step.model_copy(update={"depends_on": needs}), times))
    return shared(found, {step.key: times.usual(step) for step in found}, pods)


def _shards(step: PlannedStep, times: Times) -> Iterator[PlannedStep]:
    bound = step.step.shard_minutes
    number = min(MOST_SHARDS, math.ceil(times.usual(step) / bound)) if bound else 1
    number = min(number, len(times.tests.get(step.whole, ())) or number)
    if number < 2:
        yield step
        return
    part = step.redeclared(minutes=step.step.minutes / number, packages=(*step.step.packages, SPLITTER))
    for place in range(number):
        yield part.model_copy(update={"shard": Shard(number=place + 1, of=number)})


def _ended_in_time(step: PlannedStep, times: Times) -> PlannedStep:
    passes = times.passes.get(step.whole, ())
    if len(passes) < LEAST_PASSES:
        return step
    most = statistics.quantiles(passes, n=20, method="inclusive")[-1] / (step.shard.of if step.shard else 1)
    minutes = max(LEAST_TIMEOUT, math.ceil(TIMES_AS_LONG * most))
    if minutes >= step.step.timeout_minutes:
        return step
    why = f"ended after {minutes} min, as 95 % of {len(passes)} passes took up to {most:.2g}"
    return step.redeclared(timeout_minutes=minutes).model_copy(update={"reason": f"{step.reason}; {why}"})


@dataclass
class _Job:
    """A job that is being filled."""

    minutes: float = 0.0
    keys: list[Key] = field(default_factory=list)


def shared(
    steps: Sequence[PlannedStep], minutes: Mapping[Key, float], pods: Container[Key | None] = ()
) -> tuple[PlannedStep, ...]:
    """The steps, with the job that each shares, by the minutes that each usually takes.

    Jobs of the queues `pods` share nothing: a pod has one container for code of a change.

    A job that another waits for is red as a whole when one of its steps fails. So steps share a job only where the same
    steps need them, and nothing waits for more than it did alone.
    """
    needed_by: dict[Key, set[Key]] = defaultdict(set)
    for step in steps:
        for need in step.depends_on:
            needed_by[need].add(step.key)
    filling: dict[tuple[object, ...], _Job] = {}
    job_of: dict[Key, _Job] = {}
    for step in steps:
        takes = minutes[step.key]
        # On a host nothing parts steps; and shards are there to run side by side.
        if takes >= SMALL_MINUTES or step.image is None or step.step.provides or step.shard or step.queue in pods:
            continue
        alike = (*step.like, frozenset(needed_by[step.key]))
        job = filling.setdefault(alike, _Job())
        if job.minutes + takes > JOB_MINUTES:
            job = filling[alike] = _Job()
        job.minutes += takes
        job.keys.append(step.key)
        job_of[step.key] = job
    several = {key: job.keys[0] for key, job in job_of.items() if len(job.keys) > 1}
    return tuple(step.model_copy(update={"job": several.get(step.key)}) for step in steps)
