"""Tables of the steps that declare `columns`: code objects, accuracy, measured errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hilgate.model import Check, Outcome, Plan
    from hilgate.results import Recorded

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
        if not step.columns or attempt is None or not attempt.checks:
            continue
        checks = sorted(attempt.checks, key=lambda check: check.outcome.value == "pass")
        numeric = tuple(_is_numeric(column, attempt.checks) for column in step.columns)
        rows = tuple(
            Row(check.id, check.outcome, tuple(cell(check, column) for column in step.columns))
            for check in checks[:row_limit]
        )
        more = len(checks) - len(rows)
        not_green = sum(check.outcome.value != "pass" for check in checks)
        tables.append(StepTable(step.key, step.label, step.columns, numeric, rows, more, not_green))
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
