# SPDX-License-Identifier: Apache-2.0
"""Lay a plan's steps out over Buildkite jobs. Pure.

A job costs its agent about a minute besides its step (checkout, image, health of the node, uploads), so small steps
that are alike share one. Each still has a container, a time-out, results and a verdict of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from hilgate.model import Key
    from hilgate.model.plan import PlannedStep

SMALL_MINUTES = 3.0
"""Steps that usually take less than this share jobs."""

JOB_MINUTES = 12.0
"""Minutes of steps that a shared job is filled with: longer ones would keep people waiting for their first result."""


@dataclass
class _Job:
    """A job that is being filled."""

    minutes: float = 0.0
    keys: list[Key] = field(default_factory=list)


def shared(
    steps: Sequence[PlannedStep], minutes: Mapping[Key, float], pods: Container[Key | None] = ()
) -> tuple[PlannedStep, ...]:
    """The steps, with the job that each shares; `minutes` are those that were measured, of the others the declared.

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
        takes = minutes.get(step.key, step.step.minutes)
        if takes >= SMALL_MINUTES or step.image is None or step.step.provides:  # on a host nothing parts steps
            continue
        if step.queue in pods:
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
