# SPDX-License-Identifier: Apache-2.0
"""The stand-ins compute the recurrences, checked against plain loops in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mamba import oracle

from families import selective_scan, stand_ins
from families.oracle import _round_states

CHANNELS, GROUPS, STATES = 6, 2, 3
SLOTS, NULL = 9, 0
UNUSED = torch.nan


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights():
    return -drawn(CHANNELS, STATES, seed=1).exp(), drawn(CHANNELS, seed=2), drawn(CHANNELS, seed=3)


def recurrence(u, delta, A, B, C, D, z, bias, state):
    """One sequence, token by token: outputs [channels, tokens] and the state after the last token."""
    dt = oracle.step_size(delta.T[..., None], None if bias is None else bias[:, None], softplus=True)
    u, z = (rows.T[..., None] for rows in (u, z))
    B, C = (rows.permute(2, 0, 1) for rows in (B, C))
    found = oracle.scan(u, dt, A[:, None], B, C, D=D, z=z, initial=state[:, None])
    return found.y[..., 0].T, found.state[:, 0]


def scan(u, delta, A, B, C, D, z, bias, states, *, starts, slots, resumes, tables=(None,) * 5):
    selective_scan.selective_scan(
        u, delta, A, B, C, D, z, bias, True, starts, slots, resumes, states, NULL, 1024, *tables
    )


def close(got, want, dtype=torch.float32):
    """An fp32 sum of 30 terms of size one is off by less than 1e-5; 16 bits round the result once."""
    atol = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=1e-2 if dtype is not torch.float32 else 1e-5, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_scan_of_a_batch(biased, dtype):
    """Sequences of 7, 1 and 5 tokens after one that is padding; two go on from a state."""
    starts = torch.tensor([0, 2, 9, 10, 15], dtype=torch.int32)
    slots = torch.tensor([NULL, 4, 7, 2], dtype=torch.int32)
    resumes = torch.tensor([True, False, True, True])
    A, D, bias = weights()
    bias = bias if biased else None
    u, delta, z = (drawn(CHANNELS, 15, seed=s, dtype=dtype) for s in (4, 5, 6))
    B, C = (drawn(GROUPS, STATES, 15, seed=s, dtype=dtype) for s in (7, 8))
    states = torch.full((SLOTS, CHANNELS, STATES), UNUSED)
    states[7], states[2] = drawn(CHANNELS, STATES, seed=9), drawn(CHANNELS, STATES, seed=10)
    before, gate = states.clone(), z.clone()
    scan(u, delta, A, B, C, D, z, bias, states, starts=starts, slots=slots, resumes=resumes)
    for i in range(1, len(slots)):
        part = slice(int(starts[i]), int(starts[i + 1]))
        begin = before[slots[i]] if resumes[i] else torch.zeros(CHANNELS, STATES)
        own_u, own_delta, own_z, own_B, own_C = (rows[..., part] for rows in (u, delta, gate, B, C))
        y, after = recurrence(own_u, own_delta, A, own_B, own_C, D, own_z, bias, begin)
        close(z[:, part], y, dtype)
        close(states[slots[i]], after)
    assert torch.equal(z[:, :2], gate[:, :2]), "padding was written"
    assert states[[0, 1, 3, 5, 6, 8]].isnan().all(), "a slot of nobody was written"


def test_update_is_one_token_of_the_scan():
    A, D, bias = weights()
    x, dt, z = (drawn(3, CHANNELS, seed=s) for s in (4, 5, 6))
    B, C = (drawn(3, STATES, seed=s) for s in (7, 8))
    states, out = torch.full((SLOTS, CHANNELS, STATES), UNUSED), torch.full((3, CHANNELS), UNUSED)
    states[3], states[6] = drawn(CHANNELS, STATES, seed=9), drawn(CHANNELS, STATES, seed=10)
    before = states.clone()
    read, write = torch.tensor([3, NULL, 6]), torch.tensor([3, NULL, 5])
    selective_scan.state_update(states, x, dt, A, B, C, D, z, bias, True, read, write, NULL, out, None, None)
    for i, source, target in ((0, 3, 3), (2, 6, 5)):
        columns = [rows[i, :, None] for rows in (x, dt)], [rows[i, None, :, None] for rows in (B, C)]
        y, after = recurrence(*columns[0], A, *columns[1], D, z[i, :, None], bias, before[source])
        close(out[i], y[:, 0])
        close(states[target], after)
    assert out[1].isnan().all()
    assert torch.equal(states[6], before[6])
    assert states[[0, 1, 2, 4, 7, 8]].isnan().all()


def test_what_the_stand_ins_cannot_is_refused():
    A, D, _bias = weights()
    some = torch.zeros(1, CHANNELS)
    with pytest.raises(NotImplementedError, match="draft tokens"):
        selective_scan.state_update(
            A[None], some, some, A, some, some, D, some, None, True, some[0], some[0], NULL, some, None, None
        )
    with pytest.raises(NotImplementedError, match="last states alone"):
        scan(some, some, A, some, some, D, some, None, A, starts=None, slots=None, resumes=None, tables=(some,))


def test_how_vllm_rounds_states_is_asked_of_its_operator():
    """A thousand states, each the nearest bfloat16 or each cut towards zero, as one number of the probe has said."""
    pytest.importorskip("vllm", reason="needs package:vllm")
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        assert not stand_ins.states_are_cut()
        return
    cut = stand_ins.states_are_cut()
    state, ones = torch.zeros(1, 4, 16, 16, dtype=torch.bfloat16), torch.ones(1, 4, 16)
    added, x = drawn(1, 1, 16, seed=21), drawn(1, 4, 16, seed=22)
    a, b = torch.zeros(4, 16, 16), ones[:, :1]
    _custom_ops.selective_state_update_cpu(
        state, x, ones, a, added, b, *[None] * 3, False, None, None, -1, x.clone(), None, None
    )
    exact = x[..., None] * added[:, :, None]
    towards_zero = torch.from_numpy((exact.numpy().view(np.uint32) & 0xFFFF0000).view(np.float32))
    assert torch.equal(state.float(), towards_zero if cut else exact.bfloat16().float())
    kept = SimpleNamespace(layers=[SimpleNamespace(recurrent_states={0: exact.double(), 1: None})])
    _round_states(kept, torch.bfloat16, cut=cut)
    assert torch.equal(kept.layers[0].recurrent_states[0], state.double()), "the reference rounds as the engine does"
