"""Plans to simulate: small toy plans of every shape, and real ones of random changes to this repository."""

from __future__ import annotations

import datetime as dt
import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.buildkite import steps as buildkite
from hilgate.buildkite.steps import recheck_yaml
from hilgate.declare.load import Declarations, load
from hilgate.errors import NothingSelectedError
from hilgate.images.contents import contents
from hilgate.model import CPU, Plan, PlannedStep, Step
from hilgate.plan.make import ChangeFacts, assemble
from hilgate.simulate.buildkite import Command, Wait, parse

if TYPE_CHECKING:
    from pathlib import Path

TOYS, REALS = 20, 4
"""Different toy plans and real plans of one seed; builds share them."""

REAL_SHARE = 0.02
"""How many builds follow a real plan: one of those has up to a hundred times the records of a toy."""

IMAGE = "rocm"
CONTENT = "ab" * 32
MAX_STEPS = 6
"""Of a toy plan, the step that builds its image not counted."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A plan and its pipeline as Buildkite reads it.

    Attributes:
        flow: The static pipeline.
        generated: What its plan step uploads.
        queues: Queues that have agents.
    """

    name: str
    plan: Plan
    flow: tuple[Command | Wait, ...]
    generated: tuple[Command | Wait, ...]
    queues: tuple[str, ...]

    def rechecks(self, keys: tuple[str, ...]) -> tuple[Command | Wait, ...]:
        """The steps that run failing tests of these planned steps once more; other tests make the same steps."""
        return _rechecks(self, keys) if keys else ()


class Scenarios:
    """The plans of one seed, made when they are asked for and then shared."""

    def __init__(self, root: Path, seed: str) -> None:
        self.root = root
        self.seed = seed
        self.declarations = load(root)
        self.images = contents(root)
        self.flow = parse((root / ".buildkite" / "pipeline.yml").read_text(encoding="utf-8"))
        self.toy = functools.cache(self._toy)
        self.real = functools.cache(self._real)

    def draw(self, rng: random.Random) -> Scenario:
        """One of them: a toy mostly."""
        real, number = rng.random() < REAL_SHARE, rng.randrange(TOYS * REALS)
        return self.real(number % REALS) if real else self.toy(number % TOYS)

    def _toy(self, number: int) -> Scenario:
        return self._scenario(f"toy {number}", toy_plan(random.Random(f"{self.seed}:toy:{number}"), self.declarations))

    def _real(self, number: int) -> Scenario:
        rng = random.Random(f"{self.seed}:real:{number}")
        files = [name for name in git.tracked_files(self.root) if not name.endswith(".png")]
        while True:
            changed = tuple(sorted(rng.sample(files, rng.choice((1, 1, 2, 5)))))
            change = git.Changes("0" * 40, dirty=False, base="main", files=changed)
            try:
                plan = assemble(self.declarations, change, None, profile="pr", facts=ChangeFacts(images=self.images))
                return self._scenario(f"real {number}", plan)
            except NothingSelectedError:
                continue

    def _scenario(self, name: str, plan: Plan) -> Scenario:
        generated = parse(buildkite.pipeline_yaml(plan, self.declarations))
        return Scenario(name, plan, self.flow, generated, tuple(self.declarations.agents.queues))


@functools.lru_cache(maxsize=16)
def scenarios_of(root: Path, seed: str) -> Scenarios:
    """The plans of a seed; made once in a process."""
    return Scenarios(root, seed)


@functools.lru_cache(maxsize=4096)
def _rechecks(scenario: Scenario, keys: tuple[str, ...]) -> tuple[Command | Wait, ...]:
    return parse(recheck_yaml(scenario.plan, dict.fromkeys(keys, ("a test",))))


def toy_plan(rng: random.Random, declarations: Declarations) -> Plan:
    """A plan of a few steps on the queues of `ci/agents.yaml`, some in an image that one of them builds."""
    queues = declarations.agents.queues
    cpu = [name for name, queue in queues.items() if queue.device == CPU]
    gpu = [name for name, queue in queues.items() if queue.device != CPU]
    in_image = rng.random() < 0.6
    steps = [_step("image", rng.choice(cpu), declarations, rng, provides=IMAGE)] if in_image else []
    for name in "abcdef"[: rng.randint(1, MAX_STEPS)]:
        queue = rng.choice(gpu if rng.random() < 0.6 else cpu)
        runs_in = IMAGE if in_image and queue in gpu else None
        needs = tuple(step.key for step in steps if step.step.provides is None and rng.random() < 0.2)
        needs += tuple(step.key for step in steps if runs_in and step.step.provides)
        steps.append(_step(name, queue, declarations, rng, depends_on=needs, image=runs_in))
    return Plan(
        created=dt.datetime(2026, 11, 21, tzinfo=dt.UTC),
        commit="0" * 40,
        dirty=False,
        base="main",
        merge_base="1" * 40,
        profile="pr",
        images={IMAGE: CONTENT} if in_image else {},
        changed_files=("kernels/toy.py",),
        steps=tuple(steps),
        omissions=(),
    )


def _step(
    name: str,
    queue: str,
    declarations: Declarations,
    rng: random.Random,
    *,
    depends_on: tuple[str, ...] = (),
    image: str | None = None,
    provides: str | None = None,
) -> PlannedStep:
    offered = declarations.agents.queues[queue]
    minutes = rng.uniform(1, 20)
    declared = Step(
        key=name,
        label=f"toy {name}",
        command=f"python -m pytest tests/{name}.py",
        devices=(offered.device,),
        evidence="findings" if provides else rng.choice(["junit", "junit", "findings"]),
        minimum=rng.randint(1, 4),
        timeout_minutes=int(minutes * 2) + 1,
        gpus=max(1, offered.gpus),
        provides=provides,
        minutes=minutes,
    )
    return PlannedStep(
        step=declared,
        area="toys",
        device=offered.device,
        queue=queue,
        image=image,
        depends_on=depends_on,
        reason="kernels/toy.py changed",
    )
