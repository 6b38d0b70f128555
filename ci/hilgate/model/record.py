# SPDX-License-Identifier: Apache-2.0
"""What a run leaves: checks with their outcomes, and the records of `results.jsonl` and of a node's health."""

from __future__ import annotations

import collections
import datetime as dt
import enum
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter, model_validator

from hilgate.errors import Exit, writing
from hilgate.model import FINDINGS_FILE, ImageDigest, Key, StrictModel
from hilgate.model.declaration import Condition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class Outcome(enum.StrEnum):
    """The only four things that can be said of a check, a step or a build."""

    PASS = "pass"  # noqa: S105 - an outcome, not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    DID_NOT_RUN = "did not run"


class HasOutcome(Protocol):
    """A record, a verdict or a check."""

    @property
    def outcome(self) -> Outcome:
        """How it ended."""


SEVERITY: dict[Outcome, int] = {
    Outcome.PASS: 0,
    Outcome.INCONCLUSIVE: 1,
    Outcome.DID_NOT_RUN: 2,
    Outcome.FAIL: 3,
}
"""The order in which outcomes win: fail over did not run over inconclusive over pass."""


def severity(one: HasOutcome) -> int:
    """The severity of a record's outcome, to sort by."""
    return SEVERITY[one.outcome]


EXIT_STATUS: dict[Outcome, Exit] = {
    Outcome.PASS: Exit.PASS,
    Outcome.INCONCLUSIVE: Exit.INCONCLUSIVE,
    Outcome.DID_NOT_RUN: Exit.NOTHING_RAN,
    Outcome.FAIL: Exit.FAIL,
}
"""Status of a command that ends with an outcome."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome that wins; of nothing at all: did not run."""
    return max(outcomes, key=SEVERITY.__getitem__, default=Outcome.DID_NOT_RUN)


LONGEST_TEXT = 20_000
"""Characters of any text of a record: code of the change may have written it, and reports are made of it."""


class BoundedModel(StrictModel):
    """Base of what a step leaves: no text of it is longer than `LONGEST_TEXT`."""

    model_config = ConfigDict(str_max_length=LONGEST_TEXT)


def _shortened(words: object) -> object:
    """A text without its middle where it is too long: it begins with what is wrong and ends with the place."""
    if not isinstance(words, str) or len(words) <= LONGEST_TEXT:
        return words
    kept = LONGEST_TEXT // 2 - 50
    return f"{words[:kept]}\n({len(words) - 2 * kept} more characters)\n{words[-kept:]}"


Message = Annotated[str, BeforeValidator(_shortened)]
"""Text that people read and nothing is found by; a longer one is shortened, where another text is refused."""

Measured = Annotated[int, Field(ge=-(2**63), lt=2**63)] | float
"""An integer that SQLite can hold, or a finite float, which a larger integer becomes."""


class Environment(BoundedModel):
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
    """Digest of the image the agent ran; empty locally."""


class Check(BoundedModel):
    """One thing that was checked: a test, a code object, a gate. A line of `findings.jsonl`."""

    schema_version: Literal[1] = Field(default=1, exclude=True)
    """Version for writers of such lines; in `results.jsonl` the first record's counts."""
    id: str = Field(min_length=1)
    """Stable name that can be pasted back, with shapes and dtypes rather than indices."""
    outcome: Outcome
    seconds: float = Field(default=0.0, ge=0)
    message: Message = ""
    """Why it is not a pass; for a pass, one line of evidence or nothing."""
    labels: dict[str, Message] = Field(default_factory=dict)
    """What it was: arch, kernel, dtype ... `passed_but` says of a pass what it does not prove, and reports list it."""
    numbers: dict[str, Measured] = Field(default_factory=dict)
    """What was measured, with the unit in the name: lds_bytes, max_abs_err, seconds_median."""

    @model_validator(mode="after")
    def _says_why(self) -> Check:
        if self.outcome is not Outcome.PASS and not self.message:
            raise ValueError(f"check {self.id!r} is {self.outcome.value!r} without a message that says why")
        return self

    @staticmethod
    def write_all(folder: Path, checks: Iterable[Check]) -> None:
        """Write `findings.jsonl`, the evidence of a step that is not pytest."""
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder):
            lines = [f"{check.model_dump_json()}\n" for check in checks]
            (folder / FINDINGS_FILE).write_text("".join(lines), "utf-8")


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a JSON Lines file with their numbers, blank ones left out.

    Split at line feeds alone: answers may hold U+2028, U+2029 and U+0085, which end a line of text and none of JSON.

    Raises:
        OSError: It cannot be read.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            yield number, line


class BuildRecord(BoundedModel):
    """First line of `results.jsonl`: which plan the following lines answer."""

    kind: Literal["build"] = "build"
    schema_version: Literal[8] = 8
    started: AwareDatetime
    plan_digest: str
    """sha256 of the canonical plan JSON; results of another plan are refused."""
    commit: str
    tree: str = ""
    """Fingerprint of the files under test (`hilgate.git`); empty outside a git checkout."""
    surroundings: str = ""
    """sha256 of machine, packages and variables (`hilgate.run.surroundings`); empty where nothing is resumed."""
    environment: Environment


class CheckRecord(BoundedModel):
    """One check of one step."""

    kind: Literal["check"] = "check"
    step: Key
    check: Check


MOST_TESTS, MOST_KERNELS, LONGEST_ID = 50_000, 20_000, 2000
"""Ids in a list of tests or of kernels, and characters of each: code of the change may have written them."""

_Id = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_ID)]


class StepRecord(BoundedModel):
    """Last line of a finished step; a step without it did not finish."""

    kind: Literal["step"] = "step"
    key: Key
    started: AwareDatetime
    seconds: float = Field(ge=0)
    exit_status: int | None
    """None when the step was killed (timeout) or could not be started."""
    outcome: Outcome
    message: Message = ""
    checks: int = Field(ge=0)
    """How many CheckRecords of this step precede it; another number means lines were lost."""
    command: str
    imported: dict[str, str] = Field(default_factory=dict)
    """Package of `Plan.packages` -> where Python finds it in the step's environment: below the root, or absolute."""
    peak_memory_mib: float | None = None
    environment: Environment
    lacked: tuple[Condition, ...] = ()
    """Those conditions of `Step.may_lack` that the machine lacked, asked where the step ran."""
    kernels: Annotated[tuple[_Id, ...], Field(max_length=MOST_KERNELS)] | None = None
    """Functions of Triton that it compiled or interpreted, as `<file>::<function>` (`*` for a file that is not the
    checkout's), and sources that it read as text; None where not all is known."""


class RerunRecord(BoundedModel):
    """A failing check that was run once more over the same files. It never replaces the first answer."""

    kind: Literal["rerun"] = "rerun"
    step: Key
    """The planned step that it failed in."""
    check: str
    """Id of the check."""
    host: str
    elsewhere: bool
    """Whether this is another node than the one it failed on."""
    on_base: bool = False
    """Whether it ran over the files of the merge base, on the same node: it says whose a failure is and judges nothing.
    """
    outcome: Outcome
    seconds: float = Field(ge=0)
    message: Message = ""


class ImageRecord(BoundedModel):
    """An image that a step built, or found already built from the same contents."""

    kind: Literal["image"] = "image"
    step: Key
    """The planned step that provides it."""
    image: Key
    content: str
    """sha256 of everything it is built from; equals `Plan.images[image]`."""
    digest: ImageDigest
    """Digest of the image itself; every result that was made in it carries this digest."""
    reused: bool = False


_TestIds = Annotated[tuple[_Id, ...], Field(max_length=MOST_TESTS)]


class ListingRecord(BoundedModel):
    """Tests of a step here and at the merge base, where a change may have taken some away (`hilgate.run.listing`).

    Each shard has one, so that a test that none of them ran is missed.
    """

    kind: Literal["listing"] = "listing"
    step: Key
    here: _TestIds
    """Ids of the tests that began."""
    at_base: _TestIds
    """Ids of those that the same command collects over the merge base."""
    of_all_shards: _TestIds = ()
    """Ids of the tests that all shards of a step together must run; empty where it is whole."""
    problem: str = Field(default="", max_length=LONGEST_ID)
    """Why pytest could not collect them; `at_base` is then empty."""


class GpuHealth(StrictModel):
    """One GPU as `amd-smi` reports it."""

    index: int
    bdf: str
    """PCI address, e.g. 0000:05:00.0."""
    name: str = ""
    vram_total_mib: int = Field(ge=0)
    vram_used_mib: int = Field(ge=0)
    ecc_uncorrectable: int = Field(ge=0)
    temperature_c: float | None = None


class Health(StrictModel):
    """`health-before.json`, `health-after.json` of a job: what the agent's hooks saw; no GPU result counts without."""

    schema_version: Literal[1] = 1
    step: str
    moment: Literal["before", "after"]
    host: str
    agent: str
    """Buildkite's name of the agent; empty locally."""
    taken: dt.datetime
    seconds: float = Field(ge=0)
    healthy: bool
    problems: tuple[str, ...] = ()
    gpus: tuple[GpuHealth, ...] = ()
    dmesg: tuple[str, ...] = ()
    """Kernel log lines of GPU trouble since the job began."""
    ended: tuple[str, ...] = ()
    """Processes that the step left behind and that were ended."""
    notes: tuple[str, ...] = ()
    """What was seen and decides nothing: other agents' GPUs, lines of the kernel's log that are not understood."""


Record = Annotated[
    BuildRecord | CheckRecord | StepRecord | RerunRecord | ImageRecord | ListingRecord, Field(discriminator="kind")
]

record_adapter: TypeAdapter[BuildRecord | CheckRecord | StepRecord | RerunRecord | ImageRecord | ListingRecord] = (
    TypeAdapter(Record)
)


class Counts(StrictModel):
    """How many checks ended how."""

    passed: int = 0
    failed: int = 0
    inconclusive: int = 0
    did_not_run: int = 0

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Counts:
        """Count outcomes."""
        found = collections.Counter(outcomes)
        return cls(
            passed=found[Outcome.PASS],
            failed=found[Outcome.FAIL],
            inconclusive=found[Outcome.INCONCLUSIVE],
            did_not_run=found[Outcome.DID_NOT_RUN],
        )

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: number + getattr(other, name) for name, number in self})

    def __str__(self) -> str:
        """`41 passed, 1 failed, 2 inconclusive, 12 not run`; zeros are left out except passed and failed."""
        words = [f"{self.passed} passed", f"{self.failed} failed"]
        words += [f"{self.inconclusive} inconclusive"] if self.inconclusive else []
        words += [f"{self.did_not_run} not run"] if self.did_not_run else []
        return ", ".join(words)
