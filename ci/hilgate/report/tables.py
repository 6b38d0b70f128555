# SPDX-License-Identifier: Apache-2.0
"""Tables of checks: a pivot over two of their labels, with each reason why cells are not a pass reported once. Pure.

A step with a `matrix` names the two labels: family and behaviour, arch and dtype. A check that lacks one has no cell
and is reported beside the table; of two checks of one cell the worse counts. A step with `columns` has a row for each
check, and cells that show its labels and numbers. A step that may have lost cells says so.

The checks of a matrix are also a JSON file of the results folder, of every device that the step ran on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import Exit
from hilgate.evidence import EVIDENCE_CHECK, kind_of
from hilgate.model.record import SEVERITY, Counts, Outcome, severity
from hilgate.model.table import TableCheck, TableFile, TableStep, tables_in
from hilgate.run.outcome import first, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from hilgate.model import Number
    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Check
    from hilgate.model.verdict import StepVerdict, Verdict
    from hilgate.run.results import Attempt, Recorded

NOTES = 30
"""Most notes of a kind below a table; the others are counted."""
NO_VALUE = "–"  # noqa: RUF001 - a dash, where a check has no such label or number
WHOLE = frozenset({Exit.PASS, Exit.FAIL, Exit.INCONCLUSIVE})
"""Exit statuses of a step that did all its work; after any other, cells may be missing."""


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        reason: Why it is not a pass, on one line; for a pass, evidence or nothing.
        seconds: Of all its checks.
        checks: Their ids, in the order in which they ran.
        numbers: Of the check that decides.
        text: What stands in it; empty for the mark of its outcome.
    """

    outcome: Outcome
    reason: str
    seconds: float
    checks: tuple[str, ...]
    numbers: Mapping[str, Number]
    text: str = ""


@dataclass(frozen=True)
class Table:
    """The table of one planned step.

    Attributes:
        verdict: What was decided about the step.
        labels: What its rows and its columns are called.
        grid: (row, column) -> cell, in the order in which they ran.
        outside: (cell, which labels it lacks) of checks without a place.
        incomplete: Why cells may be missing, or why those here do not count; empty when the table is whole.
    """

    step: PlannedStep
    verdict: StepVerdict
    labels: tuple[str, str]
    grid: dict[tuple[str, str], Cell]
    outside: tuple[tuple[Cell, str], ...] = ()
    incomplete: str = ""

    @functools.cached_property
    def rows(self) -> tuple[str, ...]:
        """Labels in the order in which their checks ran."""
        return tuple(dict.fromkeys(row for row, _ in self.grid))

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """Labels in the order in which their checks ran."""
        return tuple(dict.fromkeys(column for _, column in self.grid))

    @functools.cached_property
    def rows_of(self) -> dict[str, list[str]]:
        """Column -> the rows that have a cell in it."""
        return _by_column(self.grid)

    @property
    def summary(self) -> str:
        """`214 passed, 2 failed, 18 not run, 3 not asked (blank)`, in cells; blank are those that no check has.

        Of a step with columns, in rows.
        """
        if not self.step.step.matrix:
            return str(Counts.of(self.grid[row, self.columns[0]].outcome for row in self.rows))
        counts = Counts.of(cell.outcome for cell in self.grid.values())
        blank = len(self.rows) * len(self.columns) - len(self.grid)
        return str(counts) + (f", {blank} not asked (blank)" if blank else "")


def tables(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Table, ...]:
    """A table for each planned step that declares a matrix, in the order of the plan."""
    decided = {step.key: step for step in verdict.steps}
    return tuple(_pivot(step, recorded, decided[step.key]) for step in plan.steps if step.step.matrix)


def tables_beside(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Table, ...]:
    """One table of each device for the planned steps that stand beside each other, in the order of the plan.

    A cell holds all checks of a step in that row, the worst of which counts. A step that has no cells is said.
    """
    decided = {step.key: step for step in verdict.steps}
    groups: dict[tuple[str, str, str], list[PlannedStep]] = {}
    for step in plan.steps:
        if (matrix := step.step.matrix) and matrix.beside:
            groups.setdefault((matrix.rows, matrix.beside, step.device), []).append(step)
    return tuple(
        _joined((rows, column), steps, recorded, decided)
        for (rows, column, _device), steps in groups.items()
        if len(steps) > 1
    )


def _joined(
    labels: tuple[str, str],
    steps: list[PlannedStep],
    recorded: Recorded,
    decided: Mapping[str, StepVerdict],
) -> Table:
    """The table of several steps, named by its labels."""
    found = [_pivot(step, recorded, decided[step.key], labels) for step in steps]
    grid: dict[tuple[str, str], Cell] = {}
    for table in found:
        for place, cell in table.grid.items():
            grid[place] = _worst([grid[place], cell]) if place in grid else cell
    lost = [f"{table.step.key}: {table.incomplete}" for table in found if table.incomplete]
    worst = _worst_of(table.verdict for table in found)
    named = _named(steps[0], labels[1], f"{labels[0]} x {labels[1]}")
    outside = tuple(cell for table in found for cell in table.outside)
    return Table(named, worst, labels, grid, outside, "; ".join(lost))


def value_tables(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Table, ...]:
    """A table for each step that declares columns and recorded checks; those that did not pass lead each.

    Steps that stand together share one on each device; a step of them that recorded none is said.
    """
    groups: dict[tuple[str, str], list[tuple[PlannedStep, StepVerdict]]] = {}
    for step, decided in zip(plan.steps, verdict.steps, strict=True):
        if step.step.columns:
            groups.setdefault((step.step.together or step.key, step.device), []).append((step, decided))
    found = [_valued(steps, recorded) for steps in groups.values()]
    return tuple(sorted((table for table in found if table.grid), key=lambda table: len(table.grid)))


def _valued(steps: list[tuple[PlannedStep, StepVerdict]], recorded: Recorded) -> Table:
    """The table of values of one step, or of several that stand together."""
    rows: list[tuple[Check, PlannedStep, StepVerdict]] = []
    lost = []
    for step, decided in steps:
        attempt = recorded.last(step.key)
        rows += [(check, step, decided) for check in (attempt.checks if attempt else ())]
        if len(steps) > 1 and (attempt is None or not attempt.checks):
            lost.append(f"{step.key}: {decided.why}")
    grid = {
        (check.id, column): _cell(check, decided, _value(check, column))
        for check, step, decided in sorted(rows, key=_passed if len(steps) == 1 else _passed_and_kind)
        for column in step.step.columns
        if column != "check"
    }
    named, worst = steps[0]
    if len(steps) > 1:
        worst = _worst_of(decided for _, decided in steps)
        named = _named(named, named.step.together, f"{named.step.together}, steps beside each other")
    return Table(named, worst, ("check", ""), grid, (), "; ".join(lost))


def _worst_of(verdicts: Iterable[StepVerdict]) -> StepVerdict:
    """The verdict that a table of several steps shows: the worst of theirs."""
    return max(verdicts, key=severity)


def _named(step: PlannedStep, key: str, label: str) -> PlannedStep:
    """The step whose key and label a table of several steps shows."""
    return step.model_copy(update={"step": step.step.model_copy(update={"key": key, "label": label})})


def _passed(row: tuple[Check, PlannedStep, StepVerdict]) -> bool:
    return row[0].outcome is Outcome.PASS


def _passed_and_kind(row: tuple[Check, PlannedStep, StepVerdict]) -> tuple[bool, str]:
    """So that the checks of one kind follow each other: `granite/accuracy`, `granite-triton/accuracy`."""
    return _passed(row), row[0].id.rpartition("/")[2]


def _value(check: Check, column: str) -> str:
    """A number with at most four significant digits unless it is whole, a label as it is, else a dash."""
    number = check.numbers.get(column)
    if number is None:
        return check.labels.get(column, NO_VALUE)
    return f"{number:,}".replace(",", "\u202f") if isinstance(number, int) else f"{number:.4g}"


def _pivot(
    step: PlannedStep,
    recorded: Recorded,
    verdict: StepVerdict,
    labels: tuple[str, str] | None = None,
) -> Table:
    assert step.step.matrix is not None
    labels = labels or (step.step.matrix.rows, step.step.matrix.columns)
    attempt = recorded.last(step.key)
    cells: dict[tuple[str, str], list[Cell]] = {}
    outside = []
    for check in attempt.checks if attempt else ():
        row, column = (check.labels.get(label, "") for label in labels)
        if row and column:
            cells.setdefault((row, column), []).append(_cell(check, verdict))
        else:
            outside.append((_cell(check, verdict), " and no ".join(n for n in labels if not check.labels.get(n))))
    grid = {place: _worst(found) for place, found in cells.items()}
    incomplete = _incomplete(step, verdict, attempt, recorded.damaged.get(step.key, ""))
    if not grid:
        incomplete = incomplete or f"no check has the labels {labels[0]} and {labels[1]}"
    return Table(step, verdict, labels, grid, tuple(outside), incomplete)


def _cell(check: Check, verdict: StepVerdict, text: str = "") -> Cell:
    outcome, reason = check.outcome, first_line(check.message)
    if check.id in verdict.flaky:
        outcome = Outcome.INCONCLUSIVE
        reason = f"failed and then passed over the same files: {reason}".rstrip(": ")
    elif check.id in verdict.quarantined:
        reason = f"in quarantine: {reason}"
    return Cell(outcome, reason, check.seconds, (check.id,), check.numbers, text)


def _worst(cells: list[Cell]) -> Cell:
    """One cell of several checks: the worst decides; how many are like it, and why the first of those is."""
    if len(cells) == 1:
        return cells[0]
    worst = max(cells, key=severity)
    alike = sum(cell.outcome is worst.outcome for cell in cells)
    reason = "" if worst.outcome is Outcome.PASS else f"{alike} of {len(cells)} checks, the first: {worst.reason}"
    checks = tuple(name for cell in cells for name in cell.checks)
    return Cell(worst.outcome, reason, sum(cell.seconds for cell in cells), checks, worst.numbers)


def _incomplete(step: PlannedStep, verdict: StepVerdict, attempt: Attempt | None, damage: str) -> str:
    if attempt is None or damage:
        return damage or verdict.why
    record = attempt.record
    if record.exit_status is None:
        return record.message or "it has no exit status"
    if record.exit_status not in WHOLE:
        return kind_of(step).exit_meaning(record.exit_status)
    lost = next((check for check in attempt.checks if check.id == EVIDENCE_CHECK), None)
    if lost is not None:
        return lost.message
    failed = first(attempt.checks, Outcome.FAIL)
    if verdict.outcome is Outcome.DID_NOT_RUN or (verdict.outcome is Outcome.FAIL and failed is None):
        return verdict.why
    return ""


def notes(table: Table) -> Iterator[tuple[Outcome, str]]:
    """What stands below a table: reasons, checks without a place, why it is not whole; at most `NOTES` of a kind."""
    reasons: dict[tuple[Outcome, str], list[tuple[str, str]]] = {}
    for place, cell in table.grid.items() if table.step.step.matrix else ():
        if cell.outcome is not Outcome.PASS:
            reasons.setdefault((cell.outcome, cell.reason), []).append(place)
    worst = sorted(reasons.items(), key=lambda item: -SEVERITY[item[0][0]])
    yield from ((outcome, f"{_places(table, places)}: {words}") for (outcome, words), places in worst[:NOTES])
    if len(worst) > NOTES:
        yield worst[NOTES][0][0], f"and {len(worst) - NOTES} more reasons"
    for cell, lacking in table.outside[:NOTES]:
        words = f": {cell.reason}" if cell.reason else ""
        yield cell.outcome, f"not in the table, it has no {lacking}: {cell.checks[0]}{words}"
    if len(table.outside) > NOTES:
        yield table.outside[NOTES][0].outcome, f"and {len(table.outside) - NOTES} more that are not in the table"
    if table.incomplete:
        yield table.verdict.outcome, f"not the whole table: {table.incomplete}"


def _places(table: Table, places: Iterable[tuple[str, str]]) -> str:
    """`decode, prefix: a, b; large: every family but c`: columns with the same rows together."""
    columns_of: dict[str, list[str]] = {}
    for column, rows in _by_column(places).items():
        words = _listed(rows, table.rows_of[column], table.labels[0])
        columns_of.setdefault(words, []).append(column)
    return "; ".join(
        f"{_listed(columns, table.columns, table.labels[1])}: {words}" for words, columns in columns_of.items()
    )


def _by_column(places: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row, column in places:
        found.setdefault(column, []).append(row)
    return found


def _listed(names: Iterable[str], known: Iterable[str], label: str) -> str:
    """Names, or whichever is shorter to read: `every family but whisper`."""
    found = dict.fromkeys(names)
    others = [name for name in known if name not in found]
    if len(found) < 2 or 2 * len(others) > len(found):
        return ", ".join(found)
    return f"every {label}" + (f" but {', '.join(others)}" if others else "")


def write(folder: Path, plan: Plan, digest: str, recorded: Recorded, found: Iterable[Table]) -> None:
    """Write the checks of each table into the file that its step names, and remove the files of other plans.

    `digest` is `plan_digest` of the whole plan where only a part of it is reported. Tables of one file are the same
    declared step on several devices.
    """
    clear(folder)
    files: dict[str, tuple[list[TableStep], list[TableCheck]]] = {}
    for table in found:
        assert table.step.step.matrix is not None
        steps, checks = files.setdefault(table.step.step.matrix.file, ([], []))
        step, verdict, attempt = table.step, table.verdict, recorded.last(table.step.key)
        steps.append(
            TableStep(
                step=step.key,
                device=step.device,
                command=step.step.command,
                outcome=verdict.outcome,
                incomplete=table.incomplete,
                flaky=verdict.flaky,
                quarantined=verdict.quarantined,
                environment=attempt.record.environment if attempt else None,
            )
        )
        checks += [TableCheck(step=step.key, **dict(check)) for check in (attempt.checks if attempt else ())]
    for name, (of, rows) in files.items():
        about = {"table": name, "commit": plan.commit, "dirty": plan.dirty, "plan_digest": digest}
        TableFile(**about, steps=tuple(of), checks=tuple(rows)).save(folder / name)


def clear(folder: Path) -> None:
    """Remove the files of tables: none may outlive the verdict that it belonged to."""
    for path in tables_in(folder):
        path.unlink()
