"""The lines of the history: one per build, per step and per check worth keeping. Strict, with a schema version each."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from pydantic import Field

from hilgate.model import Key, Noun, Number, Outcome, Profile, Ruling

HISTORY_VERSION: Literal[1] = 1


class Line(Noun):
    """What every line says: which build it belongs to. A build is there once its `BuildLine` is."""

    schema_version: Literal[1] = HISTORY_VERSION
    build: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Made from what the build says of itself, so that adding it twice is noticed."""
    commit: str
    branch: str
    """Empty where nobody said."""
    time: dt.datetime
    """When the build began, UTC."""


class BuildLine(Line):
    """`builds.jsonl`, written last: a build without it was not added whole."""

    kind: Literal["build"] = "build"
    profile: Profile | Literal["benchmarks"]
    outcome: Outcome
    why: str
    steps: int = Field(ge=0)
    seconds: float = Field(ge=0)
    """From the start of its first step to the end of its last."""
    step_minutes: float = Field(ge=0)
    gpu_minutes: float = Field(ge=0)
    queue_minutes: float = Field(ge=0)
    """Sums over its steps."""


class StepLine(Line):
    """`steps.jsonl`: how one planned step ended."""

    kind: Literal["step"] = "step"
    key: Key
    step: Key
    area: Key
    device: str
    queue: str
    """Empty where no queue offers the device."""
    node: str
    outcome: Outcome
    ruling: Ruling
    passed: int = Field(ge=0)
    failed: int = Field(ge=0)
    seconds: float = Field(ge=0)
    """Of the attempt that counts; 0 when it was not started."""
    gpu_minutes: float = Field(ge=0)
    """Its minutes times its GPUs, all attempts."""
    queue_seconds: float = Field(ge=0)
    """From the end of all that it needs (or the plan) to its first start: waiting for an agent or for cores."""
    attempts: int = Field(ge=0)
    flaky: tuple[str, ...]
    """Ids that failed and then passed over the same files."""


class CheckLine(Line):
    """`checks.jsonl`: a check with numbers, or one that is not green. The others are counted in their step's line."""

    kind: Literal["check"] = "check"
    key: Key
    step: Key
    device: str
    id: str = Field(min_length=1)
    outcome: Outcome
    message: str
    """First line, of what is not green."""
    labels: dict[str, str]
    numbers: dict[str, Number]
