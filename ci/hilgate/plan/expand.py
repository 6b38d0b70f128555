# SPDX-License-Identifier: Apache-2.0
"""Expand wanted steps to planned steps on devices, with a reason for each omission. Pure.

`gate` asks what this machine can run: one device per step, on the host. The other profiles ask what the agents run:
every device with a queue, in the image of that queue, after the step that builds it. `place` answers for both, and for
`hilgate doctor`.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hilgate.model import Key, StrictModel
from hilgate.model.declaration import CPU, Area, Step
from hilgate.model.plan import Omission, OmissionCause, PlannedStep, planned_key
from hilgate.model.record import Check
from hilgate.plan.machine import Machine
from hilgate.plan.select import Wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hilgate.declare.load import Declarations
    from hilgate.plan.select import Chosen, NotWanted


NOT_ASKED_FOR: NotWanted = ("not asked for", "not asked for")


@dataclass(frozen=True)
class Target:
    """Where a plan is to run."""

    machine: Machine | None = None
    """This machine; None for the agents."""
    absent_tools: frozenset[str] = frozenset()
    """Programs that steps need and that are not on this machine's path."""
    no_checkout: str = ""
    """Why this machine's tree is no git checkout (`git.no_checkout`); empty where it is one."""
    fork: bool = False
    """Whether the change comes from a fork, whose steps are given no secrets and run in images alone."""
    built: frozenset[Key] = frozenset()
    """Images that nothing needs to build."""
    report_only: frozenset[Key] = frozenset()
    """Planned keys of the steps that no verdict counts."""
    out: Mapping[Key, str] = field(default_factory=dict)
    """Queues that take no steps of changes, each with the reason."""


def expand(
    declarations: Declarations, chosen: Chosen, target: Target
) -> tuple[tuple[PlannedStep, ...], tuple[Omission, ...]]:
    """Place chosen steps where `target` says: steps after what they depend on, and what is left out.

    What a wanted step needs is planned too, and so is what builds the images of its queues. A step whose need has
    nowhere to run is omitted, and the reason says so.
    """
    wanted = _with_needs(declarations, chosen, target)
    placed: dict[Key, Placement] = {}
    omissions: list[Omission] = []
    for area, step in declarations.steps():
        if step.key not in wanted:
            omissions.append(_omission(area, step, step.key, *chosen.unwanted.get(step.key, NOT_ASKED_FOR)))
            continue
        only = wanted[step.key].devices
        placed[step.key] = place(declarations, step, target, only)
        for device, why in placed[step.key].left_out.items():
            cause = _cause(declarations, step, target, device)
            omissions.append(_omission(area, step, planned_key(step, device), cause, why))
        for device, why in chosen.settled.get(step.key, {}).items():
            if device not in (only or step.devices):
                omissions.append(_omission(area, step, planned_key(step, device), "not affected", why))

    places = {key: list(placement.devices) for key, placement in placed.items()}
    held = {key for key, placement in placed.items() if set(placement.left_out.values()) & set(target.out.values())}
    steps: list[PlannedStep] = []
    for area, step in _in_order(declarations, target, places):
        for device in placed[step.key].devices:
            waits = [need for need in step.needs if need in places and device not in chosen.settled.get(need, {})]
            needs = dict.fromkeys([*waits, *_provider_keys(declarations, target, step, [device])])
            met = {need: _met_by(need, device, places[need]) for need in needs}
            unmet = [need for need, key in met.items() if key is None]
            if unmet:
                key, cause = planned_key(step, device), "need omitted"
                if held.intersection(unmet):  # what waits for a queue that is out is held up with it
                    held.add(step.key)
                    cause = "only reported" if key in target.report_only else "queue out"
                omissions.append(_omission(area, step, key, cause, f"needs {unmet[0]}, which is omitted"))
                places[step.key].remove(device)
                continue
            reason = wanted[step.key].of_device.get(device, wanted[step.key].reason)
            steps.append(
                PlannedStep(
                    step=step.model_copy(update={"secrets": ()}) if target.fork else step,
                    area=area.area,
                    device=device,
                    queue=declarations.queue_for(step, device),
                    image=_image(declarations, target, step, device),
                    depends_on=tuple(key for key in met.values() if key is not None),
                    env={**declarations.agents.devices[device].env, **step.env},
                    reason=reason + _note(declarations, target, step, device, placed[step.key].obstacle),
                    report_only=planned_key(step, device) in target.report_only,
                )
            )
    return tuple(steps), tuple(omissions)


def _note(declarations: Declarations, target: Target, step: Step, device: Key, obstacle: str) -> str:
    """What is added to the reason of a step that is planned and will not run; empty for any other.

    A missing package is such an obstacle: the step stays planned, and ends as did not run.
    """
    note = f"; will not run here, {obstacle}" if obstacle else ""
    if not target.fork or target.machine is not None:
        return note
    if _image(declarations, target, step, device) is None:
        lacks = "runs on no host that is kept: it"
    elif step.network and device != CPU:
        lacks = "has no network: what the cache of models lacks"
    else:
        return note
    who = f"{declarations.project.approvers} may push the commit to a branch here"
    return f"{note}; a fork's code {lacks} will not run, and {who}"


def _with_needs(declarations: Declarations, chosen: Chosen, target: Target) -> dict[Key, Wanted]:
    """The wanted steps and, transitively, what they need: steps but where they are settled, and builders of images."""
    steps = {step.key: step for _, step in declarations.steps()}
    closed = dict(chosen.wanted)
    waiting = list(closed)
    while waiting:
        step = steps[waiting.pop(0)]
        also = [(need, f"needed by {step.key}") for need in step.needs]
        devices = [device for device in step.devices if device in (closed[step.key].devices or step.devices)]
        builders = _provider_keys(declarations, target, step, devices)
        also += [(builder, f"builds the image of {step.key}") for builder in builders]
        for need, reason in also:
            before = closed.get(need, Wanted(reason, frozenset()))
            if before.devices is None:
                continue
            # What was asked for on some devices only may be needed on another.
            rest = frozenset(steps[need].devices) - chosen.settled.get(need, {}).keys()
            if rest and rest != before.devices:
                closed[need] = Wanted(before.reason, rest if need in chosen.settled else None, before.of_device)
                waiting.append(need)
    return closed


def _in_order(
    declarations: Declarations, target: Target, places: Mapping[Key, Sequence[Key]]
) -> list[tuple[Area, Step]]:
    """Sort the declared steps that have a place: after what they wait for, else in declared order."""
    declared = {step.key: (area, step) for area, step in declarations.steps() if step.key in places}
    rank = {key: position for position, key in enumerate(declared)}
    graph = {
        key: {*places.keys() & {*step.needs}, *_provider_keys(declarations, target, step, places[key])}
        for key, (_, step) in declared.items()
    }
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    order: list[Key] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=rank.__getitem__)
        order += ready
        sorter.done(*ready)
    return [declared[key] for key in order]


def _provider_keys(declarations: Declarations, target: Target, step: Step, devices: Iterable[Key]) -> list[Key]:
    """Keys of the steps that build the images of a step's jobs on these devices, but for images that exist already."""
    images = (_image(declarations, target, step, device) for device in devices)
    providers = (declarations.provider(image) for image in images if image and image not in target.built)
    return [provider.key for provider in providers if provider]


def _image(declarations: Declarations, target: Target, step: Step, device: Key) -> Key | None:
    return declarations.image_for(step, device) if target.machine is None else None


def _met_by(need: Key, device: Key, places: Sequence[Key]) -> Key | None:
    """The planned step that meets a need: on the same device, else on the cpu, else where it is planned at all."""
    found = next((d for d in (device, CPU, *places) if d in places), None)
    return f"{need}-{found}" if found else None


def _cause(declarations: Declarations, step: Step, target: Target, device: Key) -> OmissionCause:
    """Why a wanted step is not placed on a device."""
    if target.machine is not None:
        return "not here"
    if declarations.queue_for(step, device) not in target.out:
        return "no queue"
    return "only reported" if planned_key(step, device) in target.report_only else "queue out"


def _omission(area: Area, step: Step, key: Key, cause: OmissionCause, reason: str) -> Omission:
    return Omission(key=key, area=area.area, label=step.label, cause=cause, reason=reason)


@dataclass(frozen=True)
class Placement:
    """Where a step can run, and why not elsewhere."""

    devices: tuple[Key, ...]
    """Devices on which it is planned; on one machine at most one."""
    left_out: Mapping[Key, str]
    """The other devices, each with the reason."""
    obstacle: str
    """Why it cannot do its work there, in a few words; empty where it can."""


def place(declarations: Declarations, step: Step, target: Target, only: frozenset[Key] | None = None) -> Placement:
    """Place a step on a machine or on the agents; of its devices `only` these, where some were asked for."""
    listed = [device for device in step.devices if only is None or device in only]
    obstacle = f"needs {' or '.join(_gpus(step, device) for device in listed)}"
    if target.machine is None:
        left_out = {
            device: f"no queue offers {_gpus(step, device)}; run it on a machine that has "
            + ("one" if device == _gpus(step, device) else "them")
            for device in listed
            if declarations.queue_for(step, device) is None
        }
        queues = {device: declarations.queue_for(step, device) or "" for device in listed}
        left_out |= {device: target.out[queue] for device, queue in queues.items() if queue in target.out}
        devices = tuple(device for device in listed if device not in left_out)
        return Placement(devices, left_out, "" if devices else obstacle)
    machine = target.machine
    absent = [tool for tool in step.tools if tool in target.absent_tools]
    enough = machine.device == CPU or machine.gpus >= step.gpus
    candidates = [device for device in ((machine.device, CPU) if enough else (CPU,)) if device in listed]
    chosen = tuple(candidates[:1]) if not absent else ()
    here = f"this machine has {machine.device if enough else machine.gpus}"
    if machine.device == CPU:
        here = "this machine has no GPU"
    left_out = {}
    for device in (device for device in listed if device not in chosen):
        queue = declarations.queue_for(step, device)
        agents = f" (agents: {queue})" if queue else ""
        if absent and device in (machine.device, CPU):
            left_out[device] = f"needs {', '.join(absent)}; not installed here{agents}"
        elif device == CPU:
            left_out[device] = f"runs on {chosen[0]} here, which is the stronger evidence"
        else:
            left_out[device] = f"needs {_gpus(step, device)}; {here}{agents}"
    if candidates:  # a missing package or checkout leaves it planned, to end as did not run; a missing tool does not
        missing = machine.missing(step.packages) + absent
        obstacle = f"{', '.join(missing)} not installed" if missing else target.no_checkout if step.checkout else ""
    return Placement(chosen, left_out, obstacle)


def _gpus(step: Step, device: Key) -> str:
    return f"{step.gpus} x {device}" if step.gpus > 1 and device != CPU else device


class Readiness(StrictModel):
    """Which steps of an area can run on a machine, or on the agents."""

    area: Key
    title: str
    ready: int
    """Steps that can run there."""
    steps: int
    on: tuple[Key, ...]
    """Devices that they would use."""
    obstacles: tuple[str, ...]
    """Why the others cannot."""
    answer: Literal["yes", "partly", "no"]


class Diagnosis(StrictModel):
    """`hilgate doctor --json`: this machine, what it must have, and what of each area can run on it."""

    schema_version: Literal[1] = 1
    machine: Machine
    prerequisites: tuple[Check, ...] = ()
    """What the repository's own command answers; the others are missing here."""
    packages: Mapping[str, str] = {}
    """Distribution -> version, of those that steps need on this machine's device; empty where it is not installed."""
    areas: tuple[Readiness, ...]


def readiness(declarations: Declarations, target: Target) -> list[Readiness]:
    """One entry per area, in declared order."""
    found = []
    for area in declarations.areas:
        placed = [place(declarations, step, target) for step in area.steps]
        ready = [one for one in placed if not one.obstacle]
        on = tuple(dict.fromkeys(device for one in ready for device in one.devices))
        obstacles = tuple(dict.fromkeys(one.obstacle for one in placed if one.obstacle))
        found.append(
            Readiness(
                area=area.area,
                title=area.title,
                ready=len(ready),
                steps=len(placed),
                on=on,
                obstacles=obstacles,
                answer="yes" if len(ready) == len(placed) else "partly" if ready else "no",
            )
        )
    return found
