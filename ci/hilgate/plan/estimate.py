# SPDX-License-Identifier: Apache-2.0
"""Estimate how long a plan takes: the median of what was measured, else what is declared; and its longest chains."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import MisuseError, RecordsError
from hilgate.model import CPU, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hilgate.model import Key, Plan, PlannedStep

HISTORY_FOLDER = "results/history"
"""A folder of builds (`hilgate.history.store`), whose names sort by time."""

PASSES = 20
"""How many of the last passes count: a step that became slower shows after ten, and one slow node does not."""

RECENT_BUILDS = 200
"""How many builds are looked at: about a month of a busy repository."""


def measured(root: Path, given: Path | None = None) -> dict[Key, float]:
    """Planned key -> minutes: the median of its last `PASSES` passes. `given` is another folder than the default.

    Raises:
        MisuseError: A folder was given and is not there.
        RecordsError: A verdict in it cannot be read; says which.
    """
    folder = given or root / HISTORY_FOLDER
    if given and not given.is_dir():
        raise MisuseError(
            "there is no such history", where=str(given), remedy="leave out --history to use declared minutes"
        )
    passes: dict[Key, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("[0-9]*Z-*-*/verdict.json"), reverse=True)[:RECENT_BUILDS]:
        try:
            steps = Verdict.model_validate_json(path.read_bytes()).steps
        except (OSError, ValueError) as error:
            raise RecordsError(
                f"not a verdict: {str(error).splitlines()[0]}",
                where=str(path),
                remedy="remove that build from the history: the estimate then uses the others",
            ) from error
        for step in steps:
            if step.outcome is Outcome.PASS and step.seconds is not None:
                passes[step.key].append(step.seconds / 60)
    return {key: statistics.median(minutes[:PASSES]) for key, minutes in passes.items()}


@dataclass(frozen=True)
class Estimate:
    """How big a plan is, in minutes: measured where there is a history, else as declared (usual time on 2 cores)."""

    minutes: float
    """Sum over all steps."""
    chain: tuple[Key, ...]
    """The longest chain of steps that must wait for each other."""
    chain_minutes: float
    on_gpus: float
    """Minutes of the steps that run on GPUs."""
    gpu_minutes: float
    """The same times the GPUs of each step: what the fleet pays."""
    measured: int
    """Steps whose minutes were measured."""


def estimate(plan: Plan, history: Mapping[Key, float] | None = None) -> Estimate:
    """Sums and longest chain of a plan; `history` has measured minutes by planned key."""
    known = history or {}
    minutes = {step.key: known.get(step.key, step.step.minutes) for step in plan.steps}
    chain_minutes, chain = max(longest_chains(plan.steps, minutes).values(), default=(0.0, ()))
    gpu_steps = [step for step in plan.steps if step.device != CPU]
    return Estimate(
        minutes=sum(minutes.values()),
        chain=chain,
        chain_minutes=chain_minutes,
        on_gpus=sum(minutes[step.key] for step in gpu_steps),
        gpu_minutes=sum(minutes[step.key] * step.gpus for step in gpu_steps),
        measured=sum(step.key in known for step in plan.steps),
    )


def longest_chains(
    steps: Sequence[PlannedStep], minutes: Mapping[Key, float]
) -> dict[Key, tuple[float, tuple[Key, ...]]]:
    """Minutes and keys of the longest chain of dependants that begins with each step, itself included.

    Args:
        steps: What is to run; each stands behind what it depends on, as in a plan.
        minutes: Planned key -> minutes.
    """
    chains: dict[Key, tuple[float, tuple[Key, ...]]] = {}
    after: dict[Key, tuple[float, tuple[Key, ...]]] = defaultdict(lambda: (0.0, ()))
    for step in reversed(steps):
        longest, keys = after[step.key]
        chains[step.key] = (longest + minutes[step.key], (step.key, *keys))
        for need in step.depends_on:
            after[need] = max(after[need], chains[step.key])
    return chains
