# SPDX-License-Identifier: Apache-2.0
"""The chunked scan of mamba-ssm (five kernels, and one for the states of packed sequences) against the recurrence."""

from __future__ import annotations

import itertools

import pytest
import torch
from mamba import oracle
from mamba.data import DTYPES, LAYERS, check, dots, inputs

pytestmark = pytest.mark.device

LAYER = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.id)
DTYPE = pytest.mark.parametrize("dtype", DTYPES)

STARTS = [0, 70, 71, 104]
"""Three sequences: one over several chunks, one of a single token, one that begins and ends inside a chunk."""


def sequence_of(starts: list[int], device: str) -> torch.Tensor:
    """[1, tokens] int32: which sequence each token belongs to."""
    lengths = torch.tensor(starts).diff()
    return torch.arange(len(lengths)).repeat_interleave(lengths).int().to(device)[None]


@LAYER
@DTYPE
def test_mamba_chunk_scan_combined_keeps_packed_sequences_apart(layer, dtype, device, package, record_property):
    data = inputs(layer, 1, STARTS[-1], dtype, device)
    out, last, states = package("ssd_combined").mamba_chunk_scan_combined(
        data.x,
        data.dt,
        data.A,
        data.B,
        data.C,
        layer.chunk,
        D=data.D,
        z=data.z,
        dt_bias=data.dt_bias,
        dt_softplus=True,
        seq_idx=sequence_of(STARTS, device),
        cu_seqlens=torch.tensor(STARTS).int().to(device),
        return_final_states=True,
        return_varlen_states=True,
    )
    dt = oracle.step_size(data.dt, data.dt_bias, softplus=True)
    golden = []
    for tokens in (slice(*ends) for ends in itertools.pairwise(STARTS)):
        x, z, B, C, step = (each[0, tokens] for each in (data.x, data.z, data.B, data.C, dt))
        golden.append(oracle.scan(x, step, data.A, B, C, D=data.D, z=z))
    scale = torch.cat([each.scale for each in golden])
    check(out[0], torch.cat([each.y for each in golden]), "scan", dots(dtype), record_property, scale=scale)
    check(states, torch.stack([each.state for each in golden]), "scan", dots(dtype), record_property)
    check(last[0], golden[-1].state, "scan", dots(dtype), record_property)


@LAYER
@DTYPE
def test_mamba_chunk_scan_combined_continues_from_initial_states(layer, dtype, device, package, record_property):
    """Two sequences side by side, a last chunk that is not full, dt clamped on both sides, D per channel, no gate."""
    limit = (0.2, 0.4)
    data = inputs(layer, 2, layer.chunk + 19, dtype, device)
    D = torch.randn(layer.heads, layer.head_size).to(device)
    initial = torch.randn(2, layer.heads, layer.head_size, layer.state).to(device)
    out, last = package("ssd_combined").mamba_chunk_scan_combined(
        data.x,
        data.dt,
        data.A,
        data.B,
        data.C,
        layer.chunk,
        D=D,
        dt_bias=data.dt_bias,
        dt_softplus=True,
        dt_limit=limit,
        initial_states=initial,
        return_final_states=True,
    )
    dt = oracle.step_size(data.dt, data.dt_bias, softplus=True, limit=limit)
    assert (dt == limit[0]).any()
    assert (dt == limit[1]).any()
    for each in range(2):
        golden = oracle.scan(data.x[each], dt[each], data.A, data.B[each], data.C[each], D=D, initial=initial[each])
        check(out[each], golden.y, "scan", dots(dtype), record_property, scale=golden.scale)
        check(last[each], golden.state, "scan", dots(dtype), record_property)


@LAYER
def test_chunk_cumsum(layer, device, package, record_property):
    """dt and the running sum of dt A, chunk by chunk; behind the last token dt is 0, so the sum stays."""
    tokens, chunk = 2 * layer.chunk - 5, layer.chunk
    data = inputs(layer, 1, tokens, "float32", device)
    sums, dt = package("ssd_chunk_state")._chunk_cumsum_fwd(data.dt, data.A, chunk, data.dt_bias, dt_softplus=True)
    golden = torch.zeros(layer.heads, 2 * chunk, dtype=torch.float64)
    golden[:, :tokens] = oracle.step_size(data.dt[0], data.dt_bias, softplus=True).T
    golden = golden.view(layer.heads, 2, chunk)
    check(dt[0], golden, "scan", "float32", record_property)
    assert (dt[0, :, 1, -5:] == 0).all()
    check(sums[0], (golden * data.A.double().cpu()[:, None, None]).cumsum(-1), "scan", "float32", record_property)


@LAYER
@DTYPE
def test_bmm_chunk(layer, dtype, device, package, record_property):
    """C_i B_j for i and j of one sequence in one chunk, 0 for two sequences and behind the last token."""
    data = inputs(layer, 1, STARTS[-1], dtype, device)
    owner = sequence_of(STARTS, device)
    products = package("ssd_bmm")._bmm_chunk_fwd(data.C, data.B, layer.chunk, seq_idx=owner, output_dtype=torch.float32)
    for number, products_of_chunk in enumerate(products[0]):
        tokens = slice(number * layer.chunk, min((number + 1) * layer.chunk, STARTS[-1]))
        C, B = (each[0, tokens].double().cpu().transpose(0, 1) for each in (data.C, data.B))
        same = (owner[0, tokens, None] == owner[0, None, tokens]).cpu()
        count = same.shape[0]
        got = products_of_chunk[:, :count, :count]
        scale = (C.norm(dim=-1)[:, :, None] * B.norm(dim=-1)[:, None, :]).norm(dim=-1)
        check(got, (C @ B.transpose(1, 2)) * same, "scan", dots(dtype), record_property, scale=scale)
        assert (got.cpu()[:, ~same] == 0).all()


@DTYPE
def test_chunk_state_starts_at_the_sequence_that_reaches_the_end(dtype, device, package, record_property):
    """The state a chunk adds is that of its last sequence: what lies before it in the chunk has no part in it."""
    layer = LAYERS[0]
    data = inputs(layer, 1, 2 * layer.chunk, dtype, device)
    starts = [0, layer.chunk - 9, 2 * layer.chunk]
    module = package("ssd_chunk_state")
    sums, dt = module._chunk_cumsum_fwd(data.dt, data.A, layer.chunk, data.dt_bias, dt_softplus=True)
    states = module._chunk_state_fwd(data.B, data.x, dt, sums, seq_idx=sequence_of(starts, device))
    step = oracle.step_size(data.dt, data.dt_bias, softplus=True)
    for number, (begin, end) in enumerate(((layer.chunk - 9, layer.chunk), (layer.chunk, 2 * layer.chunk))):
        x, dt_, B = (each[0, begin:end] for each in (data.x, step, data.B))
        golden = oracle.scan(x, dt_, data.A, B, B).state
        check(states[0, number], golden, "scan", dots(dtype), record_property)


def test_state_passing(device, package, record_property):
    """States at the beginning of each chunk: decayed, added up, and forgotten where another sequence has begun."""
    chunk, lengths = 8, [14, 3, 11]
    chunks, heads, size = -(-sum(lengths) // chunk), 3, 1300
    torch.manual_seed(0)
    added, initial = torch.randn(1, chunks, heads, size), torch.randn(1, heads, size)
    decay = -torch.rand(1, heads, chunks)
    owner = sequence_of([0, 14, 17, 28], "cpu")
    arguments = [each.to(device) for each in (added, decay)]
    states, last = package("ssd_state_passing")._state_passing_fwd(
        *arguments, initial_states=initial.to(device), seq_idx=owner.to(device), chunk_size=chunk
    )
    state, sequence = initial[0].double(), 0
    for number in range(chunks):
        check(states[0, number], state, "scan", "float32", record_property)
        at_end = int(owner[0, min((number + 1) * chunk, sum(lengths)) - 1])
        kept = state * decay[0, :, number, None].double().exp() if at_end == sequence else torch.zeros_like(state)
        state, sequence = kept + added[0, number].double(), at_end
    check(last[0], state, "scan", "float32", record_property)


def test_the_oracle_agrees_with_the_packages_own_reference(package):
    """Both sides are float64, where only a difference of meaning shows."""
    layer = LAYERS[1]
    data = inputs(layer, 1, 2 * layer.chunk, "float32", "cpu")
    x, z, B, C, dt = (each.double() for each in (data.x, data.z, data.B, data.C, data.dt))
    theirs = package("ssd_combined").ssd_chunk_scan_combined_ref(
        x,
        dt,
        data.A.double(),
        B,
        C,
        layer.chunk,
        D=data.D.double(),
        z=z,
        dt_bias=data.dt_bias.double(),
        dt_softplus=True,
    )
    step = oracle.step_size(dt, data.dt_bias, softplus=True)
    ours = oracle.scan(x[0], step[0], data.A, B[0], C[0], D=data.D, z=z[0])
    torch.testing.assert_close(theirs[0].double(), ours.y, rtol=1e-5, atol=1e-5)
