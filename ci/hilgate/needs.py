"""Whether what steps need of each other can be had: needs, images, the plans that both belong to, and no circles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.graph import find_cycle
from hilgate.names import CPU
from hilgate.suggest import suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hilgate.model import Agents, Area, Key, Profile, Step
    from hilgate.strictyaml import Document, Loc

DESK = "gate"
"""The profile that runs on the host: images are the agents'."""


def check_needs(agents: Document[Agents], areas: Sequence[Document[Area]]) -> None:
    """Needs and images exist, can be met on each device and in each plan, and wait for each other in no circle."""
    # A step or provider may stand in a file that has mistakes of its own; those come first.
    unread = any(document.noun is None for document in areas)
    declared = list(_declared(areas))
    steps = {step.key: step for _, _, step in declared}
    providers = _providers(declared)
    graph: dict[str, set[str]] = {}
    for document, at, step in declared:
        graph[step.key] = {need for need in step.needs if need in steps}
        for position, need in enumerate(step.needs):
            if need in steps:
                _check_need(document, (*at, "needs", position), step, steps[need])
            elif not unread:
                document.blame((*at, "needs", position), f"unknown step {need!r}", suggest(need, steps))
        for image, device in _images(agents.noun, step):
            if image in providers:
                graph[step.key].add(providers[image].key)
                _check_provider(document, at, step, providers[image], device)
    if not unread:
        _check_queue_images(agents, providers)
    if cycle := find_cycle(graph):
        document, at = next((document, at) for document, at, step in declared if step.key == cycle[0])
        document.blame((*at, "needs"), "steps need each other: " + " -> ".join(cycle), "drop one of these needs")


def _check_queue_images(agents: Document[Agents], providers: Mapping[Key, Step]) -> None:
    for name, queue in (agents.noun.queues if agents.noun else {}).items():
        if queue.image is not None and queue.image not in providers:
            known = suggest(queue.image, providers) if providers else "declare a step with `provides`"
            agents.blame(("queues", name, "image"), f"no step provides the image {queue.image!r}", known)


def _declared(areas: Sequence[Document[Area]]) -> Iterator[tuple[Document[Area], Loc, Step]]:
    for document in areas:
        for index, step in enumerate(document.noun.steps if document.noun else ()):
            yield document, ("steps", index), step


def _providers(declared: Sequence[tuple[Document[Area], Loc, Step]]) -> Mapping[Key, Step]:
    """Image -> the step that builds it, of which there is one, on the cpu."""
    found: dict[Key, Step] = {}
    for document, at, step in declared:
        if step.provides is None:
            continue
        if step.provides in found:
            what = f"the image {step.provides!r} is built by step {found[step.provides].key!r} already"
            document.blame((*at, "provides"), what, "keep one of the two")
        elif step.devices != (CPU,):
            document.blame((*at, "devices"), "a step that builds an image runs on the cpu alone", f"write [{CPU}]")
        found.setdefault(step.provides, step)
    return found


def _images(agents: Agents | None, step: Step) -> Iterator[tuple[Key, Key]]:
    """Images that jobs of a step may run in, each with the device; any queue of a device may become its smallest."""
    if agents is None or step.provides:
        return
    for device in step.devices:
        queues = [step.queues[device]] if device in step.queues else list(agents.queues)
        for name in queues:
            queue = agents.queues.get(name)
            if queue and queue.device == device and queue.image:
                yield queue.image, device


def _check_need(document: Document[Area], loc: Loc, step: Step, need: Step) -> None:
    never = [device for device in step.devices if not {device, CPU}.intersection(need.devices)]
    if never:
        document.blame(
            loc,
            f"step {need.key!r} does not run on {', '.join(dict.fromkeys((*never, CPU)))}",
            f"add a device to {need.key!r} or drop the need",
        )
    absent: list[Profile] = [profile for profile in step.profiles if profile not in need.profiles]
    if absent:
        document.blame(
            loc,
            f"step {need.key!r} is not in the plans {', '.join(absent)}",
            f"add to the profiles of {need.key!r} or drop the need",
        )


def _check_provider(document: Document[Area], at: Loc, step: Step, provider: Step, device: Key) -> None:
    absent = [profile for profile in step.profiles if profile != DESK and profile not in provider.profiles]
    if absent:
        document.blame(
            (*at, "profiles"),
            f"on {device} it runs in the image {provider.provides!r}, which {provider.key!r} does not build in the "
            f"plans {', '.join(absent)}",
            f"add to the profiles of {provider.key!r}",
        )
