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


def recurrence(u, delta, A, B, C, D, z, bias, state, *, softplus):
    """One sequence, token by token: outputs [channels, tokens] and the state behind the last token."""
    dt = oracle.step_size(delta.T[..., None], None if bias is None else bias[:, None], softplus=softplus)
    tokens = [None if rows is None else rows.T[..., None] for rows in (u, z)]
    B, C = (rows.permute(2, 0, 1) for rows in (B, C))
    found = oracle.scan(tokens[0], dt, A[:, None], B, C, D=D, z=tokens[1], initial=state[:, None])
    return found.y[..., 0].T, found.state[:, 0]


def scan(u, delta, A, B, C, D, z, bias, states, *, softplus=True, starts=None, slots=None, resumes=None, blocks=()):
    size, *tables = blocks or (1024, None, None, None, None, None)
    selective_scan.selective_scan(
        u, delta, A, B, C, D, z, bias, softplus, starts, slots, resumes, states, NULL, size, *tables
    )


def close(got, want, dtype=torch.float32):
    """An fp32 sum of 30 terms of size one is off by less than 1e-5; 16 bits round the result once."""
    atol = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=1e-2 if dtype is not torch.float32 else 1e-5, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optional", [True, False])
def test_scan_of_a_batch(optional, dtype):
    """Four sequences of 7, 1, 0 and 5 tokens behind one that is padding; two go on from a state."""
    lengths = [2, 7, 1, 5]
    starts = torch.tensor([0, 2, 9, 10, 15], dtype=torch.int32)
    slots = torch.tensor([NULL, 4, 7, 2], dtype=torch.int32)
    resumes = torch.tensor([True, False, True, True])
    A, D, bias = weights()
    D, bias = (D, bias) if optional else (None, None)
    total = sum(lengths)
    u, delta, z = (drawn(CHANNELS, total, seed=s, dtype=dtype) for s in (4, 5, 6))
    B, C = (drawn(GROUPS, STATES, total, seed=s, dtype=dtype) for s in (7, 8))
    z = z if optional else None
    states = torch.full((SLOTS, CHANNELS, STATES), UNUSED)
    states[7], states[2] = drawn(CHANNELS, STATES, seed=9), drawn(CHANNELS, STATES, seed=10)
    before, out = states.clone(), (delta if z is None else z)
    inputs = [x.clone() if x is not None else None for x in (u, delta, z)]
    scan(u, delta, A, B, C, D, z, bias, states, starts=starts, slots=slots, resumes=resumes, softplus=optional)
    for i in range(1, len(lengths)):
        part = slice(int(starts[i]), int(starts[i + 1]))
        begin = before[slots[i]] if resumes[i] else torch.zeros(CHANNELS, STATES)
        own = [x[..., part] if x is not None else None for x in (*inputs, B, C)]
        y, after = recurrence(own[0], own[1], A, own[3], own[4], D, own[2], bias, begin, softplus=optional)
        close(out[:, part], y, dtype)
        close(states[slots[i]], after)
    assert torch.equal(out[:, :2], (inputs[1] if z is None else inputs[2])[:, :2]), "padding was written"
    others = [s for s in range(SLOTS) if s not in (4, 7, 2)]
    assert states[others].isnan().all(), "a slot of nobody was written"


def test_scan_of_a_rectangle():
    """Without `query_start_loc` every sequence has its own row, and sequence i has slot i."""
    A, D, bias = weights()
    u, delta = (drawn(2, CHANNELS, 5, seed=s) for s in (4, 5))
    B, C = (drawn(2, GROUPS, STATES, 5, seed=s) for s in (7, 8))
    states, dt = torch.full((2, CHANNELS, STATES), UNUSED), delta.clone()
    scan(u, delta, A, B, C, D, None, bias, states)
    for i in range(2):
        y, after = recurrence(u[i], dt[i], A, B[i], C[i], D, None, bias, torch.zeros(CHANNELS, STATES), softplus=True)
        close(delta[i], y)
        close(states[i], after)


def test_scan_fills_the_blocks_of_a_prefix_cache():
    """The first sequence begins in the middle of block 1 and ends in that of block 3; the second fills one block."""
    size, A, (D, bias) = 4, weights()[0], weights()[1:]
    starts = torch.tensor([0, 8, 11])
    slots = torch.tensor([[5, 6, 7, 8], [1, 2, NULL, NULL]])
    first, last, begin = torch.tensor([1, 0]), torch.tensor([3, 0]), torch.tensor([0, 0])
    cuts, ends = torch.tensor([0, 2, 6, 8, 11]), torch.tensor([2, 3])  # tokens 2 + 4 + 2, and 3
    u, delta = (drawn(CHANNELS, 11, seed=s) for s in (4, 5))
    B, C = (drawn(GROUPS, STATES, 11, seed=s) for s in (7, 8))
    states, dt = torch.full((SLOTS, CHANNELS, STATES), UNUSED), delta.clone()
    states[5] = kept = drawn(CHANNELS, STATES, seed=9)
    kept = kept.clone()
    resumes = torch.tensor([True, False])
    blocks = (size, first, last, begin, cuts, ends)
    scan(u, delta, A, B, C, D, None, bias, states, starts=starts, slots=slots, resumes=resumes, blocks=blocks)
    zero = torch.zeros(CHANNELS, STATES)
    for slot, begin, end, state in ((6, 0, 2, kept), (7, 0, 6, kept), (8, 0, 8, kept), (1, 8, 11, zero)):
        own = [rows[..., begin:end] for rows in (u, dt, B, C)]
        y, after = recurrence(own[0], own[1], A, own[2], own[3], D, None, bias, state, softplus=True)
        close(delta[:, begin:end], y)
        close(states[slot], after)
    assert torch.equal(states[5], kept), "the block that was read is complete"
    assert states[[0, 2, 3, 4]].isnan().all()


def test_update_is_one_token_of_the_scan():
    A, D, bias = weights()
    x, dt, z = (drawn(3, CHANNELS, seed=s) for s in (4, 5, 6))
    B, C = (drawn(3, STATES, seed=s) for s in (7, 8))
    states, out = torch.full((SLOTS, CHANNELS, STATES), UNUSED), torch.full((3, CHANNELS), UNUSED)
    states[3], states[6] = drawn(CHANNELS, STATES, seed=9), drawn(CHANNELS, STATES, seed=10)
    before = states.clone()
    read, write = torch.tensor([3, NULL, 6]), torch.tensor([3, NULL, 5])
    selective_scan.state_update(states, x, dt, A, B, C, D, z, bias, True, read, write, NULL, out, None, None)
    for i, (source, target) in ((0, (3, 3)), (2, (6, 5))):
        one = [rows[i, :, None] for rows in (x, dt)] + [rows[i, None, :, None] for rows in (B, C)]
        y, after = recurrence(one[0], one[1], A, *one[2:], D, z[i, :, None], bias, before[source], softplus=True)
        close(out[i], y[:, 0])
        close(states[target], after)
    assert out[1].isnan().all()
    assert torch.equal(states[6], before[6])
    assert states[[0, 1, 2, 4, 7, 8]].isnan().all()


def test_update_refuses_drafts():
    A, _D, _bias = weights()
    some = torch.zeros(1, CHANNELS)
    with pytest.raises(NotImplementedError, match="draft tokens"):
        selective_scan.state_update(
            A[None], some, some, A, some, some, None, None, None, True, None, None, NULL, some, torch.ones(1), None
        )


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
