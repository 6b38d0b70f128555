# SPDX-License-Identifier: Apache-2.0
"""How often a drift gate fails right attention: some of the replays behind the figures of docs/reference/drift.md."""

import numpy as np
import pytest
from support.gates import declared, resolved

from hileval.ask.sides import sequences_of
from hileval.pocket.rounding import ATTENTIONS, ONE_IN_A_HUNDRED, ask, false_alarms


# In float32 all attentions agree to the last bits, however many sequences are read; rounding needs more of them.
@pytest.mark.parametrize("name", ["hybrid", "packed"])
@pytest.mark.parametrize(("dtype", "sequences"), [("float32", 3), ("bfloat16", 6)])
def test_every_right_attention_passes_in_every_role_and_a_replaced_block_never_does(name, dtype, sequences):
    gate, drift = declared().gates[f"pocket-{name}"], declared().drifts[f"pocket-{name}-drift"]
    few = sequences_of(resolved(gate), drift.model_copy(update={"lengths": {0: sequences}}))
    said = ask(gate.path(gate.model), few, dtype, np.random.default_rng(1))
    found = false_alarms(said, dtype, drawn=sequences - 1, replays=3, seed=1)
    assert (found.roles, len(ATTENTIONS)) == (120, 6)
    assert found.unnoticed == 0
    assert found.beside <= ONE_IN_A_HUNDRED, found
    if dtype == "float32":
        assert found.alone == found.often == 0
    else:
        assert found.alone > 0.1, "the peer alone says too little there, so gates in 16 bits name a second"
