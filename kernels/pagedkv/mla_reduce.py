"""Merge the partial results of the sequences that MLA decode split among programs; the formula is `split_reduce`'s."""

from __future__ import annotations

import triton
import triton.language as tl

from .mla_kernel import LN2


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
