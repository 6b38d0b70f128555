"""Reads `ci/agents.yaml` and `ci/areas/*.yaml` and validates them together.

All mistakes of a load are reported at once: an author who has made three should not push three times.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pathspec

from hilgate.errors import DeclarationError, MisuseError
from hilgate.graph import find_cycle
from hilgate.model import Agents, Area, Key, Step
from hilgate.strictyaml import Document, Mistake, read
from hilgate.suggest import suggest

CPU = "cpu"
"""The device that every machine has: kernels under Triton's interpreter, and everything that needs no GPU."""

RESERVED_KEYS = frozenset({"plan", "verdict"})
"""Step keys of the pipeline itself."""

SHELL_WORDS = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>&1"})


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
    """In file order."""
    agents: Agents

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
        """Queue of a step on a device: the one it names, else the fewest GPUs, then the least memory, then by name."""
        if device in step.queues:
            return step.queues[device]
        offers = [
            (queue.gpus, queue.memory_gib, name) for name, queue in self.agents.queues.items() if queue.device == device
        ]
        return min(offers)[2] if offers else None


def planned_key(step: Step, device: Key) -> Key:
    """Key of a step on a device."""
    return f"{step.key}-{device}"


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
        remedy="change to a folder below one that has ci/agents.yaml, or pass --root",
    )


def load(root: Path) -> Declarations:
    """Read and validate all declarations under `root`.

    Raises:
        InvalidDeclarationsError: With every mistake found (exit status 3).
    """
    agents = read(root / "ci" / "agents.yaml", root, Agents)
    files = sorted((root / "ci" / "areas").glob("*.yaml"))
    areas = [read(path, root, Area) for path in files]
    if not files:
        agents.mistakes.append(Mistake("ci/areas", "no area is declared", "add a file ci/areas/<area>.yaml"))
    if agents.noun:
        _check_agents(agents)
        for document in areas:
            if document.noun:
                _check_places(document, agents.noun)
    _check_names(areas)
    _check_needs(areas)
    mistakes = [mistake for document in (agents, *areas) for mistake in document.mistakes]
    if mistakes:
        raise InvalidDeclarationsError(mistakes)
    assert agents.noun is not None
    return Declarations(tuple(document.noun for document in areas if document.noun), agents.noun)


def _check_agents(document: Document[Agents]) -> None:
    assert document.noun is not None
    agents = document.noun
    if CPU not in agents.devices:
        document.blame(("devices",), f"device {CPU!r} is missing", "every machine has it; declare it")
    for name, queue in agents.queues.items():
        if queue.device not in agents.devices:
            document.blame(
                ("queues", name, "device"), f"unknown device {queue.device!r}", suggest(queue.device, agents.devices)
            )
        elif (queue.device == CPU) != (queue.gpus == 0):
            document.blame(
                ("queues", name, "gpus"),
                f"{queue.gpus} GPUs on a queue of device {queue.device!r}",
                "a cpu queue has 0, any other at least 1",
            )


def _check_places(document: Document[Area], agents: Agents) -> None:
    """Globs, commands, devices and queues of one area."""
    assert document.noun is not None
    for index, glob in enumerate(document.noun.paths):
        try:
            pathspec.PathSpec.from_lines("gitwildmatch", [glob])
        except ValueError as error:
            document.blame(("paths", index), f"not a glob: {error}", "write it as in .gitignore")
    for index, step in enumerate(document.noun.steps):
        at = ("steps", index)
        _check_command(document, at, step)
        if step.minutes > step.timeout_minutes:
            document.blame(
                (*at, "minutes"),
                f"usually {step.minutes} minutes, but ends after {step.timeout_minutes}",
                "raise timeout_minutes",
            )
        for position, device in enumerate(step.devices):
            if device not in agents.devices:
                document.blame(
                    (*at, "devices", position), f"unknown device {device!r}", suggest(device, agents.devices)
                )
            elif device in step.devices[:position]:
                document.blame((*at, "devices", position), f"device {device!r} is listed twice", "keep one")
        for device, queue in step.queues.items():
            if device not in step.devices:
                document.blame(
                    (*at, "queues", device), f"not a device of step {step.key!r}", suggest(device, step.devices)
                )
            elif queue not in agents.queues:
                document.blame((*at, "queues", device), f"unknown queue {queue!r}", suggest(queue, agents.queues))
            elif agents.queues[queue].device != device:
                document.blame(
                    (*at, "queues", device),
                    f"queue {queue!r} offers {agents.queues[queue].device}, not {device}",
                    suggest(device, (q for q, o in agents.queues.items() if o.device == device)),
                )


def _check_command(document: Document[Area], at: tuple[str, int], step: Step) -> None:
    try:
        words = shlex.split(step.command)
    except ValueError as error:
        document.blame((*at, "command"), f"cannot be split into words: {error}", "balance the quotes")
        return
    if not words:
        document.blame((*at, "command"), "is empty", "say what to run")
    for word in SHELL_WORDS.intersection(words):
        document.blame(
            (*at, "command"),
            f"{word!r} needs a shell and there is none",
            "put it into a script or a module and run that",
        )


def _check_names(areas: list[Document[Area]]) -> None:
    """Area and step keys are unique, and so are the planned keys, which become Buildkite step keys."""
    taken: dict[str, str] = {}
    for document in areas:
        if document.noun is None:
            continue
        stem = Path(document.shown).stem
        if document.noun.area != stem:
            document.blame(
                ("area",),
                f"area {document.noun.area!r} is declared in {stem}.yaml",
                f"name the file {document.noun.area}.yaml",
            )
        for loc, keys in _names(document.noun):
            for key in keys:
                if key in RESERVED_KEYS:
                    document.blame(loc, f"{key!r} is a step of the pipeline itself", "choose another key")
                elif key in taken:
                    document.blame(loc, f"{key!r} is taken by {taken[key]}", "choose another key")
                    break
                else:
                    taken[key] = document.at(*loc)


def _names(area: Area) -> Iterator[tuple[tuple[str | int, ...], list[str]]]:
    """Keys that must be unique: the area's, and each step's with its planned keys."""
    yield ("area",), [area.area]
    for index, step in enumerate(area.steps):
        planned = [planned_key(step, device) for device in dict.fromkeys(step.devices)]
        # A step may carry its area's name: Buildkite sees the area's group and `<step>-<device>` only.
        yield ("steps", index, "key"), planned if step.key == area.area else [step.key, *planned]


def _check_needs(areas: list[Document[Area]]) -> None:
    """Needs exist, can be met on each device, and have no cycle."""
    steps: Mapping[str, Step] = {step.key: step for document in areas if document.noun for step in document.noun.steps}
    unread = any(document.noun is None for document in areas)
    graph: dict[str, set[str]] = {}
    place: dict[str, tuple[Document[Area], tuple[str | int, ...]]] = {}
    for document in areas:
        for index, step in enumerate(document.noun.steps if document.noun else ()):
            place[step.key] = (document, ("steps", index, "needs"))
            graph[step.key] = set(step.needs)
            for position, need in enumerate(step.needs):
                loc = ("steps", index, "needs", position)
                if need not in steps:
                    # The step may stand in a file that has mistakes of its own; those come first.
                    if not unread:
                        document.blame(loc, f"unknown step {need!r}", suggest(need, steps))
                    continue
                never = [d for d in step.devices if not {d, CPU}.intersection(steps[need].devices)]
                if never:
                    document.blame(
                        loc,
                        f"step {need!r} runs neither on {', '.join(never)} nor on {CPU}",
                        f"add a device to {need!r} or drop the need",
                    )
    if cycle := find_cycle(graph):
        document, loc = place[cycle[0]]
        document.blame(loc, "steps need each other: " + " -> ".join(cycle), "drop one of these needs")
