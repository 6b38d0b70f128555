# SPDX-License-Identifier: Apache-2.0
"""Attention over parts of the KV: merge two results, and attend a prefix that all sequences share only once.

A prefix that many sequences have in common (a system prompt) is the same K and V for all of them. One pass would read
it once for each sequence; here all queries attend it together, as one sequence, and each its own rest, and the two are
merged by their sums of exponentials (`merge_kernel`). The partial results are fp32, so nothing is rounded twice.
Library only: vLLM's plugin does not call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from pagedkv import checks
from pagedkv.arch import next_power_of_two
from pagedkv.attention.merge import merge_kernel
from pagedkv.attention.paged import paged_attention
from pagedkv.device import current, on
from pagedkv.errors import ArgumentError
from pagedkv.launch import tuning

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache


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
        lse: Output: natural logarithm of the sum of exponentials of both; None if nobody asks.
        prefix_out: One part, fp32, fp16 or bf16; last dimension dense. Rows whose `prefix_lse` is -inf are not read.
        prefix_lse: Its sums, natural logarithm; -inf for a query that saw nothing of that part.
        suffix_out: The other part.
        suffix_lse: Its sums.
        query_start_loc: Where given, rows before its first and behind its last entry are left alone.

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
        checks.dtype(name, tensor, (torch.float32,), "Sums of exponentials are fp32.")
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
        merge_kernel[(triton.cdiv(num_tokens * num_q_heads, launch.rows),)](
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
            PADDED=next_power_of_two(head_size),
            ROWS=launch.rows,
            BOUNDED=query_start_loc is not None,
            LSE=lse is not None,
            num_warps=launch.waves,
        )


def cascade_attention(
    query: Tensor,  # [num_tokens, num_q_heads, head_size]
    cache: PagedCache,
    out: Tensor,  # [num_tokens, num_q_heads, head_size]
    *,
    block_table: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32
    query_start_loc: Tensor,  # [num_seqs + 1] int32
    common_prefix_len: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,  # [num_tokens, num_q_heads] fp32
    num_splits: int | None = None,
    debug: bool = False,
) -> None:
    """Causal attention like `paged_attention`, with the prefix that all sequences share attended once.

    The prefix is the first `common_prefix_len` tokens of the first row of the block table, and every query stands
    behind it. Its length is the host's: a captured graph keeps the one it was captured with.

    Args:
        query: As in `paged_attention`, like all arguments that are not named here.
        cache: The cache.
        out: Result.
        block_table: Block ids of each sequence; all rows begin with those of the prefix.
        seq_lens: Tokens of each sequence in the cache, prefix and this step included.
        query_start_loc: Where the queries of each sequence begin in `query`.
        common_prefix_len: Tokens of the shared prefix, a positive multiple of the block size, below `max_seq_len`.
        max_query_len: Upper bound of the query lengths.
        max_seq_len: Upper bound of `seq_lens`.
        scale: Factor of the scores.
        sliding_window: None; anything else is refused.
        softcap: Of the scores of both parts.
        alibi_slopes: None; anything else is refused.
        sinks: Counted once, with each sequence's own part.
        lse: Output: natural logarithm of the sum of exponentials over both parts, the sink included.
        num_splits: Partitions of each of the two parts.
        debug: Also check lengths, block ids, and that the prefix is shared (synchronises with the device).

    Raises:
        ArgumentError: of kind "prefix" if it is not whole blocks, or with debug=True not shared by every sequence with
            a query; for a window, for slopes, and what `paged_attention` raises.
    """
    _options(cache.block_size, common_prefix_len, max_seq_len, sliding_window, alibi_slopes)
    checks.shape("block_table", block_table, (None, None), "[num_seqs, max_blocks]")
    checks.shape("query", query, (None, None, None), "[num_tokens, num_q_heads, head_size]")
    checks.shape("out", out, tuple(query.shape), "[num_tokens, num_q_heads, head_size]")
    num_seqs, prefix_blocks = block_table.shape[0], common_prefix_len // cache.block_size
    checks.shape("query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    if query.numel() == 0 or num_seqs == 0:
        return
    if debug:
        _shared(block_table, seq_lens, query_start_loc, common_prefix_len, prefix_blocks)
    prefix_out, suffix_out = query.new_empty((2, *query.shape), dtype=torch.float32)
    prefix_lse, suffix_lse = query.new_empty((2, *query.shape[:2]), dtype=torch.float32)
    options = {"scale": scale, "softcap": softcap, "num_splits": num_splits, "debug": debug}
    paged_attention(
        query,
        cache,
        prefix_out,
        block_table=block_table[:1],
        seq_lens=seq_lens.new_full((1,), common_prefix_len),
        query_start_loc=query_start_loc[::num_seqs].contiguous(),  # all queries are one sequence's
        max_query_len=query.shape[0],
        max_seq_len=common_prefix_len,
        causal=False,
        lse=prefix_lse,
        **options,
    )
    paged_attention(
        query,
        cache,
        suffix_out,
        block_table=block_table[:, prefix_blocks:],
        seq_lens=(seq_lens - common_prefix_len).clamp(min=0),  # a sequence of padding may be any length
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len - common_prefix_len,
        sinks=sinks,
        lse=suffix_lse,
        **options,
    )
    merge_attention(out, lse, prefix_out, prefix_lse, suffix_out, suffix_lse, query_start_loc=query_start_loc)


def _options(
    block_size: int, prefix_len: int, max_seq_len: int, sliding_window: int | None, alibi_slopes: Tensor | None
) -> None:
    if prefix_len < 1 or prefix_len % block_size or prefix_len >= max_seq_len:
        raise ArgumentError(
            "prefix",
            "common_prefix_len",
            got=f"{prefix_len} with max_seq_len {max_seq_len}",
            expected=f"a positive multiple of the block size {block_size}, below max_seq_len",
            remedy="Round down to whole blocks; without a shared prefix call paged_attention.",
        )
    if sliding_window is not None:
        raise ArgumentError(
            "window",
            "sliding_window",
            got=sliding_window,
            expected="None: a window begins at another token for each query, and in the prefix they share one mask",
            remedy="Call paged_attention, which skips what is outside the window anyway.",
        )
    if alibi_slopes is not None:
        raise ArgumentError(
            "option",
            "alibi_slopes",
            got="slopes",
            expected="None: the bias counts from the position of each query, and in the prefix all queries share one",
            remedy="Call paged_attention.",
        )


def _shared(
    block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, prefix_len: int, prefix_blocks: int
) -> None:
    query_lens = query_start_loc.diff()
    for wrong, what in (
        (seq_lens - query_lens < prefix_len, "has its first query inside the prefix"),
        ((block_table[:, :prefix_blocks] != block_table[:1, :prefix_blocks]).any(dim=1), "begins with other blocks"),
    ):
        seqs = (wrong & (query_lens > 0)).nonzero().flatten().tolist()
        if seqs:
            raise ArgumentError(
                "prefix",
                "common_prefix_len",
                got=f"{prefix_len}, but sequence {seqs[0]} {what} ({len(seqs)} in all)",
                expected="a prefix that lies before every query and in the same blocks",
                remedy="Pass what all sequences with a query have in common, in whole blocks.",
            )
