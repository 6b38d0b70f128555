"""Print plans, verdicts and tables: results on stdout, narration on stderr, readable at 80 columns.

A symbol or a word accompanies every colour.
"""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hilgate import text
from hilgate.model import Counts, Outcome, planned_key
from hilgate.plan.estimate import estimate
from hilgate.plan.machine import TRACKED, Machine
from hilgate.plan.make import WHEN
from hilgate.report import tables
from hilgate.report.merge_base import NOTHING
from hilgate.report.problems import approval, at_most, headline, named, problems, ruled, step_counts
from hilgate.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hilgate.declare.load import Declarations
    from hilgate.model import Area, Check, Key, Plan, Step, Verdict
    from hilgate.plan.expand import Readiness
    from hilgate.report.merge_base import MergeBase
    from hilgate.report.problems import StepProblem
    from hilgate.report.write import Judged


def stdout() -> Console:
    """Results go here."""
    return Console(highlight=False)


def stderr() -> Console:
    """Narration goes here."""
    return Console(stderr=True, highlight=False)


def print_plan(plan: Plan) -> None:
    """What will run and why, on stderr, before anything runs."""
    table = _table("step", "~min", "because")
    for step in plan.steps:
        table.add_row(step.key, f"{step.step.minutes:g}", Text(text.line(step.reason)))
    console = stderr()
    console.print(table)
    omitted = f", {len(plan.omissions)} not planned here" if plan.omissions else ""
    minutes = sum(step.step.minutes for step in plan.steps)
    console.print(f"{len(plan.steps)} steps, about {minutes:.0f} CPU-minutes{omitted}\n", style="dim")


def print_verdict(judged: Judged, facts: MergeBase | None = None) -> None:
    """The four outcomes, what broke in each step that is not green, and where the report is."""
    recorded, verdict = judged.recorded, judged.verdict
    console = stdout()
    table = _table("outcome", "step", "passed", "failed", "other", "time")
    for column in table.columns:
        column.justify, column.no_wrap, column.ratio = "right", True, None
    for column in table.columns[:2]:
        column.justify, column.max_width, column.overflow = "left", 34, "ellipsis"
    for step in verdict.steps:
        counts, style = step.counts, text.STYLES[step.outcome]
        other = str(counts.inconclusive + counts.did_not_run)
        words = (str(counts.passed), str(counts.failed), other, text.duration(step.seconds))
        table.add_row(Text(text.marked(step.outcome), style), step.key, *words)
    console.print(table)
    for problem in problems(judged.plan, recorded, verdict, limit=1, facts=facts or NOTHING):
        _print_problem(console, problem, with_merge_base=facts is not None)
    for one in named(verdict):
        console.print()
        _print(console, f"{one.kind} in {one.step}: {', '.join(one.ids)}")
    console.print()
    style = text.STYLES[verdict.outcome]
    console.print(Text.assemble((text.marked(verdict.outcome), style), f": {text.line(headline(verdict, recorded))}"))
    console.print(Text(step_counts(verdict), "dim"))
    if approved := approval(verdict):
        _print(console, f"changes its own gate: {approved}", "bold")
    _print(console, f"report: {short(judged.report)}", "dim")


def _print(console: Console, words: str, style: str = "", indent: str = "") -> None:
    """One line of text of a change, however long."""
    console.print(Text(indent + text.line(words), style), soft_wrap=True)


def _print_problem(console: Console, problem: StepProblem, *, with_merge_base: bool) -> None:
    step = problem.step
    console.print(Text(f"\n{ruled(step)}: {step.key}", text.STYLES[step.outcome]))
    lines, merge_base = [step.why], problem.merge_base
    facts: list[tuple[str, str]] = []
    if problem.findings:
        finding = problem.findings[0]
        merge_base = finding.merge_base
        lines = [finding.check.id, *finding.check.message.splitlines()[:12]]
        facts = [("error", finding.error), ("case", finding.case)]
    facts += [("merge base", merge_base)] if with_merge_base else []
    facts += [("node", step.node), *(("evidence", line) for line in at_most(step.evidence, 6))]
    for line in lines + [f"{name}: {words}" for name, words in facts if words]:
        _print(console, line, indent="  ")
    _print(console, f"reproduce: {step.reproduce}", "bold", indent="  ")


def print_checks(checks: tuple[Check, ...]) -> None:
    """One line per check and its message below, readable at 80 columns."""
    console = stdout()
    for check in checks:
        console.print(
            Text.assemble((text.marked(check.outcome), text.STYLES[check.outcome]), f" {text.line(check.id)}"),
            soft_wrap=True,
        )
        console.print(Text(text.log(f"  {check.message}"), "dim"), soft_wrap=True)
    console.print(Text(f"\n{Counts.of(check.outcome for check in checks)}"))


def short(path: Path) -> Path:
    """Relative to the current folder where that is shorter to read."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


_STYLE = {"yes": "green", "partly": "yellow", "no": "red"}


def show_plan(plan: Plan, history: Mapping[Key, float]) -> None:
    """Steps with place, minutes and reason; omissions with reasons; the size of it all. `history` is in minutes."""
    out = stdout()
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
        table.add_row(step.key, place, f"{history.get(step.key, step.step.minutes):.3g}", escape(step.reason))
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


def show_step(declarations: Declarations, area: Area, step: Step, *, rule: str, history: Mapping[Key, float]) -> None:
    """Everything declared about a step; `rule` says whether a change selects it, `history` is in minutes."""
    out = stdout()
    out.print(f"[bold]{step.key}[/]  {escape(step.label)}  (area {area.area})")
    selected = "any change" if area.always else "a change to " + ", ".join(area.paths)
    if step.imports and not area.always:
        selected = f"a changed module that {', '.join(step.imports)} imports; of other files, {selected}"
    rows = {
        "why": area.why,
        "declared in": f"ci/areas/{area.area}.yaml",
        "selected by": selected,
        "runs": ", ".join(WHEN[profile] for profile in step.profiles),
        "command": step.command,
        "evidence": f"{step.evidence}, at least {step.minimum} passed",
        "ends after": f"{step.timeout_minutes} minutes (usually {step.minutes:g} on 2 cores)",
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
    table = _table("", "", header=False)
    for name, value in rows.items():
        if value:
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


def show_machine(machine: Machine, declarations: Declarations) -> None:
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
    stdout().print(table, "")


def show_readiness(areas: Sequence[Readiness], *, every_obstacle: bool = False) -> None:
    """Area, yes / partly / no, and on what or why not."""
    table = _table("area", "here", "steps", "on, or why not")
    for area in areas:
        obstacles = "; ".join(area.obstacles if every_obstacle else area.obstacles[:1])
        detail = obstacles or f"on {', '.join(area.on)}"
        style = _STYLE[area.answer]
        table.add_row(area.area, f"[{style}]{area.answer}[/]", f"{area.ready}/{area.steps}", escape(detail))
    stdout().print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(*names: str, header: bool = True) -> Table:
    """A table whose last column folds into the room that is left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=header, header_style="bold")
    for position, name in enumerate(names):
        last = position == len(names) - 1
        table.add_column(name, overflow="fold", no_wrap=False, ratio=1 if last else None)
    return table


NARROWEST = 60
"""Columns of a terminal below which lines are left to wrap."""
ROW_CELLS = 22
NAME_CELLS = 12
"""Room that the last column's name gets at least."""
STEP = 3
"""Terminal columns for a mark, where the names stand above each other."""
NOTE_CHARACTERS = 400


def print_tables(judged: Judged, *, every: bool = False) -> None:
    """Print the tables of a build: all of them, or those of steps that are not green and a line for each other one.

    A gate answers whether a change may merge and what broke; a table that says neither is in the report.
    """
    console = stdout()
    width = max(NARROWEST, console.width)
    for table in tables.tables(judged.plan, judged.recorded, judged.verdict):
        whole = every or table.verdict.outcome is not Outcome.PASS
        for line in lines(table, width) if whole else _title(table, width):
            console.print(line, soft_wrap=True)
        if table.step.step.matrix:
            path = short(judged.report.with_name(table.step.step.matrix.file))
            _print(console, f"table: {path}", "dim")


def lines(table: tables.Table, width: int) -> Iterator[Text]:
    """The table and what is to be said of it, no line wider than `width` but for a word that is wider itself."""
    yield Text("")
    yield from _title(table, width)
    first = min(ROW_CELLS, max((cell_len(text.line(row)) for row in table.rows), default=0)) + 2
    for columns in _blocks(table.columns, first, width):
        # As wide as their names where all fit side by side.
        widths = [max(STEP, cell_len(text.line(column)) + 2) for column in columns]
        if first + sum(widths) - 2 > width:
            widths = [STEP] * len(columns)
        yield from _header(columns, widths, first, width)
        for row in table.rows:
            line = Text(_fitted(row, first - 2) + "  ")
            for column, room in zip(columns, widths, strict=True):
                cell = table.grid.get((row, column))
                mark = text.MARKS[cell.outcome] if cell else ""
                line.append(mark.ljust(room), text.STYLES[cell.outcome] if cell else None)
            line.rstrip()
            yield line
    for worst, words in tables.notes(table):
        style = text.STYLES[worst]
        note = shorten(text.line(words), NOTE_CHARACTERS)
        wrapped = textwrap.wrap(note, width - 2, break_long_words=False, break_on_hyphens=False)
        for number, part in enumerate(wrapped):
            yield Text.assemble((text.MARKS[worst] if number == 0 else " ", style), f" {part}")


def _title(table: tables.Table, width: int) -> Iterator[Text]:
    yield from (Text(part, "bold") for part in textwrap.wrap(f"{table.step.key}: {table.summary}", width))


def _blocks(columns: tuple[str, ...], first: int, width: int) -> Iterator[tuple[str, ...]]:
    """Columns that stand side by side: as many as fit with room for the last one's name."""
    most = max(1, (width - first - NAME_CELLS) // STEP + 1)
    for start in range(0, len(columns), most):
        yield columns[start : start + most]


def _header(columns: tuple[str, ...], widths: list[int], first: int, width: int) -> Iterator[Text]:
    """One line of names, or where they are too wide a line for each, which a bar leads down to its column."""
    if all(cell_len(text.line(column)) + 2 <= room for column, room in zip(columns, widths, strict=True)):
        names = (_fitted(column, room) for column, room in zip(columns, widths, strict=True))
        yield Text((" " * first + "".join(names)).rstrip(), "dim")
        return
    for number, column in enumerate(columns):
        bars = ("│" + " " * (STEP - 1)) * number
        name, room = text.line(column), width - first - len(bars)
        yield Text(" " * first + bars + (name if cell_len(name) <= room else _fitted(name, room)), "dim")


def _fitted(words: str, room: int) -> str:
    """Text in exactly `room` terminal columns, with an ellipsis where it is cut."""
    line = text.line(words)
    return set_cell_size(line, room) if cell_len(line) <= room else set_cell_size(line, room - 1) + "…"


def print_notes(verdict: Verdict) -> None:
    """What a change does to the values that decide about it, a line each; nothing where it leaves them alone."""
    console = stdout()
    for one in verdict.loosened:
        _print(console, f"changes its own gate: {one.path}: {one.what}")
        for row in one.hunk.splitlines():
            console.print(Text(f"  {text.visible(row)}"), soft_wrap=True)
