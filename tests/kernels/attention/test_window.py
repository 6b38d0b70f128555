# SPDX-License-Identifier: Apache-2.0
"""A sliding window: what is outside is not looked up, not read and not walked over.

`pools.batch` makes NaN of every K and V, every code and every scale that no query of the step sees.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.attending import HALF, attend, check, expected, small
from triton.runtime import interpreter

from pagedkv.device import INTERPRETED

pytestmark = pytest.mark.device

PHASES = {"decode": ([1, 1, 1], [170, 20, 64]), "extend": ([9, 40, 1], [170, 40, 64])}
WINDOWS = (1, 16, 33)
POOLS = {
    "native": {"layout_name": "native-interleaved", "dtype": HALF},
    "shuffle": {"layout_name": "shuffle-interleaved", "dtype": HALF},
    "codes": {"layout_name": "packed", "dtype": HALF, "quantised": "e5m2", "scales": "head"},
    "shuffled codes": {"layout_name": "shuffle-interleaved", "quantised": "e4m3fnuz"},
    "codes with a scale each": {"layout_name": "native-interleaved", "quantised": "e4m3fn", "scales": "token"},
}
CASES = list(itertools.product(PHASES, POOLS, (1, 3)))


@pytest.mark.parametrize(("phase", "pool", "splits"), CASES, ids=str)
def test_nothing_outside_the_window_is_read(phase, pool, splits, device, record_property):
    """Blocks before the window have ids that are no address, and what is in its first block before it is NaN."""
    query_lens, seq_lens = PHASES[phase]
    op = "attention of scaled rows" if "each" in pool else "attention"
    for window in WINDOWS:
        data = small(device, query_lens, seq_lens, window=window, **POOLS[pool])
        golden = expected(data, sliding_window=window)
        for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            data.block_table[seq, : max(0, seq_len - query_len - window + 1) // 16] = 2**31 - 1
            data.block_table[seq, -(-seq_len // 16) :] = -(2**31)
        out = attend(data, sliding_window=window, num_splits=splits)
        check(out, golden, record_property, op)


@pytest.mark.parametrize("layout", ["packed", "shuffle"])
def test_a_window_inside_a_large_block(layout, device, record_property):
    """The block of a hybrid model is longer than the window: the rest of it is NaN."""
    shape = {"layout_name": layout, "block_size": 784, "window": 50, "dtype": HALF}
    data = small(device, [1, 5], [700, 1200], **shape)
    check(attend(data, sliding_window=50), expected(data, sliding_window=50), record_property)


def test_a_window_of_several_tiles(device, record_property):
    """Every token of the tiles between both ends of the window is seen, and no mask is computed for them."""
    data = small(device, [1, 5], [900, 1000], window=700, layout_name="shuffle-interleaved", dtype=HALF)
    check(attend(data, sliding_window=700), expected(data, sliding_window=700), record_property)


def test_a_window_as_long_as_the_sequence_is_none(device, record_property):
    data = small(device, [1, 5], [100, 70])
    out = attend(data, sliding_window=100)
    check(out, expected(data), record_property)


if INTERPRETED:  # elsewhere products are not counted

    @pytest.mark.parametrize("splits", [1, 2])
    @pytest.mark.parametrize("query_len", [1, 6])
    def test_the_walk_is_as_long_as_the_window(query_len, splits, device, monkeypatch):
        """Tokens of the tiles that a KV head walks over, by the scores' products, at ten times the length too."""
        products = []
        real = interpreter.InterpreterBuilder.create_dot
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, "create_dot", lambda *args: products.append(args[2]) or real(*args)
        )

        def walked(seq_len: int, window: int | None) -> int:
            products.clear()
            data = small(device, [query_len], [seq_len], window=window, head_size=32)
            attend(data, sliding_window=window, num_splits=splits)
            return sum(keys.data.shape[1] for keys in products[::2]) // 2

        # A tile is at most as long as the window and the queries, rounded up; they may touch one more.
        assert max(walked(seq_len, 64) for seq_len in (400, 4000)) <= 256
        assert walked(4000, None) >= 4000


def test_partitions_share_the_window(device, record_property):
    """More partitions than tiles in the window: those left over see nothing and weigh nothing."""
    data = small(device, [1, 1], [900, 30], window=64)
    check(attend(data, sliding_window=64, num_splits=7), expected(data, sliding_window=64), record_property)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_window_with_everything(splits, device, record_property):
    """Cap, slopes and sinks beside the window, over codes."""
    shape = {"layout_name": "shuffle-interleaved", "quantised": "e4m3fnuz", "window": 40, "dtype": HALF}
    data = small(device, [1, 7], [90, 110], **shape)
    heads = torch.arange(4, device=device)
    options = {"softcap": 5.0, "alibi_slopes": 0.5**heads, "sinks": heads - 1.5, "sliding_window": 40}
    out = attend(data, num_splits=splits, **options)
    check(out, expected(data, **options), record_property, "attention of capped scores")
