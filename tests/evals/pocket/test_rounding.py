# SPDX-License-Identifier: Apache-2.0
"""How often a drift gate fails right attention: a slice of the table in evals/README.md."""

from hileval.ask.drift import sequences_of
from hileval.gates.declare import load_gates
from hileval.pocket.rounding import DTYPES, false_alarms


def test_right_attention_is_no_drift_in_any_dtype_where_a_second_one_says_what_rounding_is():
    declared = load_gates()
    gate, drift = declared.gates["pocket-hybrid"], declared.drifts["pocket-hybrid-drift"]
    few = sequences_of(gate, drift.model_copy(update={"lengths": {0: 12}}))
    found = list(false_alarms(gate.path(gate.model), few, drawn=8, replays=20, seed=1, batches=(4,)))
    assert [row.dtype for row in found] == [dtype for dtype in DTYPES for _ in range(2)]
    assert max(row.beside for row in found) <= 0.05
    assert max(row.unnoticed for row in found) == 0
    assert [row.alone for row in found if row.dtype == "float32"] == [0, 0]
    assert min(row.alone for row in found if row.dtype == "bfloat16") > 0.5, "the peer alone says too little there"
