"""Tables of steps whose checks are cells, named by two labels: family and behaviour, arch and dtype. Pure.

A check that lacks a label has no place in the table and is told beside it. Two checks of one cell are one cell: the
worse outcome wins. A step that may have lost cells says so, and then the table is not the whole one.

The cells of a matrix as a file beside the other reports: a JSON list, and each record can be read alone.

Kinds of records: `cell`; `check`, which lacks a label and so has no place; and `step`, which says why cells of a step
may be missing or do not count. A file with a `step` in it is not the whole table.

What stands below a matrix: why cells are not a pass, each reason once with the cells it holds for. Pure.

Tables of the steps that declare `columns`: code objects, accuracy, measured errors.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import Exit
from hilgate.model import Counts, Outcome
from hilgate.run import outcome as rules
from hilgate.run.evidence import EVIDENCE_CHECK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from hilgate.model import Check, Matrix, Number, Plan, PlannedStep, StepVerdict, Verdict
    from hilgate.run.results import Attempt, Recorded


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
    return tuple(_table(step, step.step.matrix, recorded, decided[step.key]) for step in plan.steps if step.step.matrix)


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
        return rules.exit_meaning(record.exit_status, step.step.evidence)
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


_OPENING = '[\n{{"matrix": "{name}"'
"""How each of these files begins, so that one is known by its name and first bytes whatever plan it was of."""


def write(folder: Path, plan: Plan, digest: str, tables: Iterable[Table]) -> tuple[Path, ...]:
    """Write each file that the plan's steps name, and remove those of other plans; returns the paths.

    Args:
        folder: A results folder.
        plan: What was expected.
        digest: `plan_digest(plan)`, of the whole plan where only a part of it is reported.
        tables: `matrix.tables`; those of one file are the same declared step on several devices.
    """
    clear(folder)
    lines: dict[str, list[str]] = {}
    for table in tables:
        lines.setdefault(table.spec.file, []).extend(json.dumps(record) for record in records(table, plan, digest))
    for name, found in lines.items():
        fresh = folder / f"{name}.new"
        fresh.write_text("[\n" + ",\n".join(found) + "\n]\n", encoding="utf-8")
        fresh.replace(folder / name)
    return tuple(folder / name for name in lines)


def records(table: Table, plan: Plan, digest: str) -> Iterator[dict[str, object]]:
    """The records of one table, in the order in which the checks ran; a `step` comes last. There is always one."""
    attempt = table.attempt
    about: dict[str, object] = {
        "step": table.step.key,
        "device": table.step.device,
        "command": table.step.step.command,
        "commit": plan.commit,
        "dirty": plan.dirty,
        "plan_digest": digest,
        "environment": attempt.record.environment.model_dump(mode="json") if attempt else None,
    }
    for cell in table.cells:
        names = {table.spec.rows: cell.row or None, table.spec.columns: cell.column or None}
        options = table.spec.options({label: value for label, value in names.items() if value})
        yield {
            "matrix": table.spec.file,
            "kind": "cell" if all(names.values()) else "check",
            **names,
            "outcome": cell.outcome.value,
            "reason": cell.reason,
            "seconds": cell.seconds,
            "checks": list(cell.checks),
            "labels": dict(cell.labels),
            "numbers": dict(cell.numbers),
            "reproduce": f"hilgate run {table.step.key} {options}".rstrip(),
            **about,
        }
    if table.lack or not table.grid:
        yield {
            "matrix": table.spec.file,
            "kind": "step",
            table.spec.rows: None,
            table.spec.columns: None,
            "outcome": table.verdict.outcome.value,
            "reason": table.lack or f"no check has the labels {table.spec.rows} and {table.spec.columns}",
            "seconds": table.verdict.seconds or 0.0,
            "checks": [],
            "labels": {},
            "numbers": {},
            "reproduce": table.verdict.reproduce,
            **about,
        }


def found(folder: Path) -> tuple[Path, ...]:
    """The files of matrices in a results folder, of whatever plan."""
    return tuple(path for path in sorted(folder.glob("*.json")) if _is_ours(path))


def clear(folder: Path) -> None:
    """Remove them: no table may outlive the verdict that it belonged to."""
    for path in found(folder):
        path.unlink()


def _is_ours(path: Path) -> bool:
    opening = _OPENING.format(name=path.name).encode()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(opening)) == opening


NOTES = 30
"""Of a kind, below a table; the others are counted."""


@dataclass(frozen=True)
class Reason:
    """Why some cells are not a pass, told once, and which cells those are, as in `decode, prefix: a, b; large: a`."""

    outcome: Outcome
    words: str
    where: str


def reasons(table: Table) -> tuple[Reason, ...]:
    """Each distinct reason (first line) of cells that did not pass, worst first, otherwise in the order they ran."""
    held: dict[tuple[Outcome, str], list[tuple[str, str]]] = {}
    for place, cell in table.grid.items():
        if cell.outcome is not Outcome.PASS:
            held.setdefault((cell.outcome, cell.first_line), []).append(place)
    ordered = sorted(held.items(), key=lambda item: -rules.SEVERITY[item[0][0]])
    return tuple(Reason(outcome, words, _where(table, places)) for (outcome, words), places in ordered)


def notes(table: Table) -> Iterator[tuple[Outcome, str]]:
    """What stands below a table: reasons, checks without a place, why it is not whole; at most `NOTES` of a kind."""
    found = reasons(table)
    yield from ((reason.outcome, f"{reason.where}: {reason.words}") for reason in found[:NOTES])
    if len(found) > NOTES:
        yield found[NOTES].outcome, f"and {len(found) - NOTES} more reasons in {table.spec.file}"
    for cell in table.outside[:NOTES]:
        lacking = " and no ".join(
            label for label, name in ((table.spec.rows, cell.row), (table.spec.columns, cell.column)) if not name
        )
        told = f": {cell.first_line}" if cell.reason else ""
        yield cell.outcome, f"not in the table, it has no {lacking}: {', '.join(cell.checks)}{told}"
    if len(table.outside) > NOTES:
        yield table.outside[NOTES].outcome, f"and {len(table.outside) - NOTES} more that are not in the table"
    if table.lack:
        yield table.verdict.outcome, f"not the whole table: {table.lack}"


def _where(table: Table, places: Iterable[tuple[str, str]]) -> str:
    """Columns with the same rows together; `every` where no other row was asked there."""
    together: dict[str, list[str]] = {}
    for column, rows in by_column(places).items():
        words = _listed(rows, _without(table.asked[column], rows), table.spec.rows)
        together.setdefault(words, []).append(column)
    return "; ".join(
        f"{_listed(columns, _without(table.columns, columns), table.spec.columns)}: {words}"
        for words, columns in together.items()
    )


def _without(names: Iterable[str], some: Iterable[str]) -> tuple[str, ...]:
    left_out = frozenset(some)
    return tuple(name for name in names if name not in left_out)


def _listed(names: Iterable[str], others: tuple[str, ...], label: str) -> str:
    """Names, or whichever is shorter to read: `every family but whisper`."""
    found = tuple(names)
    if len(found) < 2 or 2 * len(others) > len(found):
        return ", ".join(found)
    return f"every {label}" + (f" but {', '.join(others)}" if others else "")


FOLD_ROWS = 30
NOTHING = "–"  # noqa: RUF001 - a dash, where a check has no such label or number


@dataclass(frozen=True)
class Row:
    """One check: its name, its outcome and a cell per column."""

    id: str
    outcome: Outcome
    cells: tuple[str, ...]


@dataclass(frozen=True)
class StepTable:
    """The checks of one step.

    Attributes:
        numeric: Per column, whether every cell with a value is a number (set flush right).
        more: Rows that are not shown.
        not_green: How many checks did not pass, shown or not.
    """

    key: str
    label: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[Row, ...]
    more: int
    not_green: int

    @property
    def is_long(self) -> bool:
        """Whether it would push what follows off the reader's screen, and is better folded."""
        return len(self.rows) > FOLD_ROWS


def step_tables(plan: Plan, recorded: Recorded, row_limit: int) -> tuple[StepTable, ...]:
    """A table per step that declares columns and recorded checks, short ones first; not green checks lead each."""
    tables = []
    for step in plan.steps:
        attempt = recorded.last(step.key)
        if not step.step.columns or attempt is None or not attempt.checks:
            continue
        checks = sorted(attempt.checks, key=lambda check: check.outcome.value == "pass")
        numeric = tuple(_is_numeric(column, attempt.checks) for column in step.step.columns)
        rows = tuple(
            Row(check.id, check.outcome, tuple(cell(check, column) for column in step.step.columns))
            for check in checks[:row_limit]
        )
        more = len(checks) - len(rows)
        not_green = sum(check.outcome.value != "pass" for check in checks)
        tables.append(StepTable(step.key, step.label, step.step.columns, numeric, rows, more, not_green))
    return tuple(sorted(tables, key=lambda table: len(table.rows) + table.more))


def cell(check: Check, column: str) -> str:
    """A number with at most four significant digits unless it is whole, a label as it is, else a dash.

    The column `check` is the id.
    """
    if column == "check":
        return check.id
    if column in check.numbers:
        number = check.numbers[column]
        return f"{number:,}".replace(",", "\u202f") if isinstance(number, int) else f"{number:.4g}"
    return check.labels.get(column, NOTHING)


def _is_numeric(column: str, checks: tuple[Check, ...]) -> bool:
    """Whether every value of a column is a number; sizes come as labels, because they name the case."""
    labels = [check.labels[column] for check in checks if column in check.labels]
    return all(label.isdigit() for label in labels) and (bool(labels) or any(column in c.numbers for c in checks))
