# SPDX-License-Identifier: Apache-2.0
"""Load `ci/project.yaml`, `ci/agents.yaml` and `ci/areas/*.yaml`, and validate them together.

All mistakes of a load are reported at once: an author who has made three should not push three times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hilgate.declare import imports
from hilgate.declare.check import check, check_project, check_quick
from hilgate.declare.yaml import Document, Mistake, parse, read
from hilgate.errors import DeclarationError, MisuseError
from hilgate.git import files_at, names_at
from hilgate.model.declaration import CPU, Agents, Area, DeclaredArea, Image, Project, Step
from hilgate.model.plan import planned_key
from hilgate.names import AGENTS_FILE, PROJECT_FILE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from hilgate.model import Key
    from hilgate.model.plan import PlannedStep


class InvalidDeclarationsError(DeclarationError):
    """One or more mistakes in the declarations.

    Attributes:
        mistakes: Every mistake found, in file order.
    """

    def __init__(self, mistakes: list[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        if len(mistakes) == 1:
            super().__init__(mistakes[0].what, where=mistakes[0].where, remedy=mistakes[0].remedy)
        else:
            lines = "".join(f"\n  - {mistake}" for mistake in mistakes)
            super().__init__(f"{len(mistakes)} mistakes in the declarations:{lines}", remedy="correct each of them")


@dataclass(frozen=True)
class Declarations:
    """What may run, where it may run, and which files it answers for."""

    areas: tuple[Area, ...]
    """Areas, in file order."""
    agents: Agents
    project: Project = field(default_factory=Project)

    def steps(self) -> Iterator[tuple[Area, Step]]:
        """Every declared step with its area, in declared order."""
        for area in self.areas:
            for step in area.steps:
                yield area, step

    def step(self, key: str) -> tuple[Area, Step] | None:
        """The step declared as `key`, or planned as `<key>-<device>`; None when there is none."""
        return next(
            ((a, s) for a, s in self.steps() if key == s.key or key in {planned_key(s, d) for d in s.devices}), None
        )

    def queue_for(self, step: Step, device: Key) -> Key | None:
        """Queue of a step on a device: the one it names, else the smallest with the GPUs that it needs, if any."""
        if device in step.queues:
            return step.queues[device]
        return self.smallest_queue(device, 0 if device == CPU else step.gpus)

    def smallest_queue(self, device: Key, gpus: int = 0) -> Key | None:
        """The queue of a device with the fewest GPUs that are enough, then the least memory, then by name."""
        offers = [
            (queue.gpus, queue.memory_gib, name)
            for name, queue in self.agents.queues.items()
            if queue.device == device and queue.gpus >= gpus and not queue.gate
        ]
        return min(offers)[2] if offers else None

    def report_only(self) -> frozenset[Key]:
        """Planned keys of the steps that are declared to be reported alone, or whose queue is."""
        queues = {name for name, queue in self.agents.queues.items() if queue.report_only}
        return frozenset(
            planned_key(step, device)
            for _, step in self.steps()
            for device in step.devices
            if step.report_only or self.queue_for(step, device) in queues
        )

    def gate_queue(self) -> Key | None:
        """The queue of what decides; without one of its own, the smallest of the cpu."""
        own = (name for name, queue in self.agents.queues.items() if queue.gate and not queue.signs)
        return next(own, self.smallest_queue(CPU))

    def signing_queue(self) -> Key | None:
        """The queue whose agents hold the key of releases; None where nothing is signed."""
        return next((name for name, queue in self.agents.queues.items() if queue.signs), None)

    def image_for(self, step: Step, device: Key) -> Key | None:
        """The image that a step's job on the agents runs in; what builds an image runs on the host."""
        queue = None if step.provides else self.queue_for(step, device)
        return self.agents.queues[queue].image if queue else None

    def provider(self, image: Key) -> Step | None:
        """The step that builds an image."""
        return self._providers.get(image)

    @functools.cached_property
    def _providers(self) -> dict[str | None, Step]:
        return {step.provides: step for _, step in reversed([*self.steps()])}

    def without(self, keys: Collection[Key]) -> Declarations:
        """The same without these steps, as if each had passed: no other step waits for one of them."""

        def kept(area: Area) -> Area:
            steps = [step for step in area.steps if step.key not in keys]
            free = [step.model_copy(update={"needs": tuple(n for n in step.needs if n not in keys)}) for step in steps]
            return area.model_copy(update={"steps": tuple(free)})

        return replace(self, areas=tuple(map(kept, self.areas)))

    def models(self) -> dict[Key, tuple[Step, ...]]:
        """Model -> the steps that run it, in declared order."""
        found: dict[Key, tuple[Step, ...]] = {}
        for _, step in self.steps():
            for model in step.models:
                found[model] = (*found.get(model, ()), step)
        return found


def find_root(start: Path) -> Path:
    """The repository that contains `start`: the nearest folder with `ci/agents.yaml`.

    Raises:
        MisuseError: There is none.
    """
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "ci" / "agents.yaml").is_file():
            return folder
    raise MisuseError(
        "not inside a repository that hilgate can plan",
        where=str(start),
        remedy="change to a folder below one that has ci/agents.yaml, pass --root, or write one: `hilgate init`",
    )


def _area(path: Path, root: Path) -> Document[Area]:
    """An area file with its steps resolved; mistakes keep the places where they stand in the file."""
    document = read(path, root, DeclaredArea)
    value = document.value.resolved() if document.value else None
    return Document(document.name, value, document.lines, document.mistakes)


def _project(root: Path) -> Document[Project]:
    path = root / PROJECT_FILE
    return read(path, root, Project, aliases=False) if path.exists() else Document(PROJECT_FILE, Project())


def load_project(root: Path) -> Project:
    """Read `ci/project.yaml` alone; its defaults where there is none.

    Raises:
        InvalidDeclarationsError: With every mistake found (exit status 3).
    """
    document = _project(root)
    if document.value is None:
        raise InvalidDeclarationsError(document.mistakes)
    return document.value


FORKS_MINUTES = 30
"""At most, for a step that a fork adds."""

FORKS_STEPS, FORKS_GPU_MINUTES = 20, 240
"""At most, for all planned steps that the merge base does not declare: how many, and minutes as declared times GPUs."""

MOST_AREAS = 100
"""Files in ci/areas."""


def declared_at(root: Path, commit: str) -> Declarations:
    """What a commit declares, without its areas that cannot be read and without its project.

    Raises:
        CannotRunHereError: The merge base is not in this checkout.
        InvalidDeclarationsError: The queues of the merge base cannot be read.
    """
    names = [name for name in names_at(root, commit, "ci/areas") if name.endswith(".yaml")]
    texts = files_at(root, commit, [*names, AGENTS_FILE])
    areas = [parse(texts[name] or b"", name, DeclaredArea).value for name in names]
    agents = parse(texts[AGENTS_FILE] or b"", AGENTS_FILE, Agents)
    if agents.value is None:
        raise InvalidDeclarationsError(agents.mistakes)
    return Declarations(tuple(area.resolved() for area in areas if area), agents.value)


def as_permitted(declared: Declarations, root: Path, commit: str) -> tuple[Declarations, frozenset[Key]]:
    """The declarations of a fork, with the permissions that the merge base gives: a fork can give itself none.

    Returns them with the planned keys that the merge base declares; `require_modest` limits what a fork adds to these.

    Network, secrets, time, queue, GPUs and images are those of the step of the same name; a step that the fork adds has
    neither network nor secrets, builds no image, and runs on the smallest queue of its devices.

    `root` is a checkout that has the merge base, `commit`.

    Raises:
        CannotRunHereError: The merge base is not in this checkout.
        InvalidDeclarationsError: The queues of the merge base cannot be read.
    """
    base = declared_at(root, commit)
    known = {step.key: step for _, step in base.steps()}
    none: dict[str, object] = {"network": False, "secrets": (), "queues": {}, "gpus": 1, "provides": None}

    def permitted(step: Step) -> Step:
        own = known.get(step.key)
        most = own.timeout_minutes if own else min(step.timeout_minutes, FORKS_MINUTES)
        given = none if own is None else {name: getattr(own, name) for name in none}
        return step.model_copy(update={**given, "timeout_minutes": most, "minutes": min(step.minutes, most)})

    shown = tuple(area.model_copy(update={"steps": tuple(map(permitted, area.steps))}) for area in declared.areas)
    own_keys = frozenset(planned_key(step, device) for step in known.values() for device in step.devices)
    return replace(declared, areas=shown, agents=base.agents), own_keys


def require_modest(steps: Iterable[PlannedStep], known: frozenset[Key]) -> None:
    """Refuse a fork whose own steps would take too much machine time.

    Raises:
        DeclarationError: The steps beside those that are `known` are too many, or take too many GPU-minutes.
    """
    added = [step for step in steps if step.key not in known]
    minutes = sum(step.step.timeout_minutes * step.step.gpus for step in added if step.device != CPU)
    if len(added) > FORKS_STEPS or minutes > FORKS_GPU_MINUTES:
        raise DeclarationError(
            f"this fork adds {len(added)} steps and {minutes} GPU-minutes; it may add {FORKS_STEPS} and "
            f"{FORKS_GPU_MINUTES}",
            where=", ".join(step.key for step in added[:5]),
            remedy="declare fewer, or a maintainer reads them and pushes the change to a branch of this repository",
        )


def load(root: Path) -> Declarations:
    """Read and validate all declarations under `root`.

    Raises:
        InvalidDeclarationsError: With every mistake found (exit status 3).
    """
    agents, project = read(root / AGENTS_FILE, root, Agents, aliases=False), _project(root)
    files = sorted((root / "ci" / "areas").glob("*.yaml"))
    areas = [_area(path, root) for path in files[:MOST_AREAS]]
    if len(files) > MOST_AREAS:
        agents.mistakes.append(Mistake("ci/areas", f"has {len(files)} files", f"put the steps into {MOST_AREAS}"))
    if not files:
        agents.mistakes.append(Mistake("ci/areas", "no area is declared", "add a file ci/areas/<area>.yaml"))
    packages = imports.find(root, (project.value or Project()).python_path)
    check(agents, areas, packages)
    if project.value:
        check_project(project)
        check_quick(project, areas)
    documents: list[Document[Project] | Document[Agents] | Document[Area]] = [project, agents, *areas]
    if mistakes := [mistake for document in documents for mistake in document.mistakes]:
        raise InvalidDeclarationsError(mistakes)
    assert agents.value is not None
    assert project.value is not None
    declarations = Declarations(
        tuple(document.value for document in areas if document.value), agents.value, project.value
    )
    _check_tools(areas, declarations)  # where a step runs is known once everything else is right
    if mistakes := [mistake for document in areas for mistake in document.mistakes]:
        raise InvalidDeclarationsError(mistakes)
    return declarations


def _check_tools(areas: Iterable[Document[Area]], declarations: Declarations) -> None:
    """What a step asks for by `tools` is where its jobs on agents run: in its image, or on the hosts of its queue."""
    for document in areas:
        for index, step in enumerate(document.value.steps if document.value else ()):
            for device in step.devices:
                queue, image = declarations.queue_for(step, device), declarations.image_for(step, device)
                if queue is None:  # no agent offers the device
                    continue
                if image is None:
                    there, place = declarations.agents.queues[queue].tools, f"on hosts of {queue!r}"
                    remedy = f"install it there and name it in queues.{queue}.tools of {AGENTS_FILE}"
                else:
                    there, place = (
                        declarations.project.images.get(image, Image(recipe="")).tools,
                        f"in the image {image!r}",
                    )
                    remedy = f"name a queue without an image, or images.{image}.tools of {PROJECT_FILE}"
                if missing := [tool for tool in step.tools if tool not in there]:
                    what = f"on agents it runs {place}, which does not declare {', '.join(missing)}"
                    document.blame(("steps", index, "requires"), what, remedy)
