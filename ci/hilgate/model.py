# SPDX-License-Identifier: Apache-2.0
"""The data models of hilgate: what is declared, planned, found and decided, and how their files are read and written.

Every file that one stage hands to the next (`plan.json`, `results.jsonl`, `findings.jsonl`, `verdict.json`) is one of
these models as JSON. They are frozen and forbid unknown keys, so a misspelt key is an error and never a silent default.
A change of the keys raises the `schema_version` of the file. `hilgate schema` prints them.
"""

from __future__ import annotations

import collections
import datetime as dt
import enum
import re
import shlex
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hilgate.conditions import problem_of
from hilgate.errors import MisuseError, RecordsError, writing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SCHEMA_VERSION: Final = 1

REFUSED: Final = "refused"
"""Type of the validation errors that `refused` makes."""


def refused(what: str, remedy: str = "") -> PydanticCustomError:
    """The error that a validator raises for a value that is of the right type and wrong all the same."""
    return PydanticCustomError(REFUSED, "{what}", {"what": what, "remedy": remedy})


def first_problem(error: ValidationError) -> str:
    """The first mistake with its place; but another version before all others, because they follow from it."""
    mistakes = error.errors(include_url=False)
    version = next((one for one in mistakes if one["loc"][-1:] == ("schema_version",)), None)
    if version and version["type"] == "literal_error":
        return f"schema {version['input']!r:.20}, this reads {version['ctx']['expected']}"
    place = ".".join(map(str, mistakes[0]["loc"]))
    return f"{place}: {mistakes[0]['msg']}" if place else mistakes[0]["msg"]


CPU = "cpu"
"""The device that every machine has: kernels under Triton's interpreter, and everything that needs no GPU."""

Key = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
"""A name usable as a Buildkite step key and as a folder name."""

ImageDigest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

PLAN_FILE, VERDICT_FILE, FINDINGS_FILE, JOBS_FOLDER = "plan.json", "verdict.json", "findings.jsonl", "jobs"

RESERVED_FILES = frozenset(
    {
        PLAN_FILE,
        VERDICT_FILE,
        "quarantine.json",
        "restored.json",
        "manifest.json",
        "health-before.json",
        "health-after.json",
    }
)
"""Files that every build leaves, or its bundle, under these names."""


def _label_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise refused("must be a word of lower case letters, digits and '_'")
    return name


def _json_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,60}\.json", name):
        raise refused("must be a plain file name, lower case, that ends in .json")
    if name in RESERVED_FILES:
        raise refused(f"{name!r} is a file of every build", "choose another name")
    return name


def _condition(text: str) -> str:
    if problem := problem_of(text):
        raise refused(problem)
    return text


Condition = Annotated[str, AfterValidator(_condition)]
"""What a machine may lack, e.g. `cpu:amx_tile` (`hilgate.conditions`)."""

LabelName = Annotated[str, AfterValidator(_label_name)]
"""Name of a label of checks, usable as an option on the command line."""

JsonName = Annotated[str, AfterValidator(_json_name)]
"""Name of a JSON file without a folder, that no build has of its own."""

Profile = Literal["gate", "pr", "nightly", "release"]
"""Who asks for a plan: this machine, a pull request, the night, a release."""

PlanProfile = Literal["smoke"] | Profile
"""What a plan is made for: a profile, or `smoke`, which only local plans have."""

LOCAL = frozenset({"gate", "smoke"})
"""Profiles of plans for one machine at hand; no other one reuses a pass."""

Number = int | float
Scalar = str | int | float | bool | None


class StrictModel(BaseModel):
    """Base of every record: frozen, no unknown keys, no NaN or infinity (JSON has neither)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )

    def save(self, path: Path) -> None:
        """Write it as JSON, atomically: a reader sees the old file or the whole new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        with writing(path):
            new.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            new.replace(path)

    @classmethod
    def load(cls, path: Path, remedy: str) -> Self:
        """Read what `save` wrote.

        Raises:
            RecordsError: Missing, truncated, of another schema or contradicting itself; with this remedy.
        """
        name = cls.__name__.lower()
        try:
            found = cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise RecordsError(f"there is no {name}", where=str(path), remedy=remedy) from error
        except OSError as error:
            raise RecordsError(f"the {name} cannot be read: {error}", where=str(path), remedy=remedy) from error
        except ValidationError as error:
            raise RecordsError(f"not a {name}: {first_problem(error)}", where=str(path), remedy=remedy) from error
        if "schema_version" in cls.model_fields.keys() - found.model_fields_set:
            raise RecordsError(f"not a {name}: it has no schema_version", where=str(path), remedy=remedy)
        return found


class Outcome(enum.StrEnum):
    """The only four things that can be said of a check, a step or a build."""

    PASS = "pass"  # noqa: S105 - an outcome, not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    DID_NOT_RUN = "did not run"


SEVERITY: dict[Outcome, int] = {
    Outcome.PASS: 0,
    Outcome.INCONCLUSIVE: 1,
    Outcome.DID_NOT_RUN: 2,
    Outcome.FAIL: 3,
}
"""The order in which outcomes win: fail over did not run over inconclusive over pass."""


class Ruling(enum.StrEnum):
    """What the author of a change reads about a step; an `Outcome` says only whether it is green."""

    PASS = "pass"  # noqa: S105 - a ruling, not a password
    REGRESSION = "regression"
    """The step did its work and what it checks is wrong."""
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


EVIDENCE = {"junit", "findings"}
"""Kinds of evidence; `hilgate.run.evidence` has a class for each, and adds the names of those registered there."""


def _evidence(name: str) -> str:
    if name not in EVIDENCE:
        raise PydanticCustomError("evidence", "must be one of {kinds}", {"kinds": ", ".join(sorted(EVIDENCE))})
    return name


Evidence = Annotated[str, AfterValidator(_evidence)]
"""What a step must leave in its output folder besides an exit status."""


class Device(StrictModel):
    """Something kernels run on. `cpu` runs them under Triton's interpreter."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every step on this device."""


class Queue(StrictModel):
    """A Buildkite queue: a pool of identical agents."""

    device: Key
    """A key of `devices`: cpu, or a gfx arch."""
    gpus: int = Field(ge=0, le=8)
    memory_gib: int = Field(gt=0)
    """GPU memory of one device, or host memory for a cpu queue."""
    image: Key | None = None
    """The image that its jobs run in; None runs them on the host."""
    gate: bool = False
    """Whether it runs only what decides (plan, recheck, verdict), and no step of a change."""
    agents: int = Field(default=0, ge=0)
    """How many agents of it must be connected and not paused, before `hilgate watch` says so; 0 for no number."""
    signs: bool = False
    """Whether its agents hold the key that signs releases; such a queue is a `gate` and signs, nothing else."""
    tools: tuple[str, ...] = ()
    """Programs that its hosts have, for steps that run there without an image."""
    wait_minutes: int = Field(default=120, gt=0)
    """How long a job may wait for an agent of it before `hilgate watch` says so."""


class Agents(StrictModel):
    """`ci/agents.yaml`: the devices that exist and the queues that offer them."""

    devices: dict[Key, Device]
    queues: dict[Key, Queue]


class Image(StrictModel):
    """How an image is built. Its key covers every file that its build sees; equal contents are the same image."""

    recipe: str
    """Its Dockerfile, below the root."""
    inputs: tuple[str, ...] = ()
    """gitignore-style globs of the other files that its build sees; the last match wins."""
    pins: bool = False
    """Whether `docker/pins.toml` has a table of its name, which its build is given and which it proves itself by."""
    check: str = ""
    """Command that runs once in a new image, with the checkout mounted, before the image is published. Optional."""
    gigabytes: float = Field(default=0, ge=0)
    """What it may hold at most; 0 for no budget."""
    tools: tuple[str, ...] = ()
    """Programs in it that steps may ask for by their `tools`."""


def _place(path: str) -> str:
    if not re.fullmatch(r"\.|(?:[A-Za-z0-9_][\w.-]*/)*[A-Za-z0-9_][\w.-]*/?", path):
        raise refused(f"{path!r} is no plain path below the root", "write e.g. src or tests/kernels/")
    return path


Place = Annotated[str, AfterValidator(_place)]
"""A file or a folder below the root, as an agent's host and its shell can take it: no '..', no blank."""


class GateBudgets(StrictModel):
    """Minutes that `hilgate gate` may take on 2 idle cores. More is said at its end, and makes nothing red."""

    smoke: float | None = Field(default=None, gt=0)
    all: float | None = Field(default=None, gt=0)
    """When nothing is left out as not affected."""
    change: float | None = Field(default=None, gt=0)
    """Of a change, say of one line."""
    always: float | None = Field(default=None, gt=0)
    """Of a change that selects only what always runs, say of a document."""


class Project(StrictModel):
    """`ci/project.yaml`: what hilgate must know of the repository it serves. Without the file, the defaults hold."""

    python_path: tuple[Place, ...] = (".",)
    """Folders below the root that every step imports from before anything else, in this order."""
    forks_may_change: tuple[Place, ...] = ()
    """Folders (with a closing slash) and files that hosts only copy into containers. Forks may change these, and areas,
    the quarantine and pages. Agents refuse a fork that changes anything else."""
    selfcheck: str = ""
    """Command of the tiny kernel that each GPU must compute before a job; empty for none (`pagedkv.selfcheck`)."""
    prerequisites: str = ""
    """Command that prints a check a line (`hilgate schema findings.jsonl`) for each thing that a machine must have
    before any step runs; empty for none. `hilgate doctor` shows them; a local run begins only where all pass."""
    images: dict[Key, Image] = Field(default_factory=dict)
    """Name, as queues and `provides` give it, to how it is built."""
    budgets: GateBudgets = GateBudgets()
    """How long a person should wait."""
    status: str = "hilgate/required"
    """The one commit status that a merge waits for."""
    approvers: str = "hilgate-approvers"
    """The team that approves protected changes."""


class Matrix(StrictModel):
    """A table of a step's checks: each check is the cell that two of its labels name."""

    rows: LabelName
    """The label that names the row, e.g. arch; also an option of the step's command, which runs that part alone."""
    columns: LabelName
    """The label that names the column; an option as well."""
    file: JsonName
    """The file of the results folder that gets its checks, e.g. cells.json: of this step, on all devices."""

    @field_validator("columns")
    @classmethod
    def _not_the_rows(cls, columns: str, info: ValidationInfo) -> str:
        if columns == info.data.get("rows"):
            raise refused(f"{columns!r} names the rows already", "name another label")
        return columns

    def options(self, labels: Mapping[str, str]) -> str:
        """The options that narrow a step to a cell, e.g. `--arch gfx942 --dtype bf16`; empty where they cannot."""
        names = [(label, labels.get(label, "")) for label in (self.rows, self.columns)]
        if not all(value and not value.startswith("-") and value.isprintable() for _, value in names):
            return ""
        return shlex.join(word for label, value in names for word in (f"--{label}", value))


SHELL_WORDS = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>&1"})


def _needs_no_shell(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise refused(f"cannot be split into words: {error}", "balance the quotes") from None
    if shell := sorted(SHELL_WORDS.intersection(words)):
        what = f"{shell[0]!r} needs a shell and there is none"
        raise refused(what, "put it into a script or a module and run that")
    return command


class Smoke(StrictModel):
    """The subset of a step that a local machine runs when nothing has changed (`hilgate gate --smoke`)."""

    arguments: Annotated[str, AfterValidator(_needs_no_shell)] = ""
    """Added to the step's command, to run a part of it; empty runs it whole."""
    minimum: int = Field(ge=1)
    """Fewest checks that it must report, as `Step.minimum`."""
    minutes: float = Field(gt=0)
    """What it usually takes on 2 cores."""
    on_change: bool = False
    """Whether a change that selects the step runs only this subset locally. `--all` and agents always run all of it."""


BUILDKITE_KEY = re.compile(r"[a-z0-9_-]{1,100}")
"""What every published version of Buildkite's schema takes as a step key; only the newest also takes a '.'."""

RESERVED_KEYS = frozenset({"plan", "recheck", "verdict"})
"""Step keys of the pipeline itself."""

POSTED_BY = (
    "build.pull_request.base_branch == pipeline.default_branch"
    " || build.merge_queue.base_branch == pipeline.default_branch"
    " || (build.branch == pipeline.default_branch && build.pull_request.id == null)"
)
"""Builds that post the required status. A build of another branch has no part in it: nobody asked to merge that."""


class Step(StrictModel):
    """One declared unit of work. It becomes one planned step per device."""

    key: Key
    label: str
    """What a person reads: a few words, no device name."""
    command: Annotated[str, AfterValidator(_needs_no_shell)]
    """Run without a shell in the repository root; a leading `python` is the interpreter that runs hilgate."""
    devices: tuple[Key, ...] = Field(min_length=1)
    """Where it can run, keys of `agents.yaml: devices`."""
    queues: dict[Key, Key] = Field(default_factory=dict)
    """device -> queue, where the smallest queue of that device is not the right one."""
    evidence: Evidence
    minimum: int = Field(default=1, ge=1)
    """Fewest checks that it must report: those that ran, and those that cannot run here (`may_lack`). It notices that
    whole files of checks are gone; `python -m hilgate.checks.floors --write` writes it for steps of pytest."""
    may_lack: dict[Condition, str] = Field(default_factory=dict)
    """Conditions that a machine may lack -> the sentence that a verdict says where one is lacking, e.g.
    {cpu:amx_tile: the prefix cache of MLA needs AMX}. A check that names such a condition, and is skipped where it is
    lacking, is said and not red; any other check that did not run makes the step *did not run*."""
    timeout_minutes: int = Field(ge=1, le=180)
    env: dict[str, str] = Field(default_factory=dict)
    needs: tuple[Key, ...] = ()
    """Step keys (of any area) that must have passed first, on the same device or on the cpu."""
    packages: tuple[str, ...] = ()
    """Distributions that must be installed, e.g. torch, triton, vllm."""
    tools: tuple[str, ...] = ()
    """Programs that must be on the path, e.g. buildah. On agents its image must have them, or without one its queue."""
    checkout: bool = False
    """Whether it asks git about the repository's files. Outside of a git checkout (a zip) it did not run."""
    imports: tuple[str, ...] = ()
    """Modules (dotted) and test files that it runs: a changed Python module selects it only when one of these imports
    it. Empty: every file of the area selects it."""
    models: tuple[Key, ...] = ()
    """Names of the models that it runs; `--models` selects by them."""
    profiles: tuple[Profile, ...] = ("gate", "pr", "nightly", "release")
    """Plans that it belongs to."""
    gpus: int = Field(default=1, ge=1, le=8)
    """GPUs it needs where its device is a GPU."""
    network: bool = False
    """Whether its container may reach the network."""
    secrets: tuple[str, ...] = ()
    """Environment variables it is given from the agent's secrets; never in a build of a fork."""
    provides: Key | None = None
    """The image that it builds; steps on queues with that image wait for it."""
    cores: int = Field(default=1, ge=1)
    """CPU cores it keeps busy; the local runner fills the machine with them."""
    minutes: float = Field(default=1.0, gt=0)
    """What it usually takes on 2 cores; used for ordering and for the estimate in the plan."""
    smoke: Smoke | None = None
    """Its subset in a smoke run; a step without one is not in it."""
    columns: tuple[str, ...] = ()
    """Labels and numbers of its checks, and `check` for the id, that the report shows as a table; empty shows only what
    is not green."""
    matrix: Matrix | None = None
    """The table that its checks fill, e.g. {rows: arch, columns: dtype, file: cells.json}."""
    reuse: bool = True
    """Whether a local run may reuse a pass of it; false where its outcome rests on what no key holds: the clock, a
    service, refs of git, files outside the tree or ignored in it. One with `network` is never reused."""

    @field_validator("command")
    @classmethod
    def _says_what(cls, command: str) -> str:
        if not shlex.split(command):
            raise refused("is empty", "say what to run")
        return command

    @field_validator("devices")
    @classmethod
    def _listed_once(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [device for place, device in enumerate(devices) if device in devices[:place]]:
            raise refused(f"device {twice[0]!r} is listed twice", "keep one")
        return devices

    @field_validator("minutes")
    @classmethod
    def _within_the_timeout(cls, minutes: float, info: ValidationInfo) -> float:
        if minutes > info.data.get("timeout_minutes", minutes):
            what = f"usually {minutes:g} minutes, but ended after {info.data['timeout_minutes']}"
            raise refused(what, "raise timeout_minutes")
        return minutes


def planned_key(step: Step, device: Key) -> Key:
    """Key of a step on a device."""
    return f"{step.key}-{device}"


class Area(StrictModel):
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


LONGEST_QUARANTINE = dt.timedelta(days=14)
"""Two weeks: long enough to mend a kernel, and short enough that whoever promised it is still asked."""


class Quarantined(StrictModel):
    """One check that may fail for a while without stopping others, because somebody has promised to mend it."""

    test: str = Field(min_length=1)
    """Id of the check, as results write it."""
    step: Key
    """The declared step it belongs to."""
    devices: tuple[Key, ...] = ()
    """Where it fails; empty is everywhere."""
    reason: str = Field(min_length=1)
    owner: str = Field(min_length=1)
    """A person or a team that can be asked."""
    added: dt.date
    expires: dt.date
    """At most 14 days after `added`; from that day on the entry itself is red."""

    @field_validator("expires")
    @classmethod
    def _soon(cls, expires: dt.date, info: ValidationInfo) -> dt.date:
        added = info.data.get("added", expires - dt.timedelta(1))
        if not dt.timedelta(0) < expires - added <= LONGEST_QUARANTINE:
            what = f"expires {(expires - added).days} days after it was added"
            raise refused(what, f"choose a day 1 to {LONGEST_QUARANTINE.days} days after {added}")
        return expires

    def overlaps(self, other: Quarantined) -> bool:
        """Whether both are about one check on one device."""
        everywhere = not self.devices or not other.devices
        return (self.test, self.step) == (other.test, other.step) and (
            everywhere or not set(self.devices).isdisjoint(other.devices)
        )


class Quarantine(StrictModel):
    """`ci/quarantine.yaml`: quarantined checks still run and are still reported."""

    tests: tuple[Quarantined, ...] = ()

    @field_validator("tests")
    @classmethod
    def _once(cls, tests: tuple[Quarantined, ...]) -> tuple[Quarantined, ...]:
        for place, one in enumerate(tests):
            if any(one.overlaps(other) for other in tests[:place]):
                raise refused(f"{one.test} of {one.step} is in quarantine already", "keep one of them")
        return tests


class PlannedStep(StrictModel):
    """A declared step on a device, with where it runs there and the reason it was selected."""

    step: Step
    """As declared; without its secrets where the change comes from a fork."""
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
    arguments: str = ""
    """What a person or its smoke subset added to its command, to run a part of it."""

    @property
    def as_declared(self) -> bool:
        """Whether it is whole, or its smoke subset: nothing that a person narrowed."""
        return self.arguments in {"", self.step.smoke.arguments if self.step.smoke else ""}

    def part(self, arguments: str, minimum: int = 1) -> PlannedStep:
        """A part of it: these arguments behind its command, and by default one check is enough."""
        command = f"{self.step.command} {arguments}".rstrip()
        return self.redeclared(command=command, minimum=minimum).model_copy(update={"arguments": arguments})

    def subset(self) -> PlannedStep:
        """Its smoke subset; the step itself where it has none."""
        if self.step.smoke is None:
            return self
        return self.part(self.step.smoke.arguments, self.step.smoke.minimum).redeclared(minutes=self.step.smoke.minutes)

    def redeclared(self, **changes: object) -> PlannedStep:
        """The same with these fields of its declared step changed, e.g. `command`, for a run of a part of it."""
        return self.model_copy(update={"step": self.step.model_copy(update=changes)})

    @property
    def key(self) -> Key:
        """`<declared key>-<device>`."""
        return planned_key(self.step, self.device)

    @property
    def label(self) -> str:
        """What a person reads, with the device where there are several."""
        return f"{self.step.label} ({self.device})" if len(self.step.devices) > 1 else self.step.label

    @property
    def gpus(self) -> int:
        """GPUs it is given; 0 on the cpu."""
        return 0 if self.device == CPU else self.step.gpus


OmissionCause = Literal[
    "not affected", "not asked for", "other profiles", "not in smoke", "no queue", "not here", "need omitted"
]
"""Why a step is left out: the change does not select it; others were named; it belongs to other plans; it has no smoke
subset; no queue offers the device; this machine lacks something or another device of it is taken; what it needs is left
out itself."""


class Omission(StrictModel):
    """A step that is not in the plan, and why not."""

    key: Key
    area: Key
    label: str
    cause: OmissionCause
    reason: str
    """The cause in full, for people."""


class ProtectedChange(StrictModel):
    """A change to a protected file, which decides: a tolerance, a budget, a gate, an area, the quarantine, hilgate."""

    path: str
    what: str
    """In a few words: changed, deleted or new."""
    hunk: str = ""
    """The beginning of its diff against the merge base."""


class Plan(StrictModel):
    """`plan.json`: what will run and why, fixed before anything runs."""

    schema_version: Literal[3, 4, 5] = 5
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
    promised: int = 0
    """Of a smoke plan: the fewest checks that the whole gate's steps promise here; of one that runs subsets of what a
    change selects, those that its whole steps promise. Else 0."""
    fork: bool = False
    """Whether the change comes from a fork: no secrets, no caches written."""
    images: dict[Key, str] = Field(default_factory=dict)
    """Image -> sha256 of everything it is built from (`docker/`); its digest is known once it is built."""
    digests: dict[Key, ImageDigest] = Field(default_factory=dict)
    """Image -> digest, where a build of the default branch has built the same contents: no step of this one does."""
    loosened: tuple[ProtectedChange, ...] = ()
    """What the change alters in its own gate; needs a named approval."""
    python_path: tuple[str, ...] = (".",)
    """Folders below the root that every step imports from before anything else, as the project declares them."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Import package in those folders -> where it stands below the root; no result of another copy of it counts."""
    changed_files: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    omissions: tuple[Omission, ...]

    @property
    def local(self) -> bool:
        """Whether it was made for one machine at hand, not for the agents."""
        return self.profile in LOCAL

    def require_whole(self, where: str) -> None:
        """Refuse to let a part of the gate stand for it.

        Raises:
            MisuseError: It is a smoke plan, or a step of it was narrowed by hand.
        """
        part = next((step.key for step in self.steps if step.arguments), "")
        if self.profile == "smoke" or part:
            what = "a smoke run" if self.profile == "smoke" else f"a run of a part of {part}"
            raise MisuseError(
                f"{what} decides about no merge and no release", where=where, remedy="run `hilgate gate --all`"
            )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[PlannedStep, ...]) -> tuple[PlannedStep, ...]:
        """Each key stands once, and behind what it depends on."""
        before: set[Key] = set()
        for step in steps:
            if step.key in before:
                raise refused(f"step {step.key} stands twice")
            if late := [need for need in step.depends_on if need not in before]:
                raise refused(f"step {step.key} depends on {late[0]}, which does not stand before it")
            before.add(step.key)
        return steps


class Environment(StrictModel):
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


class Check(StrictModel):
    """One thing that was checked: a test, a code object, a gate. A line of `findings.jsonl`."""

    schema_version: Literal[1] = Field(default=SCHEMA_VERSION, exclude=True)
    """For whoever writes such lines; in `results.jsonl` the first record's counts."""
    id: str = Field(min_length=1)
    """Stable name that can be pasted back, with shapes and dtypes rather than indices."""
    outcome: Outcome
    seconds: float = Field(default=0.0, ge=0)
    message: str = ""
    """Why it is not a pass; for a pass, one line of evidence or nothing."""
    labels: dict[str, str] = Field(default_factory=dict)
    """What it was: arch, kernel, dtype ... `passed_but` says of a pass what it does not prove, and reports list it."""
    numbers: dict[str, Number] = Field(default_factory=dict)
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


class BuildRecord(StrictModel):
    """First line of `results.jsonl`: which plan the following lines answer."""

    kind: Literal["build"] = "build"
    schema_version: Literal[2, 3, 4] = 4
    started: dt.datetime
    plan_digest: str
    """sha256 of the canonical plan JSON; results of another plan are refused."""
    commit: str
    tree: str = ""
    """Fingerprint of the files under test (`hilgate.git`); empty outside a git checkout."""
    surroundings: str = ""
    """sha256 of machine, installed packages and variables (`hilgate.run.reuse`); empty where nothing is resumed."""
    environment: Environment


class CheckRecord(StrictModel):
    """One check of one step."""

    kind: Literal["check"] = "check"
    step: Key
    check: Check


class Reused(StrictModel):
    """Where a pass is from that was not run again (`hilgate.run.reuse`)."""

    of: str
    """sha256 of the step, its device and its settings, as they were when it ran."""
    commit: str
    tree: str
    """Fingerprint of the files that it ran over."""


class FailedBefore(StrictModel):
    """A failure of an earlier run, over the same files and in the same environment (`hilgate.run.reuse`)."""

    when: dt.datetime
    checks: tuple[str, ...] = ()
    """Ids that failed; empty for a crash, a timeout or an exit status alone."""


class StepRecord(StrictModel):
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
    imported: dict[str, str] = Field(default_factory=dict)
    """Package of `Plan.packages` -> where Python finds it in the step's environment: below the root, or absolute."""
    peak_memory_mib: float | None = None
    environment: Environment
    lacked: tuple[Condition, ...] = ()
    """Those conditions of `Step.may_lack` that the machine lacked, asked where the step ran."""
    reused: Reused | None = None
    """Set where an earlier build's pass stands here; `started` and `seconds` are then of that."""
    failed_before: FailedBefore | None = None
    """Set where it failed in an earlier run over the same files: a pass is then inconclusive."""


class RerunRecord(StrictModel):
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
    message: str = ""


class ImageRecord(StrictModel):
    """An image that a step built, or found already built from the same contents."""

    kind: Literal["image"] = "image"
    step: Key
    """The planned step that provides it."""
    image: Key
    content: str
    """sha256 of everything it is built from; equals `Plan.images[image]`."""
    digest: ImageDigest
    """Of the image itself; every result that was made in it carries this digest."""
    reused: bool = False


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

    schema_version: Literal[1] = SCHEMA_VERSION
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


Record = Annotated[BuildRecord | CheckRecord | StepRecord | RerunRecord | ImageRecord, Field(discriminator="kind")]
record_adapter: TypeAdapter[BuildRecord | CheckRecord | StepRecord | RerunRecord | ImageRecord] = TypeAdapter(Record)


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
    reused: dt.datetime | None = None
    """When it ran, where a pass of an earlier build stands for it."""


class Verdict(StrictModel):
    """`verdict.json`: the one answer, and the answer for each planned step."""

    schema_version: Literal[3] = 3
    decided: dt.datetime
    profile: PlanProfile | None
    """Of its plan; null where there was none. What a smoke run says is no answer about a change."""
    commit: str
    plan_digest: str
    outcome: Outcome
    why: str
    images: dict[Key, str] = Field(default_factory=dict)
    """Image -> digest, as built."""
    loosened: tuple[ProtectedChange, ...] = ()
    """The protected changes of the plan."""
    approved_by: str = ""
    """Who approved the protected changes; empty when there are none or nobody has."""
    notes: tuple[str, ...] = ()
    """What a reader must know besides: that nothing was compared with a merge base."""
    doubts: tuple[str, ...] = ()
    """What stands against the whole: files that changed since the steps ran. A pass with one is inconclusive."""
    steps: tuple[StepVerdict, ...]
    omissions: tuple[Omission, ...]
