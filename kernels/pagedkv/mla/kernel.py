# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over a paged latent cache: DeepSeek's absorbed form (arXiv 2405.04434, section 2.1).

    out[n, h, :] = softmax_p(scale * query[n, h, :] . cache[p, :]) cache[p, :KV_LORA_RANK]

All heads share one row a token, and the value is the row's own first KV_LORA_RANK channels (the latent): a tile of the
cache is loaded once and used twice, as K and as V. That makes 2 * NUM_HEADS * (2 * KV_LORA_RANK + ROPE_HEAD_DIM)
operations out of every row, so 16 heads are bound by memory and 128 heads by the matrix units.

Programs are persistent: program `group * ROW_TILES + tile` walks the work items of its group (`schedule.py`) for its
BLOCK_M rows, row = token * NUM_HEADS + head. Any number of heads will do; rows after the last are masked. A work item
that is the only one of its sequence writes the output, the others write partial results that `mla_reduce_kernel`
merges (the formula is that of `attention/merge.py`). Tokens that no row sees are not loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from pagedkv.attention.softmax import FP16_WEIGHT_EXPONENT, LN2, log_sum, merge_parts, narrow, online_softmax
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
    """Compile-time options of `mla_decode_kernel`: Triton compiles once for each combination of values."""

    NUM_HEADS: int
    KV_LORA_RANK: int
    """Channels of the latent."""
    ROPE_HEAD_DIM: int
    """Channels of the rotary key."""
    HALF_RANK: int
    """Half of KV_LORA_RANK, rounded up to a power of two."""
    ROPE_PADDED: int
    """ROPE_HEAD_DIM rounded up to a power of two."""
    BLOCK_SIZE: int
    """Tokens of a block of the cache."""
    BLOCK_M: int
    """(token, head) rows of a program."""
    BLOCK_N: int
    """KV tokens of a tile."""
    ROW_TILES: int
    """Programs that share the rows of the longest query."""
    IS_CAUSAL: bool
    """Whether sequences have several query tokens, of which each sees the tokens up to its own."""
    WRITE_LSE: bool
    FP8_FORMAT: str | None
    """Format of the uint8 codes in the cache; None where it is not quantised."""
    NATIVE_FP8: bool
    """Whether the device converts FP8_FORMAT itself."""
    STRIDE_ALIGN: int
    """Largest power of two up to 16 that divides all strides (`strides.alignment`)."""
    PREFETCH_BLOCK_TABLE: bool
    """Whether blocks are looked up a tile ahead, which takes registers and saves a wait."""
    FP8_PAIRS: bool
    """Whether FP8 codes are loaded two at a time, as int16; see `attention.attend.attend_pairs`."""
    QUERY_IN_LDS: bool
    """Whether the query stays in LDS as it was loaded, which requires that no scale is negative."""
    SPLIT_K_WARPS: int
    """Waves that share the channels of a score's product (split K); with 1 each computes whole scores."""


@triton.jit
def split_k(x, WARPS: tl.constexpr):
    """Return [n, channels] as [WARPS, n, channels / WARPS]: the compiler gives the first axis of a product to warps."""
    return tl.permute(tl.reshape(x, [x.shape[0], WARPS, x.shape[1] // WARPS]), (1, 0, 2))


@triton.jit
def transposed(x):
    """Return [batch, n, channels] as [batch, channels, n]."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def load_channels(cache, channel, loaded, WIDTH: tl.constexpr):
    """Return WIDTH channels of the rows at `cache` [BLOCK_N, 1], 0 where not `loaded`, for 0 * NaN would be NaN."""
    return tl.load(cache + channel[None, :], mask=loaded[:, None] & (channel < WIDTH)[None, :], other=0)


@triton.jit
def store_halves(rows, low, high, acc_low, acc_high, live, WIDTH: tl.constexpr):
    """Store the WIDTH channels of each row from their two halves, in the dtype of `rows`."""
    dtype = rows.dtype.element_ty
    tl.store(rows + low[None, :], acc_low.to(dtype), mask=live[:, None] & (low < WIDTH)[None, :])
    tl.store(rows + high[None, :], acc_high.to(dtype), mask=live[:, None] & (high < WIDTH)[None, :])


@triton.jit
def mla_decode_kernel(
    query,  # [num_tokens, NUM_HEADS, KV_LORA_RANK + ROPE_HEAD_DIM]
    cache,  # [num_blocks, BLOCK_SIZE, KV_LORA_RANK + ROPE_HEAD_DIM]
    cache_scale,  # [1] fp32; used with FP8_FORMAT
    out,  # [num_tokens, NUM_HEADS, KV_LORA_RANK]
    lse,  # [num_tokens, NUM_HEADS] fp32, natural log; used with WRITE_LSE
    partial,  # [partials, ROW_TILES, BLOCK_M, KV_LORA_RANK] fp32, contiguous
    partial_lse,  # [partials, ROW_TILES, BLOCK_M] fp32, base 2, contiguous
    works,  # [works, 4] int32, contiguous
    work_indptr,  # [groups + 1] int32
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    scale_log2e,
    strides,  # MlaStrides
    OPTIONS: tl.constexpr,  # MlaOptions
):
    """Attend BLOCK_M rows to the tokens of each work item of a group; grid [groups * ROW_TILES]."""
    NUM_HEADS: tl.constexpr = OPTIONS.NUM_HEADS
    KV_LORA_RANK: tl.constexpr = OPTIONS.KV_LORA_RANK
    ROPE_HEAD_DIM: tl.constexpr = OPTIONS.ROPE_HEAD_DIM
    HALF_RANK: tl.constexpr = OPTIONS.HALF_RANK
    ROPE_PADDED: tl.constexpr = OPTIONS.ROPE_PADDED
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    NATIVE_FP8: tl.constexpr = OPTIONS.NATIVE_FP8
    FP8_PAIRS: tl.constexpr = OPTIONS.FP8_PAIRS
    SPLIT_K_WARPS: tl.constexpr = OPTIONS.SPLIT_K_WARPS
    stride_query_token, stride_query_head = wide(strides.query, OPTIONS.STRIDE_ALIGN)
    stride_block, stride_token = wide(strides.cache, OPTIONS.STRIDE_ALIGN)
    stride_out_token, stride_out_head = wide(strides.out)
    stride_lse_token, stride_lse_head = wide(strides.lse)
    (stride_table,) = wide(strides.table)
    group = tl.program_id(0) // OPTIONS.ROW_TILES
    row_tile = tl.program_id(0) % OPTIONS.ROW_TILES
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_head = row % NUM_HEADS
    column = tl.arange(0, BLOCK_N)
    # The channels of each product: halves of the latent, or with FP8_PAIRS its even and its odd channels.
    half = tl.arange(0, HALF_RANK)
    low = half * 2 if FP8_PAIRS else half
    high = low + 1 if FP8_PAIRS else HALF_RANK + half
    rope = tl.arange(0, ROPE_PADDED)
    BASE_ALIGN: tl.constexpr = max(1, OPTIONS.STRIDE_ALIGN // 2) if OPTIONS.FP8_PAIRS else OPTIONS.STRIDE_ALIGN
    if FP8_PAIRS:
        cache = cache.to(tl.pointer_type(tl.int16))
        stride_block, stride_token = stride_block // 2, stride_token // 2
    WEIGHT_EXPONENT: tl.constexpr = FP16_WEIGHT_EXPONENT if FP8_PAIRS or query.dtype.element_ty == tl.float16 else 0.0
    scale = 1.0
    if FP8_FORMAT is not None:
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
        kv_end = tl.where(row_tile * BLOCK_M < query_len * NUM_HEADS, kv_end, kv_begin)
        position = tl.load(seq_lens + seq) - query_len + row // NUM_HEADS
        query_row = (query_start + row // NUM_HEADS).to(tl.int64)

        query_at = query + (query_row * stride_query_token + row_head * stride_query_head)[:, None]
        live = row_live[:, None]
        q_low = tl.load(query_at + low[None, :], mask=live & (low < KV_LORA_RANK)[None, :], other=0.0)
        q_high = tl.load(query_at + high[None, :], mask=live & (high < KV_LORA_RANK)[None, :], other=0.0)
        rope_live = live & (rope < ROPE_HEAD_DIM)[None, :]
        q_rope = tl.load(query_at + KV_LORA_RANK + rope[None, :], mask=rope_live, other=0.0)
        # The largest score is the largest product times the scale, so that must be positive; 0 * -inf would be NaN.
        if not OPTIONS.QUERY_IN_LDS:
            negative = scale_log2e < 0
            q_low, q_high = tl.where(negative, -q_low, q_low), tl.where(negative, -q_high, q_high)
            q_rope = tl.where(negative, -q_rope, q_rope)
        row_factor = factor
        if FP8_PAIRS:
            largest = tl.maximum(tl.max(tl.abs(q_low), axis=1), tl.max(tl.abs(q_high), axis=1))
            unit = row_unit(tl.maximum(largest, tl.max(tl.abs(q_rope), axis=1)))
            row_factor *= unit
            q_low = (q_low / unit[:, None]).to(tl.float16)
            q_high = (q_high / unit[:, None]).to(tl.float16)
            rope_pairs: tl.constexpr = [BLOCK_M, ROPE_PADDED // 2, 2]
            q_even, q_odd = tl.split(tl.reshape((q_rope / unit[:, None]).to(tl.float16), rope_pairs))
        if SPLIT_K_WARPS > 1:
            q_low, q_high = split_k(q_low, SPLIT_K_WARPS), split_k(q_high, SPLIT_K_WARPS)
            q_rope = split_k(q_rope, SPLIT_K_WARPS)
        table = block_table + seq.to(tl.int64) * stride_table
        last = (kv_end + BLOCK_SIZE - 1) // BLOCK_SIZE - 1

        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc_low = tl.full([BLOCK_M, HALF_RANK], 0.0, tl.float32)
        acc_high = tl.full([BLOCK_M, HALF_RANK], 0.0, tl.float32)
        if OPTIONS.PREFETCH_BLOCK_TABLE:
            base = tile_base(table, kv_begin, column, last, stride_block, stride_token, BLOCK_SIZE, BLOCK_N, BASE_ALIGN)
        for first in range(kv_begin, kv_end, BLOCK_N):
            token = first + column
            loaded = token < kv_end
            if OPTIONS.PREFETCH_BLOCK_TABLE:
                offsets = base + column * stride_token
            else:
                block, offset = locate(table, first, column, loaded, BLOCK_SIZE, BLOCK_N, 1)
                offsets = block * stride_block + offset * stride_token
            kv_row = cache + offsets[:, None]
            if FP8_PAIRS:
                pair = load_channels(kv_row, half, loaded, KV_LORA_RANK // 2)
                rope_pair = load_channels(
                    kv_row + KV_LORA_RANK // 2, tl.arange(0, ROPE_PADDED // 2), loaded, ROPE_HEAD_DIM // 2
                )
            else:
                kv_low = load_channels(kv_row, low, loaded, KV_LORA_RANK)
                kv_high = load_channels(kv_row, high, loaded, KV_LORA_RANK)
                # Not by load_channels: a lane has less than 16 bytes of rope, and the audit asks 16 of the latent.
                rope_seen = loaded[:, None] & (rope < ROPE_HEAD_DIM)[None, :]
                k_rope = tl.load(kv_row + KV_LORA_RANK + rope[None, :], mask=rope_seen, other=0)
            if OPTIONS.PREFETCH_BLOCK_TABLE:
                following = first + BLOCK_N
                base = tile_base(
                    table, following, column, last, stride_block, stride_token, BLOCK_SIZE, BLOCK_N, BASE_ALIGN
                )
            if FP8_PAIRS:
                key, rope_key = tl.trans(pair), tl.trans(rope_pair)
                scores = tl.dot(q_even, half_of(rope_key, False, FP8_FORMAT, NATIVE_FP8))
                scores = tl.dot(q_odd, half_of(rope_key, True, FP8_FORMAT, NATIVE_FP8), scores)
                scores = tl.dot(q_low, half_of(key, False, FP8_FORMAT, NATIVE_FP8), scores)
                scores = tl.dot(q_high, half_of(key, True, FP8_FORMAT, NATIVE_FP8), scores)
                kv_low = half_of(pair, False, FP8_FORMAT, NATIVE_FP8)
                kv_high = half_of(pair, True, FP8_FORMAT, NATIVE_FP8)
            else:
                if FP8_FORMAT is not None:
                    kv_low = decoded(kv_low, FP8_FORMAT, NATIVE_FP8, q_low.dtype)
                    kv_high = decoded(kv_high, FP8_FORMAT, NATIVE_FP8, q_low.dtype)
                    k_rope = decoded(k_rope, FP8_FORMAT, NATIVE_FP8, q_low.dtype)
                if SPLIT_K_WARPS > 1:
                    scores = tl.dot(q_rope, transposed(split_k(k_rope, SPLIT_K_WARPS)), input_precision="ieee")
                    scores = tl.dot(q_low, transposed(split_k(kv_low, SPLIT_K_WARPS)), scores, input_precision="ieee")
                    scores = tl.dot(q_high, transposed(split_k(kv_high, SPLIT_K_WARPS)), scores, input_precision="ieee")
                    scores = tl.sum(scores, axis=0)
                else:
                    scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
                    scores = tl.dot(q_low, tl.trans(kv_low), scores, input_precision="ieee")
                    scores = tl.dot(q_high, tl.trans(kv_high), scores, input_precision="ieee")
            seen = loaded[None, :]
            if OPTIONS.IS_CAUSAL:
                seen = seen & (token[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            weights, decay, maximum, total = online_softmax(scores, maximum, total, row_factor, WEIGHT_EXPONENT)
            weights = narrow(weights, kv_low.dtype)
            acc_low = tl.dot(weights, kv_low, acc_low * decay[:, None], input_precision="ieee")
            acc_high = tl.dot(weights, kv_high, acc_high * decay[:, None], input_precision="ieee")

        # A row that saw nothing has total 0 and accumulators 0: its result is 0, its lse -inf.
        divisor, row_lse = log_sum(maximum, total, WEIGHT_EXPONENT)
        inverse = (scale / divisor)[:, None]
        acc_low, acc_high = acc_low * inverse, acc_high * inverse
        if slot < 0:
            out_row = out + (query_row * stride_out_token + row_head * stride_out_head)[:, None]
            store_halves(out_row, low, high, acc_low, acc_high, row_live, KV_LORA_RANK)
            if OPTIONS.WRITE_LSE:
                tl.store(lse + query_row * stride_lse_token + row_head * stride_lse_head, row_lse * LN2, mask=row_live)
        else:
            part = (slot.to(tl.int64) * OPTIONS.ROW_TILES + row_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
            store_halves(partial + (part * KV_LORA_RANK)[:, None], low, high, acc_low, acc_high, row_live, KV_LORA_RANK)
            tl.store(partial_lse + part, row_lse, mask=row_live)


@triton.jit
def mla_reduce_kernel(
    partial,  # [partials, ROWS_PER_PARTIAL, KV_LORA_RANK] fp32, contiguous
    partial_lse,  # [partials, ROWS_PER_PARTIAL] fp32 base 2, contiguous
    out,  # [num_tokens, NUM_HEADS, KV_LORA_RANK]
    lse,  # [num_tokens, NUM_HEADS] fp32, natural log; used with WRITE_LSE
    reduce_indptr,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    out_strides,  # token, head
    lse_strides,  # token, head
    NUM_HEADS: tl.constexpr,
    KV_LORA_RANK: tl.constexpr,
    ROWS_PER_PARTIAL: tl.constexpr,  # rows of a partial result: row tiles times their rows
    WRITE_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # (token, head) rows of a program
    BLOCK_D: tl.constexpr,  # channels of a program
    BLOCK_SPLITS: tl.constexpr,  # partial results loaded at once
):
    """Merge BLOCK_M rows and BLOCK_D channels; grid [num_seqs, ceil(rows / BLOCK_M), ceil(KV_LORA_RANK / BLOCK_D)].

    A sequence with a single work item has its result already. One without tokens has no work item and gets 0 and -inf.
    """
    seq = tl.program_id(0)
    first = tl.load(reduce_indptr + seq)
    end = tl.load(reduce_indptr + seq + 1)
    if (first == end) & (tl.load(seq_lens + seq) > 0):
        return
    query_start = tl.load(query_start_loc + seq)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < (tl.load(query_start_loc + seq + 1) - query_start) * NUM_HEADS
    channel = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for begin in range(first, end, BLOCK_SPLITS):
        slot = begin + tl.arange(0, BLOCK_SPLITS)
        part = slot.to(tl.int64)[None, :] * ROWS_PER_PARTIAL + row[:, None]
        inside = live[:, None] & (slot < end)[None, :]
        maximum, total, acc = merge_parts(
            partial, partial_lse, part, inside, channel, channel < KV_LORA_RANK, KV_LORA_RANK, maximum, total, acc
        )
    divisor, row_lse = log_sum(maximum, total)
    token = (query_start + row // NUM_HEADS).to(tl.int64)
    head = row % NUM_HEADS
    stride_token, stride_head = wide(out_strides)
    target = out + (token * stride_token + head * stride_head)[:, None] + channel[None, :]
    result = (acc * (1.0 / divisor)[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=live[:, None] & (channel < KV_LORA_RANK)[None, :])
    if WRITE_LSE:
        stride_token, stride_head = wide(lse_strides)
        mask = live & (tl.program_id(2) == 0)
        tl.store(lse + token * stride_token + head * stride_head, row_lse * LN2, mask=mask)
