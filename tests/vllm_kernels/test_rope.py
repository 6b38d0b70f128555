# SPDX-License-Identifier: Apache-2.0
"""The fused rotation and write of ROCM_ATTN: aiter's Triton kernel, called as vLLM calls it.

aiter is installed where there is an AMD GPU alone.
"""

from __future__ import annotations

import pytest
import torch
from support import vllm_kernels
from support.pools import assert_same_bits, pool
from support.tolerances import UNIT_ROUNDOFF

from pagedkv.cache import reference

pytestmark = [pytest.mark.device, pytest.mark.needs("package:aiter")]

LAYOUTS = ("native", "native-interleaved")


def angles(max_position: int, rotary_dim: int) -> torch.Tensor:
    frequency = 10000.0 ** -torch.linspace(0, 1, rotary_dim // 2 + 1)[:-1]
    angle = torch.arange(max_position)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 544, 2048])
def test_rotate_and_write(block_size, layout, neox, device):
    heads, head_size, tokens = 2, 128, 21
    got = pool(layout, (5, block_size, heads, head_size), "bfloat16", device)
    want = got.clone()
    gen = torch.Generator().manual_seed(block_size)
    fused = torch.randn(tokens, 4 * heads, head_size, generator=gen).to(device, torch.bfloat16)
    query, key, value = (part.contiguous() for part in fused.split([2 * heads, heads, heads], 1))
    before = torch.cat((query, key), 1)
    cos_sin = angles(50, head_size).to(device, torch.bfloat16)
    positions = torch.randint(0, 50, (tokens,), generator=gen).to(device)
    slots = torch.randperm(5 * block_size, generator=gen)[:tokens].to(device)
    slots[::5] = -1
    vllm_kernels.rotate_and_write(query, key, value, got.cache, positions, cos_sin, slots, neox=neox)
    turned = reference.rotate(before, positions, cos_sin, neox=neox)
    # Two products and their sum are rounded in fp32, then the result to the dtype.
    sizes = reference.rotate(before.abs(), positions, cos_sin.abs(), neox=neox).abs() + turned.abs()
    bound = 2.01 * UNIT_ROUNDOFF["float32"] * sizes + UNIT_ROUNDOFF["bfloat16"] * turned.abs()
    assert ((torch.cat((query, key), 1).double() - turned).abs() <= bound).all()
    kept = slots >= 0
    where = (slots[kept] // block_size, slots[kept] % block_size)
    want.put("key", *where, key[kept])
    want.put("value", *where, value[kept])
    assert_same_bits(got.storage, want.storage, "storage of the pool")
