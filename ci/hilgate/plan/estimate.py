# SPDX-License-Identifier: Apache-2.0
"""Estimate how long a plan takes: the minutes of its steps, divided by the cores that it keeps busy.

Minutes are those that a step took when it last passed on this machine, else the declared ones. An estimate changes no
plan, no timeout and no verdict.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from hilgate.model import Key, StrictModel
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from hilgate.model.plan import Plan
    from hilgate.model.record import StepRecord

MINUTES_FILE = "results/minutes.json"
"""File with the last times of whole steps on this machine. A local run writes it; only estimates read it."""


class LastMinutes(StrictModel):
    """`results/minutes.json`."""

    schema_version: Literal[1] = 1
    host: str
    minutes: dict[Key, float]
    """Planned key -> minutes of the last pass."""


def last_minutes(root: Path) -> dict[Key, float]:
    """Return the last minutes of each step on this machine; none where the file is missing, damaged or another's."""
    try:
        found = LastMinutes.model_validate_json((root / MINUTES_FILE).read_bytes())
    except (OSError, ValidationError):
        return {}
    return found.minutes if found.host == socket.gethostname() else {}


def keep_minutes(root: Path, plan: Plan, records: Iterable[StepRecord]) -> None:
    """Store the minutes of the steps that passed whole; trouble with the file stops no gate."""
    unnarrowed = {step.key for step in plan.steps if plan.local and not step.arguments}
    passed = [
        record
        for record in records
        if record.key in unnarrowed and record.outcome is Outcome.PASS and record.seconds > 0
    ]
    minutes = last_minutes(root) | {one.key: one.seconds / 60 for one in passed}
    if passed and (root / MINUTES_FILE).parent.is_dir():
        with contextlib.suppress(OSError):
            LastMinutes(host=socket.gethostname(), minutes=minutes).save(root / MINUTES_FILE)


@dataclass(frozen=True)
class Estimate:
    """How long a plan takes.

    Attributes:
        minutes: From the first start to the last end on `cores`; without cores (agents) the sum over all steps.
        gpu_minutes: Minutes of the steps on GPUs, times their GPUs.
        each: Planned key -> minutes.
        measured: Steps whose minutes were measured on this machine.
        cores: Cores that the run fills; 0 in plans of agents.
    """

    minutes: float
    gpu_minutes: float
    each: Mapping[Key, float]
    measured: frozenset[Key] = field(default=frozenset())
    cores: int = 0


def estimate(
    plan: Plan, last: Mapping[Key, float] | None = None, *, cores: int = 0, keys: Collection[Key] | None = None
) -> Estimate:
    """Return the estimate of a plan, of a local one on `cores`; `keys` are what is to run (None is all)."""
    measured = {step.key: last[step.key] for step in plan.steps if last and step.key in last and not step.arguments}
    each = {step.key: measured.get(step.key, step.step.minutes) for step in plan.steps}
    steps = [step for step in plan.steps if keys is None or step.key in keys]
    busy = sum(each[step.key] for step in steps)
    longest = max((each[step.key] for step in steps), default=0.0)
    minutes = max(busy / cores, longest) if cores else busy
    gpu_minutes = sum(each[step.key] * step.gpus for step in steps)
    return Estimate(minutes, gpu_minutes, each, frozenset(measured), cores)
