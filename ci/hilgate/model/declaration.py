# SPDX-License-Identifier: Apache-2.0
"""What a repository declares: its steps in areas, its devices and queues, its images, itself, and its quarantine."""

from __future__ import annotations

import datetime as dt
import math
import re
import shlex
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hilgate.conditions import problem_of
from hilgate.model import MAPPING, RESERVED_FILES, WORD, Key, StrictModel, refused

if TYPE_CHECKING:
    from collections.abc import Mapping


CPU = "cpu"
"""The device that every machine has: kernels under Triton's interpreter, and everything that needs no GPU."""


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


class Excuse(StrictModel):
    """Why a machine may lack a condition, and how many checks that may cost."""

    why: str = Field(min_length=1)
    """The sentence that a verdict says where the condition is lacking, e.g. the prefix cache of MLA needs AMX."""
    most: int = Field(ge=1)
    """The most checks that may be skipped because of it, on any of the step's devices."""


def _with_its_number(value: object) -> object:
    if isinstance(value, str):
        raise refused("is a sentence without a number", f"write {{why: {value}, most: N}}, N checks at most")
    return value


Excuses = dict[Condition, Annotated[Excuse, BeforeValidator(_with_its_number)]]
"""Condition -> its excuse."""


LabelName = Annotated[str, AfterValidator(_label_name)]
"""Name of a label of checks, usable as an option on the command line."""

JsonName = Annotated[str, AfterValidator(_json_name)]
"""Name of a JSON file without a folder, that no build has of its own."""

Profile = Literal["gate", "pr", "nightly", "release"]
"""Who asks for a plan: this machine, a pull request, the night, a release."""


class Device(StrictModel):
    """Something kernels run on. `cpu` runs them under Triton's interpreter."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every step on this device."""


PARTITIONS = ("dpx", "tpx", "qpx", "cpx")
"""How an MI300 or a later GPU can be split: into 2, 3, 4 or as many devices as it has compute dies."""

RESOURCE = re.compile(r"amd\.com/(?:gpu|(?P<partition>spx|dpx|tpx|qpx|cpx)_nps[1248])")
"""What AMD's device plugin calls GPUs: always `amd.com/gpu` by its naming strategy `single`; by `mixed`, partitions
have a name of their own (ROCm/k8s-device-plugin, docs/user-guide/configuration.md)."""

_REPOSITORY = re.compile(r"[a-z0-9][a-z0-9.-]*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?")


class Pods(StrictModel):
    """What each job of a queue gets where its jobs are pods that Buildkite's agent-stack-k8s makes.

    Service account, pull secrets and tolerations are its controller's, which no pipeline can change (`ci/agent/pods`).
    """

    registry: str
    """Where its nodes pull images from, without name and digest, e.g. registry.internal/hilgate."""
    cpus: int = Field(gt=0)
    """Processors of one job."""
    memory_gib: int = Field(gt=0)
    """Memory of one job on its node."""
    disk_gib: int = Field(default=60, gt=0)
    """What a job may write on its node's disk."""
    resource: str = "amd.com/gpu"
    """What the device plugin calls one GPU, or one partition of it, e.g. amd.com/cpx_nps4."""
    groups: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Numbers of the groups that own /dev/kfd and the render nodes on its nodes (video and render)."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of its nodes, e.g. {amd.com/gpu.product-name: AMD_Instinct_MI300X}."""

    @field_validator("registry")
    @classmethod
    def _without_tag(cls, registry: str) -> str:
        if not _REPOSITORY.fullmatch(registry):
            raise refused(f"{registry!r} is no repository", "write e.g. registry.internal/hilgate, without a tag")
        return registry

    @field_validator("resource")
    @classmethod
    def _known(cls, resource: str) -> str:
        if not RESOURCE.fullmatch(resource):
            raise refused(f"unknown resource {resource!r}", "write amd.com/gpu, or a partition, e.g. amd.com/cpx_nps4")
        return resource

    @field_validator("node_selector")
    @classmethod
    def _labels(cls, labels: dict[str, str]) -> dict[str, str]:
        if wrong := [word for pair in labels.items() for word in pair if not _LABEL.fullmatch(word)]:
            raise refused(f"{wrong[0]!r} is no label of a node", "see kubectl get nodes --show-labels")
        return labels


class Queue(StrictModel):
    """A Buildkite queue: a pool of identical agents."""

    device: Key
    """A key of `devices`: cpu, a gfx arch, or a partition of one, e.g. gfx942-cpx."""
    gpus: int = Field(ge=0, le=64)
    """GPUs of one agent, or partitions of them."""
    memory_gib: int = Field(gt=0)
    """GPU memory of one device, or host memory for a cpu queue."""
    pods: Pods | None = None
    """What each of its jobs gets where jobs are pods of Kubernetes; None where agents run on hosts."""
    compute_units: int = Field(default=0, ge=0)
    """Compute units of one GPU, which tell products of one arch and partitions apart; 0 is not looked at."""
    image: Key | None = None
    """The image that its jobs run in; None runs them on the host."""
    gate: bool = False
    """Whether it runs only what decides (plan, recheck, verdict), and no step of a change."""
    signs: bool = False
    """Whether its agents hold the key that signs releases; such a queue is a `gate` and signs, nothing else."""
    tools: tuple[str, ...] = ()
    """Programs that its hosts have, for steps that run there without an image."""
    wait_minutes: int = Field(default=120, gt=0)
    """How long a job may wait for an agent of it before `hilgate end-waiting` ends it."""
    report_only: bool = False
    """Whether steps on it are in the report and never in the verdict of a change; a release counts them."""
    out_after: int = Field(default=5, ge=0)
    """Infrastructure failures in a row, in builds of the default branch, after which it takes no steps of changes until
    a build of the default branch has worked there; 0 for never."""


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
    """Command that prints a check a line (as in `findings.jsonl`) for each thing that a machine must have
    before any step runs; empty for none. `hilgate doctor` shows them; a local run begins only where all pass."""
    images: dict[Key, Image] = Field(default_factory=dict)
    """Name, as queues and `provides` give it, to how it is built."""
    refuse_reads: bool = True
    """Whether a step that read a file which does not select it did not run; else its record only says so."""
    quick: tuple[Key, ...] = ()
    """Keys of the steps that `hilgate gate` runs on a person's machine when nothing has changed, with what they need;
    empty runs every step. They decide no merge."""
    manual_retry: bool = False
    """Whether a person may try a job again whose machine failed; never in builds of forks and releases. A build in
    which a job was retried after an answer is inconclusive, and so is one without HILGATE_READ_TOKEN, which tells."""
    history_builds: int = Field(default=5000, ge=1)
    """How many judged builds the history keeps; `hilgate history add` removes older ones."""
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
    beside: LabelName | None = None
    """A label that tells this step's checks from those of the other steps that name it: of each device the report shows
    them all in one more table, the rows and this label, e.g. family x attention_backend."""

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


class _StepFields(StrictModel):
    """What a step says of itself, as declared and as resolved."""

    key: Key
    """Its name; on a device it is followed by the device, e.g. kernels-mla-gfx942."""
    label: str
    """What a person reads: a few words, no device name."""
    devices: tuple[Key, ...] = Field(min_length=1)
    """Where it can run, keys of `agents.yaml: devices`."""
    needs: tuple[Key, ...] = ()
    """Step keys (of any area) that must have passed first, on the same device or on the cpu."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of its command, over those of the device."""
    reads: tuple[str, ...] = ()
    """gitignore-style globs of files that it reads beside the `paths` of its area: a change to one selects this step.
    A step that reads a file which does not select it did not run."""
    may_lack: Excuses = Field(default_factory=dict)
    """Conditions that a machine may lack, e.g. {cpu:amx_tile: {why: the prefix cache of MLA needs AMX, most: 14}}. A
    check that names such a condition, and is skipped where it is lacking, is said and not red. Any other check that did
    not run, and one more than `most`, makes the step *did not run*."""
    profiles: tuple[Profile, ...] = ("gate", "pr", "nightly", "release")
    """Plans that it belongs to."""
    report_only: bool = False
    """Whether it is in the report and never in the verdict of a change, once the merge base says so too; a release
    counts it. `hilgate history promote` says when it is steady enough to count."""

    @field_validator("devices")
    @classmethod
    def _listed_once(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [device for place, device in enumerate(devices) if device in devices[:place]]:
            raise refused(f"device {twice[0]!r} is listed twice", "keep one")
        return devices


class _TableFields(StrictModel):
    """The table that the report makes of a step's checks."""

    columns: tuple[str, ...] = ()
    """Labels and numbers of its checks, and `check` for the id, that the report shows as a table; empty shows only what
    is not green."""
    together: str = ""
    """Title of the table that it shares with the steps of the same title, on each device; empty for one of its own."""
    matrix: Matrix | None = None
    """The table that its checks fill, e.g. {rows: arch, columns: dtype, file: cells.json}."""


class OnAgents(StrictModel):
    """What a job of a step is given on agents. A fork's step has what the merge base gives the step of that name."""

    queues: dict[Key, Key] = Field(default_factory=dict)
    """device -> queue, where the smallest queue of that device is not the right one."""
    gpus: int = Field(default=1, ge=1, le=8)
    """GPUs it needs where its device is a GPU; a local machine must have them too."""
    network: bool = False
    """Whether its container may reach the network."""
    secrets: tuple[str, ...] = ()
    """Environment variables it is given from the agent's secrets; never in a build of a fork."""
    provides: Key | None = None
    """The image that it builds; steps on queues with that image wait for it."""
    shard_minutes: float | None = Field(default=None, ge=1)
    """Where it takes longer, pytest-split deals its tests to as many jobs as keep each below that. Only of pytest."""


class Step(_StepFields, OnAgents, _TableFields):
    """A declared step, resolved (`DeclaredStep.resolved`). It becomes one planned step per device."""

    tests: tuple[str, ...] = ()
    """The tests as declared; empty where it is no run of pytest, or was declared by its command."""
    command: Annotated[str, AfterValidator(_needs_no_shell)]
    """Run without a shell in the repository root; a leading `python` is the interpreter that runs hilgate."""
    evidence: str
    """What it must leave in its output folder besides an exit status: a kind of `hilgate.evidence`."""
    minimum: int = Field(default=1, ge=1)
    """Fewest checks that must run, where its evidence is findings. Of a step of pytest every test that is collected
    must end, and at least one must run."""
    timeout_minutes: int = Field(ge=1, le=180)
    """When it is ended; it then did not run."""
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
    minutes: float = Field(default=1.0, gt=0)
    """What it usually takes on 2 cores; used for ordering and, until it was measured, for the estimate in the plan."""

    @field_validator("command")
    @classmethod
    def _says_what(cls, command: str) -> str:
        if not shlex.split(command):
            raise refused("is empty", "say what to run")
        return command

    @field_validator("minutes")
    @classmethod
    def _within_the_timeout(cls, minutes: float, info: ValidationInfo) -> float:
        if minutes > info.data.get("timeout_minutes", minutes):
            what = f"usually {minutes:g} minutes, but ended after {info.data['timeout_minutes']}"
            raise refused(what, "raise timeout_minutes")
        return minutes


EVIDENCE_KINDS = {"junit": False, "findings": True}
"""Kind of evidence that an area may name -> whether a step declares the fewest checks (`minimum`), because its evidence
does not count them. `hilgate.evidence` says how each is collected, and adds those that are registered."""


class Evidence(_TableFields):
    """What a step leaves, and the table that the report makes of it."""

    kind: str
    """A kind of `hilgate.evidence`: findings or junit."""

    @model_validator(mode="after")
    def _shares_a_table(self) -> Self:
        if self.together and not self.columns:
            raise refused("together names a table, and there are no columns", "write `columns` too")
        return self


def _spelling(value: object) -> str:
    return MAPPING if isinstance(value, dict | Evidence) else WORD


KindAlone = Annotated[str, Tag(WORD)]
KindAndTable = Annotated[Evidence, Tag(MAPPING)]
"""The two ways to write the evidence of a step; each reports its own mistakes alone."""


PYTEST = "python -m pytest"

CHECKOUT, PROGRAM, MODEL = "checkout", "program:", "model:"
"""Words of `DeclaredStep.requires` that name no distribution: a git checkout, a program on the path, a model."""


def _requirement(text: str) -> str:
    if not re.fullmatch(rf"({PROGRAM}[\w.+-]+|{MODEL}[a-z0-9][a-z0-9_.-]*|[A-Za-z0-9][\w.-]*)", text):
        remedy = f"write a distribution (torch), {PROGRAM}NAME, {MODEL}NAME or {CHECKOUT}"
        raise refused(f"{text!r} is nothing that a machine can be asked for", remedy)
    return text


def _test(text: str) -> str:
    _place(text.removeprefix("!").partition("::")[0])
    if text.startswith("!") and "::" in text:
        raise refused(f"{text!r} leaves out a single test", "leave out its file or folder, or --deselect it")
    return text


MINIMUM_TIMEOUT, TIMES_AS_LONG, MAXIMUM_TIMEOUT = 30, 8, 180
"""A step is ended after eight times the minutes that it usually takes on 2 cores: under load with a cold compile cache,
steps have taken six times as long. Bounds in minutes."""


class DeclaredStep(_StepFields):
    """One step as an area declares it. `resolved` gives what the planner works with, a `Step`."""

    tests: tuple[Annotated[str, AfterValidator(_test)], ...] = ()
    """Folders and files of tests, or `file.py::name`; `!` before a folder or file leaves it out. They end its command,
    and a changed module selects the step when one of them imports it."""
    command: Annotated[str, AfterValidator(_needs_no_shell)] = ""
    """Run without a shell in the repository root; a leading `python` is the interpreter that runs hilgate. With `tests`
    it is `python -m pytest`, unless options are needed: `python -m pytest -m device`."""
    imports: tuple[str, ...] = ()
    """Modules (dotted) and test files that it runs beside its `tests`: a changed Python module selects it only when one
    of these imports it. Without both, every file of the area selects it."""
    requires: tuple[Annotated[str, AfterValidator(_requirement)], ...] = ()
    """What the machine must have: distributions (torch), `program:git`, `model:NAME` (`--models` selects by it), and
    `checkout` where it asks git about the repository. Without one of them it did not run."""
    evidence: KindAlone | KindAndTable = Field(default="junit", discriminator=Discriminator(_spelling))
    """What it must leave in its output folder besides an exit status: a kind, or `{kind: findings, columns: [...]}`.
    Required where there are no `tests`, which leave junit."""
    minimum: int | None = Field(default=None, ge=1)
    """Fewest findings that it must report; only with the evidence `findings`."""
    minutes: float = Field(default=1.0, gt=0, le=MAXIMUM_TIMEOUT)
    """What it usually takes on 2 cores. Eight times as long, but between 30 minutes and three hours, ends it."""
    agents: OnAgents = OnAgents()
    """What its job is given on agents: queues, GPUs, network, secrets, and the image that it builds."""

    @model_validator(mode="after")
    def _says_what_runs(self) -> Self:
        if not self.tests and not shlex.split(self.command):
            raise refused(f"step {self.key!r} runs nothing", "write `tests: [tests/kernels]`, or a `command`")
        if self.tests and all(test.startswith("!") for test in self.tests):
            raise refused(f"step {self.key!r} leaves out tests and names none", "name the folder that holds them")
        if not self.tests and "evidence" not in self.model_fields_set:
            raise refused(f"step {self.key!r} has a command and no evidence", "write evidence: findings, or junit")
        words = shlex.split(self.command or PYTEST)
        if self.agents.shard_minutes and (words[:3] != shlex.split(PYTEST) or {"-n", "--splits"} & {*words}):
            what = f"step {self.key!r} has shard_minutes, and only a run of `{PYTEST}` without -n can be split"
            raise refused(what, "remove shard_minutes, or split it into several steps")
        return self

    def resolved(self) -> Step:
        """What the planner works with: one command line, what it imports, and when it is ended."""
        named = [test for test in self.tests if not test.startswith("!")]
        left_out = [f"--ignore={test[1:]}" for test in self.tests if test.startswith("!")]
        words = [self.command or PYTEST, shlex.join([*named, *left_out])]
        files = [test.partition("::")[0] for test in named]
        evidence = Evidence(kind=self.evidence) if isinstance(self.evidence, str) else self.evidence
        return Step(
            **{name: getattr(self, name) for name in _StepFields.model_fields},
            **{name: getattr(self.agents, name) for name in OnAgents.model_fields},
            **{name: getattr(evidence, name) for name in _TableFields.model_fields},
            **({} if self.minimum is None else {"minimum": self.minimum}),
            tests=self.tests,
            command=" ".join(word for word in words if word),
            evidence=evidence.kind,
            timeout_minutes=min(MAXIMUM_TIMEOUT, max(MINIMUM_TIMEOUT, math.ceil(TIMES_AS_LONG * self.minutes))),
            packages=tuple(word for word in self.requires if ":" not in word and word != CHECKOUT),
            tools=tuple(word.removeprefix(PROGRAM) for word in self.requires if word.startswith(PROGRAM)),
            checkout=CHECKOUT in self.requires,
            imports=tuple(dict.fromkeys([*files, *self.imports])),
            models=tuple(word.removeprefix(MODEL) for word in self.requires if word.startswith(MODEL)),
            minutes=self.minutes,
        )


class _AreaFields(StrictModel):
    """What an area says of itself, beside its steps."""

    area: Key
    """Its name, on the command line and in records."""
    title: str
    """Its heading in reports."""
    why: str
    """One sentence: what a green tick of this area tells the reader."""
    paths: tuple[str, ...] = Field(min_length=1)
    """gitignore-style globs; a change to a matching file selects the area."""
    always: bool = False
    """Selected whatever changed."""


class DeclaredArea(_AreaFields):
    """`ci/areas/*.yaml`: a family of steps and the files that can break them."""

    steps: tuple[DeclaredStep, ...] = Field(min_length=1)
    """What checks it."""

    def resolved(self) -> Area:
        """The area with its steps resolved."""
        steps = tuple(step.resolved() for step in self.steps)
        return Area(area=self.area, title=self.title, why=self.why, paths=self.paths, always=self.always, steps=steps)


class Area(_AreaFields):
    """An area as it is planned: `DeclaredArea` with each step resolved."""

    steps: tuple[Step, ...] = Field(min_length=1)
    """What checks it."""


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
    """Why it fails, as far as that is known."""
    owner: str = Field(min_length=1)
    """A person or a team that can be asked."""
    added: dt.date
    """Day of the entry."""
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
