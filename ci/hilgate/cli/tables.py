"""What planning commands print. Tables fold in 80 columns; a symbol or word always accompanies a colour."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from hilgate.durations import estimate
from hilgate.hardware import TRACKED, Machine
from hilgate.names import planned_key
from hilgate.plan import WHEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from hilgate.declare import Declarations
    from hilgate.model import Area, Key, Plan, Step
    from hilgate.readiness import Readiness

_STYLE = {"yes": "green", "partly": "yellow", "no": "red"}


def show_plan(out: Console, plan: Plan, history: Mapping[Key, float]) -> None:
    """Steps with place, minutes and reason; omissions with reasons; the size of it all. `history` is in minutes."""
    here = plan.profile == "gate"
    against = f"against {plan.base}, {_count(len(plan.changed_files), 'file')} changed" if plan.base else "everything"
    where = "on this machine" if here else f"on the agents, profile {plan.profile}"
    commit = (plan.commit[:12] or "no git") + (" with local changes" if plan.dirty else "")
    out.print(f"Plan of {escape(commit)}, {escape(against)}, {where}")
    if plan.fork:
        out.print("From a fork: no secrets are given and no caches are written")
    table = _table("step", "device" if here else "queue", "min", "because")
    table.columns[2].justify = "right"
    for step in plan.steps:
        place = step.device if here else step.queue
        table.add_row(step.key, place, f"{history.get(step.key, step.minutes):.3g}", escape(step.reason))
    out.print(table)
    if plan.omissions:
        out.print(f"\n{len(plan.omissions)} omitted")
        table = _table("because", "omitted")
        for reason in dict.fromkeys(omission.reason for omission in plan.omissions):
            keys = [omission.key for omission in plan.omissions if omission.reason == reason]
            table.add_row(escape(reason), ", ".join(keys), style="dim")
        out.print(table)
    size = estimate(plan, history)
    gpu = f", {size.on_gpus:.3g} of them on GPUs" if size.on_gpus else ""
    gpu += f" ({size.gpu_minutes:.3g} GPU-minutes)" if size.gpu_minutes != size.on_gpus else ""
    known = f"measured for {size.measured} of {len(plan.steps)}" if size.measured else "as declared"
    out.print(
        f"\n{_count(len(plan.steps), 'step')}, about {size.minutes:.3g} minutes{gpu} ({known}); "
        f"longest chain {size.chain_minutes:.3g}: {' -> '.join(size.chain)}"
    )


def show_step(
    out: Console,
    declarations: Declarations,
    area: Area,
    step: Step,
    *,
    rule: str,
    history: Mapping[Key, float],
) -> None:
    """Everything declared about a step; `rule` says whether a change selects it, `history` is in minutes."""
    out.print(f"[bold]{step.key}[/]  {escape(step.label)}  (area {area.area})")
    selected = "any change" if area.always else "a change to " + ", ".join(area.paths)
    if step.imports and not area.always:
        selected = f"a changed module that {', '.join(step.imports)} imports; of other files, {selected}"
    optional = {
        "this change": rule,
        "env": " ".join(f"{name}={shlex.quote(value)}" for name, value in step.env.items()),
        "models": ", ".join(step.models),
        "table": f"{step.matrix.rows} x {step.matrix.columns}, in {step.matrix.file}" if step.matrix else "",
        "needs": ", ".join(step.needs),
        "packages": ", ".join(step.packages),
        "tools": ", ".join(step.tools),
        "secrets": ", ".join(step.secrets),
        "network": "its container may reach it" if step.network else "",
        "builds": f"the image {step.provides}" if step.provides else "",
    }
    rows = {
        "why": area.why,
        "declared in": f"ci/areas/{area.area}.yaml",
        "selected by": selected,
        "runs": ", ".join(WHEN[profile] for profile in step.profiles),
        "command": step.command,
        "evidence": f"{step.evidence.value}, at least {step.minimum} passed",
        "ends after": f"{step.timeout_minutes} minutes (usually {step.minutes:g} on 2 cores)",
        **{name: value for name, value in optional.items() if value},
    }
    table = _table("", "", header=False)
    for name, value in rows.items():
        table.add_row(name, escape(value))
    out.print(table)
    table = _table("device", "queue", "image", "median", "repeat it there with")
    for device in step.devices:
        queue = declarations.queue_for(step, device) or "none: at a desk only"
        key = planned_key(step, device)
        median = f"{history[key]:.3g} min" if key in history else "-"
        table.add_row(device, queue, declarations.image_for(step, device) or "-", median, f"hilgate run {key}")
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
