"""Selected areas to planned steps on devices, and a reason for each omission. Pure.

`gate` asks what this machine can run: one device per step. `pr` asks what the agents run: every device with a queue.
"""

from __future__ import annotations

import graphlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.model import Area, Key, Omission, PlannedStep, Step
from hilgate.names import CPU, planned_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hilgate.declare import Declarations
    from hilgate.hardware import Machine


@dataclass(frozen=True)
class Wanted:
    """Why a declared step is wanted, and on which devices (None: all that it lists)."""

    reason: str
    devices: frozenset[Key] | None = None


@dataclass(frozen=True)
class Expansion:
    """Steps in an order that respects their dependencies, and what was left out."""

    steps: tuple[PlannedStep, ...]
    omissions: tuple[Omission, ...]


def expand(
    declarations: Declarations, wanted: Mapping[Key, Wanted], machine: Machine | None, *, otherwise: str
) -> Expansion:
    """Place wanted steps (by declared key) on devices: this machine's, or the agents' when `machine` is None.

    `otherwise` is the reason of every step that is not wanted.

    What a wanted step needs is planned too. A step whose need has nowhere to run is omitted, and the reason says so.
    """
    wanted = with_needs(declarations, wanted)
    places: dict[Key, list[Key]] = {}
    omissions: list[Omission] = []
    for area, step in declarations.steps():
        if step.key not in wanted:
            omissions.append(_omission(area, step, step.key, otherwise))
            continue
        devices, left_out = _devices(declarations, step, wanted[step.key].devices, machine)
        omissions += [_omission(area, step, planned_key(step, device), why) for device, why in left_out]
        places[step.key] = devices
    planned: list[PlannedStep] = []
    for area, step in _in_order(declarations, places):
        for device in places[step.key]:
            needs = {need: _meet(need, device, places[need]) for need in step.needs}
            unmet = [need for need, key in needs.items() if key is None]
            if unmet:
                omissions.append(
                    _omission(area, step, planned_key(step, device), f"needs {unmet[0]}, which is omitted")
                )
                places[step.key] = [d for d in places[step.key] if d != device]
                continue
            depends_on = tuple(key for key in needs.values() if key is not None)
            reason = wanted[step.key].reason + _missing_note(machine, step)
            planned.append(_planned(declarations, area, step, device, depends_on=depends_on, reason=reason))
    return Expansion(tuple(planned), tuple(omissions))


def with_needs(declarations: Declarations, wanted: Mapping[Key, Wanted]) -> dict[Key, Wanted]:
    """`wanted` and, transitively, what it needs."""
    steps = {step.key: step for _, step in declarations.steps()}
    closed = dict(wanted)
    waiting = list(wanted)
    while waiting:
        key = waiting.pop(0)
        for need in steps[key].needs:
            if need not in closed:
                closed[need] = Wanted(f"needed by {key}")
                waiting.append(need)
            elif closed[need].devices is not None:
                # Asked for on some devices only, but the dependant may meet it on another.
                closed[need] = Wanted(closed[need].reason)
    return closed


def _devices(
    declarations: Declarations, step: Step, only: frozenset[Key] | None, machine: Machine | None
) -> tuple[list[Key], list[tuple[Key, str]]]:
    """Devices to run on, and the others with the reason."""
    listed = [device for device in step.devices if only is None or device in only]
    if machine is None:
        without_queue = [d for d in listed if declarations.queue_for(step, d) is None]
        return (
            [d for d in listed if d not in without_queue],
            [(d, f"no queue offers {d}; run it at a desk that has one") for d in without_queue],
        )
    chosen = next((device for device in (machine.device, CPU) if device in listed), None)
    here = "this machine has no GPU" if machine.device == CPU else f"this machine has {machine.device}"
    left_out = []
    for device in listed:
        queue = declarations.queue_for(step, device)
        if device == chosen:
            continue
        if device == CPU:
            left_out.append((device, f"runs on {chosen} here, which is the stronger evidence"))
        else:
            left_out.append((device, f"needs {device}; {here}" + (f" (agents: {queue})" if queue else "")))
    return [chosen] if chosen else [], left_out


def _in_order(declarations: Declarations, places: Mapping[Key, list[Key]]) -> list[tuple[Area, Step]]:
    """Declared steps that have a place, needs first, else in declared order."""
    declared = {step.key: (area, step) for area, step in declarations.steps() if step.key in places}
    rank = {key: position for position, key in enumerate(declared)}
    sorter = graphlib.TopologicalSorter({key: step.needs for key, (_, step) in declared.items()})
    sorter.prepare()
    order: list[Key] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=rank.__getitem__)
        order += ready
        sorter.done(*ready)
    return [declared[key] for key in order]


def _meet(need: Key, device: Key, places: list[Key]) -> Key | None:
    """The planned step that meets a need: on the same device, else on the cpu, else where it is planned at all."""
    place = next((d for d in (device, CPU, *places) if d in places), None)
    return f"{need}-{place}" if place else None


def _missing_note(machine: Machine | None, step: Step) -> str:
    """A missing package does not make a step vanish: it stays planned, and ends as did not run."""
    missing = machine.missing(step.packages) if machine else []
    return f"; will not run here, {', '.join(missing)} not installed" if missing else ""


def _planned(
    declarations: Declarations, area: Area, step: Step, device: Key, *, depends_on: tuple[Key, ...], reason: str
) -> PlannedStep:
    return PlannedStep(
        key=planned_key(step, device),
        step=step.key,
        area=area.area,
        label=f"{step.label} ({device})" if len(step.devices) > 1 else step.label,
        device=device,
        queue=declarations.queue_for(step, device),
        command=step.command,
        env={**declarations.agents.devices[device].env, **step.env},
        evidence=step.evidence,
        minimum=step.minimum,
        timeout_minutes=step.timeout_minutes,
        depends_on=depends_on,
        cores=step.cores,
        minutes=step.minutes,
        columns=step.columns,
        packages=step.packages,
        reason=reason,
    )


def _omission(area: Area, step: Step, key: Key, reason: str) -> Omission:
    return Omission(key=key, area=area.area, label=step.label, reason=reason)
