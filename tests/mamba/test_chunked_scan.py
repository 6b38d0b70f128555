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
