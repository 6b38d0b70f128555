# SPDX-License-Identifier: Apache-2.0
"""The order in which steps start, and which of them run side by side."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hilgate.model.declaration import CPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilgate.model import Key
    from hilgate.model.plan import PlannedStep


def in_order(steps: Sequence[PlannedStep]) -> list[Key]:
    """Return the order in which steps start as cores become free: one quick step, then the longest chain of dependants.

    With a quick step first, something is known soon. The order follows declared minutes and is the same everywhere.
    """
    minutes = {step.key: step.step.minutes for step in steps}
    chains = chain_minutes(steps)
    keys = sorted(minutes, key=lambda key: (-chains[key], key))
    known = minutes.keys()
    free = [step.key for step in steps if known.isdisjoint(step.depends_on)]
    quick = min(free, key=lambda key: (minutes[key], key), default=None)
    return keys if quick is None else [quick, *(key for key in keys if key != quick)]


def chain_minutes(steps: Sequence[PlannedStep]) -> dict[Key, float]:
    """Return the declared minutes of the longest chain of dependants that begins with each step, itself included.

    Each step stands after what it depends on, as in a plan.
    """
    chains: dict[Key, float] = {}
    after: dict[Key, float] = defaultdict(float)
    for step in reversed(steps):
        chains[step.key] = step.step.minutes + after[step.key]
        for need in step.depends_on:
            after[need] = max(after[need], chains[step.key])
    return chains


def fits(step: PlannedStep, running: Sequence[PlannedStep], cores: int) -> bool:
    """Return whether a core and a step's GPU are free; each step keeps one core busy."""
    if step.device != CPU and any(other.device == step.device for other in running):
        return False
    return len(running) < cores
