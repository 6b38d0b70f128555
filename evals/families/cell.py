# SPDX-License-Identifier: Apache-2.0
"""One cell of the table: what became of one behaviour of one family. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from families.family import FamilyLimit

Outcome = Literal["pass", "fail", "did not run"]


@dataclass(frozen=True)
class FamilyCell:
    """A behaviour's outcome, why, and what was measured."""

    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    """Who served: backend, route, layout, packing; what stood in for a missing operator."""
    needs: str = ""
    """The condition without which it is declared not to run. A cell that did not run and names none has no excuse."""
    ours: bool = False
    """Whether it failed of an error that our code raised in vLLM's engine: no limit of vLLM explains that."""


def settled(cell: FamilyCell, limit: FamilyLimit | None, *, measured: bool = True) -> FamilyCell:
    """Hold a cell against what is declared about it.

    Args:
        cell: As it came out.
        limit: What this platform is declared not to do; None where it can do it.
        measured: Whether that was measured on this model. Another of its family may escape the limit.

    Returns:
        A failure that matches becomes *did not run*, with the error as its reason and the condition that it needs; an
        error that our code raised never does. A cell that passes although it is declared not to run becomes a failure,
        so that declarations end with what they describe; where only some machines have the limit the cell keeps the
        condition, and hilgate asks whether this machine meets it.
    """
    if limit is None or cell.ours:
        return cell
    if cell.outcome != "pass":
        if not limit.error.search(cell.reason):
            return cell
        reason = cell.reason if cell.outcome == "did not run" else f"vLLM here: {cell.reason}"
        return FamilyCell("did not run", reason, cell.seconds, needs=limit.needs)
    if not measured:
        return cell
    if not limit.everywhere:
        return replace(cell, needs=limit.needs)
    reason = (
        f"declared not to run here ({limit.error.pattern}), but it runs and is right: remove it from the declaration"
    )
    return FamilyCell("fail", reason, cell.seconds, cell.numbers, cell.labels)


SEVERITY: tuple[Outcome, ...] = ("pass", "did not run", "fail")


def worse(one: FamilyCell | None, other: FamilyCell) -> FamilyCell:
    """The worse of two cells of one behaviour, that several engines drove; of equals the first, with both times."""
    if one is None:
        return other
    chosen = max(one, other, key=lambda cell: SEVERITY.index(cell.outcome))
    return replace(chosen, seconds=one.seconds + other.seconds)
