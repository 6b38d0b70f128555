"""Wanted steps to planned steps on devices, and a reason for each omission. Pure.

`gate` asks what this machine can run: one device per step, on the host. The other profiles ask what the agents run:
every device with a queue, in the image of that queue, after the step that builds it.
"""

from __future__ import annotations

import graphlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.model import Area, Key, Omission, PlannedStep, Step
from hilgate.names import CPU, planned_key
from hilgate.places import place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hilgate.declare import Declarations
    from hilgate.hardware import Machine


@dataclass(frozen=True)
class Wanted:
    """Why a declared step is wanted, and on which devices (None: all that it lists)."""

    reason: str
    devices: frozenset[Key] | None = None


@dataclass(frozen=True)
class Site:
    """Where a plan is to run."""

    machine: Machine | None = None
    """This machine; None for the agents."""
    absent_tools: frozenset[str] = frozenset()
    """Programs that steps need and that are not on this machine's path."""
    fork: bool = False
    """Whether the change comes from a fork, whose steps are given no secrets."""


@dataclass(frozen=True)
class Expansion:
    """Steps in an order that respects their dependencies, and what was left out."""

    steps: tuple[PlannedStep, ...]
    omissions: tuple[Omission, ...]


def expand(
    declarations: Declarations, wanted: Mapping[Key, Wanted], site: Site, *, otherwise: Mapping[Key, str]
) -> Expansion:
    """Place wanted steps (by declared key) where `site` says.

    What a wanted step needs is planned too, and so is what builds the images of its queues. A step whose need has
    nowhere to run is omitted, and the reason says so. `otherwise` has the reason of every step that is not wanted.
    """
    wanted = with_needs(declarations, wanted, site)
    places: dict[Key, list[Key]] = {}
    omissions: list[Omission] = []
    for area, step in declarations.steps():
        if step.key not in wanted:
            omissions.append(_omission(area, step, step.key, otherwise[step.key]))
            continue
        placed = place(declarations, step, wanted[step.key].devices, site.machine, site.absent_tools)
        omissions += [_omission(area, step, planned_key(step, device), why) for device, why in placed.left_out]
        places[step.key] = list(placed.devices)
    planner = _Planner(declarations, site, wanted, places)
    for area, step in planner.in_order():
        for device in tuple(places[step.key]):
            planned = planner.planned(area, step, device)
            if isinstance(planned, Omission):
                omissions.append(planned)
                places[step.key].remove(device)
            else:
                planner.steps.append(planned)
    return Expansion(tuple(planner.steps), tuple(omissions))


def with_needs(declarations: Declarations, wanted: Mapping[Key, Wanted], site: Site) -> dict[Key, Wanted]:
    """`wanted` and, transitively, what it needs: steps, and what builds its images."""
    steps = {step.key: step for _, step in declarations.steps()}
    closed = dict(wanted)
    waiting = list(wanted)
    while waiting:
        step = steps[waiting.pop(0)]
        also = [(need, f"needed by {step.key}") for need in step.needs]
        also += [
            (provider.key, f"builds the image of {step.key}")
            for device in step.devices
            if _may_run_on(closed[step.key], device) and (provider := _provider(declarations, site, step, device))
        ]
        for need, reason in also:
            if need not in closed:
                closed[need] = Wanted(reason)
                waiting.append(need)
            elif closed[need].devices is not None:
                # Asked for on some devices only, but the dependant may meet it on another.
                closed[need] = Wanted(closed[need].reason)
                waiting.append(need)
    return closed


@dataclass
class _Planner:
    """Makes planned steps, one after the other."""

    declarations: Declarations
    site: Site
    wanted: Mapping[Key, Wanted]
    places: Mapping[Key, list[Key]]
    steps: list[PlannedStep] = field(default_factory=list)

    def in_order(self) -> list[tuple[Area, Step]]:
        """Declared steps that have a place, what they wait for first, else in declared order."""
        declared = {step.key: (area, step) for area, step in self.declarations.steps() if step.key in self.places}
        rank = {key: position for position, key in enumerate(declared)}
        sorter = graphlib.TopologicalSorter(
            {
                key: {*step.needs, *(p.key for d in self.places[key] if (p := self._provider(step, d)))}
                for key, (_, step) in declared.items()
            }
        )
        sorter.prepare()
        order: list[Key] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=rank.__getitem__)
            order += ready
            sorter.done(*ready)
        return [declared[key] for key in order]

    def planned(self, area: Area, step: Step, device: Key) -> PlannedStep | Omission:
        """The step on a device, or its omission when something it waits for has no place."""
        provider = self._provider(step, device)
        needs = [*step.needs, *([provider.key] if provider and provider.key not in step.needs else [])]
        met = {need: _meet(need, device, self.places[need]) for need in needs}
        unmet = [need for need, key in met.items() if key is None]
        if unmet:
            return _omission(area, step, planned_key(step, device), f"needs {unmet[0]}, which is omitted")
        return PlannedStep(
            key=planned_key(step, device),
            step=step.key,
            area=area.area,
            label=f"{step.label} ({device})" if len(step.devices) > 1 else step.label,
            device=device,
            queue=self.declarations.queue_for(step, device),
            command=step.command,
            env={**self.declarations.agents.devices[device].env, **step.env},
            evidence=step.evidence,
            minimum=step.minimum,
            timeout_minutes=step.timeout_minutes,
            depends_on=tuple(key for key in met.values() if key is not None),
            cores=step.cores,
            minutes=step.minutes,
            columns=step.columns,
            matrix=step.matrix,
            packages=step.packages,
            tools=step.tools,
            models=step.models,
            gpus=0 if device == CPU else step.gpus,
            image=provider.provides if provider else None,
            network=step.network,
            secrets=() if self.site.fork else step.secrets,
            provides=step.provides,
            reason=self.wanted[step.key].reason + self._missing_note(step),
        )

    def _provider(self, step: Step, device: Key) -> Step | None:
        return _provider(self.declarations, self.site, step, device)

    def _missing_note(self, step: Step) -> str:
        """A missing package does not make a step vanish: it stays planned, and ends as did not run."""
        missing = self.site.machine.missing(step.packages) if self.site.machine else []
        return f"; will not run here, {', '.join(missing)} not installed" if missing else ""


def _may_run_on(wanted: Wanted, device: Key) -> bool:
    return wanted.devices is None or device in wanted.devices


def _provider(declarations: Declarations, site: Site, step: Step, device: Key) -> Step | None:
    """The step that builds the image of a step's job; None on the host."""
    image = declarations.image_for(step, device) if site.machine is None else None
    return declarations.provider(image) if image else None


def _meet(need: Key, device: Key, places: Sequence[Key]) -> Key | None:
    """The planned step that meets a need: on the same device, else on the cpu, else where it is planned at all."""
    found = next((d for d in (device, CPU, *places) if d in places), None)
    return f"{need}-{found}" if found else None


def _omission(area: Area, step: Step, key: Key, reason: str) -> Omission:
    return Omission(key=key, area=area.area, label=step.label, reason=reason)
