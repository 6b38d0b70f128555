# SPDX-License-Identifier: Apache-2.0
"""Blocks as they come: every size that ranks and states make, through write, gather and attention."""

from __future__ import annotations

import pytest
import torch
from support.attending import attend, check, expected, small
from support.pools import assert_same_bits, pool

from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.write import write_kv_cache
from pagedkv.configurations import BLOCKS

pytestmark = pytest.mark.device

HEADS = {"num_q_heads": 4, "num_kv_heads": 1, "head_size": 32}

STEPS = {
    "decode": lambda block: ([1, 1, 1], [block, block + 1, 2 * block - 1]),
    "extend": lambda block: ([3, 17, 0], [block + 1, 2 * block, block]),
    # Drafts of 1 to 7 tokens and the token before them: one end is before an edge, one at it, the others after it.
    "verify": lambda block: (
        [2, 3, 4, 5, 6, 7, 8],
        [block - 1, block, block + 1, block + 2, block + 3, 2 * block, 2 * block + 7],
    ),
    "mixed": lambda block: ([1, 19, 1, 5], [block + 1, 19, 2 * block, block + 3]),
}
"""Query and sequence lengths around the ends of blocks."""


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("step", STEPS)
def test_attention(step, block, device, record_property):
    data = small(device, *STEPS[step](block), block_size=block, **HEADS)
    check(attend(data, debug=True), expected(data), record_property)


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_written_is_gathered(block, device):
    """From the last token of one block over the next into a third; blocks are not in order, the rest stays NaN."""
    made = pool("interleaved", (4, block, 1, 32), "float32", device)
    rows = torch.randn(2, block + 3, 1, 32, generator=torch.Generator().manual_seed(block)).to(device)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=device)
    places = torch.arange(block - 1, 2 * block + 2)
    slots = table[0].cpu().long()[places // block] * block + places % block
    write_kv_cache(rows[0], rows[1], made.cache, slots.to(device), debug=True)
    key, value = (torch.full_like(rows[0], float("nan")) for _ in range(2))
    starts = {"cu_seq_lens": [0, len(places)], "token_to_seq": [0] * len(places), "seq_starts": [block - 1]}
    arguments = {name: torch.tensor(numbers, dtype=torch.int32, device=device) for name, numbers in starts.items()}
    gather_kv_cache(made.cache, key, value, table, **arguments, debug=True)
    assert_same_bits(key, rows[0], "key")
    assert_same_bits(value, rows[1], "value")
    assert int(made.key.isfinite().sum()) == rows[0].numel(), "nothing else was written"
