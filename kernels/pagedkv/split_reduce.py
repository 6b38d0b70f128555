"""Merge the results of the split-KV partitions of each query row.

    out[n, h, :] = sum_s 2^(lse[n, h, s] - m) partial[n, h, s, :] / sum_s 2^(lse[n, h, s] - m),   m = max_s lse[n, h, s]

A partition that saw no token has lse -inf and weight 0; a row that no partition saw anything of becomes 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reduce_kernel(
    partial,  # [num_tokens, num_q_heads, SPLITS, head_size] fp32, contiguous
    lse,  # [num_tokens, num_q_heads, SPLITS] fp32 base 2, contiguous
    out,  # [num_tokens, num_q_heads, head_size]
    query_start_loc,  # [num_seqs + 1] int32
    num_seqs,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,  # (token, head) rows of a program
):
    """Merge SPLITS partial results of each of ROWS rows; grid [ceil(num_tokens * NUM_HEADS / ROWS)]."""
    # Rows behind the last sequence (padding of a captured graph) have no partial results and keep what `out` holds.
    num_rows = tl.load(query_start_loc + num_seqs).to(tl.int64) * NUM_HEADS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)[None, :]
    live = row < num_rows
    mask = live[:, None] & (channel < HEAD_SIZE)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(SPLITS):
        maximum = tl.maximum(maximum, tl.load(lse + row * SPLITS + split, mask=live, other=float("-inf")))
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for split in range(SPLITS):
        weight = tl.exp2(tl.load(lse + row * SPLITS + split, mask=live, other=float("-inf")) - base)
        total += weight
        acc += weight[:, None] * tl.load(
            partial + ((row * SPLITS + split) * HEAD_SIZE)[:, None] + channel, mask=mask, other=0.0
        )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = row // NUM_HEADS * stride_out_token + row % NUM_HEADS * stride_out_head
    tl.store(out + target[:, None] + channel, result.to(out.dtype.element_ty), mask=mask)
