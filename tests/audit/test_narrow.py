"""Declared narrow loads: one row of one Triton, checked both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton

from pagedkv.audit import judge, narrow
from pagedkv.audit.budgets import KernelBudget, load_budgets

ENTRY = """[[narrow]]
triton = "{version}"
row = "gfx942/ours/a/attend"
pointers = ["value_cache"]
why = "it does"
"""


def test_an_entry_holds_for_its_row_and_its_compiler(tmp_path):
    file = tmp_path / "narrow.toml"
    file.write_text(ENTRY.format(version=triton.__version__))
    assert narrow.declared("gfx942/ours/a/attend", file) == ("value_cache",)
    assert narrow.declared("gfx950/ours/a/attend", file) == ()
    other = tmp_path / "other.toml"
    other.write_text(ENTRY.format(version="0.0"))
    assert narrow.declared("gfx942/ours/a/attend", other) == ()


@pytest.mark.parametrize("text", ['[[narrow]]\ntriton = "3.8.0"\n', ENTRY.replace('["value_cache"]', "[]")])
def test_an_entry_that_does_not_say_enough(text, tmp_path):
    file = tmp_path / "narrow.toml"
    file.write_text(text)
    with pytest.raises(narrow.InvalidNarrowError, match="expected"):
        narrow.declared("any", file)


def test_a_declared_load_that_is_wide_again_fails(figures, monkeypatch):
    monkeypatch.setattr(judge, "declared", lambda _: ("key_cache",))
    budgets = load_budgets()
    budgets = replace(budgets, kernels=budgets.kernels | {"attend": KernelBudget(wide=("key_cache",))})
    result = figures()
    assert budgets.violations(result) == []

    class Row:
        id, twin, case = "gfx942/ours/a/attend", "", type("Case", (), {"scattered": ()})

    Row.result = result
    outcome, message = judge._ours(Row, budgets)
    assert (outcome, "remove that entry" in message) == ("fail", True)
