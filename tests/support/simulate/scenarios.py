# SPDX-License-Identifier: Apache-2.0
"""What a simulated build is made of: a plan, and the faults that strike it, both drawn from a seed.

Plans are small ones of every shape, and real ones of random changes to this repository.
"""

from __future__ import annotations

import datetime as dt
import enum
import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.simulate.buildkite import Command, Wait, parse

from hilgate import git
from hilgate.buildkite.steps import pipeline_yaml, recheck_yaml
from hilgate.conditions import of_the_device
from hilgate.declare.load import Declarations, load
from hilgate.errors import MisuseError, NothingSelectedError
from hilgate.evidence import kind_of
from hilgate.images.contents import contents
from hilgate.model.declaration import CPU, Excuse, Step
from hilgate.model.plan import Plan, PlannedStep
from hilgate.plan.make import ChangeFacts, assemble

if TYPE_CHECKING:
    from pathlib import Path


class FaultKind(enum.StrEnum):
    """A fault, in the words of the report."""

    AGENT_LOST = "agent lost mid-step"
    AGENT_STOPPED = "agent stopped"
    HANG = "hang, ended by the inner timeout"
    HANG_HARD = "hang, ended by Buildkite"
    OUT_OF_MEMORY = "step killed, out of memory"
    OUT_OF_MEMORY_HARD = "job killed, out of memory"
    SICK_NODE = "sick node, found by preflight"
    HIDDEN_SICK_NODE = "sick node, preflight passed, tests fail"
    SICK_AFTERWARDS = "node sick by the end, tests pass"
    EXECUTOR_KILLED = "what runs the job killed"
    NETWORK_LOSS = "network lost at upload"
    RESULTS_LOST = "results not uploaded, said by the hooks"
    LATE = "results later than the verdict"
    DISK_FULL = "disk full while writing"
    DUPLICATED = "results twice"
    FLIPPED_BIT = "flipped bit"
    TRUNCATED = "truncated line"
    NOT_A_NUMBER = "NaN"
    LINE_REMOVED = "removed line"
    LINES_REORDERED = "reordered lines"
    WRONG_TYPE = "wrong JSON type"
    OTHER_COMMIT = "results of another commit"
    OTHER_PLAN = "results of another plan"
    OTHER_TREE = "results of another tree"
    OTHER_PACKAGES = "results of another tree's packages"
    OTHER_IMAGE = "results of another image"
    OTHER_COMMAND = "results of another command"
    OTHER_STEP = "results of another step"
    FALSE_CLAIM = "record claims more than it shows"
    NO_EVIDENCE = "exit 0 without evidence"
    ZERO_TESTS = "zero tests"
    ALL_SKIPPED = "everything skipped"
    BELOW_MINIMUM = "fewer than the minimum"
    CANNOT_RUN = "test that its machine cannot run"
    SKIPPED_TEST = "test skipped without a true excuse"
    RAN_WITHOUT = "test ran without what it needs"
    SOFT_FAILED = "soft-failed job"
    SKIPPED = "unplanned skip"
    CANCELLED = "cancelled by a person"
    FLAKY = "flaky test"
    REGRESSION = "regression"
    QUARANTINED_FAILURE = "quarantined failure"
    QUARANTINED_ELSEWHERE = "failure quarantined for another device"
    UNEXPECTED_PASS = "unexpected pass"
    QUARANTINE_EXPIRED = "expired quarantine"
    HEALTH_MISSING = "health file missing"
    HEALTH_CORRUPT = "health file corrupt"
    HEALTH_OF_OTHER_NODE = "health of another node"
    PREFLIGHT_MISSING = "preflight missing"
    PREFLIGHT_IGNORED = "unfit by preflight, and ran"
    GPU_LOST = "GPU gone by the end"
    IMAGE_OTHER_CONTENT = "image of other content"
    IMAGE_NOT_RECORDED = "image not recorded"
    IMAGE_IMPOSTOR = "image recorded by its user"
    RECHECK_SAME_NODE = "recheck on the same node"
    PLAN_FAILED = "plan job failed"
    PLAN_ALTERED = "plan altered after the jobs began"
    PLAN_AGENT_LOST = "agent of the plan lost"
    VERDICT_AGENT_LOST = "agent of the verdict lost"
    LOOSENED = "loosened gate, no approval"
    LOOSENED_APPROVED = "loosened gate, approved"
    NAMES_OF_OTHERS = "files that are named as other steps' results"
    HOLES = "sparse file of a terabyte left"
    MANY_FILES = "more files left than a job may"
    FAST_FAILING = "agent that fails fast"


OF_THE_BUILD = frozenset(
    {
        FaultKind.PLAN_FAILED,
        FaultKind.PLAN_ALTERED,
        FaultKind.PLAN_AGENT_LOST,
        FaultKind.VERDICT_AGENT_LOST,
        FaultKind.LOOSENED,
        FaultKind.LOOSENED_APPROVED,
    }
)
"""Faults that strike no single step."""

FIRST_ATTEMPT_ONLY = frozenset(
    {
        FaultKind.AGENT_LOST,
        FaultKind.AGENT_STOPPED,
        FaultKind.EXECUTOR_KILLED,
        FaultKind.RESULTS_LOST,
        FaultKind.SICK_NODE,
        FaultKind.FAST_FAILING,
    }
)
"""Faults that Buildkite answers with another attempt, which then goes well; every other kind strikes each attempt."""

DEFAULT_RATE = 0.03
"""Probability of each kind in a build: 65 kinds make 2 faults a build on average, and one build in eight has none."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        step: The planned step that it strikes; empty for a fault of the build.
        number: Decides the details (which line, which byte, which check), so that dropping another fault changes none.
    """

    kind: FaultKind
    step: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind.value} [{self.step or 'build'}, {self.number}]"


def draw(
    rng: random.Random, plan: Plan, rate: float, kinds: frozenset[FaultKind] = frozenset(FaultKind)
) -> tuple[Fault, ...]:
    """Draw the faults of a build.

    The same numbers are drawn whatever the `rate`, the probability of each kind.
    """
    drawn = []
    for kind in FaultKind:
        strikes, place, number = rng.random() < rate, rng.random(), rng.randrange(1 << 30)
        places = possible(kind, plan)
        if strikes and places and kind in kinds:
            drawn.append(Fault(kind, places[int(place * len(places))], number))
    return tuple(drawn)


def possible(kind: FaultKind, plan: Plan) -> tuple[str, ...]:
    """Keys of the steps that a kind can strike in a plan, or one empty key for a fault of the build."""
    return ("",) if kind in OF_THE_BUILD else tuple(step.key for step in plan.steps if _fits(kind, step))


def _fits(kind: FaultKind, step: PlannedStep) -> bool:
    if kind in {FaultKind.IMAGE_OTHER_CONTENT, FaultKind.IMAGE_NOT_RECORDED}:
        return step.step.provides is not None
    if kind in {FaultKind.OTHER_IMAGE, FaultKind.IMAGE_IMPOSTOR}:
        return step.image is not None
    if kind in {
        FaultKind.SICK_AFTERWARDS,
        FaultKind.PREFLIGHT_IGNORED,
        FaultKind.GPU_LOST,
        FaultKind.HEALTH_OF_OTHER_NODE,
    }:
        return step.device != CPU
    if kind in {FaultKind.CANNOT_RUN, FaultKind.RAN_WITHOUT}:
        return bool(lackable(step))
    if kind is FaultKind.RECHECK_SAME_NODE:
        return bool(kind_of(step).selector(f"tests/{step.step.key}.py::test_0"))
    return True


def lackable(step: PlannedStep) -> str:
    """A condition that its machine may really lack, whatever its device; empty where it declares none."""
    return next((one for one in step.step.may_lack if not of_the_device(one)), "")


SMALL, REALS = 20, 4
"""Different small plans and real plans of one seed; builds share them."""

REAL_SHARE = 0.02
"""How many builds follow a real plan: one of those has up to a hundred times the records of a small one."""

IMAGE = "rocm"
CONTENT = "ab" * 32
MAX_STEPS = 6
"""Of a small plan, the step that builds its image not counted."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A plan and its pipeline as Buildkite reads it.

    Attributes:
        flow: The static pipeline.
        generated: What its plan step uploads.
        declarations: Whose queues have agents.
    """

    name: str
    plan: Plan
    flow: tuple[Command | Wait, ...]
    generated: tuple[Command | Wait, ...]
    declarations: Declarations


class Scenarios:
    """The plans of one seed, made when they are asked for and then shared."""

    def __init__(self, root: Path, seed: str) -> None:
        self.root = root
        self.seed = seed
        self.declarations = load(root)
        self.images = contents(root)
        flow = root / ".buildkite" / "pipeline.yml"
        if not flow.is_file() or self.declarations.smallest_queue(CPU) is None:
            remedy = "`hilgate init` writes the file; ci/agents.yaml needs a queue of device cpu"
            raise MisuseError("there is no flow to simulate on a cpu queue", where=str(flow), remedy=remedy)
        self.flow = parse(flow.read_text(encoding="utf-8"))
        self.small = functools.cache(self._small)
        self.real = functools.cache(self._real)

    def draw(self, rng: random.Random) -> Scenario:
        """One of them: a small one mostly."""
        real, number = rng.random() < REAL_SHARE, rng.randrange(SMALL * REALS)
        return self.real(number % REALS) if real else self.small(number % SMALL)

    def _small(self, number: int) -> Scenario:
        return self._scenario(
            f"small {number}", small_plan(random.Random(f"{self.seed}:small:{number}"), self.declarations)
        )

    def _real(self, number: int) -> Scenario:
        rng = random.Random(f"{self.seed}:real:{number}")
        files = [name for name in git.tracked_files(self.root) if not name.endswith(".png")]
        while True:
            changed = tuple(sorted(rng.sample(files, min(len(files), rng.choice((1, 1, 2, 5))))))
            change = git.Changes("0" * 40, dirty=False, base="main", files=changed)
            try:
                plan = assemble(self.declarations, change, None, profile="pr", facts=ChangeFacts(images=self.images))
                return self._scenario(f"real {number}", plan)
            except NothingSelectedError:
                continue

    def _scenario(self, name: str, plan: Plan) -> Scenario:
        plan = plan.model_copy(update={"packages": {"sample": "kernels/sample"}})
        generated = parse(pipeline_yaml(plan, self.declarations))
        return Scenario(name, plan, self.flow, generated, self.declarations)


@functools.lru_cache(maxsize=16)
def scenarios_of(root: Path, seed: str) -> Scenarios:
    """The plans of a seed; made once in a process."""
    return Scenarios(root, seed)


@functools.lru_cache(maxsize=4096)
def rechecks(scenario: Scenario, keys: tuple[str, ...]) -> tuple[Command | Wait, ...]:
    """The steps that run failing tests of these planned steps once more; other tests make the same steps."""
    return () if not keys else parse(recheck_yaml(scenario.plan, dict.fromkeys(keys, ("a test",))))


def small_plan(rng: random.Random, declarations: Declarations) -> Plan:
    """A plan of a few steps on the queues of `ci/agents.yaml`, some in an image that one of them builds."""
    queues = declarations.agents.queues
    cpu = [name for name, queue in queues.items() if queue.device == CPU]
    gpu = [name for name, queue in queues.items() if queue.device != CPU] or cpu
    in_image = rng.random() < 0.6
    steps = [_step("image", rng.choice(cpu), declarations, rng, provides=IMAGE)] if in_image else []
    for name in "abcdef"[: rng.randint(1, MAX_STEPS)]:
        queue = rng.choice(gpu if rng.random() < 0.6 else cpu)
        runs_in = IMAGE if in_image and queue in gpu else None
        needs = tuple(step.key for step in steps if step.step.provides is None and rng.random() < 0.2)
        needs += tuple(step.key for step in steps if runs_in and step.step.provides)
        step = _step(name, queue, declarations, rng)
        steps.append(step.model_copy(update={"depends_on": needs, "image": runs_in}))
    return Plan(
        created=dt.datetime(2026, 11, 21, tzinfo=dt.UTC),
        commit="0" * 40,
        dirty=False,
        base="main",
        merge_base="1" * 40,
        profile="pr",
        images={IMAGE: CONTENT} if in_image else {},
        changed_files=("kernels/sample.py",),
        steps=tuple(steps),
        omissions=(),
    )


def _step(
    name: str, queue: str, declarations: Declarations, rng: random.Random, provides: str | None = None
) -> PlannedStep:
    offered = declarations.agents.queues[queue]
    minutes = rng.uniform(1, 20)
    declared = Step(
        key=name,
        label=f"small {name}",
        command=f"python -m pytest tests/{name}.py",
        devices=(offered.device,),
        evidence="findings" if provides else rng.choice(["junit", "junit", "findings"]),
        minimum=rng.randint(1, 4),
        may_lack={
            "cpu:amx_tile": Excuse(why="a sample needs AMX", most=1000),
            f"device:{offered.device}": Excuse(why="another needs this device", most=1000),
        },
        timeout_minutes=int(minutes * 2) + 1,
        gpus=max(1, offered.gpus),
        provides=provides,
        minutes=minutes,
    )
    return PlannedStep(
        step=declared, area="samples", device=offered.device, queue=queue, reason="kernels/sample.py changed"
    )
