"""The nouns of hilgate: what is declared, what is planned, what was found, what was decided.

Every file that one stage hands to the next (`plan.json`, `results.jsonl`, `findings.jsonl`, `verdict.json`) is one of
these models as JSON. They are frozen and forbid unknown keys, so a misspelt key is an error and never a silent default.
"""

from __future__ import annotations

import datetime as dt
import enum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, model_validator

SCHEMA_VERSION: Final = 1

Key = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
"""A name usable as a Buildkite step key and as a folder name."""

Number = int | float
Scalar = str | int | float | bool | None


class Noun(BaseModel):
    """Base of every record: frozen, no unknown keys, no NaN or infinity (JSON has neither)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Outcome(enum.StrEnum):
    """The only four things that can be said of a check, a step or a build."""

    PASS = "pass"  # noqa: S105 - an outcome, not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    DID_NOT_RUN = "did not run"


class Evidence(enum.StrEnum):
    """What a step must leave in its output folder besides an exit status."""

    JUNIT = "junit"
    """`junit.xml`, one test case per check (pytest --junitxml)."""
    FINDINGS = "findings"
    """`findings.jsonl`, one `Check` per line."""


class Device(Noun):
    """Something kernels run on. `cpu` runs them under Triton's interpreter."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every step on this device."""


class Queue(Noun):
    """A Buildkite queue: a pool of identical agents."""

    device: Key
    """A key of `devices`: cpu, or a gfx arch."""
    gpus: int = Field(ge=0, le=8)
    memory_gib: int = Field(gt=0)
    """GPU memory of one device, or host memory for a cpu queue."""


class Agents(Noun):
    """`ci/agents.yaml`: the devices that exist and the queues that offer them."""

    devices: dict[Key, Device]
    queues: dict[Key, Queue]


class Step(Noun):
    """One declared unit of work. It becomes one planned step per device."""

    key: Key
    label: str
    """What a person reads: a few words, no device name."""
    command: str
    """Run without a shell in the repository root; a leading `python` is the interpreter that runs hilgate."""
    devices: tuple[Key, ...] = Field(min_length=1)
    """Where it can run, keys of `agents.yaml: devices`."""
    queues: dict[Key, Key] = Field(default_factory=dict)
    """device -> queue, where the smallest queue of that device is not the right one."""
    evidence: Evidence
    minimum: int = Field(default=1, ge=1)
    """Fewest checks that must have passed: a step that ran fewer did not do its work."""
    timeout_minutes: int = Field(ge=1, le=180)
    env: dict[str, str] = Field(default_factory=dict)
    needs: tuple[Key, ...] = ()
    """Step keys (of any area) that must have passed first, on the same device or on the cpu."""
    packages: tuple[str, ...] = ()
    """Distributions that must be installed, e.g. torch, triton, vllm."""
    cores: int = Field(default=1, ge=1)
    """CPU cores it keeps busy; the local runner fills the machine with them."""
    minutes: float = Field(default=1.0, gt=0)
    """What it usually takes on 2 cores; used for ordering and for the estimate in the plan."""
    columns: tuple[str, ...] = ()
    """Labels and numbers of its checks that the report shows as a table; empty shows only what is not green."""


class Area(Noun):
    """`ci/areas/*.yaml`: a family of steps and the files that can break them."""

    area: Key
    title: str
    why: str
    """One sentence: what a green tick of this area tells the reader."""
    paths: tuple[str, ...] = Field(min_length=1)
    """gitignore-style globs; a change to a matching file selects the area."""
    always: bool = False
    """Selected whatever changed."""
    steps: tuple[Step, ...] = Field(min_length=1)


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


Record = Annotated[BuildRecord | CheckRecord | StepRecord, Field(discriminator="kind")]
record_adapter: TypeAdapter[BuildRecord | CheckRecord | StepRecord] = TypeAdapter(Record)


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
    why: str
    """The first thing that is not green, or the count of what passed."""
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
    steps: tuple[StepVerdict, ...]
    omissions: tuple[Omission, ...]
