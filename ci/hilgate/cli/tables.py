"""What planning commands print. Tables fold in 80 columns; a symbol or word always accompanies a colour."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from hilgate.hardware import TRACKED, Machine
from hilgate.names import planned_key
from hilgate.plan import estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hilgate.declare import Declarations
    from hilgate.model import Area, Plan, Step
    from hilgate.readiness import Readiness

_STYLE = {"yes": "green", "partly": "yellow", "no": "red"}


def show_plan(out: Console, plan: Plan) -> None:
    """Steps with place, minutes and reason; omissions with reasons; the size of it all."""
    against = f"against {plan.base}, {_count(len(plan.changed_files), 'file')} changed" if plan.base else "everything"
    where = "on the agents" if plan.profile == "pr" else "on this machine"
    commit = (plan.commit[:12] or "no git") + (" with local changes" if plan.dirty else "")
    out.print(f"Plan of {escape(commit)}, {escape(against)}, {where}")
    table = _table("step", "queue" if plan.profile == "pr" else "device", "min", "because")
    table.columns[2].justify = "right"
    for step in plan.steps:
        place = step.queue if plan.profile == "pr" else step.device
        table.add_row(step.key, place, f"{step.minutes:g}", escape(step.reason))
    out.print(table)
    if plan.omissions:
        out.print(f"\n{len(plan.omissions)} omitted")
        table = _table("because", "omitted")
        for reason in dict.fromkeys(omission.reason for omission in plan.omissions):
            keys = [omission.key for omission in plan.omissions if omission.reason == reason]
            table.add_row(escape(reason), ", ".join(keys), style="dim")
        out.print(table)
    size = estimate(plan)
    gpu = f", {size.gpu_minutes:.3g} of them on GPUs" if size.gpu_minutes else ""
    out.print(
        f"\n{_count(len(plan.steps), 'step')}, about {size.minutes:.3g} minutes{gpu}; "
        f"longest chain {size.chain_minutes:.3g}: {' -> '.join(size.chain)}"
    )


def show_step(out: Console, declarations: Declarations, area: Area, step: Step, *, rule: str) -> None:
    """Everything declared about a step; `rule` says whether a change selects it."""
    out.print(f"[bold]{step.key}[/]  {escape(step.label)}  (area {area.area})")
    rows = [
        ("why", area.why),
        ("declared in", f"ci/areas/{area.area}.yaml"),
        ("selected by", "any change" if area.always else "a change to " + ", ".join(area.paths)),
        *([("this change", rule)] if rule else []),
        ("command", step.command),
        *([("env", " ".join(f"{name}={shlex.quote(value)}" for name, value in step.env.items()))] if step.env else []),
        ("evidence", f"{step.evidence.value}, at least {step.minimum} passed"),
        ("ends after", f"{step.timeout_minutes} minutes (usually {step.minutes:g})"),
        *([("needs", ", ".join(step.needs))] if step.needs else []),
        *([("packages", ", ".join(step.packages))] if step.packages else []),
    ]
    table = _table("", "", header=False)
    for name, value in rows:
        table.add_row(name, escape(value))
    out.print(table)
    table = _table("device", "queue", "repeat it there with")
    for device in step.devices:
        queue = declarations.queue_for(step, device) or "none: at a desk only"
        table.add_row(device, queue, f"hilgate run {planned_key(step, device)}")
    out.print()
    out.print(table)


def show_machine(out: Console, machine: Machine, declarations: Declarations) -> None:
    """Hardware and versions, with what is missing."""
    table = _table("", "", header=False)
    gpus = f"{machine.gpus} x {machine.name}" if machine.gpus else "none: kernels run under Triton's interpreter"
    table.add_row("GPU", escape(gpus))
    known = machine.device in declarations.agents.devices
    table.add_row("device", machine.device + ("" if known else " (not in ci/agents.yaml, so no step uses it)"))
    table.add_row("cores", str(machine.cores))
    table.add_row("GPU memory" if machine.gpus else "memory", f"{machine.memory_gib:.1f} GiB")
    for name in TRACKED:
        table.add_row(name, machine.distributions.get(name, "[dim]not installed[/]"))
    for note in machine.notes:
        table.add_row("note", escape(note))
    out.print(table)
    out.print()


def show_readiness(out: Console, areas: Sequence[Readiness], *, every_obstacle: bool = False) -> None:
    """Area, yes / partly / no, and on what or why not."""
    table = _table("area", "here", "steps", "on, or why not")
    for area in areas:
        obstacles = "; ".join(area.obstacles if every_obstacle else area.obstacles[:1])
        detail = obstacles or f"on {', '.join(area.on)}"
        style = _STYLE[area.answer]
        table.add_row(area.area, f"[{style}]{area.answer}[/]", f"{area.ready}/{area.steps}", escape(detail))
    out.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(*names: str, header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, show_header=header, header_style="bold")
    for position, name in enumerate(names):
        last = position == len(names) - 1
        table.add_column(name, overflow="fold", no_wrap=False, ratio=1 if last else None)
    return table
