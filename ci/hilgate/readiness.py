"""What a machine can and cannot run, area by area. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.names import CPU

if TYPE_CHECKING:
    from hilgate.declare import Declarations
    from hilgate.hardware import Machine
    from hilgate.model import Key, Step


@dataclass(frozen=True)
class Readiness:
    """One area on one machine."""

    area: Key
    title: str
    ready: int
    """Steps that can run here."""
    steps: int
    on: tuple[Key, ...]
    """Devices that they would use."""
    obstacles: tuple[str, ...]
    """Why the others cannot."""

    @property
    def answer(self) -> str:
        """`yes`, `partly` or `no`."""
        return "yes" if self.ready == self.steps else "partly" if self.ready else "no"


def readiness(
    declarations: Declarations, machine: Machine, absent_tools: frozenset[str] = frozenset()
) -> list[Readiness]:
    """One entry per area, in declared order; `absent_tools` are programs that are not on this machine's path."""
    found = []
    for area in declarations.areas:
        places = [place(step, machine, absent_tools) for step in area.steps]
        found.append(
            Readiness(
                area=area.area,
                title=area.title,
                ready=sum(device is not None for device, _ in places),
                steps=len(places),
                on=tuple(dict.fromkeys(device for device, _ in places if device)),
                obstacles=tuple(dict.fromkeys(why for _, why in places if why)),
            )
        )
    return found


def place(step: Step, machine: Machine, absent_tools: frozenset[str]) -> tuple[Key | None, str]:
    """Device on which a step would run here; else None and why not."""
    device = next((device for device in (machine.device, CPU) if device in step.devices), None)
    if device is None:
        return None, f"needs {' or '.join(step.devices)}"
    missing = machine.missing(step.packages) + [tool for tool in step.tools if tool in absent_tools]
    if missing:
        return None, f"{', '.join(missing)} not installed"
    return device, ""
