# SPDX-License-Identifier: Apache-2.0
"""`plan.json`: which steps will run and why, which were left out, and which protected files the change alters."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import Literal

from pydantic import Field, field_validator

from hilgate.errors import MisuseError
from hilgate.model import ImageDigest, Key, StrictModel, refused
from hilgate.model.declaration import CPU, Profile, Step

PlanProfile = Literal["quick"] | Profile
"""What a plan is made for: a profile, or `quick`, which only local plans have."""

LOCAL = frozenset({"gate", "quick"})
"""Profiles of plans for one machine at hand."""


def planned_key(step: Step, device: Key) -> Key:
    """Key of a step on a device."""
    return f"{step.key}-{device}"


class Shard(StrictModel):
    """One of the jobs that a step's tests are split over (pytest-split)."""

    number: int = Field(ge=1)
    of: int = Field(ge=2)


class PlannedStep(StrictModel):
    """A declared step on a device, with where it runs there and the reason it was selected."""

    step: Step
    """The step as declared; without its secrets where the change comes from a fork."""
    area: Key
    device: Key
    queue: Key | None
    """None where no queue offers the device (a local CUDA machine)."""
    image: Key | None = None
    """The image it runs in, a key of `Plan.images`; None runs it on the host (locally)."""
    depends_on: tuple[Key, ...] = ()
    """Keys of the planned steps that must have passed first."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the device and of the step."""
    reason: str
    """Why it is in the plan."""
    report_only: bool = False
    """Whether it is in the report and never in the verdict."""
    arguments: str = ""
    """What a person added to its command, to run a part of it."""
    shard: Shard | None = None
    """Which part of its tests it runs; None for all."""
    job: Key | None = None
    """Key of the first step of the Buildkite job that it shares; None where its job runs nothing else."""

    def part(self, arguments: str) -> PlannedStep:
        """Return a part of it: these arguments after its command, and one check is enough."""
        command = f"{self.step.command} {arguments}".rstrip()
        return self.redeclared(command=command, minimum=1).model_copy(update={"arguments": arguments})

    def redeclared(self, **changes: object) -> PlannedStep:
        """The same with these fields of its declared step changed, e.g. `command`, for a run of a part of it."""
        return self.model_copy(update={"step": self.step.model_copy(update=changes)})

    @property
    def key(self) -> Key:
        """`<declared key>-<device>`, of a shard `<declared key>-<device>-<number>of<shards>`."""
        return f"{self.whole}-{self.shard.number}of{self.shard.of}" if self.shard else self.whole

    @property
    def whole(self) -> Key:
        """Key of the step that it is a shard of; its own where it is whole."""
        return planned_key(self.step, self.device)

    @property
    def label(self) -> str:
        """What a person reads, with the device where there are several."""
        label = f"{self.step.label} ({self.device})" if len(self.step.devices) > 1 else self.step.label
        return f"{label}, {self.shard.number} of {self.shard.of}" if self.shard else label

    @property
    def gpus(self) -> int:
        """GPUs it is given; 0 on the cpu."""
        return 0 if self.device == CPU else self.step.gpus

    @property
    def job_key(self) -> Key:
        """Key of its Buildkite job: that of the first step of the job."""
        return self.job or self.key

    @property
    def like(self) -> tuple[object, ...]:
        """What steps of a job have in common: where it runs, what it is given, what it waits for, whether it counts."""
        given = self.queue, self.image, self.gpus, frozenset(self.step.secrets), frozenset(self.depends_on)
        return (*given, self.report_only)


OmissionCause = Literal[
    "not affected",
    "not asked for",
    "other profiles",
    "not quick",
    "no queue",
    "queue out",
    "only reported",
    "not here",
    "need omitted",
]
"""Why a step is left out: the change does not select it; others were named; it belongs to other plans; it is
no quick step of the project; no queue offers the device; its queue takes no steps of changes, and the build is
inconclusive; the same of a step that no verdict counts; this machine lacks something or another device of it is taken;
what it needs is left out itself."""


class Omission(StrictModel):
    """A step that is not in the plan, and why not."""

    key: Key
    area: Key
    label: str
    cause: OmissionCause
    reason: str
    """The cause in full, for people."""


class ProtectedChange(StrictModel):
    """A change to a protected file, which decides (tolerances, gates, areas, hilgate), or tests gone from a file."""

    path: str
    what: str
    """The kind of change in a few words: changed, deleted or new, or which tests are gone."""
    hunk: str = ""
    """The beginning of its diff against the merge base."""
    tests: tuple[str, ...] = ()
    """Ids of tests in it that the merge base has and the change has not; only in a verdict."""


class Plan(StrictModel):
    """`plan.json`: what will run and why, fixed before anything runs."""

    schema_version: Literal[9] = 9
    created: dt.datetime
    commit: str
    """Full sha of HEAD; empty outside a git checkout."""
    dirty: bool
    """Whether the working tree differs from the commit."""
    base: str | None
    """What the change was compared with; None plans everything."""
    merge_base: str = ""
    """Full sha of the merge base of HEAD and `base`; its thresholds and its quarantine are the ones that count."""
    profile: PlanProfile
    fork: bool = False
    """Whether the change comes from a fork: no secrets, no caches written."""
    manual_retry: bool = False
    """Whether a person may try a job again. A pass then needs to know that no answer was lost by that."""
    images: dict[Key, str] = Field(default_factory=dict)
    """Image -> sha256 of everything it is built from (`docker/`); its digest is known once it is built."""
    digests: dict[Key, ImageDigest] = Field(default_factory=dict)
    """Image -> digest, where a build of the default branch has built the same contents: no step of this one does."""
    protected_changes: tuple[ProtectedChange, ...] = ()
    """What the change alters in its own gate; needs a named approval."""
    python_path: tuple[str, ...] = (".",)
    """Folders below the root that every step imports from before anything else, as the project declares them."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Import package in those folders -> where it stands below the root; no result of another copy of it counts."""
    changed_files: tuple[str, ...]
    test_seconds: dict[Key, dict[str, float]] = Field(default_factory=dict)
    """`PlannedStep.whole` of a step with shards -> id of a test -> what it took when the step last passed."""
    steps: tuple[PlannedStep, ...]
    omissions: tuple[Omission, ...]

    @property
    def held_up(self) -> tuple[Omission, ...]:
        """The steps that count and were not started, because their queue takes none: the build cannot pass."""
        return tuple(omission for omission in self.omissions if omission.cause == "queue out")

    @property
    def local(self) -> bool:
        """Whether it was made for one machine at hand, not for the agents."""
        return self.profile in LOCAL

    def jobs(self) -> dict[Key, list[PlannedStep]]:
        """Key of a Buildkite job -> the steps that it runs, one after the other."""
        found: dict[Key, list[PlannedStep]] = {}
        for step in self.steps:
            found.setdefault(step.job_key, []).append(step)
        return found

    def require_whole(self, where: str) -> None:
        """Refuse a plan that runs only a part of the gate.

        Raises:
            MisuseError: It is a quick plan, or a step of it was narrowed by hand.
        """
        part = next((step.key for step in self.steps if step.arguments), "")
        if self.profile == "quick" or part:
            what = "a quick run" if self.profile == "quick" else f"a run of a part of {part}"
            raise MisuseError(
                f"{what} decides about no merge and no release", where=where, remedy="run `hilgate gate --all`"
            )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[PlannedStep, ...]) -> tuple[PlannedStep, ...]:
        """Each key stands once, after what it depends on, and after the first step of its job, which is like it."""
        before: dict[Key, PlannedStep] = {}
        for step in steps:
            if step.key in before:
                raise refused(f"step {step.key} stands twice")
            if late := [need for need in step.depends_on if need not in before]:
                raise refused(f"step {step.key} depends on {late[0]}, which does not stand before it")
            before[step.key] = step
            first = before.get(step.job_key)
            if first is None or first.job_key != first.key or first.like != step.like:
                raise refused(f"step {step.key} cannot share the job of {step.job_key}")
        return steps


def plan_digest(plan: Plan) -> str:
    """sha256 of the canonical JSON without `created`: equal plans have equal digests whenever they were made."""
    data = plan.model_dump(mode="json", exclude={"created"})
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
