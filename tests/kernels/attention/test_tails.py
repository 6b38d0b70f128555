# SPDX-License-Identifier: Apache-2.0
"""The ends of things: the block after the last token, sequences of one token, scores that are as large as they get."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.attending import HALF, attend, check, expected, small
from support.pools import NAN_CODE
from support.tolerances import ROW_RELATIVE

pytestmark = pytest.mark.device

LAYOUTS = ("nhd", "interleaved", "packed", "native", "native-interleaved", "shuffle", "shuffle-interleaved")
CODES = {"": {}, "codes": {"quantised": "e4m3fn", "scales": "token"}}


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_behind_a_sequence_does_not_count(layout, codes, device, record_property):
    """Around groups of 8 and 16 tokens: the rest is NaN, in K, in V and in the scales, and 0 * NaN would show."""
    seq_lens = [1, 2, 7, 8, 9, 15, 16, 17, 33]
    data = small(device, [1] * len(seq_lens), seq_lens, layout_name=layout, dtype=HALF, **CODES[codes])
    poison = data.pool.storage == NAN_CODE["e4m3fn"] if codes else data.pool.storage.isnan()
    assert poison.float().mean() > 0.3, "the pool has no poison"
    op = "attention of scaled rows" if codes else "attention"
    check(attend(data), expected(data), record_property, op)
    data.max_query_len = 2  # the same through the kernel's other phase
    check(attend(data, num_splits=2), expected(data), record_property, op)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 2, 1]], ids=["decode", "extend"])
def test_a_sequence_of_one_token_gets_its_value(query_lens, device):
    """One key has all the weight, whatever its score: V itself, to the last bit."""
    data = small(device, query_lens, [1, 2, 1], dtype=HALF)
    out = attend(data, scale=1000.0)
    for seq in (0, 2):
        value = data.pool.rows("value")[data.block_table[seq, 0].long(), 0]
        assert torch.equal(out[data.query_start_loc[seq]], value.repeat_interleave(2, dim=0))


@pytest.mark.parametrize(("splits", "query_len"), list(itertools.product([1, 3], [1, 5])))
def test_scores_of_ten_thousand(splits, query_len, device, record_property):
    """Neither end overflows, and the softmax is a choice of the largest score."""
    data = small(device, [query_len] * 2, [130, 40], dtype="float32")
    out = attend(data, scale=1e4, num_splits=splits)
    golden = expected(data, scale=1e4)
    check(out, golden, record_property, "attention of huge scores")
    relative = (out.double().cpu() - golden).norm(dim=-1) / golden.norm(dim=-1)
    assert relative.median() <= ROW_RELATIVE["attention", "float32"], "most rows are V of one key"


def test_scores_of_minus_ten_thousand(device, record_property):
    """All scores far below 0: the largest is subtracted, and no row becomes 0 / 0."""
    data = small(device, [1, 3], [60, 20])
    key = torch.ones_like(data.query[:1, :1, :]).expand(1, 2, 64)
    for seq, seq_len in enumerate((60, 20)):
        position = torch.arange(seq_len, device=device)
        block = data.block_table[seq, position // 16].long()
        data.pool.put("key", block, position % 16, key.expand(seq_len, 2, 64))
    data.query = torch.full_like(data.query, -1.0)
    out = attend(data, scale=200.0)  # 64 channels of -1: every score is -12800
    golden = expected(data, scale=200.0)
    check(out, golden, record_property)


@pytest.mark.parametrize("more", [1, 2, 4])
@pytest.mark.parametrize("query_lens", [[1, 1], [5, 20]], ids=["decode", "extend"])
def test_groups_of_v_any_distance_apart(query_lens, more, device, record_property):
    """X tokens of `shuffle` are a group: where its stride is no multiple of X, a token has no stride of its own."""
    data = small(device, query_lens, [100, 70], dtype=HALF, layout_name="shuffle")
    golden, value = expected(data), data.pool.value
    shape, group = list(value.shape), value.shape[3] * value.shape[4] + more  # [blocks, heads, groups, channels, X]
    strides = [shape[1] * shape[2] * group, shape[2] * group, group, shape[4], 1]
    storage = torch.full((shape[0] * strides[0],), float("nan"), dtype=value.dtype, device=device)
    data.pool.value = storage.as_strided(shape, strides).copy_(value)
    assert data.pool.cache.value_strides[1] % data.pool.cache.x
    check(attend(data, num_splits=1), golden, record_property)
