"""Where a step runs: this machine's device, or every device that an agents' queue offers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.names import CPU

if TYPE_CHECKING:
    from hilgate.declare import Declarations
    from hilgate.hardware import Machine
    from hilgate.model import Key, Step


@dataclass(frozen=True)
class Placed:
    """Devices to run on, and the others, each with the reason."""

    devices: tuple[Key, ...]
    left_out: tuple[tuple[Key, str], ...]


def place(
    declarations: Declarations,
    step: Step,
    only: frozenset[Key] | None,
    machine: Machine | None,
    absent_tools: frozenset[str] = frozenset(),
) -> Placed:
    """Place a step on `machine`, or on the agents where that is None.

    Args:
        declarations: Queues and devices.
        step: What to place.
        only: The devices that were asked for; None for all that it lists.
        machine: This machine, one device of which is chosen.
        absent_tools: Programs that are not on this machine's path.
    """
    listed = [device for device in step.devices if only is None or device in only]
    if machine is None:
        return _on_agents(declarations, step, listed)
    return _here(declarations, step, listed, machine, absent_tools)


def _on_agents(declarations: Declarations, step: Step, listed: list[Key]) -> Placed:
    left_out = []
    for device in listed:
        if declarations.queue_for(step, device) is None:
            what = _gpus(step, device)
            left_out.append((device, f"no queue offers {what}; run it at a desk that has {_pronoun(step, device)}"))
    without = {device for device, _ in left_out}
    return Placed(tuple(device for device in listed if device not in without), tuple(left_out))


def _here(
    declarations: Declarations, step: Step, listed: list[Key], machine: Machine, absent_tools: frozenset[str]
) -> Placed:
    absent = [tool for tool in step.tools if tool in absent_tools]
    enough = machine.device == CPU or machine.gpus >= step.gpus
    candidates = (machine.device, CPU) if enough else (CPU,)
    chosen = None if absent else next((device for device in candidates if device in listed), None)
    if machine.device == CPU:
        here = "this machine has no GPU"
    else:
        here = f"this machine has {machine.device}" if enough else f"this machine has {machine.gpus}"
    left_out = []
    for device in listed:
        queue = declarations.queue_for(step, device)
        agents = f" (agents: {queue})" if queue else ""
        if device == chosen:
            continue
        if absent and device in (machine.device, CPU):
            left_out.append((device, f"needs {', '.join(absent)}; not installed here{agents}"))
        elif device == CPU:
            left_out.append((device, f"runs on {chosen} here, which is the stronger evidence"))
        else:
            left_out.append((device, f"needs {_gpus(step, device)}; {here}{agents}"))
    return Placed((chosen,) if chosen else (), tuple(left_out))


def _gpus(step: Step, device: Key) -> str:
    return f"{step.gpus} x {device}" if step.gpus > 1 and device != CPU else device


def _pronoun(step: Step, device: Key) -> str:
    return "them" if step.gpus > 1 and device != CPU else "one"
