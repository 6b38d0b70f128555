"""Matrices on a terminal: marks in rows and columns that fit its width, and each reason once below."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from hilgate import escape, matrix, matrix_reasons, shown
from hilgate.cli import printing
from hilgate.model import Outcome
from hilgate.pages import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hilgate.cli.gating import Judged
    from hilgate.matrix import Table

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
    console = printing.stdout()
    width = max(NARROWEST, console.width)
    for table in matrix.tables(judged.plan, judged.recorded, judged.verdict):
        whole = every or table.verdict.outcome is not Outcome.PASS
        for line in lines(table, width) if whole else _title(table, width):
            console.print(line, soft_wrap=True)
        console.print(Text(f"table: {_path(judged, table)}", "dim"), soft_wrap=True)


def lines(table: Table, width: int) -> Iterator[Text]:
    """The table and what is to be said of it, no line wider than `width` but for a word that is wider itself."""
    yield Text("")
    yield from _title(table, width)
    first = min(ROW_CELLS, max((cell_len(escape.line(row)) for row in table.rows), default=0)) + 2
    for columns in _blocks(table.columns, first, width):
        yield from _header(columns, first, width)
        step = _steps(columns, first, width)
        for row in table.rows:
            line = Text(_fitted(row, first - 2) + "  ")
            for column in columns:
                cell = table.grid.get((row, column))
                mark = shown.MARKS[cell.outcome] if cell else " "
                line.append(mark, shown.STYLES[cell.outcome] if cell else None)
                line.append(" " * (step[column] - 1))
            line.rstrip()
            yield line
    for outcome, words in matrix_reasons.notes(table):
        style = shown.STYLES[outcome]
        told = shorten(escape.line(words), NOTE_CHARACTERS)
        wrapped = textwrap.wrap(told, width - 2, break_long_words=False, break_on_hyphens=False)
        for number, part in enumerate(wrapped):
            yield Text.assemble((shown.MARKS[outcome] if number == 0 else " ", style), f" {part}")


def _title(table: Table, width: int) -> Iterator[Text]:
    yield from (Text(part, "bold") for part in textwrap.wrap(f"{table.step.key}: {table.summary}", width))


def _blocks(columns: tuple[str, ...], first: int, width: int) -> Iterator[tuple[str, ...]]:
    """Columns that stand side by side: as many as fit with room for the last one's name."""
    most = max(1, (width - first - NAME_CELLS) // STEP + 1)
    for start in range(0, len(columns), most):
        yield columns[start : start + most]


def _steps(columns: tuple[str, ...], first: int, width: int) -> dict[str, int]:
    """Terminal columns for each: as wide as its name where all names fit side by side, else `STEP`."""
    wide = {column: max(STEP, cell_len(escape.line(column)) + 2) for column in columns}
    return wide if first + sum(wide.values()) - 2 <= width else dict.fromkeys(columns, STEP)


def _header(columns: tuple[str, ...], first: int, width: int) -> Iterator[Text]:
    """One line of names, or where they are too wide a line for each, which a bar leads down to its column."""
    step = _steps(columns, first, width)
    wide = [max(STEP, cell_len(escape.line(column)) + 2) for column in columns]
    if list(step.values()) == wide:
        yield Text(" " * first + "".join(_fitted(c, step[c] - 2) + "  " for c in columns).rstrip(), "dim")
        return
    for number, column in enumerate(columns):
        bars = ("│" + " " * (STEP - 1)) * number
        room = width - first - len(bars)
        name = escape.line(column)
        yield Text(" " * first + bars + (name if cell_len(name) <= room else _fitted(name, room)), "dim")


def _fitted(text: str, room: int) -> str:
    """Text in exactly `room` terminal columns, with an ellipsis where it is cut."""
    line = escape.line(text)
    return set_cell_size(line, room) if cell_len(line) <= room else set_cell_size(line, room - 1) + "…"


def _path(judged: Judged, table: Table) -> Path:
    return printing.short(judged.report.with_name(table.spec.file))
