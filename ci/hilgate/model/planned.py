"""`plan.json`: what will run and why, fixed before anything runs."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from pydantic import Field

from hilgate.model.base import SCHEMA_VERSION, Evidence, Key, Noun, Profile
from hilgate.model.declared import Matrix


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
    matrix: Matrix | None = None
    """The table that its checks fill."""
    packages: tuple[str, ...] = ()
    """Distributions that must be installed; where one is missing the step did not run."""
    tools: tuple[str, ...] = ()
    """Programs that must be on the path."""
    models: tuple[Key, ...] = ()
    gpus: int = 0
    """GPUs it is given; 0 on the cpu."""
    image: Key | None = None
    """The image it runs in, a key of `Plan.images`; None runs it on the host (at a desk)."""
    network: bool = False
    secrets: tuple[str, ...] = ()
    provides: Key | None = None
    """The image that it builds."""
    reason: str
    """Why it is in the plan."""


class Omission(Noun):
    """A step that is not in the plan, and why not."""

    key: Key
    area: Key
    label: str
    reason: str


class Loosening(Noun):
    """A change to what decides: a tolerance, a budget, a baseline, a gate, an area, the quarantine, hilgate itself."""

    path: str
    what: str
    """The value before and after, or that the file changed."""
    looser: bool
    """False only where the change is known to be stricter; what cannot be told counts as looser."""


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
    merge_base: str = ""
    """Full sha of the merge base of HEAD and `base`; its thresholds and its quarantine are the ones that count."""
    profile: Profile
    fork: bool = False
    """Whether the change comes from a fork: no secrets, no caches written."""
    images: dict[Key, str] = Field(default_factory=dict)
    """Image -> sha256 of everything it is built from (`docker/`); its digest is known once it is built."""
    loosened: tuple[Loosening, ...] = ()
    """What the change loosens of its own gate; needs a named approval."""
    changed_files: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    omissions: tuple[Omission, ...]
