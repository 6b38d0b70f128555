"""`findings.jsonl` and `results.jsonl`: what was checked, where, and how each step ended."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, model_validator

from hilgate.model.base import SCHEMA_VERSION, Key, Noun, Number, Outcome


class Environment(Noun):
    """Where a record was made."""

    host: str
    device: str
    """Name of the GPU or of the processor."""
    cores: int
    memory_gib: float
    python: str
    versions: dict[str, str]
    """torch, triton, vllm, transformers, lm_eval ... as installed; absent packages are absent keys."""
    image: str = ""
    """Digest of the image the agent ran; empty at a desk."""


class Check(Noun):
    """One thing that was checked: a test, a code object, a gate. A line of `findings.jsonl`."""

    id: str = Field(min_length=1)
    """Stable name that can be pasted back, with shapes and dtypes rather than indices."""
    outcome: Outcome
    seconds: float = Field(default=0.0, ge=0)
    message: str = ""
    """Why it is not a pass; for a pass, one line of evidence or nothing."""
    labels: dict[str, str] = Field(default_factory=dict)
    """What it was: arch, kernel, dtype, layout ..."""
    numbers: dict[str, Number] = Field(default_factory=dict)
    """What was measured, with the unit in the name: lds_bytes, max_abs_err, seconds_median."""

    @model_validator(mode="after")
    def _says_why(self) -> Check:
        if self.outcome is not Outcome.PASS and not self.message:
            raise ValueError(f"check {self.id!r} is {self.outcome.value!r} without a message that says why")
        return self


class BuildRecord(Noun):
    """First line of `results.jsonl`: which plan the following lines answer."""

    kind: Literal["build"] = "build"
    schema_version: Literal[1] = SCHEMA_VERSION
    started: dt.datetime
    plan_digest: str
    """sha256 of the canonical plan JSON; results of another plan are refused."""
    commit: str
    tree: str = ""
    """Fingerprint of the files under test (`hilgate.tree`); empty outside a git checkout."""
    environment: Environment


class CheckRecord(Noun):
    """One check of one step."""

    kind: Literal["check"] = "check"
    step: Key
    check: Check


class StepRecord(Noun):
    """Last line of a finished step; a step without it did not finish."""

    kind: Literal["step"] = "step"
    key: Key
    started: dt.datetime
    seconds: float = Field(ge=0)
    exit_status: int | None
    """None when the step was killed (timeout) or could not be started."""
    outcome: Outcome
    message: str = ""
    checks: int = Field(ge=0)
    """How many CheckRecords of this step precede it; another number means lines were lost."""
    command: str
    peak_memory_mib: float | None = None
    environment: Environment


class RerunRecord(Noun):
    """A failing check that was run once more over the same files. It never replaces the first answer."""

    kind: Literal["rerun"] = "rerun"
    step: Key
    """The planned step that it failed in."""
    check: str
    """Id of the check."""
    host: str
    elsewhere: bool
    """Whether this is another node than the one it failed on."""
    outcome: Outcome
    seconds: float = Field(ge=0)
    message: str = ""


class ImageRecord(Noun):
    """An image that a step built, or found already built from the same contents."""

    kind: Literal["image"] = "image"
    step: Key
    """The planned step that provides it."""
    image: Key
    content: str
    """sha256 of everything it is built from; equals `Plan.images[image]`."""
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """Of the image itself; every result that was made in it carries this digest."""
    reused: bool = False


class GpuHealth(Noun):
    """One GPU as `amd-smi` reports it."""

    index: int
    bdf: str
    """PCI address, e.g. 0000:05:00.0."""
    name: str = ""
    vram_total_mib: int = Field(ge=0)
    vram_used_mib: int = Field(ge=0)
    ecc_uncorrectable: int = Field(ge=0)
    temperature_c: float | None = None


class Health(Noun):
    """`health-before.json`, `health-after.json` of a job: what the agent's hooks saw; no GPU result counts without."""

    schema_version: Literal[1] = SCHEMA_VERSION
    step: str
    moment: Literal["before", "after"]
    host: str
    agent: str
    """Buildkite's name of the agent; empty at a desk."""
    taken: dt.datetime
    seconds: float = Field(ge=0)
    healthy: bool
    problems: tuple[str, ...] = ()
    gpus: tuple[GpuHealth, ...] = ()
    dmesg: tuple[str, ...] = ()
    """Kernel log lines of GPU trouble since the job began."""
    ended: tuple[str, ...] = ()
    """Processes that the step left behind and that were ended."""


Record = Annotated[BuildRecord | CheckRecord | StepRecord | RerunRecord | ImageRecord, Field(discriminator="kind")]
record_adapter: TypeAdapter[BuildRecord | CheckRecord | StepRecord | RerunRecord | ImageRecord] = TypeAdapter(Record)
