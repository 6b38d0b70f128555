# SPDX-License-Identifier: Apache-2.0
"""Argument checks of MLA decode; none of them reads device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv import checks
from pagedkv.errors import ArgumentError
from pagedkv.fp8.formats import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.mla.launch import MlaLaunch
    from pagedkv.mla.tables import Tables

LARGEST_LATENT, LARGEST_ROPE = 512, 128


def tensors(
    query: Tensor,
    cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    lse: Tensor | None,
) -> int:
    """Check the tensors without reading them; return the number of sequences."""
    checks.shape("cache", cache, (None, None, None), "[num_blocks, block_size, latent_size + rope_size]")
    if 0 in cache.shape:
        raise ArgumentError(
            "shape", "cache", got=tuple(cache.shape), expected="no empty axis", remedy="Allocate at least one block."
        )
    checks.shape("query", query, (None, None, cache.shape[-1]), "[num_tokens, num_heads, latent_size + rope_size]")
    checks.shape("out", out, (*query.shape[:2], None), "[num_tokens, num_heads, latent_size]")
    checks.head_size("out", out.shape[-1], "latent_size", most=LARGEST_LATENT)
    checks.head_size("query", query.shape[-1] - out.shape[-1], "what is beyond out, rope_size", 16, LARGEST_ROPE)
    if query.shape[1] == 0:
        raise ArgumentError(
            "head ratio", "query", got="0 heads", expected="at least one", remedy="Leave the layer out."
        )
    num_seqs = checks.sequences(block_table, seq_lens, query_start_loc)
    checks.dtype("query", query, checks.DTYPES, "Cast it; only the cache may hold codes.")
    checks.dtype("out", out, (query.dtype,), "Allocate it in the dtype of the query.")
    for name, tensor in (("query", query), ("cache", cache), ("out", out)):
        checks.dense(name, tensor)
    checks.computable("query", query)
    others = {"query": query, "out": out, "block_table": block_table}
    others |= {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    if lse is not None:
        checks.shape("lse", lse, tuple(query.shape[:2]), "[num_tokens, num_heads]")
        checks.dtype("lse", lse, (torch.float32,), "Allocate it as float32.")
        others["lse"] = lse
    checks.device(("cache", cache), others)
    return num_seqs


def codes(query: Tensor, cache: Tensor, cache_format: str | None, cache_scale: Tensor | None) -> None:
    """Check that the cache holds what the call says."""
    if cache_format is None:
        checks.dtype("cache", cache, (query.dtype,), "Cast the query, or name the cache_format of FP8 codes.")
    else:
        checks.dtype("cache", cache, (torch.uint8,), "View the FP8 codes as uint8.")
    if cache_format not in (None, *FORMATS):
        raise ArgumentError(
            "scale",
            "cache_format",
            got=repr(cache_format),
            expected=f"None or one of {', '.join(FORMATS)}",
            remedy="Take e4m3fnuz on gfx942, e4m3fn on gfx950 and CUDA.",
        )
    if (cache_format is None) != (cache_scale is None) or (cache_scale is not None and cache_scale.numel() != 1):
        raise ArgumentError(
            "scale",
            "cache_scale",
            got="none" if cache_scale is None else tuple(cache_scale.shape),
            expected="one number with a cache_format, none without",
            remedy="Pass the layer's scale as it is; a latent cache has one for all rows.",
        )
    if cache_scale is not None:
        checks.dtype("cache_scale", cache_scale, (torch.float32,), "Cast with .float().")
        checks.device(("cache", cache), {"cache_scale": cache_scale})


def same_step(tables: Tables, expected: MlaLaunch, num_seqs: int) -> None:
    """Check that the tables were allocated for this step: same launch, same number of sequences."""
    if tables.launch != expected or tables.reduce_indptr.shape[0] != num_seqs + 1:
        raise ArgumentError(
            "tables",
            "tables",
            got=f"{tables.launch} for {tables.reduce_indptr.shape[0] - 1} sequences",
            expected=f"{expected} for {num_seqs} sequences",
            remedy="Allocate them with the heads, dtype, max_query_len and programs of this call.",
        )
