"""`plan.json`: what will run and why, fixed before anything runs."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from hilgate.model.base import SCHEMA_VERSION, Evidence, Key, Noun


class PlannedStep(Noun):
    """A step on a device, with the reason it was selected and everything needed to run it."""

    key: Key
    """`<declared key>-<device>`."""
    step: Key
    area: Key
    label: str
    device: Key
    queue: Key | None
    """None where no queue offers the device (a CUDA machine at a desk)."""
    command: str
    env: dict[str, str]
    evidence: Evidence
    minimum: int
    timeout_minutes: int
    depends_on: tuple[Key, ...]
    cores: int
    minutes: float
    columns: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Distributions that must be installed; where one is missing the step did not run."""
    reason: str
    """Why it is in the plan."""


class Omission(Noun):
    """A step that is not in the plan, and why not."""

    key: Key
    area: Key
    label: str
    reason: str


class Plan(Noun):
    """`plan.json`: what will run and why, fixed before anything runs."""

    schema_version: Literal[1] = SCHEMA_VERSION
    created: dt.datetime
    commit: str
    """Full sha of HEAD; empty outside a git checkout."""
    dirty: bool
    """Whether the working tree differs from the commit."""
    base: str | None
    """What the change was compared with; None plans everything."""
    profile: str
    """`gate` (this machine) or `pr` (the agents)."""
    changed_files: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    omissions: tuple[Omission, ...]
