# SPDX-License-Identifier: Apache-2.0
"""Offsets beyond 2^31 elements in every tensor that the operations address.

Index 4 lies 2^32 elements after index 0 and a little: an offset that is computed in 32 bits wraps to a place near
index 0, where there is NaN, or zeros that were not written.
"""

from __future__ import annotations

import pytest
import torch
from support.attending import attend, check, expected, expected_with_lse, lse_error, small
from support.pools import FAR, NAN_CODE, Pool, assert_same_bits, pool, quantisation
from support.tolerances import LSE_ABSOLUTE

from pagedkv import layout
from pagedkv.attention.merge import merge_attention
from pagedkv.attention.paged import paged_attention
from pagedkv.cache.cache import PagedCache, Quantisation
from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.write import write_kv_cache

pytestmark = pytest.mark.device

SHAPE = (5, 16, 2, 32)
LAYOUTS = ("interleaved", "native-interleaved", "shuffle-interleaved")
CODES = {"": None, "codes": "tensor", "codes with a scale each": "token"}
NAN = float("nan")


def ints(device: str, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.fixture
def far(device, far_storage):
    """far(layout, scales): a pool of `SHAPE`, fp16 or codes, in which block 4 and its scales lie far from block 0.

    Blocks 0 and 4 are NaN, and so are their scales.
    """

    def make(name: str, scales: str | None) -> Pool:
        dtype = torch.uint8 if scales else torch.float16
        block = 2 * 16 * 2 * 32
        plan = layout.describe(name, *SHAPE, padding=FAR - block, x=layout.vector_elements(dtype.itemsize))
        storage = far_storage(4 * FAR + block, dtype)
        for first in (0, 4 * FAR):
            storage[first : first + block] = NAN_CODE["e4m3fn"] if scales else NAN
        views = (storage.as_strided(view.shape, view.strides, view.offset) for view in (plan.key, plan.value))
        quantised = quantisation("e4m3fn", "tensor", SHAPE, device) if scales else None
        if scales == "token":
            numbers = far_storage(4 * FAR + 64, torch.float32)
            for first in (0, 4 * FAR):
                numbers[first : first + 64] = NAN
            sides = (numbers.as_strided(SHAPE[:3], (FAR, 2, 1), offset) for offset in (0, 32))
            quantised = Quantisation("e4m3fn", *sides)
        return Pool(storage, plan, *views, quantised)

    return make


def near(name: str, scales: str | None, device: str) -> Pool:
    """The same pool in one place."""
    kind = {"quantised": "e4m3fn", "scales": scales} if scales else {}
    return pool(name, SHAPE, "float16", device, **kind)


def in_block(pages: Pool, block: int) -> list[torch.Tensor]:
    """What is stored of K and V in a block, and the scales if each token has one."""
    stored = [pages.storage[pages._elements(side)[block]] for side in ("key", "value")]
    if pages.quantisation is not None and pages.quantisation.per_token:
        stored += [pages.quantisation.key_scale[block], pages.quantisation.value_scale[block]]
    return stored


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_far_away(name, codes, far, device, record_property):
    """Written, gathered and attended there, as in a pool that lies in one place."""
    there, here = far(name, CODES[codes]), near(name, CODES[codes], device)
    torch.manual_seed(5)
    key, value = (torch.randn(16, 2, 32, device=device, dtype=torch.float16) for _ in range(2))
    slots = torch.arange(64, 80, device=device)
    gathered = []
    for pages in (there, here):
        write_kv_cache(key, value, pages.cache, slots, debug=True)
        rows = [torch.full_like(key, NAN) for _ in range(2)]
        where = {"cu_seq_lens": ints(device, 0, 16), "token_to_seq": ints(device, *[0] * 16)}
        gather_kv_cache(pages.cache, *rows, ints(device, 4)[None], **where, seq_starts=ints(device, 0), debug=True)
        gathered.append(torch.stack(rows))
    for block in (0, 4):
        for got, want in zip(in_block(there, block), in_block(here, block), strict=True):
            assert_same_bits(got, want, f"block {block}")
    assert gathered[0].isfinite().all()
    assert_same_bits(*gathered, "gathered rows")

    for length in (16, 13):  # a full tile of the interpreter's, and a part of one: their addresses are computed apart
        data = small(device, [1], [length], head_size=32, dtype="float16")
        data.block_table.fill_(4)
        data.pool = here
        golden = expected(data)
        data.pool = there
        check(attend(data), golden, record_property, "attention of scaled rows" if "each" in codes else "attention")


@pytest.mark.parametrize("splits", [1, 3])
def test_queries_outputs_and_sums_far_away(splits, far_storage, device, record_property):
    """Token 4 of the step, alone: its row of the query, of the output and of the sums."""
    data = small(device, [1], [70], head_size=32, dtype="float16")
    golden, golden_lse = expected_with_lse(data)
    query, out = (far_storage(4 * FAR + 128, torch.float16) for _ in range(2))
    lse = far_storage(4 * FAR + 4, torch.float32)
    for tensor in (query, out, lse):
        tensor[:512] = NAN
    rows = query.as_strided((5, 4, 32), (FAR, 32, 1))
    rows[4] = data.query[0]
    data.query, data.query_start_loc = rows, ints(device, 4, 5)
    target, sums = out.as_strided((5, 4, 32), (FAR, 32, 1)), lse.as_strided((5, 4), (FAR, 1))
    bounds = {"max_query_len": 1, "max_seq_len": 70, "num_splits": splits}
    paged_attention(rows, data.pool.cache, target, **data.metadata, **bounds, scale=32**-0.5, lse=sums)
    check(target[4:], golden, record_property)
    assert lse_error(sums[4:], golden_lse) <= LSE_ABSOLUTE
    assert target[0].isnan().all()
    assert sums[0].isnan().all()


def test_merged_rows_far_away(far_storage, device, record_property):
    parts = [far_storage(4 * FAR + 128, torch.float16) for _ in range(2)]
    sums = [far_storage(4 * FAR + 4, torch.float32) for _ in range(2)]
    torch.manual_seed(6)
    rows = torch.randn(2, 4, 32, device=device).half()
    for side in range(2):
        parts[side][:512], sums[side][:512] = NAN, NAN
        parts[side] = parts[side].as_strided((5, 4, 32), (FAR, 32, 1))
        sums[side] = sums[side].as_strided((5, 4), (FAR, 1))
        parts[side][4], sums[side][4] = rows[side], float(side)
    out = torch.full((5, 4, 32), NAN, device=device)
    bounds = ints(device, 4, 5)
    merge_attention(out, None, parts[0], sums[0], parts[1], sums[1], query_start_loc=bounds)
    weight = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    golden = (1 - weight) * rows[0].double().cpu() + weight * rows[1].double().cpu()
    check(out[4:], golden[None], record_property, "merge")


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_row_of_the_block_table_far_away(query_len, far_storage, device, record_property):
    """Sequence 4, the only one with a query; unwritten entries are 0, another sequence's block."""
    data = small(device, [0, 0, 0, 0, query_len], [1, 1, 1, 1, 40])
    data.max_query_len = query_len
    golden = expected(data)
    table = far_storage(4 * FAR + 8, torch.int32)
    table[:512] = 2**31 - 1
    table = table.as_strided(data.block_table.shape, (FAR, 1))
    table[4] = data.block_table[4]
    data.block_table = table
    check(attend(data), golden, record_property)


def test_slots_beyond_2_to_the_32(far_storage, device):
    """Slot 2^32 + 5 is slot 5 in 32 bits. The blocks overlap, or there would be a hundred GiB of them."""
    block = 2**28
    storage = far_storage(block * 32 + 1024, torch.float16)
    storage[:1024] = NAN
    sides = [storage.as_strided((block + 1, 16, 1, 32), (32, 32, 32, 1), offset) for offset in (0, 512)]
    cache = PagedCache(*sides)
    key, value = (torch.full((2, 1, 32), number, dtype=torch.float16, device=device) for number in (3.0, 5.0))
    slots = torch.tensor([2**32 + 5, -1], device=device)
    write_kv_cache(key, value, cache, slots, debug=True)
    for side, number in zip(sides, (3.0, 5.0), strict=True):
        assert (side[block, 5] == number).all()
        assert side[0].isnan().all()


def test_tokens_far_away(far_storage, device):
    """Token 4 of what is written, and token 4 of what is gathered."""
    rows = far_storage(4 * FAR + 64, torch.float16)
    rows[:512] = NAN
    rows = rows.as_strided((5, 2, 32), (FAR, 32, 1))
    rows[4] = torch.randn(2, 32, device=device)
    data = small(device, [1], [5], layout_name="packed", dtype="float16", num_q_heads=2, head_size=32)
    cache = data.pool.cache
    slot = data.block_table[0, 0].long() * 16
    slots = torch.full((5,), -1, dtype=torch.int64, device=device)
    slots[4] = slot
    write_kv_cache(rows, rows, cache, slots)
    assert_same_bits(data.pool.key[slot // 16, 0], rows[4], "the written row")

    key, value = (far_storage(4 * FAR + 64, torch.float16).as_strided((5, 2, 32), (FAR, 32, 1)) for _ in range(2))
    where = {"cu_seq_lens": ints(device, 0, 4, 5), "token_to_seq": ints(device, 0, 0, 0, 0, 1)}
    table = data.block_table[[0, 0]]
    starts = ints(device, 16 * table.shape[1], 0)  # the first four have no block and are left alone
    for tensor in (key, value):
        tensor[0] = NAN
    gather_kv_cache(cache, key, value, table, **where, seq_starts=starts)
    for got in (key, value):
        assert_same_bits(got[4], rows[4], "the gathered row")
        assert got[0].isnan().all()
