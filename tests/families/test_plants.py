# SPDX-License-Identifier: Apache-2.0
"""Planted faults: each turns its cell red, and leaves green those that do not meet it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs package:vllm")

from support.model_faults import PLANTS

from families.processes import Drivers

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    spec = {"behaviours": ["prefill"], "fuzz": {"seed": 1, "examples": 1}, "plants": "support.model_faults"}
    names = [f"{fault.family}+{plant}" for plant, fault in PLANTS.items()]
    return Drivers(tmp_path_factory.mktemp("plants"), names, spec, processes=1)


@pytest.mark.parametrize("fault", PLANTS.values(), ids=PLANTS)
def test_a_planted_fault_turns_its_cell_red(fault, planted, record_property):
    """Without one all cells pass: `test_families.py`."""
    cells = planted.cells(f"{fault.family}+{fault.name}")
    record_property("reason", cells[fault.fails].reason)
    assert {name for name, cell in cells.items() if cell.outcome == "fail"} == {fault.fails}
    fault.judge({name: "" if cells[name].outcome == "pass" else cells[name].reason or "?" for name in cells})


def test_a_dead_driver_fails_its_cells_with_its_last_words(tmp_path):
    """One has a module of faults that is not there; the other is given no time."""
    spec = {"behaviours": ["prefill"], "fuzz": {"seed": 1, "examples": 1}, "plants": "no_such_module"}
    (cell,) = Drivers(tmp_path, ["jamba"], spec, processes=1).cells("jamba").values()
    assert cell.outcome == "fail"
    assert "the engine's process ended with status 1: " in cell.reason
    assert "No module named 'no_such_module'" in cell.reason
    hung = Drivers(tmp_path, ["jamba", "lfm2"], spec, processes=1, seconds=0)
    assert {hung.cells(name)["prefill"].outcome for name in ("jamba", "lfm2")} == {"fail"}
    assert "took longer than 0 s" in hung.cells("lfm2")["prefill"].reason
