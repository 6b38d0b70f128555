"""Whether declarations fit together: names that exist and are unique, places that match, needs that can be met."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pathspec

from hilgate.graph import find_cycle
from hilgate.names import BUILDKITE_KEY, CPU, RESERVED_KEYS, planned_key
from hilgate.suggest import suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hilgate.model import Agents, Area, Step
    from hilgate.strictyaml import Document

SHELL_WORDS = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>&1"})


def check(agents: Document[Agents], areas: Sequence[Document[Area]]) -> None:
    """Record every contradiction in the document where it stands; files with mistakes of their own are left out."""
    if agents.noun:
        _check_agents(agents)
        for document in areas:
            if document.noun:
                _check_area(document, agents.noun)
    _check_names(areas)
    _check_needs(areas)


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


def _check_area(document: Document[Area], agents: Agents) -> None:
    """Globs, commands, times, devices and queues of one area."""
    assert document.noun is not None
    for index, glob in enumerate(document.noun.paths):
        try:
            pathspec.PathSpec.from_lines("gitignore", [glob])
        except ValueError as error:
            document.blame(("paths", index), f"not a glob: {error}", "write it as in .gitignore")
    for index, step in enumerate(document.noun.steps):
        at = ("steps", index)
        _check_command(document, at, step)
        _check_devices(document, at, step, agents)
        _check_queues(document, at, step, agents)
        if step.minutes > step.timeout_minutes:
            what = f"usually {step.minutes:g} minutes, but ended after {step.timeout_minutes}"
            document.blame((*at, "minutes"), what, "raise timeout_minutes")


def _check_devices(document: Document[Area], at: tuple[str, int], step: Step, agents: Agents) -> None:
    for position, device in enumerate(step.devices):
        loc = (*at, "devices", position)
        if device not in agents.devices:
            document.blame(loc, f"unknown device {device!r}", suggest(device, agents.devices))
        elif device in step.devices[:position]:
            document.blame(loc, f"device {device!r} is listed twice", "keep one")


def _check_queues(document: Document[Area], at: tuple[str, int], step: Step, agents: Agents) -> None:
    for device, queue in step.queues.items():
        loc = (*at, "queues", device)
        if device not in step.devices:
            document.blame(loc, f"{device!r} is not a device of step {step.key!r}", suggest(device, step.devices))
        elif queue not in agents.queues:
            document.blame(loc, f"unknown queue {queue!r}", suggest(queue, agents.queues))
        elif (offered := agents.queues[queue].device) != device:
            fitting = (name for name, offer in agents.queues.items() if offer.device == device)
            document.blame(loc, f"queue {queue!r} offers {offered}, not {device}", suggest(queue, fitting))


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


def _check_names(areas: Sequence[Document[Area]]) -> None:
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
                if not BUILDKITE_KEY.fullmatch(key):
                    document.blame(
                        loc, f"{key!r} is no Buildkite step key", "use lower case, digits, '_' and '-', at most 100"
                    )
                    break
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


def _check_needs(areas: Sequence[Document[Area]]) -> None:
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
                loc: tuple[str | int, ...] = ("steps", index, "needs", position)
                if need not in steps:
                    # The step may stand in a file that has mistakes of its own; those come first.
                    if not unread:
                        document.blame(loc, f"unknown step {need!r}", suggest(need, steps))
                    continue
                never = [d for d in step.devices if not {d, CPU}.intersection(steps[need].devices)]
                if never:
                    document.blame(
                        loc,
                        f"step {need!r} does not run on {', '.join(dict.fromkeys((*never, CPU)))}",
                        f"add a device to {need!r} or drop the need",
                    )
    if cycle := find_cycle(graph):
        document, loc = place[cycle[0]]
        document.blame(loc, "steps need each other: " + " -> ".join(cycle), "drop one of these needs")
