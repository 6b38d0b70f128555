# SPDX-License-Identifier: Apache-2.0
"""One cell of the table: what became of one behaviour of one family. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

Outcome = Literal["pass", "fail", "did not run"]


@dataclass(frozen=True)
class Cell:
    """A behaviour's outcome, why, and what was measured."""

    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    """Who served: backend, route, layout, packing; what stood in for a missing operator."""


def settled(cell: Cell, known: str | None, *, measured: bool = True) -> Cell:
    """Hold a cell against what is declared about it.

    Args:
        cell: As it came out.
        known: Regular expression of the error that this platform is declared to give; None where it can do it.
        measured: Whether that was measured on this model. Another of its family may escape the limit.

    Returns:
        A failure that matches becomes *did not run*, with the error as its reason. A cell that passes although it is
        declared not to run becomes a failure, so that declarations end with what they describe.
    """
    if known is None:
        return cell
    if cell.outcome == "fail" and re.search(known, cell.reason):
        return Cell("did not run", f"vLLM here: {cell.reason}", cell.seconds)
    if cell.outcome == "pass" and measured:
        reason = f"declared not to run here ({known}), but it runs and is right: remove it from the declaration"
        return Cell("fail", reason, cell.seconds, cell.numbers, cell.labels)
    return cell


SEVERITY: tuple[Outcome, ...] = ("pass", "did not run", "fail")


def worse(one: Cell | None, other: Cell) -> Cell:
    """The worse of two cells of one behaviour, that several engines drove; of equals the first, with both times."""
    if one is None:
        return other
    chosen = max(one, other, key=lambda cell: SEVERITY.index(cell.outcome))
    return replace(chosen, seconds=one.seconds + other.seconds)


def write(cells: dict[str, Cell], path: Path) -> None:
    """Write the cells of a family at once, so that half a run is no result."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({name: asdict(cell) for name, cell in cells.items()}))
    partial.rename(path)


def read(path: Path) -> dict[str, Cell]:
    """Read what `write` wrote."""
    return {name: Cell(**cell) for name, cell in json.loads(path.read_text()).items()}
