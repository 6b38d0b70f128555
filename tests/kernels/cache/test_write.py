# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from support.pools import FLOAT8, assert_same_bits, pool

from pagedkv.cache.cache import PagedCache
from pagedkv.cache.write import write_kv_cache
from pagedkv.configurations import promised

pytestmark = pytest.mark.device


def tokens(count: int, heads: int, head_size: int, dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the slices of a fused QKV projection: token stride 3 times the dense one."""
    fused = torch.randn(count, 3, heads, head_size).to(device, getattr(torch, dtype))
    return fused[:, 1], fused[:, 2]


def permuted_slots(count: int, num_slots: int, device: str) -> torch.Tensor:
    return torch.randperm(num_slots)[:count].to(device)


@pytest.mark.parametrize("case", promised("write"), ids=lambda c: c.id)
def test_write_kv_cache(case, device):
    """Every byte of the pool: the written rows as torch puts them, every other one as it was."""
    torch.manual_seed(case.head_size)
    shape = (7, case.block_size, case.num_kv_heads, case.head_size)
    got = pool(case.layout, shape, case.dtype, device, quantised=case.quantised, scales=case.scales)
    expected = got.clone()
    key, value = tokens(37, case.num_kv_heads, case.head_size, case.dtype, device)
    slots = permuted_slots(37, 7 * case.block_size, device)
    slots[::5] = -1
    write_kv_cache(key, value, got.cache, slots, debug=True)
    written = slots[slots >= 0]
    where = (written // case.block_size, written % case.block_size)
    for side, rows in (("key", key[slots >= 0]), ("value", value[slots >= 0])):
        if case.quantised and case.scales == "token":
            largest = torch.finfo(FLOAT8[case.quantised]).max
            scale = (rows.float().abs().amax(-1).cpu() / largest).clamp(
                min=1e-6
            )  # torch on CUDA multiplies by 1 / largest
            getattr(expected.quantisation, f"{side}_scale")[where] = scale.to(device)
        expected.put(side, *where, rows)
    assert_same_bits(got.storage, expected.storage, "storage of the pool")
    if case.quantised:
        for side in ("key_scale", "value_scale"):
            scales = (getattr(each.quantisation, side) for each in (got, expected))
            assert_same_bits(*scales, side)


def test_write_kv_cache_with_fewer_slots_than_tokens(device):
    got = pool("packed", (3, 16, 2, 64), "float16", device)
    key, value = tokens(9, 2, 64, "float16", device)
    write_kv_cache(key, value, got.cache, permuted_slots(4, 48, device))
    assert got.value.isfinite().sum() == 4 * 2 * 64


@pytest.mark.parametrize("count", [0, 5])
def test_write_kv_cache_of_nothing(count, device):
    got = pool("nhd", (2, 16, 1, 32), "float32", device)
    key, value = tokens(count, 1, 32, "float32", device)
    write_kv_cache(key, value, got.cache, torch.full((count,), -1, device=device))
    assert got.storage.isnan().all()


def test_write_kv_cache_with_strides_of_its_own_for_v(device):
    """K token-first, V head-first: a kernel that reuses K's strides for V fails."""
    key_side = pool("nhd", (4, 16, 3, 48), "float32", device)
    value_side = pool("hnd", (4, 16, 3, 48), "float32", device, padding=8)
    key, value = tokens(20, 3, 48, "float32", device)
    slots = permuted_slots(20, 64, device)
    write_kv_cache(key, value, PagedCache(key_side.key, value_side.value), slots)
    assert torch.equal(key_side.key[slots // 16, slots % 16], key)
    assert torch.equal(value_side.value[slots // 16, slots % 16], value)
    assert key_side.value.isnan().all()
    assert value_side.key.isnan().all()
