# SPDX-License-Identifier: Apache-2.0
"""vLLM's own copies of the Mamba2 kernels: packed sequences that each continue from a state, and decode on a pool."""

from __future__ import annotations

import pytest
import torch
from mamba.data import DTYPES, LAYERS, check_packed_scan
from mamba.test_state_update import SHAPES, arguments, check_step, pool, step
from support.pools import assert_same_bits

pytestmark = pytest.mark.device


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mamba_chunk_scan_combined_varlen(layer, dtype, device, vllm_ops, record_property):
    check_packed_scan(vllm_ops("ssd_combined"), layer, dtype, device, record_property)


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
