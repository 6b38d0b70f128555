# SPDX-License-Identifier: Apache-2.0
"""vLLM's ROCm backends keep the contract of every operator that they call, but for the declared faults."""

from __future__ import annotations

import re

import pytest
import torch
from operators.cases import CASES
from operators.contracts import CONTRACTS
from operators.faults import declared, problems

FAULTS = declared()
NAMES = [case.id for case in CASES]
REACHED_BY_A_BUG = {"aiter.pa_fwd_asm"}
"""vLLM 0.32 calls paged_attention_common; the bug vllm-shuffle-head-size calls this one."""
ON_GFX950 = {name for name in CONTRACTS if "prefill_ps" in name or "ps_metadata" in name or name.endswith("_gluon")}
ON_GFX950 |= {"aiter.mla_reduce_v1"}
"""Operators that vLLM calls on that arch alone; a GPU is one arch, a CPU stands for each."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_backend_keeps_contracts(case, results):
    record = results.get(case.id) or results[""]  # "" says why no case ran
    if record["outcome"] != "ran":
        pytest.skip(record["why"])  # names no condition: hilgate says of the step that it did not run
    if said := problems(record, FAULTS):
        pytest.fail("\n".join(said), pytrace=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.operator}-{fault.promise}")
def test_declared_fault_has_cases_and_an_address(fault):
    assert any(re.fullmatch(fault.cases, name) for name in NAMES), "no case shows it"
    assert re.search(r"[\w-]+/[\w-]+(#\d+| v\d)", fault.where), "it names no upstream address"


def test_every_contract_is_reached(results):
    reached = {operator for record in results.values() for operator in record.get("calls", ())}
    missing = set(CONTRACTS) - reached - (ON_GFX950 if torch.version.hip else set())
    assert missing == REACHED_BY_A_BUG
