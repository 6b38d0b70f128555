# SPDX-License-Identifier: Apache-2.0
"""Print plans, verdicts and tables: results on stdout, narration on stderr, readable at 80 columns.

A symbol or a word accompanies every colour. What comes of a change (names, ids, messages) is never markup: consoles
here know none, and `cell` takes out what a terminal would obey.
"""

from __future__ import annotations

import io
import os
import shlex
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hilgate import text
from hilgate.model.declaration import EVIDENCE_KINDS
from hilgate.model.plan import planned_key
from hilgate.model.record import Counts, Outcome
from hilgate.plan.make import WHEN
from hilgate.report import tables
from hilgate.report.reservations import TITLE
from hilgate.report.view import at_most, beside, more, ruled
from hilgate.text import count, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hilgate.declare.load import Declarations
    from hilgate.model import Key
    from hilgate.model.declaration import Area, Step
    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Check
    from hilgate.model.verdict import Verdict
    from hilgate.plan.estimate import Estimate
    from hilgate.plan.expand import Diagnosis, Readiness
    from hilgate.report.view import CheckFinding, ReportView, StepProblem
    from hilgate.report.write import Report
    from hilgate.run.results import Recorded


def stdout() -> Console:
    """Results go here."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """Narration goes here."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def cell(words: object, style: str = "") -> Text:
    """Text of a change on one line: no markup, all of it visible, and no group of Buildkite's log begins with it."""
    return Text(text.log(text.line(str(words))), style)


def mark_of(outcome: Outcome) -> Text:
    """`✗ fail`, in its colour."""
    return Text(text.marked(outcome), text.STYLES[outcome])


def table_of(names: Sequence[str], rows: Iterable[Sequence[object]], *, header: bool = True, style: str = "") -> Table:
    """A table whose last column folds into the space that is left; what is no `Text` yet is text of a change."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=header, header_style="bold")
    for position, name in enumerate(names):
        last = position == len(names) - 1
        table.add_column(name, overflow="fold", no_wrap=False, ratio=1 if last else None)
    for row in rows:
        table.add_row(*(one if isinstance(one, Text) else cell(one) for one in row), style=style)
    return table


def print_plan(console: Console, plan: Plan, size: Estimate, *, omitted: bool = False) -> None:
    """Steps by reason, with minutes and place, what is omitted and why, and the size of it all.

    With `omitted` every omission is listed with its reason; else they are counted by cause.
    """
    here = plan.local
    against = f"against {plan.base}, {count(len(plan.changed_files), 'file')} changed" if plan.base else "everything"
    against = "the quick steps" if plan.profile == "quick" else against
    where = "on this machine" if here else f"on the agents, profile {plan.profile}"
    commit = (plan.commit[:12] or ("no commit yet" if plan.dirty else "no git")) + (
        " with local changes" if plan.dirty else ""
    )
    console.print(cell(f"Plan of {commit}, {against}, {where}"))
    if plan.fork:
        console.print("From a fork: no secrets are given and no caches are written")
    _print_planned(console, plan, size)
    gpu = f", {size.gpu_minutes:.3g} GPU-minutes" if size.gpu_minutes else ""
    known = f"measured for {len(size.measured)} of {len(plan.steps)}" if size.measured else "as declared"
    about = f"{text.rounded(60 * size.minutes)} on {count(size.cores, 'core')}" if here else _about(size.minutes)
    jobs = "" if here else f" in {count(len(plan.jobs()), 'job')}"
    console.print(f"\n{count(len(plan.steps), 'step')}{jobs}, about {about}{gpu} ({known})")
    reasons: dict[str, list[Key]] = {}
    for omission in plan.omissions:
        reasons.setdefault(omission.reason, []).append(omission.key)
    for reason, number in Counter(one.reason for one in plan.held_up).items():
        say(console, f"not started: {count(number, 'step')}: {reason}", "yellow")
    if omitted:
        listed = [(reason, ", ".join(keys)) for reason, keys in reasons.items()]
        console.print("", table_of(("omitted because", "steps"), listed, style="dim"), sep="\n")
    elif reasons:
        causes = Counter(omission.cause for omission in plan.omissions)
        words = ", ".join(f"{number} {cause}" for cause, number in causes.items())
        say(console, f"{count(len(plan.omissions), 'step')} omitted: {words} (hilgate plan --omitted)", "dim")


def _print_planned(console: Console, plan: Plan, size: Estimate) -> None:
    """A line for each step, below the reason that it shares with others: minutes, device or queue, key."""
    by_reason: dict[str, list[PlannedStep]] = {}
    for step in plan.steps:
        by_reason.setdefault(step.reason, []).append(step)
    place = {step.key: (step.device if plan.local else step.queue) or "" for step in plan.steps}
    width = max(map(len, place.values()), default=0)
    for reason, steps in by_reason.items():
        console.print()
        console.print(cell(reason, "bold"))
        for step in steps:
            where = cell(place[step.key])
            where.align("left", width)
            note = "  (only reported)" if step.report_only else ""
            # A key is there to be copied, so it is never broken.
            line = Text.assemble(f"{size.each[step.key]:4.2g} ", where, " ", cell(step.key), note)
            console.print(line, soft_wrap=True)


def print_time(console: Console, seconds: float, size: Estimate) -> None:
    """Print how long a run took beside its forecast, and the load of the machine."""
    words = f"took {text.duration(seconds)}, forecast {text.rounded(60 * size.minutes)}"
    say(console, f"{words}; load average {os.getloadavg()[0]:.0f}", "dim")


def print_slowest(recorded: Recorded, number: int) -> None:
    """So many checks of the last runs that took longest, with the seconds that they recorded."""
    took = [(check.seconds, check.id) for runs in recorded.attempts.values() for check in runs[-1].checks]
    for seconds, check in sorted(took, reverse=True)[:number]:
        say(stdout(), f"{text.duration(seconds)} {check}", whole=True)


SCREEN = (80, 24)
"""Columns and lines of a terminal at its usual size."""


def first_screen(report: Report) -> str:
    """What a reader sees of a verdict before scrolling."""
    columns, lines = SCREEN
    console = Console(file=io.StringIO(), width=columns, highlight=False, markup=False, emoji=False)
    print_verdict(report, console=console)
    return "\n".join(console.file.getvalue().splitlines()[:lines])  # type: ignore[attr-defined]  # it is a StringIO


Printed = tuple[object, ...]
"""Which causes were printed: two are equal where the same steps are red by the same checks."""


def print_causes(report: Report, meanwhile: str) -> Printed:
    """Print the steps and what broke, while a run still asks whose that is; then what it does `meanwhile`."""
    console = stdout()
    _print_causes(console, report, merge_base=False)
    console.print()
    say(console, f"{meanwhile} ...", "dim")
    return _causes_of(report)


def _print_causes(console: Console, report: Report, *, merge_base: bool) -> None:
    _print_steps(console, report.verdict)
    for problem in report.view.problems(CAUSES):
        _print_problem(console, problem, local=report.plan.local, merge_base=merge_base)


def _causes_of(report: Report) -> Printed:
    outcomes = [(step.key, step.outcome) for step in report.verdict.steps]
    return (*outcomes, *((cause.extent, *(failure.id for failure in cause.failures)) for cause in report.view.causes))


def print_verdict(
    report: Report, *, every: bool = False, console: Console | None = None, printed: Printed | None = None
) -> None:
    """The outcomes, what broke in each step that is not green, whose that is, where the report is, and tables.

    With `every` all tables are printed whole; else those of steps that are not green, and a line for each other one.
    What was `printed` before is not printed again.
    """
    view, verdict = report.view, report.verdict
    console = console or stdout()
    if printed != _causes_of(report):
        _print_causes(console, report, merge_base=True)
    console.print()
    if view.whose:
        say(console, f"{view.whose[0].upper()}{view.whose[1:]}.", "bold")
    if printed == _causes_of(report):
        _print_origins(console, view)
    _print_reservations(console, view)
    mark = mark_of(verdict.outcome)
    headline = text.log(text.line(f"{mark.plain}: {view.headline}"))
    for number, part in enumerate(_wrapped(headline, max(NARROWEST, console.width), "", "  ")):
        line = Text(part)
        line.stylize(mark.style, 0, len(mark.plain) if number == 0 else 0)
        console.print(line, soft_wrap=True)
    say(console, view.step_counts, "dim")
    for words in (*verdict.doubts, *verdict.notes, *verdict.before):
        say(console, words, "yellow" if words in verdict.doubts else "dim")
    if view.approval:
        say(console, f"changes its own gate: {view.approval}", "bold")
    say(console, f"report: {short(report.path)}", "dim", whole=True)
    _print_tables(console, view, report.path, every=every)
    for change in verdict.protected_changes:
        say(console, f"changes its own gate: {change.path}: {change.what}")
        for row in change.hunk.splitlines():
            console.print(Text(f"  {text.visible(row)}"), soft_wrap=True)


def _print_reservations(console: Console, view: ReportView) -> None:
    """Passes that prove less than they seem to, and an empty line after them."""
    if view.reservations:
        console.print(f"{TITLE}:")
    for reservation in view.reservations:
        say(console, f"{reservation.title}: {', '.join(at_most(reservation.ids, RESERVED))}", indent="  ")
    if view.reservations:
        console.print()


def _print_origins(console: Console, view: ReportView) -> None:
    """Whose each cause is, where that differs between them."""
    found = [finding for problem in view.problems(CAUSES) for finding in problem.findings if finding.merge_base]
    if len({finding.merge_base for finding in found}) > 1:
        for finding in found:
            say(console, shorten(f"{finding.check.id}: {finding.merge_base}", NOTE_CHARACTERS), indent="  ")


FEW = 6
"""Steps that passed, of which as many stand above what did not; more would push the cause off the first screen."""


def _print_steps(console: Console, verdict: Verdict) -> None:
    """The table of steps; beside what is red, many that passed are counted, and the report lists them."""
    green = [step for step in verdict.steps if step.outcome is Outcome.PASS]
    list_all = len(green) <= FEW or len(green) == len(verdict.steps)
    listed = [step for step in verdict.steps if list_all or step.outcome is not Outcome.PASS]
    rows = [
        (
            mark_of(step.outcome),
            step.key,
            step.counts.passed,
            step.counts.failed,
            step.counts.inconclusive + step.counts.did_not_run,
            text.duration(step.seconds),
        )
        for step in listed
    ]
    console.print(_table_of_steps(rows, console.width))
    if hidden := len(verdict.steps) - len(listed):
        say(console, f"and {count(hidden, 'step')} that passed: the report lists them", "dim")


STEP_COLUMNS = ("outcome", "step", "passed", "failed", "other", "time")
GAP = 2
"""Columns between two of a table."""


def _table_of_steps(rows: Sequence[Sequence[object]], width: int) -> Table:
    """Outcome, key, counts and time of each step, nothing of it cut.

    Where the terminal is too narrow for all, the checks that neither passed nor failed are left out, which the total
    and the step's own paragraph count too; then a long key goes on in a second line.
    """
    names, cells = list(STEP_COLUMNS), [[str(one) for one in row] for row in rows]

    def widths() -> list[int]:
        columns = zip(names, *cells, strict=True)
        return [max(cell_len(text.line(one)) for one in column) for column in columns]

    if sum(widths()) + GAP * (len(names) - 1) > width:
        at = names.index("other")
        names.pop(at)
        cells = [row[:at] + row[at + 1 :] for row in cells]
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    taken = sum(widths()) - widths()[1] + GAP * (len(names) - 1)
    table = table_of(names, rows)
    for column in table.columns:
        column.justify, column.no_wrap, column.ratio = "right", True, None
    for column in table.columns[:2]:
        column.justify = "left"
    key = table.columns[1]
    key.no_wrap, key.overflow, key.max_width = False, "fold", max(SHORTEST_KEY, width - taken)
    return table


SHORTEST_KEY = 12
"""Columns below which a key is not folded: a terminal that is still narrower wraps whole lines."""


PARAGRAPH_CHARACTERS = 4000
"""Most characters of a paragraph that a change wrote."""


def say(console: Console, words: str, style: str = "", *, indent: str = "", whole: bool = False) -> None:
    """Print text of a change, wrapped between its words; `whole` leaves it on one line, to be pasted."""
    line, width = text.line(words if whole else shorten(words, PARAGRAPH_CHARACTERS)), max(NARROWEST, console.width)
    for part in [indent + line] if whole else _wrapped(line, width, indent, f"{indent}  "):
        console.print(Text(part, style), soft_wrap=True)


def _wrapped(line: str, width: int, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(
        line, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def _print_tables(console: Console, view: ReportView, report: Path, *, every: bool) -> None:
    width = max(NARROWEST, console.width)
    for table in view.tables_beside:
        for line in lines(table, width):
            console.print(line, soft_wrap=True)
    for table in view.tables:
        whole = every or table.verdict.outcome is not Outcome.PASS
        for line in lines(table, width) if whole else _title(table, width):
            console.print(line, soft_wrap=True)
        if table.step.step.matrix:
            say(console, f"table: {short(report.with_name(table.step.step.matrix.file))}", "dim", whole=True)


def _print_problem(console: Console, problem: StepProblem, *, local: bool, merge_base: bool) -> None:
    """A step with the smallest case of each cause, the first of them in full; with what it did on the merge base."""
    step = problem.step
    others = f" and {count(len(problem.steps), 'other step')}" if problem.steps else ""
    console.print("", cell(f"{ruled(step)}: {step.key}{others}", text.STYLES[step.outcome]), sep="\n")
    for finding in problem.findings[:1]:
        for line in (*([finding.alike] if finding.alike else []), finding.check.id):
            say(console, shorten(line, NOTE_CHARACTERS), "bold" if line == finding.alike else "", indent="  ")
        for number, line in enumerate(finding.check.message.splitlines()[:MESSAGE_LINES]):
            say(console, shorten(line, VALUE_CHARACTERS if number else NOTE_CHARACTERS), indent="  ")
        _print_facts(console, finding, ("error", finding.error), ("case", finding.case))
    if not problem.findings:
        say(console, shorten(step.why, NOTE_CHARACTERS), indent="  ")
    there = problem.findings[0].merge_base if problem.findings else problem.merge_base
    facts = [("merge base", there if merge_base else ""), ("node", "" if local else step.node)]
    facts += [("evidence", line) for line in at_most(step.evidence, 6)]
    _print_facts(console, problem, *facts)
    for finding in problem.findings[1:]:
        say(console, f"also: {finding.alike or finding.check.id}", "bold", indent="  ")
        for line in (finding.check.id if finding.alike else "", finding.assertion, finding.place):
            say(console, shorten(line, NOTE_CHARACTERS), indent="    ")
        same = finding.merge_base == there or not merge_base
        _print_facts(console, finding, ("merge base", "" if same else finding.merge_base), indent="    ")
    if problem.more:
        say(console, more(problem), indent="  ")
    say(console, f"reproduce: {step.reproduce}", "bold", indent="  ", whole=True)


def _print_facts(console: Console, of: CheckFinding | StepProblem, *facts: tuple[str, str], indent: str = "  ") -> None:
    for name, words in (*facts, *((name, ", ".join(keys)) for name, keys in beside(of))):
        if words:
            say(console, shorten(f"{name}: {words}", NOTE_CHARACTERS), indent=indent)


def print_checks(checks: tuple[Check, ...]) -> None:
    """One line per check and its message below."""
    console = stdout()
    for check in checks:
        console.print(Text.assemble(mark_of(check.outcome), " ", cell(check.id)), soft_wrap=True)
        console.print(Text(text.log(f"  {check.message}"), "dim"), soft_wrap=True)
    console.print(f"\n{Counts.of(check.outcome for check in checks)}")


def short(path: Path) -> Path:
    """Relative to the current folder where that is shorter to read."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def print_step(declarations: Declarations, area: Area, step: Step, *, rule: str, last: Mapping[Key, float]) -> None:
    """Everything declared about a step; `rule` says whether a change selects it, `last` is in minutes."""
    out = stdout()
    out.print(Text.assemble((step.key, "bold"), "  ", cell(f"{step.label} (area {area.area})")))
    selected = "any change" if area.always else "a change to " + ", ".join(area.paths)
    if step.imports and not area.always:
        selected = f"a changed module that {', '.join(step.imports)} imports; of other files, {selected}"
    least = EVIDENCE_KINDS[step.evidence]
    required = f"at least {step.minimum} reported" if least else "of every test that is collected"
    rows = {
        "why": area.why,
        "declared in": f"ci/areas/{area.area}.yaml",
        "selected by": selected,
        "runs": ", ".join(WHEN[profile] for profile in step.profiles),
        "command": step.command,
        "evidence": f"{step.evidence}, {required}",
        "may lack": "; ".join(
            f"{lacking}: {excuse.why} (at most {excuse.most})" for lacking, excuse in step.may_lack.items()
        ),
        "ends after": f"{count(step.timeout_minutes, 'minute')} (usually {step.minutes:g} on 2 cores)",
        "this change": rule,
        "env": " ".join(f"{name}={shlex.quote(value)}" for name, value in step.env.items()),
        "models": ", ".join(step.models),
        "table": f"{step.matrix.rows} x {step.matrix.columns}, in {step.matrix.file}" if step.matrix else "",
        "needs": ", ".join(step.needs),
        "packages": ", ".join(step.packages),
        "tools": ", ".join(step.tools),
        "git": "it needs a git checkout" if step.checkout else "",
        "secrets": ", ".join(step.secrets),
        "network": "its container may reach it" if step.network else "",
        "builds": f"the image {step.provides}" if step.provides else "",
    }
    out.print(table_of(("", ""), [row for row in rows.items() if row[1]], header=False))
    places = [
        (
            device,
            declarations.queue_for(step, device) or "none: locally only",
            declarations.image_for(step, device) or "-",
            f"{last[key]:.3g} min" if key in last else "-",
            f"hilgate run {key}",
        )
        for key, device in ((planned_key(step, device), device) for device in step.devices)
    ]
    out.print("", table_of(("device", "queue", "image", "last here", "repeat it there with"), places), sep="\n")


def print_machine(diagnosis: Diagnosis, declarations: Declarations) -> None:
    """Hardware, what a machine must have, and versions of what steps import, with what is missing."""
    machine = diagnosis.machine
    known = machine.device in declarations.agents.devices
    rows: list[tuple[str, object]] = [
        ("GPU", f"{machine.gpus} x {machine.name}" if machine.gpus else "none: kernels run under Triton's interpreter"),
        ("device", machine.device + ("" if known else " (not in ci/agents.yaml, so no step uses it)")),
        ("cores", machine.cores),
        ("GPU memory" if machine.gpus else "memory", f"{machine.memory_gib:.1f} GiB"),
        *(("note", note) for note in machine.notes),
        *(("missing", Text(one.message, "red")) for one in diagnosis.prerequisites if one.outcome is not Outcome.PASS),
        *(
            (name, Text(version) if version else Text("not installed", "red"))
            for name, version in diagnosis.packages.items()
        ),
    ]
    if present := [prerequisite.id for prerequisite in diagnosis.prerequisites if prerequisite.outcome is Outcome.PASS]:
        rows.append(("present", ", ".join(present)))
    stdout().print(table_of(("", ""), rows, header=False), "")


def print_readiness(areas: Sequence[Readiness], *, every_obstacle: bool = False) -> None:
    """Area, yes / partly / no, and on what or why not."""
    styles = {"yes": "green", "partly": "yellow", "no": "red"}
    rows = [
        (
            area.area,
            Text(area.answer, styles[area.answer]),
            f"{area.ready}/{area.steps}",
            "; ".join(area.obstacles if every_obstacle else area.obstacles[:1]) or f"on {', '.join(area.on)}",
        )
        for area in areas
    ]
    stdout().print(table_of(("area", "here", "steps", "on, or why not"), rows))


def _about(minutes: float) -> str:
    """`18 s`, `1 minute`, `22 minutes`: an estimate, so no more digits than it has."""
    return f"{60 * minutes:.0f} s" if minutes < 1 else count(round(minutes), "minute")


NARROWEST = 60
"""Columns of a terminal below which lines are left to wrap."""
ROW_CELLS, NAME_CELLS, STEP = 22, 12, 3
"""Terminal columns: most for names of rows, least for the last column's name, and for a mark below upright names."""
MOST_ROWS, MOST_COLUMNS = 500, 60
"""Most rows and columns of a table, as on a page; the file of the table has all."""
RESERVED = 6
"""Most checks or steps of one kind that passed with a caveat; the others are counted."""
CAUSES = 5
"""Most causes of a step, shown in full or in a few lines."""
MESSAGE_LINES, NOTE_CHARACTERS = 6, 400
VALUE_CHARACTERS = 160
"""Most characters of a line of a message after the first, where pytest prints whole tensors."""


def lines(table: tables.Table, width: int) -> Iterator[Text]:
    """The table and what is to be said of it, no line wider than `width` but for a word that is wider itself."""
    yield Text("")
    yield from _title(table, width)
    rows, most = table.rows[:MOST_ROWS], table.columns[:MOST_COLUMNS]
    first = min(ROW_CELLS, max((cell_len(text.line(row)) for row in rows), default=0)) + 2
    for columns in _blocks(most, first, width):
        # As wide as their names where all fit side by side.
        widths = [max(STEP, cell_len(text.line(column)) + 2) for column in columns]
        if first + sum(widths) - 2 > width:
            widths = [STEP] * len(columns)
        yield from _header(columns, widths, first, width)
        for row in rows:
            line = Text(text.log(_fitted(row, first - 2)) + "  ")
            for column, room in zip(columns, widths, strict=True):
                found = table.grid.get((row, column))
                mark = text.MARKS[found.outcome] if found else ""
                line.append(mark.ljust(room), text.STYLES[found.outcome] if found else None)
            line.rstrip()
            yield line
    if len(rows) < len(table.rows) or len(most) < len(table.columns):
        yield Text(f"{len(rows)} of {len(table.rows)} rows, {len(most)} of {len(table.columns)} columns", "dim")
    for worst, words in tables.notes(table):
        style = text.STYLES[worst]
        note = shorten(text.line(words), NOTE_CHARACTERS)
        for number, part in enumerate(_wrapped(note, width - 2)):
            yield Text.assemble((text.MARKS[worst] if number == 0 else " ", style), f" {part}")


def _title(table: tables.Table, width: int) -> Iterator[Text]:
    yield from (Text(part, "bold") for part in _wrapped(f"{table.step.key}: {table.summary}", width))


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
