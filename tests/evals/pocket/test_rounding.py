# SPDX-License-Identifier: Apache-2.0
"""How often a drift gate fails right attention: some of the replays behind the figures of docs/reference/drift.md."""

import numpy as np
import pytest
from support.gates import resolved

from hileval.ask.sides import sequences_of
from hileval.gates.declare import load_gates
from hileval.pocket.rounding import ATTENTIONS, ONE_IN_A_HUNDRED, ask, false_alarms


@pytest.mark.parametrize("name", ["hybrid", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_right_attention_passes_in_every_role_and_a_replaced_block_never_does(name, dtype):
    declared = load_gates()
    gate, drift = declared.gates[f"pocket-{name}"], declared.drifts[f"pocket-{name}-drift"]
    few = sequences_of(resolved(gate), drift.model_copy(update={"lengths": {0: 12}}))
    said = ask(gate.path(gate.model), few, dtype, np.random.default_rng(1))
    found = false_alarms(said, dtype, drawn=10, replays=3, seed=1)
    assert (found.roles, len(ATTENTIONS)) == (120, 6)
    assert found.unnoticed == 0
    assert found.beside <= ONE_IN_A_HUNDRED, found
    if dtype == "float32":
        assert found.alone == found.often == 0
    else:
        assert found.alone > 0.1, "the peer alone says too little there, so gates in 16 bits name a second"
