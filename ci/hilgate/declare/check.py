# SPDX-License-Identifier: Apache-2.0
"""Check declarations against each other: names that exist and are unique, places that match, dependencies that hold.

What concerns one model alone is checked by the model itself (`hilgate.model`).
"""

from __future__ import annotations

import graphlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.declare import globs
from hilgate.model.declaration import (
    BUILDKITE_KEY,
    CPU,
    EVIDENCE_KINDS,
    PARTITIONS,
    RESERVED_KEYS,
    RESOURCE,
    Project,
)
from hilgate.model.plan import planned_key
from hilgate.names import stays_inside
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hilgate.declare.imports import Packages
    from hilgate.declare.yaml import Document, Loc
    from hilgate.model import Key
    from hilgate.model.declaration import Agents, Area, Profile, Queue, Step

    Declared = tuple[Document[Area], Loc, Step]

LOCAL = "gate"
"""The profile that runs on the host: images are the agents'."""


def check(agents: Document[Agents], areas: Sequence[Document[Area]], packages: Packages) -> None:
    """Record every contradiction in the document where it stands; files with mistakes of their own are left out."""
    steps = [
        (document, ("steps", index), step)
        for document in areas
        if document.value
        for index, step in enumerate(document.value.steps)
    ]
    if agents.value:
        _check_agents(agents, agents.value)
        for document, at, step in steps:
            _check_places(document, at, step, agents.value)
    for document, at, step in steps:
        if step.evidence not in EVIDENCE_KINDS:
            document.blame((*at, "evidence"), f"unknown kind {step.evidence!r}", suggest(step.evidence, EVIDENCE_KINDS))
        elif "minimum" in step.model_fields_set and not EVIDENCE_KINDS[step.evidence]:
            what = f"a step whose evidence is {step.evidence} has no minimum"
            document.blame((*at, "minimum"), what, "remove it: every test that pytest collects must end")
    for document in areas:
        _check_globs(document)
    for document, at, step in steps:
        _check_tests(document, at, step, packages)
        _check_imports(document, at, step, packages)
    _check_names(areas)
    _check_tables(steps)
    # A step or provider may stand in a file that has mistakes of its own; those come first.
    _check_needs(agents, steps, unread=any(document.value is None for document in areas))


def check_project(document: Document[Project]) -> None:
    """Record what hosts execute and forks may change, and pins that are no table of docker/pins.toml."""
    project = document.value or Project()
    for index, path in enumerate(project.forks_may_change):
        if path == "." or not stays_inside(f"{path}file" if path.endswith("/") else path, (path,)):
            what = f"hosts execute {path!r}, or could take it for a module of Python itself"
            document.blame(("forks_may_change", index), what, "leave it out: a maintainer pushes such a change")
    for name, image in project.images.items():
        if image.pins and name not in ("cpu", "rocm"):
            what = f"docker/pins.toml has no table for an image {name!r}"
            document.blame(("images", name, "pins"), what, "leave it out, and pin what its recipe names")


def check_quick(document: Document[Project], areas: Sequence[Document[Area]]) -> None:
    """Record quick steps that are not declared, or that the gate of a person's machine does not have."""
    steps = {step.key: step for area in areas if area.value for step in area.value.steps}
    unread = any(area.value is None for area in areas)
    quick = document.value.quick if document.value else ()
    for index, key in enumerate(quick):
        if key in quick[:index]:
            document.blame(("quick", index), f"step {key!r} is listed twice", "keep one")
        elif key in steps and LOCAL not in steps[key].profiles:
            what = f"step {key!r} is in no plan for a person's machine"
            document.blame(("quick", index), what, f"add {LOCAL} to its profiles, or name another step")
        elif key not in steps and not unread:
            document.blame(("quick", index), f"unknown step {key!r}", suggest(key, steps))


def _check_agents(document: Document[Agents], agents: Agents) -> None:
    if CPU not in agents.devices:
        document.blame(("devices",), f"device {CPU!r} is missing", "declare it: every machine has it")
    for device in agents.devices:
        arch, split, partition = device.partition("-")
        if split and not (arch.startswith("gfx") and partition in PARTITIONS):
            what = f"{device!r} is no partition of a GPU"
            document.blame(("devices", device), what, f"write gfx942-cpx; known are {', '.join(PARTITIONS)}")
    for name, queue in agents.queues.items():
        _check_queue(document, name, queue)
        if queue.device not in agents.devices:
            what = f"unknown device {queue.device!r}"
            document.blame(("queues", name, "device"), what, suggest(queue.device, agents.devices))
        elif (queue.device == CPU) != (queue.gpus == 0):
            what = f"{queue.gpus} GPUs on a queue of device {queue.device!r}"
            document.blame(("queues", name, "gpus"), what, "write 0 for a cpu queue, and at least 1 for any other")
        if queue.signs and not queue.gate:
            what = "it signs releases, and steps of a change could run there"
            document.blame(("queues", name, "signs"), what, "write gate: true as well")
        if queue.gate and queue.report_only:
            what = "it runs what decides, which cannot be reported alone"
            document.blame(("queues", name, "report_only"), what, "leave it out")


def _check_queue(document: Document[Agents], name: str, queue: Queue) -> None:
    """Pods and partitions: what else they need, and what they cannot have."""
    partition, pods = queue.device.partition("-")[2], queue.pods
    if partition and not queue.compute_units:
        what = "nothing tells a partition from a whole GPU"
        document.blame(("queues", name, "device"), what, "write its compute_units (MI300X in CPX: 38)")
    if pods is None:
        return
    for key, given in (("gate", queue.gate), ("signs", queue.signs), ("tools", queue.tools)):
        if given:
            document.blame(("queues", name, key), "is of hosts, and this queue's jobs are pods", "remove it, or `pods`")
    if queue.image is None:
        document.blame(("queues", name, "pods"), "a pod runs in an image, and the queue has none", "name its image")
    named = RESOURCE.fullmatch(pods.resource)
    if named and named["partition"] and named["partition"] != (partition or "spx"):
        what = f"{pods.resource} is no {queue.device}"
        document.blame(("queues", name, "pods", "resource"), what, "name the resource of the queue's device")


def _check_places(document: Document[Area], at: Loc, step: Step, agents: Agents) -> None:
    """Devices and queues of a step exist and fit each other."""
    for position, device in enumerate(step.devices):
        if device not in agents.devices:
            what = f"unknown device {device!r}"
            document.blame((*at, "devices", position), what, suggest(device, agents.devices))
    for device, name in step.queues.items():
        loc, queue = (*at, "agents", "queues", device), agents.queues.get(name)
        if device not in step.devices:
            document.blame(loc, f"{device!r} is not a device of step {step.key!r}", suggest(device, step.devices))
        elif queue is None:
            document.blame(loc, f"unknown queue {name!r}", suggest(name, agents.queues))
        elif queue.gate:
            document.blame(loc, f"queue {name!r} runs only what decides", "name one for steps")
        elif queue.device != device:
            fitting = (other for other, offer in agents.queues.items() if offer.device == device)
            document.blame(loc, f"queue {name!r} offers {queue.device}, not {device}", suggest(name, fitting))
        elif device != CPU and queue.gpus < step.gpus:
            what = f"queue {name!r} has {queue.gpus} GPUs and the step needs {step.gpus}"
            document.blame(loc, what, "name a larger queue")


def _check_globs(document: Document[Area]) -> None:
    area = document.value
    given: dict[Loc, tuple[str, ...]] = {("paths",): area.paths} if area else {}
    given |= {("steps", place, "reads"): step.reads for place, step in enumerate(area.steps if area else ())}
    for at, entries in given.items():
        for index, glob in enumerate(entries):
            try:
                globs.parse(glob)
            except ValueError as error:
                document.blame((*at, index), f"not a glob: {error}", "write it as in .gitignore")


def _check_tests(document: Document[Area], at: Loc, step: Step, packages: Packages) -> None:
    """What a step names in `tests` exists, and what it does not take out holds tests."""
    tests = [test.removeprefix("!").partition("::")[0] for test in step.tests]
    for position, test in enumerate(tests):
        path = packages.root / test
        if not path.exists():
            document.blame((*at, "tests", position), f"there is no {test!r}", packages.remedy(test))
        elif not step.tests[position].startswith("!") and not (path.is_file() or any(path.rglob("test_*.py"))):
            document.blame((*at, "tests", position), f"{test!r} holds no test (test_*.py)", packages.remedy(test))


def _check_imports(document: Document[Area], at: Loc, step: Step, packages: Packages) -> None:
    """Check that the `imports` of a step exist, and that the module which its command runs is among them.

    If that were left out, a change to it would not select the step.
    """
    places = {entry: packages.locate(entry) for entry in step.imports}
    tests = {test.removeprefix("!").partition("::")[0] for test in step.tests}
    declared = [entry for entry in step.imports if entry not in tests]
    for position, entry in enumerate(declared):
        if places[entry] is None:
            what = f"there is no module or test file {entry!r}"
            document.blame((*at, "imports", position), what, packages.remedy(entry))
    for name in packages.run_by(shlex.split(step.command)) if step.imports else []:
        place = packages.locate(name)
        if place is not None and not {place, *place.parents} & set(places.values()):
            document.blame((*at, "imports"), f"the command runs {name!r}, which is not among them", "add it")


def _check_names(areas: Sequence[Document[Area]]) -> None:
    """Area and step keys are unique, and so are the planned keys, which become Buildkite step keys."""
    taken: dict[str, str] = {}
    for document in areas:
        if document.value is None:
            continue
        area, stem = document.value, Path(document.name).stem
        if area.area != stem:
            what = f"area {area.area!r} is declared in {stem}.yaml"
            document.blame(("area",), what, f"name the file {area.area}.yaml")
        names: list[tuple[Loc, list[str]]] = [(("area",), [area.area])]
        for index, step in enumerate(area.steps):
            # A step may carry its area's name: Buildkite sees the area's group and `<step>-<device>` only.
            own = [] if step.key == area.area else [step.key]
            names.append((("steps", index, "key"), [*own, *(planned_key(step, device) for device in step.devices)]))
        for loc, keys in names:
            for key in keys:
                if not BUILDKITE_KEY.fullmatch(key):
                    remedy = "use lower case, digits, '_' and '-', at most 100"
                    document.blame(loc, f"{key!r} is no Buildkite step key", remedy)
                    break
                if key in RESERVED_KEYS:
                    document.blame(loc, f"{key!r} is a step of the pipeline itself", "choose another key")
                elif key in taken:
                    document.blame(loc, f"{key!r} is taken by {taken[key]}", "choose another key")
                    break
                else:
                    taken[key] = document.at(*loc)


def _check_tables(steps: Sequence[Declared]) -> None:
    """A file is the table of one declared step: on another device it is the same table again."""
    taken: dict[str, str] = {}
    for document, at, step in steps:
        if step.matrix is not None:
            file, loc = step.matrix.file, (*at, "evidence", "matrix", "file")
            if file in taken:
                document.blame(loc, f"{file!r} is taken by {taken[file]}", "choose another name")
            taken.setdefault(file, document.at(*loc))


def _check_needs(agents: Document[Agents], declared: Sequence[Declared], *, unread: bool) -> None:
    """Needs and images exist, can be met on each device and in each plan, and wait for each other in no circle."""
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
        for image, device in _images(agents.value, step):
            if image in providers:
                graph[step.key].add(providers[image].key)
                _check_provider(document, at, step, providers[image], device)
    for name, queue in agents.value.queues.items() if agents.value and not unread else ():
        if queue.image is not None and queue.image not in providers:
            known = suggest(queue.image, providers) if providers else "declare a step with `provides`"
            agents.blame(("queues", name, "image"), f"no step provides the image {queue.image!r}", known)
    if cycle := find_cycle(graph):
        document, at = next((document, at) for document, at, step in declared if step.key == cycle[0])
        document.blame((*at, "needs"), "steps need each other: " + " -> ".join(cycle), "drop one of these needs")


def _providers(declared: Sequence[Declared]) -> Mapping[Key, Step]:
    """Image -> the step that builds it, of which there is one, on the cpu."""
    found: dict[Key, Step] = {}
    for document, at, step in declared:
        if step.provides is None:
            continue
        if step.provides in found:
            what = f"the image {step.provides!r} is built by step {found[step.provides].key!r} already"
            document.blame((*at, "agents", "provides"), what, "keep one of the two")
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
    if need.report_only and not step.report_only:
        what = f"step {need.key!r} is report_only, and this step, which counts, cannot start without it"
        document.blame(loc, what, "make both report_only, or drop the need")
    absent: list[Profile] = [profile for profile in step.profiles if profile not in need.profiles]
    if absent:
        document.blame(
            loc,
            f"step {need.key!r} is not in the plans {', '.join(absent)}",
            f"add to the profiles of {need.key!r} or drop the need",
        )


def _check_provider(document: Document[Area], at: Loc, step: Step, provider: Step, device: Key) -> None:
    absent = [profile for profile in step.profiles if profile != LOCAL and profile not in provider.profiles]
    if absent:
        document.blame(
            (*at, "profiles"),
            f"on {device} it runs in the image {provider.provides!r}, which {provider.key!r} does not build in the "
            f"plans {', '.join(absent)}",
            f"add to the profiles of {provider.key!r}",
        )


def find_cycle(needs: Mapping[str, Iterable[str]]) -> list[str]:
    """A cycle of `needs` as `[a, b, a]` (a needs b needs a); empty when there is none."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        # graphlib lists each node before the one that needs it.
        return list(reversed(error.args[1]))
    return []
