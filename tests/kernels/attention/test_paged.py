# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from support.attending import attend, check, expected, expected_with_lse, lse_error, promise, small
from support.pools import assert_same_bits, pool
from support.tolerances import LSE_ABSOLUTE

from pagedkv.attention.paged import paged_attention
from pagedkv.configurations import promised
from pagedkv.device import INTERPRETED

pytestmark = pytest.mark.device


def lengths(phase: str, block_size: int) -> tuple[list[int], list[int]]:
    """Query and sequence lengths: around the ends of blocks and tiles, and a sequence that is padding."""
    match phase:
        case "decode":
            seq_lens = [1, block_size, block_size + 1, 37, 260]
            return [1] * len(seq_lens), seq_lens
        case "extend":
            return [5, 1, 33, 0], [block_size + 3, 70, 33, 0]
        case _:
            return [1, 50, 17], [1, 50, 17]


def options_of(case, device) -> dict[str, object]:
    """Mask and score options; slopes as Press et al. choose them, sinks around the scores."""
    options: dict[str, object] = {"causal": case.causal, "sliding_window": case.window, "softcap": case.softcap}
    heads = torch.arange(case.num_q_heads, device=device)
    options["alibi_slopes"] = torch.exp2(-(heads + 1) * 8.0 / case.num_q_heads) if case.alibi else None
    options["sinks"] = (heads - 1.5) * 0.7 if case.sinks else None
    return options


# Triton's interpreter computes bf16 on the bit patterns, so there the launcher refuses it (test_checks.py).
CASES = [case for case in promised("attention") if not (INTERPRETED and case.dtype == "bfloat16")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_paged_attention(case, device, record_property):
    data = promise(case, device, *lengths(case.phase, case.block_size))
    options = options_of(case, device)
    lse = torch.full(data.query.shape[1::-1], float("nan"), device=device).T if case.lse else None
    out = attend(data, **options, lse=lse, num_splits=case.splits, batch_invariant=case.batch_invariant, debug=True)
    golden, golden_lse = expected_with_lse(data, **options)
    op = "attention of capped scores" if case.softcap else "attention"
    check(out, golden, record_property, "attention of scaled rows" if case.scales == "token" else op)
    if lse is not None:
        assert lse_error(lse, golden_lse) <= LSE_ABSOLUTE


@pytest.fixture(params=[False, True], ids=["", "flushed"])
def flushed(request, monkeypatch, lacks) -> None:
    """Products of fp16 that take subnormal operands as 0, as those of MI200 do."""
    if request.param and not INTERPRETED:
        lacks("device:cpu", "a product whose operands are changed on their way")
    if request.param:
        from triton.runtime.interpreter import InterpreterBuilder

        real = InterpreterBuilder.create_dot

        def dot(self, a, b, *rest):
            for operand in (a, b):
                operand.data[abs(operand.data) < 2.0**-14] = 0
            return real(self, a, b, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("flushed")
@pytest.mark.parametrize(("keys", "gap"), [(8192, 11), (8192, 14), (32768, 16), (32768, 17.5)])
def test_fp16_weights_beside_a_key_far_above(keys, gap, device, record_property):
    """An attention sink: one key `gap` nats above equal others, which have a share of the weight together."""
    data = small(device, [1], [keys], num_q_heads=1, num_kv_heads=1, dtype="float16")
    data.query.zero_()[..., 0] = 1
    key, value = data.pool.rows("key"), data.pool.rows("value")
    key.zero_(), value.fill_(1)
    first = data.block_table[0, 0]
    key[first, 0, :, 0], value[first, 0] = gap, 0
    check(attend(data, scale=1.0), expected(data, scale=1.0), record_property)


def test_a_nan_that_one_request_sees_is_its_own(device):
    """Neither other requests nor the other KV head get it."""
    data = small(device, [1, 1, 3], [40, 60, 50])
    golden = attend(data)
    data.pool.rows("value")[data.block_table[1, 0], 3, 1] = float("nan")
    out = attend(data)
    spoilt = out.isnan().any(-1)
    assert spoilt.tolist() == [[False] * 4, [False, False, True, True], *[[False] * 4] * 3]
    assert_same_bits(out[~spoilt], golden[~spoilt], "other requests and KV heads")


@pytest.mark.parametrize("query_len", [1, 3])
def test_paged_attention_of_more_heads_than_a_program_takes(query_len, device, record_property):
    """72 query heads of one KV head, fp32, 192 channels: several programs share them."""
    data = small(device, [query_len, query_len], [40, 7], num_q_heads=144, head_size=192)
    check(attend(data), expected(data), record_property)


@pytest.mark.parametrize("splits", [1, 4])
def test_paged_attention_leaves_padding_rows_alone(splits, device):
    """A captured graph pads: tokens after the last sequence, and sequences without a query but with stale lengths."""
    data = small(device, [1, 1, 0], [40, 9, 25])
    data.query = torch.cat([data.query, data.query.new_full((2, 4, 64), float("nan"))])
    out = attend(data, num_splits=splits)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()


def test_paged_attention_of_a_query_that_sees_nothing(device):
    data = small(device, [2, 3], [0, 20])
    out = attend(data, causal=False)
    assert (out[:2] == 0).all()
    assert out[2:].isfinite().all()


def test_paged_attention_takes_strided_queries_and_outputs(device, record_property):
    data = small(device, [3, 1], [30, 20])
    golden = expected(data)
    wide = torch.full((4, 3, 4, 64), float("nan"), device=device)
    wide[:, 1] = data.query
    data.query = wide[:, 1]
    out = torch.full((4, 8, 64), float("nan"), device=device)
    bounds = {"max_query_len": 3, "max_seq_len": 30}
    paged_attention(data.query, data.pool.cache, out[:, ::2], **data.metadata, **bounds, scale=64**-0.5)
    check(out[:, ::2], golden, record_property)
    assert out[:, 1::2].isnan().all()


@pytest.mark.parametrize("query_len", [1, 6])
def test_paged_attention_with_strides_of_its_own_for_v(query_len, device, record_property):
    """K token-first, V head-first in a pool of its own: a kernel that reuses K's strides for V fails."""
    data = small(device, [query_len] * 2, [40, 20], layout_name="nhd")
    golden = expected(data)
    other = pool("hnd", tuple(data.pool.value.shape), "float32", device, padding=40)
    other.value.copy_(data.pool.value)
    data.pool.value = other.value
    check(attend(data), golden, record_property)


@pytest.mark.parametrize(("decodes", "splits"), [(2, 1), (2, 3), (130, 1)])
def test_paged_attention_of_a_mixed_batch_in_two_calls(decodes, splits, device, record_property):
    """Decode sequences first, then the others with starts that do not begin at 0: each call writes its own rows.

    130 decodes are more tokens than a query tile has: tiles of none of the others must not reach back into them. The
    others run last, so that they would overwrite what decode has written.
    """
    data = small(device, [1] * decodes + [7, 4], [40, 9] * (decodes // 2) + [30, 4])
    out = torch.full_like(data.query, float("nan"))
    cache, scale = data.pool.cache, 64**-0.5
    for first, end, longest in ((0, decodes, 1), (decodes, decodes + 2, 7)):
        metadata = {
            "block_table": data.block_table[first:end],
            "seq_lens": data.seq_lens[first:end],
            "query_start_loc": data.query_start_loc[first : end + 1],
        }
        bounds = {"max_query_len": longest, "max_seq_len": 40, "num_splits": splits, "debug": True}
        paged_attention(data.query, cache, out, **metadata, **bounds, scale=scale)
    check(out, expected(data), record_property)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 4.0])
def test_paged_attention_scale(scale, device, record_property):
    """A peaked, a flat and a reversed softmax. Error of a score grows with its size, so unit scores set the bound."""
    data = small(device, [1, 4], [60, 20], dtype="float16")
    check(attend(data, scale=scale), expected(data, scale=scale), record_property)


def test_paged_attention_with_loose_bounds(device, record_property):
    """max_seq_len and max_query_len are upper bounds; a decode step with a larger bound is still right."""
    data = small(device, [1, 1], [50, 3])
    data.max_query_len, data.max_seq_len = 9, 5000
    check(attend(data), expected(data), record_property)


def test_paged_attention_many_sequences(device, record_property):
    """More sequences than the search of the query tile looks at in one go."""
    data = small(device, [1, 2] * 70, [3, 2] * 70, num_q_heads=2, num_kv_heads=1, head_size=32)
    check(attend(data), expected(data), record_property)


def test_paged_attention_is_repeatable(device):
    data = small(device, [1, 1, 1], [70, 9, 33], dtype="float16")
    assert_same_bits(attend(data, num_splits=3), attend(data, num_splits=3), "second run")


if not INTERPRETED:  # the interpreter has no graphs

    def test_paged_attention_in_a_captured_graph(device, record_property):
        """Captured with one set of lengths and blocks, replayed with another."""
        data = small(device, [1] * 4, [1] * 4, dtype="bfloat16")
        later = small(device, [1] * 4, [300, 17, 64, 1], dtype="bfloat16")
        data.block_table = torch.zeros_like(later.block_table)
        data.max_seq_len, data.pool = 4096, later.pool
        attend(data)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(data)
        for name in ("query", "block_table", "seq_lens", "query_start_loc"):
            getattr(data, name).copy_(getattr(later, name))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(out, expected(later), record_property)
