"""Multi-head latent attention over a paged latent cache: DeepSeek's absorbed form (arXiv 2405.04434, section 2.1).

    out[n, h, :] = softmax_p(scale * query[n, h, :] . cache[p, :]) cache[p, :LATENT]

All heads share one row a token, and the value is the row's own first LATENT channels: a tile of the cache is loaded
once and used twice, as K and as V. That makes 2 * NUM_HEADS * (2 * LATENT + ROPE) operations out of every row, so 16
heads are bound by memory and 128 heads by the matrix units.

Programs are persistent: program `group * TILES + tile` walks the work items of its group (`mla_schedule.py`) for its
ROWS rows, row = token * NUM_HEADS + head. Any number of heads will do; rows behind the last are masked. A work item
that is the only one of its sequence writes the output, the others write partial results that `mla_reduce_kernel`
merges. The softmax is online, in base 2, as in `attention_kernel.py`; tokens that no row sees are not loaded.

Merge the partial results of the sequences that MLA decode split among programs; the formula is `split_reduce`'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.fp8.formats import decode
from pagedkv.strides import multiple

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
    stride_query_token: tl.int64,
    stride_query_head: tl.int64,
    stride_cache_block: tl.int64,
    stride_cache_token: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    stride_table: tl.int64,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,  # of LATENT rounded up to a power of two
    PADDED_ROPE: tl.constexpr,  # likewise
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAUSAL: tl.constexpr,  # several query tokens a sequence: each sees the tokens up to its own
    HAS_LSE: tl.constexpr,
    FORMAT: tl.constexpr,  # of the uint8 codes in the cache; None: it holds numbers
    ALIGN: tl.constexpr,  # see strides.hidden_alignment
):
    """Attend ROWS rows to the tokens of each work item of a group; grid [groups * TILES]."""
    if ALIGN > 1:
        stride_query_token = multiple(stride_query_token, ALIGN)
        stride_query_head = multiple(stride_query_head, ALIGN)
        stride_cache_block = multiple(stride_cache_block, ALIGN)
        stride_cache_token = multiple(stride_cache_token, ALIGN)
    group = tl.program_id(0) // TILES
    row_tile = tl.program_id(0) % TILES
    row = row_tile * ROWS + tl.arange(0, ROWS)
    row_head = row % NUM_HEADS
    column = tl.arange(0, TILE)
    low = tl.arange(0, HALF)
    high = HALF + low
    rope = tl.arange(0, PADDED_ROPE)
    in_low = low < LATENT
    in_high = high < LATENT
    in_rope = rope < ROPE
    cache_rope = cache + LATENT
    scale = 1.0
    if FORMAT is not None:
        # One scale for all rows: it leaves the products and comes in where their results are fp32.
        scale = tl.load(cache_scale)
        scale_log2e *= scale
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

        query_offset = query + (query_row * stride_query_token + row_head * stride_query_head)[:, None]
        q_low = tl.load(query_offset + low[None, :], mask=row_live[:, None] & in_low[None, :], other=0.0)
        q_high = tl.load(query_offset + high[None, :], mask=row_live[:, None] & in_high[None, :], other=0.0)
        q_rope = tl.load(query_offset + LATENT + rope[None, :], mask=row_live[:, None] & in_rope[None, :], other=0.0)
        table = block_table + seq.to(tl.int64) * stride_table

        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        acc_low = tl.full([ROWS, HALF], 0.0, tl.float32)
        acc_high = tl.full([ROWS, HALF], 0.0, tl.float32)
        for first in range(kv_begin, kv_end, TILE):
            token = first + column
            loaded = token < kv_end
            if BLOCK_SIZE % TILE == 0:
                block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
                offset = first % BLOCK_SIZE + column
            else:
                block = tl.load(table + token // BLOCK_SIZE, mask=loaded, other=0).to(tl.int64)
                offset = token % BLOCK_SIZE
            kv_row = (block * stride_cache_block + offset * stride_cache_token)[:, None]
            # Tokens that were not loaded are 0 and not whatever the block holds: 0 * NaN would be NaN.
            kv_low = tl.load(cache + kv_row + low[None, :], mask=loaded[:, None] & in_low[None, :], other=0)
            kv_high = tl.load(cache + kv_row + high[None, :], mask=loaded[:, None] & in_high[None, :], other=0)
            k_rope = tl.load(cache_rope + kv_row + rope[None, :], mask=loaded[:, None] & in_rope[None, :], other=0)
            if FORMAT is not None:
                kv_low = decode(kv_low, FORMAT, q_low.dtype)
                kv_high = decode(kv_high, FORMAT, q_low.dtype)
                k_rope = decode(k_rope, FORMAT, q_low.dtype)
            scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
            scores = tl.dot(q_low, tl.trans(kv_low), scores, input_precision="ieee")
            scores = tl.dot(q_high, tl.trans(kv_high), scores, input_precision="ieee") * scale_log2e
            seen = loaded[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            # A row that has seen nothing yet keeps the maximum -inf; -inf - -inf would be NaN.
            maximum_now = tl.maximum(maximum, tl.max(scores, axis=1))
            base = tl.where(maximum_now == float("-inf"), 0.0, maximum_now)
            weights = tl.exp2(scores - base[:, None])
            decay = tl.exp2(maximum - base)
            total = total * decay + tl.sum(weights, axis=1)
            maximum = maximum_now
            weights = weights.to(kv_low.dtype)
            acc_low = tl.dot(weights, kv_low, acc_low * decay[:, None], input_precision="ieee")
            acc_high = tl.dot(weights, kv_high, acc_high * decay[:, None], input_precision="ieee")

        # A row that saw nothing has total 0 and accumulators 0: its result is 0, its lse -inf.
        total = tl.where(total > 0.0, total, 1.0)
        row_lse = maximum + tl.log2(total)
        inverse = (scale / total)[:, None]
        mask_low = row_live[:, None] & in_low[None, :]
        mask_high = row_live[:, None] & in_high[None, :]
        if slot < 0:
            out_row = out + (query_row * stride_out_token + row_head * stride_out_head)[:, None]
            tl.store(out_row + low[None, :], (acc_low * inverse).to(out.dtype.element_ty), mask=mask_low)
            tl.store(out_row + high[None, :], (acc_high * inverse).to(out.dtype.element_ty), mask=mask_high)
            if HAS_LSE:
                tl.store(lse + query_row * stride_lse_token + row_head * stride_lse_head, row_lse * LN2, mask=row_live)
        else:
            part = (slot.to(tl.int64) * TILES + row_tile) * ROWS + tl.arange(0, ROWS)
            partial_row = partial + (part * LATENT)[:, None]
            tl.store(partial_row + low[None, :], acc_low * inverse, mask=mask_low)
            tl.store(partial_row + high[None, :], acc_high * inverse, mask=mask_high)
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
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
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
        weight = tl.load(partial_lse + part, mask=inside, other=float("-inf"))
        rows = tl.load(
            partial + (part * LATENT)[:, :, None] + channel[None, None, :],
            mask=inside[:, :, None] & (channel < LATENT)[None, None, :],
            other=0.0,
        )
        maximum_now = tl.maximum(maximum, tl.max(weight, axis=1))
        base = tl.where(maximum_now == float("-inf"), 0.0, maximum_now)
        weight = tl.exp2(weight - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weight, axis=1)
        acc = acc * decay[:, None] + tl.sum(weight[:, :, None] * rows, axis=1)
        maximum = maximum_now
    total = tl.where(total > 0.0, total, 1.0)
    token = (query_start + row // NUM_HEADS).to(tl.int64)
    head = row % NUM_HEADS
    target = out + (token * stride_out_token + head * stride_out_head)[:, None] + channel[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=live[:, None] & (channel < LATENT)[None, :])
    if HAS_LSE:
        row_lse = (maximum + tl.log2(total)) * LN2
        mask = live & (tl.program_id(2) == 0)
        tl.store(lse + token * stride_lse_token + head * stride_lse_head, row_lse, mask=mask)
