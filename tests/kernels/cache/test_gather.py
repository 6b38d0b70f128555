# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from support.attending import promise, small
from support.pools import assert_same_bits, pool

from pagedkv.cache import reference
from pagedkv.cache.cache import PagedCache
from pagedkv.cache.gather import gather_kv_cache
from pagedkv.configurations import promised
from pagedkv.device import INTERPRETED

pytestmark = pytest.mark.device


def gather_arguments(starts: list[int], counts: list[int], device: str) -> dict[str, torch.Tensor]:
    counted = torch.tensor(counts)
    arguments = {
        "cu_seq_lens": torch.tensor([0, *counts]).cumsum(0),
        "token_to_seq": torch.arange(len(counts)).repeat_interleave(counted),
        "seq_starts": torch.tensor(starts),
    }
    return {name: tensor.int().to(device) for name, tensor in arguments.items()}


def outputs(num_tokens: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V outputs that share one tensor: their token stride is twice the dense one."""
    both = torch.full((num_tokens, 2, *like.shape[-2:]), float("nan"), dtype=like.dtype, device=like.device)
    return both[:, 0], both[:, 1]


# Under the interpreter a cast to bf16 cuts off instead of rounding, so there the launcher refuses it (test_checks.py).
CASES = [case for case in promised("gather") if not (INTERPRETED and case.quantised and case.dtype == "bfloat16")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_gather_kv_cache(case, device):
    starts, counts = [0, 5, case.block_size - 1, 3], [17, 1, case.block_size + 2, 0]
    data = promise(case, device, [1] * 4, [start + count for start, count in zip(starts, counts, strict=True)])
    arguments = gather_arguments(starts, counts, device)
    total = sum(counts)
    key, value = outputs(total + 3, data.query)
    expected_key, expected_value = outputs(total + 3, data.query)
    gather_kv_cache(data.pool.cache, key, value, data.block_table, **arguments, debug=True)
    sides = [data.pool.rows(side) for side in ("key", "value")]
    if case.quantised:  # the product of a code and its scale is exact in float64; the kernel rounds it to fp32 first
        sides = [side.float() for side in sides]
    reference.gather(*sides, expected_key, expected_value, data.block_table, **arguments)
    assert_same_bits(key, expected_key, "key")
    assert_same_bits(value, expected_value, "value")
    assert key[:total].isfinite().all()
    assert key[total:].isnan().all(), "rows after the last token were written"


@pytest.mark.parametrize("layout_name", ["interleaved", "native-interleaved"])
def test_gather_kv_cache_from_a_block_table_of_2_31_tokens(layout_name, device):
    """Columns times block size do not fit 32 bits; the rows after the first have no meaning."""
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 32, "block_size": 2048}
    data = small(device, [1], [9], layout_name=layout_name, **shape)
    key, value = outputs(9, data.query)
    table = data.block_table[:, :1].repeat(1, 1 << 20)
    gather_kv_cache(data.pool.cache, key, value, table, **gather_arguments([0], [9], device))
    block = data.block_table[0, 0]
    assert_same_bits(key, data.pool.rows("key")[block, :9], "key")
    assert_same_bits(value, data.pool.rows("value")[block, :9], "value")


def test_gather_kv_cache_leaves_positions_without_a_block(device):
    """A row of the block table is not read beyond its end: the next row is another sequence."""
    data = small(device, [1, 1], [16, 16], layout_name="nhd", num_q_heads=1, num_kv_heads=1, head_size=32)
    key, value = outputs(20, data.query)
    arguments = gather_arguments([0, 0], [20, 0], device)
    gather_kv_cache(data.pool.cache, key, value, data.block_table, **arguments)
    assert key[:16].isfinite().all()
    assert key[16:].isnan().all()


def test_gather_kv_cache_with_strides_of_its_own_for_v(device):
    """K token-first, V head-first: a kernel that reuses K's strides for V fails."""
    key_side = pool("nhd", (4, 16, 3, 48), "float32", device)
    value_side = pool("hnd", (4, 16, 3, 48), "float32", device, padding=8)
    key_side.key.normal_()
    value_side.value.normal_()
    key, value = outputs(40, key_side.key)
    cache = PagedCache(key_side.key, value_side.value)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=device)
    gather_kv_cache(cache, key, value, table, **gather_arguments([1], [40], device))
    position = torch.arange(1, 41, device=device)
    where = (table[0, position // 16].long(), position % 16)
    assert torch.equal(key, key_side.key[where])
    assert torch.equal(value, value_side.value[where])
