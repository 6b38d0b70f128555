# SPDX-License-Identifier: Apache-2.0
"""Checks of paged attention before a launch: tensors and options always, lengths and block ids with debug=True."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv import checks
from pagedkv.cache import checks as cache_checks
from pagedkv.errors import ArgumentError

LARGEST_SOFTCAP = 1e4
"""`cap - 2 cap / (2^x + 1)` loses about `6e-8 cap` of a score: 6e-4 here, and every digit from 1e8 on."""

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache


def tensors(query: Tensor, cache: PagedCache, out: Tensor, lse: Tensor | None, index: dict[str, Tensor]) -> None:
    """Check the tensors without reading them; `index` holds block_table, seq_lens and query_start_loc.

    Raises:
        ArgumentError: one is wrong.
    """
    cache_checks.whole(cache)
    checks.head_size("cache.key", cache.head_size)
    checks.shape("query", query, (None, None, cache.head_size), "[num_tokens, num_q_heads, head_size]")
    checks.shape("out", out, tuple(query.shape), "[num_tokens, num_q_heads, head_size]")
    checks.sequences(**index)
    num_q_heads = query.shape[1]
    if num_q_heads == 0 or num_q_heads % cache.num_kv_heads:
        raise ArgumentError(
            "head ratio",
            "query",
            got=f"{num_q_heads} query heads for {cache.num_kv_heads} KV heads",
            expected="a multiple",
            remedy="Replicate the KV heads or pad the query heads.",
        )
    cache_checks.beside("query", query, cache)
    checks.dtype("out", out, (query.dtype, torch.float32), "Cast to the dtype of the query, or keep fp32 for a merge.")
    for name, tensor in (("query", query), ("out", out)):
        checks.dense(name, tensor)
    checks.computable("query", query)
    checks.device(("cache.key", cache.key), {"query": query, "out": out, **index})
    if lse is not None:
        checks.shape("lse", lse, (query.shape[0], num_q_heads), "[num_tokens, num_q_heads]")
        checks.dtype("lse", lse, (torch.float32,), "Allocate it as float32.")
        checks.device(("cache.key", cache.key), {"lse": lse})


def options(
    query: Tensor,
    max_query_len: int,
    max_seq_len: int,
    *,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    num_splits: int | None,
    batch_invariant: bool,
) -> None:
    """Check bounds and options.

    Raises:
        ArgumentError: one is wrong.
    """
    for name, value in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        checks.at_least_one("length", name, value, "Pass the upper bound of the step.")
    if sliding_window is not None and (sliding_window < 1 or not causal):
        raise ArgumentError(
            "window",
            "sliding_window",
            got=f"{sliding_window} with causal={causal}",
            expected="None, or at least 1 with causal=True",
            remedy="Pass None for full attention; a window without a causal mask is not defined here.",
        )
    if softcap is not None and not 0 < softcap <= LARGEST_SOFTCAP:
        raise ArgumentError(
            "option",
            "softcap",
            got=softcap,
            expected=f"None or a cap > 0 and at most {LARGEST_SOFTCAP:g}",
            remedy="Pass None where there is no cap; a larger one costs the digits of the scores.",
        )
    if alibi_slopes is not None and not causal:
        raise ArgumentError(
            "option",
            "alibi_slopes",
            got="slopes with causal=False",
            expected="causal=True: the bias counts back from the query",
            remedy="Pass None; without a causal mask the bias has no agreed sign.",
        )
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is not None:
            checks.shape(name, tensor, (query.shape[1],), "[num_q_heads]")
            checks.dtype(name, tensor, (torch.float32,), "Cast with .float().")
            checks.dense(name, tensor)
            checks.device(("query", query), {name: tensor})
    checks.at_least_one("split", "num_splits", num_splits)
    if num_splits is not None and batch_invariant:
        raise ArgumentError(
            "split",
            "num_splits",
            got=f"{num_splits} with batch_invariant=True",
            expected="None: partitions of a fixed length, as many as the bound of the lengths asks for",
            remedy="Leave one of the two out.",
        )


def contents(
    query: Tensor,
    cache: PagedCache,
    index: dict[str, Tensor],
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None,
) -> None:
    """Check scales, lengths and block ids (synchronises with the device).

    Raises:
        ArgumentError: one is wrong.
    """
    cache_checks.scales(cache)
    checks.within("seq_lens", index["seq_lens"], max_seq_len + 1, "max_seq_len + 1")
    checks.lengths(
        **index,
        num_tokens=query.shape[0],
        max_query_len=max_query_len,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        sliding_window=sliding_window,
    )
