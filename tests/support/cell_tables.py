# SPDX-License-Identifier: Apache-2.0
"""Steps whose checks are cells of a table, for tests of everything that shows them."""

from __future__ import annotations

from support.builds import built
from support.plans import step

from hilgate.model.declaration import Matrix
from hilgate.model.record import Check, Outcome
from hilgate.report import tables

SPEC = Matrix(rows="fruit", columns="test", file="cells.json")
STEP = step("grid", "x", matrix=SPEC, may_lack={"variable:ORCHARD": {"why": "who picks needs an orchard", "most": 9}})
WORDS = {
    "fail": "max_abs_err 0.5 > 0.001\nat line 2",
    "did not run": "did not run here: no orchard",
    "inconclusive": "too few",
}


def cell(row, column, outcome="pass", message=None, **more):
    """A check of one cell; an empty name leaves its label out."""
    labels = {name: value for name, value in ((SPEC.rows, row), (SPEC.columns, column)) if value}
    labels |= {"needs": "variable:ORCHARD"} if outcome == "did not run" else {}
    words = WORDS.get(outcome, "") if message is None else message
    name = more.pop("id", f"t.py::test_cell[{row}-{column}]")
    return Check(id=name, outcome=Outcome(outcome), message=words, labels=labels | more.pop("labels", {}), **more)


def build(*checks, one=STEP):
    """(plan, recorded, verdict) of a step that left these cells; without any, of one that left no record."""
    return built((one, list(checks) or None))


def table(*checks):
    """The table of such a step."""
    (found,) = tables.tables(*build(*checks))
    return found


def grid(rows, columns, outcome=lambda _row, _column: "pass"):
    """Cells of every row and column; those whose outcome is empty are not asked."""
    return [cell(r, c, outcome(r, c)) for r in rows for c in columns if outcome(r, c)]
