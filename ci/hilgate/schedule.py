"""Which ready step starts next, and whether there is room for it. Pure."""

from __future__ import annotations

import graphlib
from typing import TYPE_CHECKING

from hilgate.names import CPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilgate.model import PlannedStep


def fits(step: PlannedStep, running: Sequence[PlannedStep], cores: int) -> bool:
    """Whether its cores are free (a step that wants more than there are runs alone) and so is its GPU."""
    if step.device != CPU and any(other.device == step.device for other in running):
        return False
    busy = sum(min(other.cores, cores) for other in running)
    return busy + min(step.cores, cores) <= cores


def chain_minutes(steps: tuple[PlannedStep, ...]) -> dict[str, float]:
    """Minutes of the longest chain of dependants that begins with each step, itself included."""
    by_key = {step.key: step for step in steps}
    needs = {key: [need for need in step.depends_on if need in by_key] for key, step in by_key.items()}
    minutes = {key: step.minutes for key, step in by_key.items()}
    for key in reversed(list(graphlib.TopologicalSorter(needs).static_order())):
        for need in needs[key]:
            minutes[need] = max(minutes[need], by_key[need].minutes + minutes[key])
    return minutes
