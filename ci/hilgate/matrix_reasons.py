"""What stands below a matrix: why cells are not a pass, each reason once with the cells it holds for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import rules
from hilgate.matrix import by_column
from hilgate.model import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hilgate.matrix import Table

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
