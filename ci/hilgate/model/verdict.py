# SPDX-License-Identifier: Apache-2.0
"""`verdict.json`: what was decided about each planned step and about the whole build."""

from __future__ import annotations

import datetime as dt
import enum
from typing import Literal

from pydantic import Field

from hilgate.model import Key, StrictModel
from hilgate.model.plan import Omission, PlanProfile, ProtectedChange
from hilgate.model.record import Counts, Outcome


class Ruling(enum.StrEnum):
    """What the author of a change reads about a step; an `Outcome` says only whether it is green."""

    PASS = "pass"  # noqa: S105 - a ruling, not a password
    REGRESSION = "regression"
    """The step ran, and a check failed."""
    UNFINISHED = "unfinished"
    """The step did not do its work, and nothing says that the machine is at fault: too few checks, a hang, a crash."""
    INFRA = "infra"
    """The node, the agent, the network or the image: nothing was learned about the change."""
    NOT_STARTED = "not started"
    """A step that it needs did not pass, or the run stopped at an earlier red step (`--fail-fast`)."""
    FLAKY = "flaky"
    """A check failed and then passed over the same files: not a pass, and named check by check."""
    QUARANTINED = "quarantined"
    """Nothing but failures that the merge base has in quarantine."""
    INCONCLUSIVE = "inconclusive"


class StepVerdict(StrictModel):
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
    failed: tuple[str, ...] = ()
    """Ids that failed, the first ones."""
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
    """The recorded exit status; None when nothing was recorded, started or left to end by itself."""
    report_only: bool = False
    """Whether it is in the report and never in the verdict."""
    attempts: int = Field(default=0, ge=0)
    """How often it was run (more than once after `--resume`); the last attempt counts."""


class Verdict(StrictModel):
    """`verdict.json`: the one answer, and the answer for each planned step."""

    schema_version: Literal[8] = 8
    decided: dt.datetime
    profile: PlanProfile | None
    """The plan's profile; null where there was none. A quick run decides no merge."""
    commit: str
    plan_digest: str
    outcome: Outcome
    why: str
    images: dict[Key, str] = Field(default_factory=dict)
    """Image -> digest, as built."""
    protected_changes: tuple[ProtectedChange, ...] = ()
    """The protected changes of the plan."""
    approved_by: str = ""
    """Who approved the protected changes; empty when there are none or nobody has."""
    notes: tuple[str, ...] = ()
    """Remarks beside the verdict: that nothing was compared with a merge base."""
    before: tuple[str, ...] = ()
    """Lost tries of jobs, earlier builds of the same files, or that these are unknown. It decides nothing."""
    tree: str = ""
    """Fingerprint of the files that its steps ran over; empty where none ran, or where they ran over several states."""
    doubts: tuple[str, ...] = ()
    """What stands against the whole: files that changed since the steps ran. A pass with one is inconclusive."""
    waited: dict[Key, int] = Field(default_factory=dict)
    """Planned key -> minutes after which its job was ended, because no agent took it."""
    steps: tuple[StepVerdict, ...]
    omissions: tuple[Omission, ...]
