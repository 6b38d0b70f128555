# SPDX-License-Identifier: Apache-2.0
"""Merge results over parts of the KV by their sums of exponentials (section 2.2 of arXiv 2501.01005).

    out[n, h, :] = sum_s e^(lse[n, h, s] - m) part[n, h, s, :] / sum_s e^(lse[n, h, s] - m),   m = max_s lse[n, h, s]
    lse[n, h]    = m + ln sum_s e^(lse[n, h, s] - m)

`reduce_kernel` merges the partitions of one call (base 2), `merge_attention` the results of two calls (base e). A
part that saw nothing has lse -inf: its weight is 0 and its rows are not read, so they may hold anything. If no part saw
anything the result is 0 and -inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv import checks
from pagedkv.arch import next_power_of_two
from pagedkv.attention.softmax import LN2, finite, log_sum, merge_parts
from pagedkv.device import current, on
from pagedkv.errors import ArgumentError
from pagedkv.launch import FEWEST_AT_ONCE, tuning
from pagedkv.strides import wide

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def load_lse(lse, strides, token, head, live):
    """Return the sums of a part, -inf where not `live`."""
    stride_token, stride_head = wide(strides)
    return tl.load(lse + token * stride_token + head * stride_head, mask=live, other=float("-inf"))


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Wait for the kernel before this one, which then may still be ending, and let the next one begin to wait.

    With USE_PDL, a programmatic dependent launch, what it costs to start a kernel passes while the one before it
    ends (PTX ISA, griddepcontrol). Nothing may be read or written before.
    """
    if USE_PDL:
        # Not by name: only a Triton with the NVIDIA backend has these in triton.language.extra.cuda.
        wait: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0"
        tl.inline_asm_elementwise(wait, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def merge_kernel(
    out,  # [num_tokens, num_q_heads, head_size]
    lse,  # [num_tokens, num_q_heads] fp32, written if WRITE_LSE
    prefix_out,  # like out, any float
    prefix_lse,  # like lse
    suffix_out,
    suffix_lse,
    query_start_loc,  # [num_seqs + 1] int32, read if USE_QUERY_START_LOC
    num_seqs,
    num_tokens,
    out_strides,  # token, head; so are all others
    lse_strides,
    prefix_strides,
    prefix_lse_strides,
    suffix_strides,
    suffix_lse_strides,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_M: tl.constexpr,  # (token, head) rows of a program
    USE_QUERY_START_LOC: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Merge BLOCK_M rows; grid [ceil(num_tokens * NUM_HEADS / BLOCK_M)]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    live = token < num_tokens
    if USE_QUERY_START_LOC:
        live = live & (token >= tl.load(query_start_loc)) & (token < tl.load(query_start_loc + num_seqs))
    channel = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = channel < HEAD_SIZE

    prefix = load_lse(prefix_lse, prefix_lse_strides, token, head, live)
    suffix = load_lse(suffix_lse, suffix_lse_strides, token, head, live)
    # tl.maximum drops a NaN; the weights do not.
    base = finite(tl.maximum(prefix, suffix))
    prefix_weight = tl.exp(prefix - base)
    suffix_weight = tl.exp(suffix - base)
    total = prefix_weight + suffix_weight
    divisor = tl.where(total == 0.0, 1.0, total)

    # Only -inf is nothing. A NaN is seen as one and reaches the result.
    stride_token, stride_head = wide(prefix_strides)
    at = (token * stride_token + head * stride_head)[:, None] + channel[None, :]
    mask = (live & (prefix != float("-inf")))[:, None] & in_head[None, :]
    rows = tl.load(prefix_out + at, mask=mask, other=0.0).to(tl.float32)
    result = rows * (prefix_weight / divisor)[:, None]
    stride_token, stride_head = wide(suffix_strides)
    at = (token * stride_token + head * stride_head)[:, None] + channel[None, :]
    mask = (live & (suffix != float("-inf")))[:, None] & in_head[None, :]
    rows = tl.load(suffix_out + at, mask=mask, other=0.0).to(tl.float32)
    result += rows * (suffix_weight / divisor)[:, None]
    stride_token, stride_head = wide(out_strides)
    at = token * stride_token + head * stride_head
    mask = live[:, None] & in_head[None, :]
    tl.store(out + at[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=mask)
    if WRITE_LSE:
        stride_token, stride_head = wide(lse_strides)
        sums = tl.where(total == 0.0, float("-inf"), base + tl.log(divisor))
        tl.store(lse + token * stride_token + head * stride_head, sums, mask=live)


@triton.jit(
    do_not_specialize=["num_seqs", "num_rows", "splits"],  # as in the attention kernel
    do_not_specialize_on_alignment=["out_lse", "query_start_loc"],
)
def reduce_kernel(
    partial,  # [tokens of this call, num_q_heads, splits, head_size] fp32, contiguous
    lse,  # [tokens of this call, num_q_heads, splits] fp32 base 2, contiguous
    out,  # [num_tokens, num_q_heads, head_size]
    out_lse,  # [num_tokens, num_q_heads] fp32, written if WRITE_LSE
    query_start_loc,  # [num_seqs + 1] int32
    num_seqs,
    num_rows,  # of `lse`
    splits,
    out_strides,  # token, head
    out_lse_strides,  # token, head
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # (token, head) rows of a program
    BLOCK_SPLITS: tl.constexpr,  # partitions loaded at once
    SINGLE_PASS: tl.constexpr,  # whether that is all of them
    WRITE_LSE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Merge `splits` partial results of each of BLOCK_M rows; grid [ceil(num_rows / BLOCK_M)]."""
    pdl_wait(USE_PDL)
    # Rows after the last sequence (the padding of a captured graph) have no partial results and keep what `out` holds.
    # In a batch of two calls the rows of the other one are none of this: they would be most of the programs.
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(query_start_loc) + row // NUM_HEADS
    channel = tl.arange(0, HEAD_SIZE_PADDED)
    live = (row < num_rows) & (token < tl.load(query_start_loc + num_seqs))
    in_head = channel < HEAD_SIZE

    # Online over chunks, like the attention over its tiles: partial results [BLOCK_M, BLOCK_SPLITS, HEAD_SIZE_PADDED].
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, HEAD_SIZE_PADDED], 0.0, tl.float32)
    # A loop that runs once would cost a tenth of a small decode step: its loads wait for it.
    chunks = 1 if SINGLE_PASS else tl.cdiv(splits, BLOCK_SPLITS)
    for chunk in range(chunks):
        split = chunk * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
        part = row[:, None] * splits + split[None, :]
        # Rows that are not live hold anything and are not stored; a mask of them would wait for query_start_loc.
        inside = (row < num_rows)[:, None] & (split < splits)[None, :]
        maximum, total, acc = merge_parts(partial, lse, part, inside, channel, in_head, HEAD_SIZE, maximum, total, acc)
    divisor, row_lse = log_sum(maximum, total)
    head = row % NUM_HEADS
    stride_token, stride_head = wide(out_strides)
    target = out + (token * stride_token + head * stride_head)[:, None] + channel[None, :]
    mask = live[:, None] & in_head[None, :]
    tl.store(target, (acc * (1.0 / divisor)[:, None]).to(out.dtype.element_ty), mask=mask)
    if WRITE_LSE:
        stride_token, stride_head = wide(out_lse_strides)
        tl.store(out_lse + token * stride_token + head * stride_head, row_lse * LN2, mask=live)


def reduced_at_once(splits: int, most: int, *, decode: bool, batch_invariant: bool) -> int:
    """Return how many partitions a program of the reduce loads at once: a power of two, at least 8 and at most `most`.

    Few values, because each is compiled; and not always `most`, because what is not there is loaded too. Other steps
    than decode have few partitions and many rows. With `batch_invariant` it is `most`, whatever the batch.
    """
    if batch_invariant:
        return most
    return min(most, max(FEWEST_AT_ONCE, next_power_of_two(splits)) if decode else FEWEST_AT_ONCE)


def merge_attention(
    out: Tensor,  # [num_tokens, num_q_heads, head_size]
    lse: Tensor | None,  # [num_tokens, num_q_heads] fp32
    prefix_out: Tensor,  # [num_tokens, num_q_heads, head_size]
    prefix_lse: Tensor,  # [num_tokens, num_q_heads] fp32
    suffix_out: Tensor,  # [num_tokens, num_q_heads, head_size]
    suffix_lse: Tensor,  # [num_tokens, num_q_heads] fp32
    *,
    query_start_loc: Tensor | None = None,  # [num_seqs + 1] int32
) -> None:
    """Merge two results of the same queries over disjoint parts of their KV into the result over both.

    The order of the parts does not matter. A sink must have been counted in one of them, and in one only.

    Args:
        out: Result, fp32, fp16 or bf16; last dimension dense. Shares no memory with the parts.
        lse: Output: natural logarithm of the sum of exponentials of both; None leaves it out.
        prefix_out: One part, fp32, fp16 or bf16; last dimension dense. Rows whose `prefix_lse` is -inf are not read.
        prefix_lse: Its sums, natural logarithm; -inf for a query that saw nothing of that part.
        suffix_out: The other part.
        suffix_lse: Its sums.
        query_start_loc: Where given, rows before its first and after its last entry are left alone.

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    checks.shape("out", out, (None, None, None), "[num_tokens, num_q_heads, head_size]")
    num_tokens, num_q_heads, head_size = out.shape
    parts = {"prefix_out": prefix_out, "suffix_out": suffix_out}
    sums = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse}
    asked = {} if lse is None else {"lse": lse}
    for name, tensor in ({"out": out} | parts).items():
        checks.shape(name, tensor, tuple(out.shape), "[num_tokens, num_q_heads, head_size]")
        checks.dtype(name, tensor, checks.DTYPES, "Attend into a float tensor.")
        checks.dense(name, tensor)
    for name, tensor in (sums | asked).items():
        checks.shape(name, tensor, (num_tokens, num_q_heads), "[num_tokens, num_q_heads]")
        checks.dtype(name, tensor, (torch.float32,), "Allocate it as float32.")
    checks.computable("out", out)
    index = {} if query_start_loc is None else {"query_start_loc": query_start_loc}
    checks.indices(index)
    checks.device(("out", out), parts | sums | asked | index)
    if out.numel() == 0:
        return
    for name, result in ({"out": out} | asked).items():
        for other, tensor in (parts | sums).items():
            if result.data_ptr() == tensor.data_ptr():
                raise ArgumentError(
                    "alias", name, got=f"the memory of {other}", expected="memory of its own", remedy="Copy it."
                )
    launch = tuning(current().name).gather  # it moves rows of heads, as a gather does
    with on(out):
        merge_kernel[(triton.cdiv(num_tokens * num_q_heads, launch.block_m),)](
            out,
            prefix_lse if lse is None else lse,
            prefix_out,
            prefix_lse,
            suffix_out,
            suffix_lse,
            prefix_lse if query_start_loc is None else query_start_loc,
            0 if query_start_loc is None else query_start_loc.shape[0] - 1,
            num_tokens,
            out.stride()[:2],
            (0, 0) if lse is None else lse.stride(),
            prefix_out.stride()[:2],
            prefix_lse.stride(),
            suffix_out.stride()[:2],
            suffix_lse.stride(),
            NUM_HEADS=num_q_heads,
            HEAD_SIZE=head_size,
            HEAD_SIZE_PADDED=next_power_of_two(head_size),
            BLOCK_M=launch.block_m,
            USE_QUERY_START_LOC=query_start_loc is not None,
            WRITE_LSE=lse is not None,
            num_warps=launch.waves,
        )
