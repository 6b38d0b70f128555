"""Merge two results of the same queries over two parts of their KV.

    out[n, h, :] = (e^(p - m) prefix_out[n, h, :] + e^(s - m) suffix_out[n, h, :]) / (e^(p - m) + e^(s - m))
    lse[n, h]    = m + ln(e^(p - m) + e^(s - m))        p = prefix_lse[n, h], s = suffix_lse[n, h], m = max(p, s)

The softmax over all of the KV, from its parts (section 2.2 of arXiv 2501.01005). A part that saw nothing has lse -inf:
its weight is 0 and its rows are not read, so they may hold anything. If neither saw anything the result is 0 and -inf.
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
