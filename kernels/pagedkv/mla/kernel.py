# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over a paged latent cache: DeepSeek's absorbed form (arXiv 2405.04434, section 2.1).

    out[n, h, :] = softmax_p(scale * query[n, h, :] . cache[p, :]) cache[p, :LATENT]

All heads share one row a token, and the value is the row's own first LATENT channels: a tile of the cache is loaded
once and used twice, as K and as V. That makes 2 * NUM_HEADS * (2 * LATENT + ROPE) operations out of every row, so 16
heads are bound by memory and 128 heads by the matrix units.

Programs are persistent: program `group * TILES + tile` walks the work items of its group (`schedule.py`) for its
ROWS rows, row = token * NUM_HEADS + head. Any number of heads will do; rows behind the last are masked. A work item
that is the only one of its sequence writes the output, the others write partial results that `mla_reduce_kernel`
merges (the formula is that of `attention/merge.py`). Tokens that no row sees are not loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from pagedkv.attention.softmax import LN2, WEIGHT_SHIFT, log_sum, merge_parts, narrow, online_softmax
from pagedkv.fp8.scales import decoded, half_of, row_unit
from pagedkv.strides import locate, tile_base, wide


class MlaStrides(NamedTuple):
    """Strides that a launch of `mla_decode_kernel` passes, in elements."""

    query: tuple[int, int]
    """Strides of token and head."""
    cache: tuple[int, int]
    """Strides of block and token."""
    out: tuple[int, int]
    """Strides of token and head."""
    lse: tuple[int, ...]
    """Strides of token and head."""
    table: tuple[int, ...]
    """Strides of sequence."""


class MlaOptions(NamedTuple):
    """What `mla_decode_kernel` is compiled for: one machine code for each value."""

    NUM_HEADS: int
    LATENT: int
    ROPE: int
    HALF: int
    """Half of LATENT, rounded up to a power of two."""
    PADDED_ROPE: int
    """ROPE, likewise."""
    BLOCK_SIZE: int
    ROWS: int
    TILE: int
    TILES: int
    """Row tiles of the longest query."""
    CAUSAL: bool
    """Whether sequences have several query tokens, of which each sees the tokens up to its own."""
    HAS_LSE: bool
    FORMAT: str | None
    """Format of the uint8 codes in the cache; None where it holds numbers."""
    NATIVE: bool
    """Whether the device converts FORMAT itself."""
    ALIGN: int
    """What all strides are multiples of (`strides.alignment`)."""
    AHEAD: bool
    """Whether blocks are looked up a tile ahead, which takes registers and saves a wait."""
    PAIRS: bool
    """Whether codes are read in pairs; see `attention.kernel.attend_pairs`."""
    KEPT: bool
    """Whether the query is used unmodified, from LDS."""
    SPREAD: int
    """Waves that share the channels of a score's product; with 1 each computes whole scores."""


@triton.jit
def shares(x, WAVES: tl.constexpr):
    """Return [n, channels] as [WAVES, n, channels / WAVES]: the compiler gives the first axis of a product to waves."""
    return tl.permute(tl.reshape(x, [x.shape[0], WAVES, x.shape[1] // WAVES]), (1, 0, 2))


@triton.jit
def turned(x):
    """Return [batch, n, channels] as [batch, channels, n]."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def load_channels(cache, channel, loaded, WIDTH: tl.constexpr):
    """Return WIDTH channels of the rows at `cache` [TILE, 1], 0 where not `loaded`, for 0 * NaN would be NaN."""
    return tl.load(cache + channel[None, :], mask=loaded[:, None] & (channel < WIDTH)[None, :], other=0)


@triton.jit
def store_halves(rows, low, high, acc_low, acc_high, live, WIDTH: tl.constexpr):
    """Store the WIDTH channels of each row from their two halves, in the dtype of `rows`."""
    dtype = rows.dtype.element_ty
    tl.store(rows + low[None, :], acc_low.to(dtype), mask=live[:, None] & (low < WIDTH)[None, :])
    tl.store(rows + high[None, :], acc_high.to(dtype), mask=live[:, None] & (high < WIDTH)[None, :])


@triton.jit
def mla_decode_kernel(
    query,  # [num_tokens, NUM_HEADS, LATENT + ROPE]
    cache,  # [num_blocks, BLOCK_SIZE, LATENT + ROPE]
    cache_scale,  # [1] fp32; used with FORMAT
    out,  # [num_tokens, NUM_HEADS, LATENT]
    lse,  # [num_tokens, NUM_HEADS] fp32, natural log; used with HAS_LSE
    partial,  # [partials, TILES, ROWS, LATENT] fp32, contiguous
    partial_lse,  # [partials, TILES, ROWS] fp32, base 2, contiguous
    works,  # [works, 4] int32, contiguous
    work_indptr,  # [groups + 1] int32
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    scale_log2e,
    strides,  # MlaStrides
    OPTIONS: tl.constexpr,  # MlaOptions
):
    """Attend ROWS rows to the tokens of each work item of a group; grid [groups * TILES]."""
    NUM_HEADS: tl.constexpr = OPTIONS.NUM_HEADS
    LATENT: tl.constexpr = OPTIONS.LATENT
    ROPE: tl.constexpr = OPTIONS.ROPE
    HALF: tl.constexpr = OPTIONS.HALF
    PADDED_ROPE: tl.constexpr = OPTIONS.PADDED_ROPE
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    ROWS: tl.constexpr = OPTIONS.ROWS
    TILE: tl.constexpr = OPTIONS.TILE
    FORMAT: tl.constexpr = OPTIONS.FORMAT
    NATIVE: tl.constexpr = OPTIONS.NATIVE
    PAIRS: tl.constexpr = OPTIONS.PAIRS
    SPREAD: tl.constexpr = OPTIONS.SPREAD
    stride_query_token, stride_query_head = wide(strides.query, OPTIONS.ALIGN)
    stride_cache_block, stride_cache_token = wide(strides.cache, OPTIONS.ALIGN)
    stride_out_token, stride_out_head = wide(strides.out)
    stride_lse_token, stride_lse_head = wide(strides.lse)
    (stride_table,) = wide(strides.table)
    group = tl.program_id(0) // OPTIONS.TILES
    row_tile = tl.program_id(0) % OPTIONS.TILES
    row = row_tile * ROWS + tl.arange(0, ROWS)
    row_head = row % NUM_HEADS
    column = tl.arange(0, TILE)
    # The channels of each product: halves of the latent, or with PAIRS its even and its odd channels.
    half = tl.arange(0, HALF)
    low = half * 2 if PAIRS else half
    high = low + 1 if PAIRS else HALF + half
    rope = tl.arange(0, PADDED_ROPE)
    UNIT: tl.constexpr = OPTIONS.ALIGN // 2 if PAIRS and OPTIONS.ALIGN > 1 else OPTIONS.ALIGN
    if PAIRS:
        cache = cache.to(tl.pointer_type(tl.int16))
        stride_cache_block, stride_cache_token = stride_cache_block // 2, stride_cache_token // 2
    SHIFT: tl.constexpr = WEIGHT_SHIFT if PAIRS or query.dtype.element_ty == tl.float16 else 0.0
    scale = 1.0
    if FORMAT is not None:
        # One scale for all rows: it leaves the products and comes in where their results are fp32.
        scale = tl.load(cache_scale)
        scale_log2e *= scale
    factor = tl.maximum(tl.abs(scale_log2e), 1e-30)
    end_work = tl.load(work_indptr + group + 1)
    for work in range(tl.load(work_indptr + group), end_work):
        seq = tl.load(works + work * 4)
        kv_begin = tl.load(works + work * 4 + 1)
        kv_end = tl.load(works + work * 4 + 2)
        slot = tl.load(works + work * 4 + 3)
        query_start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - query_start
        row_live = row < query_len * NUM_HEADS
        # A shorter query than the longest has fewer row tiles: the programs of the others have nothing to do.
        kv_end = tl.where(row_tile * ROWS < query_len * NUM_HEADS, kv_end, kv_begin)
        position = tl.load(seq_lens + seq) - query_len + row // NUM_HEADS
        query_row = (query_start + row // NUM_HEADS).to(tl.int64)

        query_at = query + (query_row * stride_query_token + row_head * stride_query_head)[:, None]
        live = row_live[:, None]
        q_low = tl.load(query_at + low[None, :], mask=live & (low < LATENT)[None, :], other=0.0)
        q_high = tl.load(query_at + high[None, :], mask=live & (high < LATENT)[None, :], other=0.0)
        q_rope = tl.load(query_at + LATENT + rope[None, :], mask=live & (rope < ROPE)[None, :], other=0.0)
        # The largest score is the largest product times the scale, so that must be positive; 0 * -inf would be NaN.
        if not OPTIONS.KEPT:
            negative = scale_log2e < 0
            q_low, q_high = tl.where(negative, -q_low, q_low), tl.where(negative, -q_high, q_high)
            q_rope = tl.where(negative, -q_rope, q_rope)
        row_factor = factor
        if PAIRS:
            largest = tl.maximum(tl.max(tl.abs(q_low), axis=1), tl.max(tl.abs(q_high), axis=1))
            unit = row_unit(tl.maximum(largest, tl.max(tl.abs(q_rope), axis=1)))
            row_factor *= unit
            q_low = (q_low / unit[:, None]).to(tl.float16)
            q_high = (q_high / unit[:, None]).to(tl.float16)
            rope_pairs: tl.constexpr = [ROWS, PADDED_ROPE // 2, 2]
            q_even, q_odd = tl.split(tl.reshape((q_rope / unit[:, None]).to(tl.float16), rope_pairs))
        if SPREAD > 1:
            q_low, q_high, q_rope = shares(q_low, SPREAD), shares(q_high, SPREAD), shares(q_rope, SPREAD)
        table = block_table + seq.to(tl.int64) * stride_table
        last = (kv_end + BLOCK_SIZE - 1) // BLOCK_SIZE - 1

        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        acc_low = tl.full([ROWS, HALF], 0.0, tl.float32)
        acc_high = tl.full([ROWS, HALF], 0.0, tl.float32)
        if OPTIONS.AHEAD:
            base = tile_base(
                table, kv_begin, column, last, stride_cache_block, stride_cache_token, BLOCK_SIZE, TILE, UNIT
            )
        for first in range(kv_begin, kv_end, TILE):
            token = first + column
            loaded = token < kv_end
            if OPTIONS.AHEAD:
                offsets = base + column * stride_cache_token
            else:
                block, offset = locate(table, first, column, loaded, BLOCK_SIZE, TILE, 1)
                offsets = block * stride_cache_block + offset * stride_cache_token
            kv_row = cache + offsets[:, None]
            if PAIRS:
                pair = load_channels(kv_row, half, loaded, LATENT // 2)
                rope_pair = load_channels(kv_row + LATENT // 2, tl.arange(0, PADDED_ROPE // 2), loaded, ROPE // 2)
            else:
                kv_low = load_channels(kv_row, low, loaded, LATENT)
                kv_high = load_channels(kv_row, high, loaded, LATENT)
                # Not by load_channels: a lane has less than 16 bytes of rope, and the audit asks 16 of the latent.
                rope_seen = loaded[:, None] & (rope < ROPE)[None, :]
                k_rope = tl.load(kv_row + LATENT + rope[None, :], mask=rope_seen, other=0)
            if OPTIONS.AHEAD:
                following = first + TILE
                base = tile_base(
                    table, following, column, last, stride_cache_block, stride_cache_token, BLOCK_SIZE, TILE, UNIT
                )
            if PAIRS:
                key, rope_key = tl.trans(pair), tl.trans(rope_pair)
                scores = tl.dot(q_even, half_of(rope_key, False, FORMAT, NATIVE))
                scores = tl.dot(q_odd, half_of(rope_key, True, FORMAT, NATIVE), scores)
                scores = tl.dot(q_low, half_of(key, False, FORMAT, NATIVE), scores)
                scores = tl.dot(q_high, half_of(key, True, FORMAT, NATIVE), scores)
                kv_low, kv_high = half_of(pair, False, FORMAT, NATIVE), half_of(pair, True, FORMAT, NATIVE)
            else:
                if FORMAT is not None:
                    kv_low = decoded(kv_low, FORMAT, NATIVE, q_low.dtype)
                    kv_high = decoded(kv_high, FORMAT, NATIVE, q_low.dtype)
                    k_rope = decoded(k_rope, FORMAT, NATIVE, q_low.dtype)
                if SPREAD > 1:
                    scores = tl.dot(q_rope, turned(shares(k_rope, SPREAD)), input_precision="ieee")
                    scores = tl.dot(q_low, turned(shares(kv_low, SPREAD)), scores, input_precision="ieee")
                    scores = tl.dot(q_high, turned(shares(kv_high, SPREAD)), scores, input_precision="ieee")
                    scores = tl.sum(scores, axis=0)
                else:
                    scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
                    scores = tl.dot(q_low, tl.trans(kv_low), scores, input_precision="ieee")
                    scores = tl.dot(q_high, tl.trans(kv_high), scores, input_precision="ieee")
            seen = loaded[None, :]
            if OPTIONS.CAUSAL:
                seen = seen & (token[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            weights, decay, maximum, total = online_softmax(scores, maximum, total, row_factor, SHIFT)
            weights = narrow(weights, kv_low.dtype)
            acc_low = tl.dot(weights, kv_low, acc_low * decay[:, None], input_precision="ieee")
            acc_high = tl.dot(weights, kv_high, acc_high * decay[:, None], input_precision="ieee")

        # A row that saw nothing has total 0 and accumulators 0: its result is 0, its lse -inf.
        divisor, row_lse = log_sum(maximum, total, SHIFT)
        inverse = (scale / divisor)[:, None]
        acc_low, acc_high = acc_low * inverse, acc_high * inverse
        if slot < 0:
            out_row = out + (query_row * stride_out_token + row_head * stride_out_head)[:, None]
            store_halves(out_row, low, high, acc_low, acc_high, row_live, LATENT)
            if OPTIONS.HAS_LSE:
                tl.store(lse + query_row * stride_lse_token + row_head * stride_lse_head, row_lse * LN2, mask=row_live)
        else:
            part = (slot.to(tl.int64) * OPTIONS.TILES + row_tile) * ROWS + tl.arange(0, ROWS)
            store_halves(partial + (part * LATENT)[:, None], low, high, acc_low, acc_high, row_live, LATENT)
            tl.store(partial_lse + part, row_lse, mask=row_live)


@triton.jit
def mla_reduce_kernel(
    partial,  # [partials, TILE_ROWS, LATENT] fp32, contiguous
    partial_lse,  # [partials, TILE_ROWS] fp32 base 2, contiguous
    out,  # [num_tokens, NUM_HEADS, LATENT]
    lse,  # [num_tokens, NUM_HEADS] fp32, natural log; used with HAS_LSE
    reduce_indptr,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    out_strides,  # token, head
    lse_strides,  # token, head
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # rows of a partial result: row tiles times their rows
    HAS_LSE: tl.constexpr,
    ROWS: tl.constexpr,  # (token, head) rows of a program
    CHANNELS: tl.constexpr,  # channels of a program
    CHUNK: tl.constexpr,  # partial results loaded at once
):
    """Merge ROWS rows and CHANNELS channels; grid [num_seqs, ceil(rows / ROWS), ceil(LATENT / CHANNELS)].

    A sequence with a single work item has its result already. One without tokens has no work item and gets 0 and -inf.
    """
    seq = tl.program_id(0)
    first = tl.load(reduce_indptr + seq)
    end = tl.load(reduce_indptr + seq + 1)
    if (first == end) & (tl.load(seq_lens + seq) > 0):
        return
    query_start = tl.load(query_start_loc + seq)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < (tl.load(query_start_loc + seq + 1) - query_start) * NUM_HEADS
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    for begin in range(first, end, CHUNK):
        slot = begin + tl.arange(0, CHUNK)
        part = slot.to(tl.int64)[None, :] * TILE_ROWS + row[:, None]
        inside = live[:, None] & (slot < end)[None, :]
        maximum, total, acc = merge_parts(
            partial, partial_lse, part, inside, channel, channel < LATENT, LATENT, maximum, total, acc
        )
    divisor, row_lse = log_sum(maximum, total)
    token = (query_start + row // NUM_HEADS).to(tl.int64)
    head = row % NUM_HEADS
    stride_token, stride_head = wide(out_strides)
    target = out + (token * stride_token + head * stride_head)[:, None] + channel[None, :]
    result = (acc * (1.0 / divisor)[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=live[:, None] & (channel < LATENT)[None, :])
    if HAS_LSE:
        stride_token, stride_head = wide(lse_strides)
        mask = live & (tl.program_id(2) == 0)
        tl.store(lse + token * stride_token + head * stride_head, row_lse * LN2, mask=mask)
