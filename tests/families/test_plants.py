# SPDX-License-Identifier: Apache-2.0
"""Planted faults: each turns its cell red, and leaves green those that do not meet it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs package:vllm")

from support.model_faults import PLANTS

from families.fleet import Fleet

SAID = (
    "log-probabilities are",
    "NaN or infinite",
    "the draft of token",
    "compiled while serving: pagedkv.attention.kernel.attention_kernel",
)

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    spec = {"behaviours": ["prefill"], "fuzz": {"seed": 1, "examples": 1}, "plants": "support.model_faults"}
    names = [f"{fault.family}+{plant}" for plant, fault in PLANTS.items()]
    return Fleet(tmp_path_factory.mktemp("plants"), names, spec, processes=1)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_turns_its_cell_red(plant, planted, record_property):
    fault = PLANTS[plant]
    cells = planted.cells(f"{fault.family}+{plant}")
    red = cells[fault.turns_red]
    record_property("reason", red.reason)
    assert red.outcome == "fail", f"{plant}: {fault.turns_red} is {red.outcome}"
    assert any(words in red.reason for words in SAID), red.reason
    assert {name: cells[name].outcome for name in fault.leaves_green} == dict.fromkeys(fault.leaves_green, "pass")
