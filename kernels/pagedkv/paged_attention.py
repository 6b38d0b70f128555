"""The launcher of attention over the paged cache: checks, launch configuration, kernel, reduce of a split KV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton

from . import checks
from .arch import next_power_of_two
from .attention_kernel import attention_kernel
from .device import INTERPRETED, current, on
from .errors import HeadRatioError, LengthError, SplitError, WindowError
from .launch import attention as choose_launch
from .launch import query_tiles, tuning
from .split_reduce import reduce_kernel
from .strides import hidden_alignment

if TYPE_CHECKING:
    from torch import Tensor


def paged_attention(
    query: Tensor,  # [num_tokens, num_q_heads, head_size]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    out: Tensor,  # [num_tokens, num_q_heads, head_size]
    *,
    block_table: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32
    query_start_loc: Tensor,  # [num_seqs + 1] int32
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    num_splits: int | None = None,
    debug: bool = False,
) -> None:
    """Attend each query to the cached K and V of its sequence; K and V of this step must already be in the cache.

    Fit for graph capture: it never waits for the device; grid and scratch follow from shapes and the two bounds.

    A batch that mixes decode with prefill is right in one call and fast in two. With the decode sequences first, call
    it with their rows of the metadata and max_query_len=1, then with the other rows; both with the whole `query` and
    `out` (a call touches only the tokens of its own sequences, wherever `query_start_loc` begins).

    Args:
        query: Queries of all sequences, one after the other, in the dtype of the cache; last dimension dense.
        key_cache: Logical view of the K side of the pool, any strides, last dimension dense.
        value_cache: Logical view of the V side of the pool, with strides of its own.
        out: Result. Rows behind `query_start_loc[-1]` are left alone; a query that sees no token gets 0.
        block_table: Block ids of each sequence. Entries outside the visible tokens are not looked up.
        seq_lens: Tokens of each sequence in the cache, those of this step included.
        query_start_loc: Where the queries of each sequence begin in `query`.
        max_query_len: Upper bound of the query lengths; 1 says that this is a decode step.
        max_seq_len: Upper bound of `seq_lens`.
        scale: Factor of the scores, usually `head_size ** -0.5`.
        causal: Whether a query sees no token after its own. False is cross-attention and encoder attention.
        sliding_window: How many tokens a query sees, its own included; None for all.
        num_splits: Partitions of the KV of each sequence; None lets the tuning data decide.
        debug: Also check lengths and block ids (synchronises with the device).

    Raises:
        ArgumentError: the subclass of `pagedkv.errors` that names the mistake.
    """
    num_seqs = _check(query, key_cache, value_cache, out, block_table, seq_lens, query_start_loc)
    _check_options(max_query_len, max_seq_len, causal=causal, sliding_window=sliding_window, num_splits=num_splits)
    if debug:
        _check_values(
            key_cache, block_table, seq_lens, query_start_loc, query, max_query_len, max_seq_len, sliding_window
        )
    num_tokens, num_q_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if num_tokens == 0 or num_seqs == 0:
        return
    arch = current()
    launch = choose_launch(
        arch,
        head_size=head_size,
        element_bytes=query.element_size(),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        max_query_len=max_query_len,
        max_kv_len=max_seq_len if sliding_window is None else min(max_seq_len, sliding_window + max_query_len),
        num_splits=num_splits,
    )
    decode = max_query_len == 1
    splits = launch.splits
    if splits > 1:
        target = query.new_empty((num_tokens, num_q_heads, splits, head_size), dtype=torch.float32)
        lse = query.new_empty((num_tokens, num_q_heads, splits), dtype=torch.float32)
        target_strides, lse_strides = target.stride()[:3], lse.stride()[:2]
    else:
        target, lse = out, seq_lens
        target_strides, lse_strides = (*out.stride()[:2], 0), (0, 0)
    tiles = query_tiles(num_tokens, num_seqs, launch.tokens, launch.seqs, decode=decode)
    padded = next_power_of_two(head_size)
    with on(query):
        attention_kernel[(tiles * (num_kv_heads // launch.heads), splits)](
            query,
            key_cache,
            value_cache,
            target,
            lse,
            block_table,
            seq_lens,
            query_start_loc,
            num_seqs,
            scale * math.log2(math.e),
            sliding_window or 0,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *target_strides,
            *lse_strides,
            block_table.stride(0),
            HEAD_SIZE=head_size,
            PADDED=padded,
            BLOCK_SIZE=block_size,
            GROUP=num_q_heads // num_kv_heads,
            HEAD_PROGRAMS=num_kv_heads // launch.heads,
            HEADS=launch.heads,
            SEQS=launch.seqs,
            TOKENS=launch.tokens,
            ROWS=launch.rows,
            TILE=launch.tile,
            SPLITS=splits,
            DECODE=decode,
            CAUSAL=causal,
            WINDOWED=sliding_window is not None,
            ALIGN=hidden_alignment(query, key_cache, value_cache),
            num_warps=launch.waves,
            num_stages=launch.stages,
        )
        if splits > 1:
            reduce = tuning(arch.name).reduce
            reduce_kernel[(triton.cdiv(num_tokens * num_q_heads, reduce.rows),)](
                target,
                lse,
                out,
                query_start_loc,
                num_seqs,
                *out.stride()[:2],
                NUM_HEADS=num_q_heads,
                HEAD_SIZE=head_size,
                PADDED=padded,
                SPLITS=splits,
                ROWS=reduce.rows,
                CHUNK=min(reduce.chunk, next_power_of_two(splits)),
                num_warps=reduce.waves,
            )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
) -> int:
    """Check the tensors without reading them; return the number of sequences."""
    checks.caches(key_cache, value_cache)
    _, _, num_kv_heads, head_size = key_cache.shape
    checks.shape("query", query, (None, None, head_size), "[num_tokens, num_q_heads, head_size]")
    checks.shape("out", out, tuple(query.shape), "[num_tokens, num_q_heads, head_size]")
    checks.shape("block_table", block_table, (None, None), "[num_seqs, max_blocks]")
    num_seqs = block_table.shape[0]
    checks.shape("seq_lens", seq_lens, (num_seqs,), "[num_seqs]")
    checks.shape("query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    num_q_heads = query.shape[1]
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise HeadRatioError(
            "query",
            got=f"{num_q_heads} query heads for {num_kv_heads} KV heads",
            expected="a multiple",
            remedy="Replicate the KV heads or pad the query heads.",
        )
    for name, tensor in (("query", query), ("out", out)):
        checks.dtype(name, tensor, (key_cache.dtype,), "Cast to the dtype of the cache.")
        checks.dense(name, tensor)
    if INTERPRETED and query.dtype == torch.bfloat16:
        # Triton 3.6 to 3.9 interpret bf16 arithmetic on the bit patterns.
        checks.dtype("query", query, (torch.float32, torch.float16), "Triton's interpreter computes bf16 wrongly.")
    index = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    checks.indices(index)
    checks.device(("key_cache", key_cache), {"query": query, "out": out, **index})
    return num_seqs


def _check_options(
    max_query_len: int, max_seq_len: int, *, causal: bool, sliding_window: int | None, num_splits: int | None
) -> None:
    for name, value in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        if value < 1:
            raise LengthError(name, got=value, expected=">= 1", remedy="Pass the upper bound of the step.")
    if sliding_window is not None and (sliding_window < 1 or not causal):
        raise WindowError(
            "sliding_window",
            got=f"{sliding_window} with causal={causal}",
            expected="None, or at least 1 with causal=True",
            remedy="Pass None for full attention; a window without a causal mask is not defined here.",
        )
    if num_splits is not None and num_splits < 1:
        raise SplitError(
            "num_splits", got=num_splits, expected="None or >= 1", remedy="Pass None to let tuning decide."
        )


def _check_values(
    key_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query: Tensor,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None,
) -> None:
    """Check lengths, bounds and the block ids of visible tokens; reads device memory."""
    num_blocks, block_size = key_cache.shape[:2]
    query_lens = query_start_loc.diff()
    checks.within("query_start_loc", query_start_loc, query.shape[0] + 1, "num_tokens + 1")
    checks.within("query_start_loc (its differences)", query_lens, max_query_len + 1, "max_query_len + 1")
    checks.within("seq_lens", seq_lens, max_seq_len + 1, "max_seq_len + 1")
    checks.within("seq_lens", seq_lens, block_table.shape[1] * block_size + 1, "max_blocks * block_size + 1")
    oldest = torch.zeros_like(seq_lens)
    if sliding_window is not None:
        oldest = (seq_lens - query_lens - sliding_window + 1).clamp(min=0)
    column = torch.arange(block_table.shape[1], device=block_table.device)
    used = (column >= (oldest // block_size)[:, None]) & (column * block_size < seq_lens[:, None])
    used &= (query_lens > 0)[:, None]
    checks.blocks_exist(block_table, used, num_blocks)
