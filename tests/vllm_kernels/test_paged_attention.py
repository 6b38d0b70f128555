# SPDX-License-Identifier: Apache-2.0
"""`chunked_prefill_paged_decode` (`kernel_paged_attention_2d`, `_fwd_kernel`) over caches in the native packing."""

from __future__ import annotations

import pytest
import torch
from support import vllm_kernels
from support.attending import HALF, attend, check, expected

pytestmark = pytest.mark.device

LAYOUTS = ("native", "native-interleaved")
SHAPES = ((16, 8, 2, 64), (48, 4, 4, 128), (544, 6, 2, 80), (784, 4, 1, 256), (2048, 8, 8, 64), (2144, 5, 1, 128))
"""Tokens of a block, query heads, KV heads, channels of a head."""


def made(device, layout, shape, dtype, query_lens, seq_lens, **more):
    """A batch whose block table has a column to spare: kernel_paged_attention_2d reads it (test_declared.py)."""
    data = vllm_kernels.attention_batch(device, layout, shape, dtype, query_lens=query_lens, seq_lens=seq_lens, **more)
    data.block_table = torch.nn.functional.pad(data.block_table, (0, 1))
    return data


def lengths(block_size: int) -> list[int]:
    """Lengths of sequences: one token, one more than a tile, and around the edge of a block where that is near."""
    return [1, 17, 129, *({min(block_size, 300), min(block_size + 1, 301)} if block_size < 600 else {131})]


def new_tokens(data) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the queries' own tokens, as slices of a projection."""
    sides = []
    for side in ("key", "value"):
        rows, parts = data.pool.rows(side), []
        for seq, seq_len in enumerate(data.seq_lens.tolist()):
            begin, end = data.query_start_loc[seq : seq + 2].tolist()
            position = torch.arange(seq_len - (end - begin), seq_len, device=rows.device)
            block = data.block_table[seq].long()[position // rows.shape[1]]
            parts.append(rows[block, position % rows.shape[1]])
        own = torch.cat(parts)
        fused = own.new_full((len(own), own.shape[1] + 1, own.shape[2]), float("nan"))
        fused[:, :-1] = own
        sides.append(fused[:, :-1])
    return sides[0], sides[1]


@pytest.mark.parametrize("dtype", vllm_kernels.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=vllm_kernels.attention_id)
def test_decode(shape, layout, dtype, device, record_property):
    seq_lens = lengths(shape[0])
    data = made(device, layout, shape, dtype, [1] * len(seq_lens), seq_lens)
    check(attend(data, call=vllm_kernels.paged_attention), expected(data), record_property)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=vllm_kernels.attention_id)
def test_decode_with_sinks(shape, device, record_property):
    data = made(device, "native-interleaved", shape, HALF, [1] * 3, [1, 17, 129])
    sinks = torch.linspace(-2, 3, shape[1], device=device)
    check(attend(data, call=vllm_kernels.paged_attention, sinks=sinks), expected(data, sinks=sinks), record_property)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=vllm_kernels.attention_id)
def test_decode_of_a_quantised_cache(shape, layout, device, record_property):
    data = made(device, layout, shape, HALF, [1] * 3, [1, 17, 129], quantised=vllm_kernels.fp8_format())
    check(attend(data, call=vllm_kernels.paged_attention), expected(data), record_property)


@pytest.mark.parametrize("source", ["given", "cached"])
@pytest.mark.parametrize("dtype", vllm_kernels.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=vllm_kernels.attention_id)
def test_prefill(shape, layout, dtype, source, device, record_property):
    """Whole prompts, chunks after a context, and decodes in one batch; new tokens given, or read from the cache."""
    data = made(device, layout, shape, dtype, [19, 1, 7, 1, 33], [19, 1, 150, 130, 70])
    new = new_tokens(data) if source == "given" else None
    check(attend(data, call=vllm_kernels.paged_attention, new=new), expected(data), record_property)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=vllm_kernels.attention_id)
def test_prefill_with_sinks(shape, device, record_property):
    data = made(device, "native-interleaved", shape, HALF, [19, 7], [19, 150])
    sinks = torch.linspace(-2, 3, shape[1], device=device)
    out = attend(data, call=vllm_kernels.prefix_prefill, sinks=sinks, new=new_tokens(data))
    check(out, expected(data, sinks=sinks), record_property)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=vllm_kernels.attention_id)
def test_prefill_of_a_quantised_cache(shape, layout, device, record_property):
    data = made(device, layout, shape, HALF, [19, 7, 1], [19, 150, 40], quantised=vllm_kernels.fp8_format())
    check(attend(data, call=vllm_kernels.prefix_prefill), expected(data), record_property)


@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("call", [vllm_kernels.paged_attention, vllm_kernels.prefix_prefill], ids=lambda c: c.__name__)
def test_window(call, window, device, record_property):
    """Over blocks that are all written; what happens over freed ones is declared (test_declared.py)."""
    queries = [1, 1, 1] if call is vllm_kernels.paged_attention else [19, 7, 3]
    data = made(device, "native-interleaved", SHAPES[0], HALF, queries, [19, 150, 65])
    out = attend(data, call=call, sliding_window=window)
    check(out, expected(data, sliding_window=window), record_property)
