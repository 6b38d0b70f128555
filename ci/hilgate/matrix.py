"""Tables of steps whose checks are cells, named by two labels: family and behaviour, arch and dtype. Pure.

A check that lacks a label has no place in the table and is told beside it. Two checks of one cell are one cell: the
worse outcome wins. A step that may have lost cells says so, and then the table is not the whole one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import rules
from hilgate.errors import Exit
from hilgate.evidence import EVIDENCE_CHECK
from hilgate.model import Counts, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hilgate.model import Check, Matrix, Number, Plan, PlannedStep, StepVerdict, Verdict
    from hilgate.records import Attempt, Recorded

WHOLE = frozenset({Exit.PASS, Exit.FAIL, Exit.INCONCLUSIVE})
"""Exit statuses of a step that did all its work; after any other, cells may be missing."""


@dataclass(frozen=True)
class Cell:
    """What is known of one cell; without a row or a column it is a check that has no place.

    Attributes:
        reason: Why it is not a pass, all lines; for a pass, evidence or nothing.
        seconds: Of all its checks.
        checks: Their ids, in the order in which they ran.
        labels: Of the check that decides, without the two that name the cell.
        numbers: Of the check that decides.
    """

    row: str
    column: str
    outcome: Outcome
    reason: str
    seconds: float
    checks: tuple[str, ...]
    labels: Mapping[str, str]
    numbers: Mapping[str, Number]

    @property
    def first_line(self) -> str:
        """The first line of the reason."""
        return rules.first_line(self.reason)


@dataclass(frozen=True)
class Table:
    """The table of one planned step.

    Attributes:
        cells: In the order in which they ran, those without a place included.
        lack: Why cells may be missing, or why those here do not count; empty when the table is whole.
        verdict: What was decided about the step.
        attempt: The attempt that counts; None when nothing of it can be believed.
    """

    step: PlannedStep
    spec: Matrix
    cells: tuple[Cell, ...]
    lack: str
    verdict: StepVerdict
    attempt: Attempt | None

    @functools.cached_property
    def grid(self) -> dict[tuple[str, str], Cell]:
        """(row, column) -> cell, in the order in which they ran."""
        return {(cell.row, cell.column): cell for cell in self.cells if cell.row and cell.column}

    @functools.cached_property
    def outside(self) -> tuple[Cell, ...]:
        """Checks that lack a label."""
        return tuple(cell for cell in self.cells if not (cell.row and cell.column))

    @functools.cached_property
    def rows(self) -> tuple[str, ...]:
        """In the order in which they ran."""
        return tuple(dict.fromkeys(row for row, _ in self.grid))

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """In the order in which they ran."""
        return tuple(dict.fromkeys(column for _, column in self.grid))

    @functools.cached_property
    def asked(self) -> dict[str, tuple[str, ...]]:
        """Column -> the rows that have a cell in it."""
        return by_column(self.grid)

    @property
    def summary(self) -> str:
        """`214 passed, 2 failed, 18 not run, 3 not asked`, in cells; blank are those that no check has."""
        blank = len(self.rows) * len(self.columns) - len(self.grid)
        outcomes = [cell.outcome for cell in self.grid.values()]
        counts = Counts(
            passed=outcomes.count(Outcome.PASS),
            failed=outcomes.count(Outcome.FAIL),
            inconclusive=outcomes.count(Outcome.INCONCLUSIVE),
            did_not_run=outcomes.count(Outcome.DID_NOT_RUN),
        )
        return rules.summary(counts) + (f", {blank} not asked (blank)" if blank else "")


def tables(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Table, ...]:
    """A table for each planned step that declares one, in the order of the plan."""
    decided = {step.key: step for step in verdict.steps}
    return tuple(_table(step, step.matrix, recorded, decided[step.key]) for step in plan.steps if step.matrix)


def _table(step: PlannedStep, spec: Matrix, recorded: Recorded, verdict: StepVerdict) -> Table:
    attempt = recorded.last(step.key)
    checks = attempt.checks if attempt else recorded.salvaged.get(step.key, ())
    cells: dict[object, list[Cell]] = {}
    for check in checks:
        cell = _cell(check, spec, verdict)
        place = (cell.row, cell.column) if cell.row and cell.column else check.id
        cells.setdefault(place, []).append(cell)
    lack = _lack(step, verdict, attempt, recorded.damaged.get(step.key, ""))
    return Table(step, spec, tuple(_merged(same) for same in cells.values()), lack, verdict, attempt)


def _cell(check: Check, spec: Matrix, verdict: StepVerdict) -> Cell:
    outcome, reason = check.outcome, check.message
    if check.id in verdict.flaky:
        outcome = Outcome.INCONCLUSIVE
        reason = f"failed and then passed over the same files: {reason}".rstrip(": ")
    elif check.id in verdict.quarantined:
        reason = f"in quarantine: {reason}"
    others = {name: value for name, value in check.labels.items() if name not in {spec.rows, spec.columns}}
    row, column = check.labels.get(spec.rows, ""), check.labels.get(spec.columns, "")
    return Cell(row, column, outcome, reason, check.seconds, (check.id,), others, check.numbers)


def _merged(same: list[Cell]) -> Cell:
    """One cell of several checks: the worst decides (the first of equals), and the reason names them all."""
    if len(same) == 1:
        return same[0]
    worst = max(same, key=lambda cell: rules.SEVERITY[cell.outcome])
    told = (f"{cell.checks[0]}: {cell.outcome.value}{f', {cell.first_line}' if cell.reason else ''}" for cell in same)
    ids = tuple(name for cell in same for name in cell.checks)
    return Cell(
        row=worst.row,
        column=worst.column,
        outcome=worst.outcome,
        reason=f"{len(same)} checks of this cell: {'; '.join(told)}",
        seconds=sum(cell.seconds for cell in same),
        checks=ids,
        labels=worst.labels,
        numbers=worst.numbers,
    )


def _lack(step: PlannedStep, verdict: StepVerdict, attempt: Attempt | None, damage: str) -> str:
    if attempt is None or damage:
        return damage or verdict.why
    record = attempt.record
    if record.exit_status is None:
        return record.message or "it has no exit status"
    if record.exit_status not in WHOLE:
        return rules.exit_meaning(record.exit_status, step.evidence)
    lost = next((check for check in attempt.checks if check.id == EVIDENCE_CHECK), None)
    if lost is not None:
        return lost.message
    failed = rules.first(attempt.checks, Outcome.FAIL)
    if verdict.outcome is Outcome.DID_NOT_RUN or (verdict.outcome is Outcome.FAIL and failed is None):
        return verdict.why
    return ""


def by_column(places: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Column -> its rows, of some (row, column), each in the order in which it comes first."""
    found: dict[str, list[str]] = {}
    for row, column in places:
        found.setdefault(column, []).append(row)
    return {column: tuple(rows) for column, rows in found.items()}
