# SPDX-License-Identifier: Apache-2.0
"""Cross-attention of an encoder-decoder model: every query sees all tokens of the encoder, and how many is unrelated.

K and V of the encoder are written in the first step and read in all later ones.
"""

from __future__ import annotations

import pytest
import torch
from support.attending import HALF, attend, check, expected, expected_with_lse, lse_error, small
from support.pools import assert_same_bits
from support.tolerances import LSE_ABSOLUTE

from pagedkv.cache.write import write_kv_cache

pytestmark = pytest.mark.device

LENGTHS = {
    "shorter": (
        [20, 7, 33],
        [5, 1, 17],
    ),  # fewer tokens in the encoder than queries: no query stands at a position >= 0
    "longer": ([2, 9, 4], [75, 33, 150]),
    "long": ([150, 90], [170, 40]),  # more queries than a program takes
    "nothing": ([3, 5, 1], [0, 40, 0]),
    "decode": ([1, 1, 1], [75, 0, 16]),
}
LAYOUTS = {"interleaved": "float32", "shuffle": HALF, "native-interleaved": HALF}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_cross_attention(lengths, layout, splits, device, record_property):
    data = small(device, *LENGTHS[lengths], layout_name=layout, dtype=LAYOUTS[layout])
    lse = torch.full(data.query.shape[:2], float("nan"), device=device)
    out = attend(data, causal=False, lse=lse, num_splits=splits)
    golden, golden_lse = expected_with_lse(data, causal=False)
    check(out, golden, record_property)
    assert lse_error(lse, golden_lse) <= LSE_ABSOLUTE


def test_the_encoder_is_written_once_and_read_by_every_step(device, record_property):
    """A prompt of three tokens, then decode steps of one: no step counts an encoder token twice or moves one."""
    data = small(device, [3, 3], [50, 21], layout_name="packed")
    slots = torch.cat(
        [
            row[torch.arange(n) // 16].long() * 16 + torch.arange(n).to(device) % 16
            for row, n in zip(data.block_table, (50, 21), strict=True)
        ]
    )
    key, value = (torch.randn(71, 2, 64, device=device) for _ in range(2))
    write_kv_cache(key, value, data.pool.cache, slots)
    before = data.pool.storage.clone()
    for query_len in (3, 1, 1):
        data.query = torch.randn(2 * query_len, 4, 64, device=device)
        data.query_start_loc = torch.arange(3, dtype=torch.int32, device=device) * query_len
        data.max_query_len = query_len
        check(attend(data, causal=False), expected(data, causal=False), record_property)
    assert_same_bits(data.pool.storage, before, "pool after the steps")


def test_beams_are_queries_like_any_others(device, record_property):
    """Four beams of one encoder sequence: as four queries of one sequence, or as four sequences of one query each."""
    data = small(device, [4, 1], [61, 35])
    golden = expected(data, causal=False)
    check(attend(data, causal=False), golden, record_property)
    data.block_table = data.block_table[[0, 0, 0, 0, 1]]
    data.seq_lens = data.seq_lens[[0, 0, 0, 0, 1]]
    data.query_start_loc = torch.arange(6, dtype=torch.int32, device=device)
    data.max_query_len = 1
    check(attend(data, causal=False), golden, record_property)
