"""Merge two results of the same queries over two parts of their KV.

    out[n, h, :] = (e^(p - m) prefix_out[n, h, :] + e^(s - m) suffix_out[n, h, :]) / (e^(p - m) + e^(s - m))
    lse[n, h]    = m + ln(e^(p - m) + e^(s - m))        p = prefix_lse[n, h], s = suffix_lse[n, h], m = max(p, s)

The softmax over all of the KV, from its parts (section 2.2 of arXiv 2501.01005). A part that saw nothing has lse -inf:
its weight is 0 and its rows are not read, so they may hold anything. If neither saw anything the result is 0 and -inf.

Merge the results of the split-KV partitions of each query row.

    out[n, h, :] = sum_s 2^(lse[n, h, s] - m) partial[n, h, s, :] / sum_s 2^(lse[n, h, s] - m),   m = max_s lse[n, h, s]

A partition that saw no token has lse -inf and weight 0; a row that no partition saw anything of becomes 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    out,  # [num_tokens, num_q_heads, head_size]
    lse,  # [num_tokens, num_q_heads] fp32, written if LSE
    prefix_out,  # like out, any float
    prefix_lse,  # like lse
    suffix_out,
    suffix_lse,
    query_start_loc,  # [num_seqs + 1] int32, read if BOUNDED
    num_seqs,
    num_tokens,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    stride_prefix_token: tl.int64,
    stride_prefix_head: tl.int64,
    stride_prefix_lse_token: tl.int64,
    stride_prefix_lse_head: tl.int64,
    stride_suffix_token: tl.int64,
    stride_suffix_head: tl.int64,
    stride_suffix_lse_token: tl.int64,
    stride_suffix_lse_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # head_size rounded up to a power of two
    ROWS: tl.constexpr,  # (token, head) rows of a program
    BOUNDED: tl.constexpr,
    LSE: tl.constexpr,
):
    """Merge ROWS rows; grid [ceil(num_tokens * NUM_HEADS / ROWS)]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    live = token < num_tokens
    if BOUNDED:
        live = live & (token >= tl.load(query_start_loc)) & (token < tl.load(query_start_loc + num_seqs))
    channel = tl.arange(0, PADDED)
    in_head = channel < HEAD_SIZE

    prefix_at = token * stride_prefix_lse_token + head * stride_prefix_lse_head
    suffix_at = token * stride_suffix_lse_token + head * stride_suffix_lse_head
    prefix = tl.load(prefix_lse + prefix_at, mask=live, other=float("-inf"))
    suffix = tl.load(suffix_lse + suffix_at, mask=live, other=float("-inf"))
    # Only -inf is nothing. A NaN is seen as one and reaches the result.
    saw_prefix = prefix != float("-inf")
    saw_suffix = suffix != float("-inf")
    # tl.maximum drops a NaN; the weights below do not. -inf - -inf would be one.
    maximum = tl.maximum(prefix, suffix)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    prefix_weight = tl.exp(prefix - base)
    suffix_weight = tl.exp(suffix - base)
    total = prefix_weight + suffix_weight
    divisor = tl.where(total == 0.0, 1.0, total)

    prefix_row = token * stride_prefix_token + head * stride_prefix_head
    mask = (live & saw_prefix)[:, None] & in_head[None, :]
    rows = tl.load(prefix_out + prefix_row[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    result = rows * (prefix_weight / divisor)[:, None]
    suffix_row = token * stride_suffix_token + head * stride_suffix_head
    mask = (live & saw_suffix)[:, None] & in_head[None, :]
    rows = tl.load(suffix_out + suffix_row[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    result += rows * (suffix_weight / divisor)[:, None]
    out_row = token * stride_out_token + head * stride_out_head
    mask = live[:, None] & in_head[None, :]
    tl.store(out + out_row[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=mask)
    if LSE:
        sums = tl.where(total == 0.0, float("-inf"), base + tl.log(divisor))
        tl.store(lse + token * stride_lse_token + head * stride_lse_head, sums, mask=live)


LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def reduce_kernel(
    partial,  # [num_tokens, num_q_heads, SPLITS, head_size] fp32, contiguous
    lse,  # [num_tokens, num_q_heads, SPLITS] fp32 base 2, contiguous
    out,  # [num_tokens, num_q_heads, head_size]
    out_lse,  # [num_tokens, num_q_heads] fp32, written if LSE
    query_start_loc,  # [num_seqs + 1] int32
    num_seqs,
    num_rows,  # num_tokens * NUM_HEADS
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_out_lse_token: tl.int64,
    stride_out_lse_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,  # (token, head) rows of a program
    CHUNK: tl.constexpr,  # partitions loaded at once
    LSE: tl.constexpr,
):
    """Merge SPLITS partial results of each of ROWS rows; grid [ceil(num_tokens * NUM_HEADS / ROWS)]."""
    # Rows before the first and behind the last sequence (another call's, the padding of a captured graph) have no
    # partial results and keep what `out` holds.
    first_row = tl.load(query_start_loc).to(tl.int64) * NUM_HEADS
    end_row = tl.load(query_start_loc + num_seqs).to(tl.int64) * NUM_HEADS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    live = (row >= first_row) & (row < end_row)
    in_head = channel < HEAD_SIZE

    # Online over chunks, like the attention over its tiles: [ROWS, CHUNK, PADDED] partial results at a time.
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, PADDED], 0.0, tl.float32)
    for first in range(0, SPLITS, CHUNK):
        split = first + tl.arange(0, CHUNK)
        part = row[:, None] * SPLITS + split[None, :]
        # Rows that are not live hold anything and are not stored; a mask of them would wait for query_start_loc.
        inside = (row < num_rows)[:, None] & (split < SPLITS)[None, :]
        weight = tl.load(lse + part, mask=inside, other=float("-inf"))
        rows = tl.load(
            partial + (part * HEAD_SIZE)[:, :, None] + channel[None, None, :],
            mask=inside[:, :, None] & in_head[None, None, :],
            other=0.0,
        )
        maximum_now = tl.maximum(maximum, tl.max(weight, axis=1))
        base = tl.where(maximum_now == float("-inf"), 0.0, maximum_now)
        weight = tl.exp2(weight - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weight, axis=1)
        acc = acc * decay[:, None] + tl.sum(weight[:, :, None] * rows, axis=1)
        maximum = maximum_now
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = row // NUM_HEADS * stride_out_token + row % NUM_HEADS * stride_out_head
    mask = live[:, None] & in_head[None, :]
    tl.store(out + target[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=mask)
    if LSE:
        target = row // NUM_HEADS * stride_out_lse_token + row % NUM_HEADS * stride_out_lse_head
        sums = (maximum + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN2
        tl.store(out_lse + target, sums, mask=live)
