"""`verdict.json`: the one answer, and the answer for each planned step."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from pydantic import Field

from hilgate.model.base import SCHEMA_VERSION, Key, Noun, Outcome, Ruling
from hilgate.model.planned import Loosening, Omission


class Counts(Noun):
    """How many checks ended how."""

    passed: int = 0
    failed: int = 0
    inconclusive: int = 0
    did_not_run: int = 0


class StepVerdict(Noun):
    """What was decided about one planned step, and on what evidence."""

    key: Key
    area: Key
    label: str
    outcome: Outcome
    ruling: Ruling
    why: str
    """The first thing that is not green, or the count of what passed."""
    evidence: tuple[str, ...] = ()
    """What the ruling rests on, a line each: node, GPU, kernel log, VRAM before and after, reruns."""
    node: str = ""
    """Host that ran the attempt that counts."""
    image: str = ""
    """Digest of the image it ran in."""
    flaky: tuple[str, ...] = ()
    """Ids that failed and then passed."""
    quarantined: tuple[str, ...] = ()
    """Ids that failed in quarantine."""
    unexpected_passes: tuple[str, ...] = ()
    """Ids in quarantine that passed: the entry can go."""
    counts: Counts
    seconds: float | None
    reproduce: str
    """A line to paste: the command that repeats this step."""
    exit_status: int | None = None
    """As recorded; None when nothing was recorded, started or left to end by itself."""
    attempts: int = Field(default=0, ge=0)
    """How often it was run (more than once after `--resume`); the last attempt counts."""


class Verdict(Noun):
    """`verdict.json`: the one answer, and the answer for each planned step."""

    schema_version: Literal[1] = SCHEMA_VERSION
    decided: dt.datetime
    commit: str
    plan_digest: str
    outcome: Outcome
    why: str
    images: dict[Key, str] = Field(default_factory=dict)
    """Image -> digest, as built."""
    loosened: tuple[Loosening, ...] = ()
    approved_by: str = ""
    """Who approved what the change loosens; empty when nothing is loosened or nobody has."""
    steps: tuple[StepVerdict, ...]
    omissions: tuple[Omission, ...]
