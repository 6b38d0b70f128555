# SPDX-License-Identifier: Apache-2.0
"""vLLM's own copies of the Mamba2 kernels: packed sequences that each continue from a state, and decode on a pool."""

from __future__ import annotations

import itertools

import pytest
import torch
from mamba import oracle
from mamba.data import DTYPES, LAYERS, check, dots, inputs
from mamba.test_state_update import SHAPES, arguments, check_step, pool, step
from support.pools import assert_same_bits

from pagedkv.vllm_plugin import scan

pytestmark = pytest.mark.device

STARTS = [0, 90, 91, 124]


def chunked(starts: list[int], chunk: int) -> tuple[list[int], list[int], list[int]]:
    """Where the chunks of some sequences begin, and all end; whose each is; the last of each sequence."""
    spans = [range(begin, end, chunk) for begin, end in itertools.pairwise(starts)]
    owners = [owner for owner, span in enumerate(spans) for _ in span]
    last = [count - 1 for count in itertools.accumulate(map(len, spans))]
    return [*itertools.chain(*spans), starts[-1]], owners, last


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.id)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whose", ["vllm", "pagedkv"])
def test_mamba_chunk_scan_combined_varlen(whose, layer, dtype, device, vllm_ops, record_property, monkeypatch):
    """Only the middle one of three sequences is new; states are kept in float32, as hybrid models keep them.

    All steps are vLLM's, or ours where the plugin puts it.
    """
    ops = vllm_ops("ssd_combined")
    if whose == "pagedkv":
        monkeypatch.setattr(ops, scan.NAME, scan.combined)
    data = inputs(layer, 1, STARTS[-1], dtype, device)
    x, z, B, C, dt = (each[0] for each in (data.x, data.z, data.B, data.C, data.dt))
    initial = torch.randn(3, layer.heads, layer.head_size, layer.state)
    initial[1] = 0.0
    begins, owners, last = (torch.tensor(each).int().to(device) for each in chunked(STARTS, layer.chunk))
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    states = ops.mamba_chunk_scan_combined_varlen(
        x,
        dt,
        data.A,
        B,
        C,
        layer.chunk,
        torch.tensor(STARTS).int().to(device),
        begins,
        last,
        owners,
        out,
        D=data.D,
        z=z,
        dt_bias=data.dt_bias,
        initial_states=initial.to(device),
        dt_softplus=True,
        state_dtype=torch.float32,
    )
    step_size = oracle.step_size(dt, data.dt_bias, softplus=True)
    for number, tokens in enumerate(slice(*ends) for ends in itertools.pairwise(STARTS)):
        golden = oracle.scan(
            x[tokens], step_size[tokens], data.A, B[tokens], C[tokens], D=data.D, z=z[tokens], initial=initial[number]
        )
        check(out[tokens], golden.y, "scan", dots(dtype), record_property, scale=golden.scale)
        check(states[number], golden.state, "scan", dots(dtype), record_property)


@pytest.mark.parametrize(("heads", "head_size", "state", "groups"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_selective_state_update(heads, head_size, state, groups, dtype, device, vllm_ops, record_property):
    """Read from one slot, written to another (a prefix cache keeps the first); block 0 is the null block of padding."""
    torch.manual_seed(heads)
    states = pool(heads, head_size, state, torch.float32, device)
    data = arguments(heads, head_size, state, groups, getattr(torch, dtype), device)
    states[2] = states[0]
    sources, targets = [5, 0, 2, 3, 0, 6], [1, 0, 2, 7, 0, 4]
    before = states.clone()
    out = torch.empty_like(data["x"])
    module = vllm_ops("mamba_ssm")
    with module.override_ssm_config((32, 4)):  # as for MI300X; the fallback would be 8 times the programs
        module.selective_state_update(
            states,
            **data,
            dt_softplus=True,
            out=out,
            null_block_id=0,
            state_batch_indices=torch.tensor(sources).int().to(device),
            dst_state_batch_indices=torch.tensor(targets).int().to(device),
        )
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source == 0:
            continue
        check_step(out[row], states[target], step(before, data, row, source), dtype, record_property)
    for target in filter(None, targets):
        before[target] = states[target]
    assert_same_bits(states, before, "slots of nobody, and the null block")
