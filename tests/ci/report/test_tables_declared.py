"""Declared tables of cells: what is planned with them, and that each mistake is named with its place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.declarations import EVERYTHING, LAPTOP, declare, step
from support.plans import hilgate, write_repository

from hilgate.declare.load import InvalidDeclarationsError, load
from hilgate.errors import Exit
from hilgate.model import Matrix
from hilgate.plan.make import assemble

ROOT = Path(__file__).resolve().parents[3]
GOOD = {"rows": "arch", "columns": "dtype", "file": "cells.json"}
COMMANDS = {"one": "python -m x", "two": "python -m x"}


def mistakes(root, **steps):
    write_repository(root, COMMANDS, **{key: {"matrix": spec} for key, spec in steps.items()})
    with pytest.raises(InvalidDeclarationsError) as caught:
        load(root)
    assert caught.value.exit_status == Exit.INVALID_DECLARATION
    return [str(mistake) for mistake in caught.value.mistakes]


def test_it_is_planned_with_the_step():
    planned = assemble(declare(a=[step("x", matrix=GOOD), step("y")]), EVERYTHING, LAPTOP, profile="gate")
    assert [one.step.matrix for one in planned.steps] == [Matrix(**GOOD), None]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"rows": "arch", "file": "m.json"}, "matrix: key 'columns' is missing; The label that names the column"),
        (GOOD | {"rows": ""}, "matrix.rows: must be a word of lower case letters, digits and '_'"),
        (GOOD | {"columns": "-b"}, "matrix.columns: must be a word of lower case letters"),
        (GOOD | {"columns": "arch"}, "matrix.columns: 'arch' names the rows already; name another label"),
        (GOOD | {"file": "../m.json"}, "matrix.file: must be a plain file name, lower case, that ends in .json"),
        (GOOD | {"file": "m.txt"}, "matrix.file: must be a plain file name, lower case, that ends in .json"),
        (GOOD | {"file": "plan.json"}, "matrix.file: 'plan.json' is a file of every build; choose another name"),
        (GOOD | {"row": "x"}, "unknown key 'row'; did you mean 'rows'"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path, spec, expected):
    (found,) = mistakes(tmp_path, one=spec)
    assert expected in found
    assert "ci/areas/samples.yaml:1 steps[0]" in found


def test_a_file_belongs_to_one_declared_step(tmp_path):
    (found,) = mistakes(tmp_path, one=GOOD, two=GOOD)
    assert "steps[1].matrix.file: 'cells.json' is taken by ci/areas/samples.yaml:1 steps[0].matrix" in found


def test_explain_tells_of_it(tmp_path):
    root = write_repository(tmp_path, COMMANDS, one={"matrix": GOOD})
    assert "arch x dtype, in cells.json" in hilgate(root, "explain", "one").stdout
