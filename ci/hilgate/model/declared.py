"""Declarations: devices and queues, areas and steps."""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Mapping

from pydantic import Field

from hilgate.model.base import Evidence, JsonName, Key, LabelName, Noun, Profile


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
    image: Key | None = None
    """The image that its jobs run in; None runs them on the host."""


class Agents(Noun):
    """`ci/agents.yaml`: the devices that exist and the queues that offer them."""

    devices: dict[Key, Device]
    queues: dict[Key, Queue]


class Matrix(Noun):
    """A table of a step's checks: each check is the cell that two of its labels name."""

    rows: LabelName
    """The label that names the row, e.g. arch; also an option of `hilgate run`, handed on to the step's command."""
    columns: LabelName
    """The label that names the column; an option as well."""
    also: tuple[LabelName, ...] = ()
    """Further labels of its checks that are options where the step itself is named, e.g. the maker of an arch."""
    file: JsonName
    """The file of the results folder that gets the cells as records, e.g. cells.json: of this step, on all devices."""

    def options(self, labels: Mapping[str, str]) -> str:
        """The options that narrow a step to a cell, e.g. `--arch gfx942 --dtype bf16`; empty where they cannot."""
        names = [(label, labels.get(label, "")) for label in (self.rows, self.columns)]
        if not all(value and not value.startswith("-") and value.isprintable() for _, value in names):
            return ""
        return shlex.join(word for label, value in names for word in (f"--{label}", value))


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
    tools: tuple[str, ...] = ()
    """Programs that must be on the path, e.g. buildah."""
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
    columns: tuple[str, ...] = ()
    """Labels and numbers of its checks, and `check` for the id, that the report shows as a table; empty shows only what
    is not green."""
    matrix: Matrix | None = None
    """The table that its checks fill, e.g. {rows: arch, columns: dtype, file: cells.json}."""


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


class Quarantined(Noun):
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


class Quarantine(Noun):
    """`ci/quarantine.yaml`: quarantined checks still run and are still reported."""

    tests: tuple[Quarantined, ...] = ()
