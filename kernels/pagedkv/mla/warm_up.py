# SPDX-License-Identifier: Apache-2.0
"""Compile what MLA decode will launch before a service begins, for each bound of the query lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pagedkv.cache.warm_up import longer
from pagedkv.mla.decode import mla_decode
from pagedkv.prepared import first_warm_up

if TYPE_CHECKING:
    from torch import Tensor


def warm_up(
    query: Tensor,  # [num_tokens, num_heads, latent_size + rope_size]
    cache: Tensor,  # [num_blocks, block_size, latent_size + rope_size]
    out: Tensor,  # [num_tokens, num_heads, latent_size]
    lse: Tensor,  # [num_tokens, num_heads] fp32
    *,
    block_table: Tensor,  # [num_seqs, max_blocks] int32
    most_queries: int,
    **options: Any,
) -> int:
    """Launch every kernel of a layer once, on a sequence without tokens: nothing is read from `cache` or written.

    What a step has of sequences and tokens makes no other code, so one sequence is enough.

    Args:
        query: A query of the layer, with the strides that it will have; so `cache`, `out` and `lse`.
        cache: The cache of the layer.
        out: Result with the strides that the layer writes.
        lse: Sums with the strides that the layer writes.
        block_table: Block table of any step, at least one row.
        most_queries: The largest bound of the query lengths: 1, or 1 + drafted tokens.
        options: Further arguments of `mla_decode`.

    Returns:
        How many bounds of the query lengths were launched; 0 where a layer that looks the same has been warmed up.
    """
    if not first_warm_up("latent attention", query, cache, out, lse, block_table, most_queries, **options):
        return 0
    query, out, lse = (longer(tensor, most_queries) for tensor in (query, out, lse))
    index = query.new_zeros(2, dtype=torch.int32)
    for bound in range(1, most_queries + 1):
        mla_decode(
            query[:bound],
            cache,
            out[:bound],
            block_table=block_table[:1],
            seq_lens=index[:1],
            query_start_loc=index,
            max_query_len=bound,
            lse=lse[:bound],
            **options,
        )
    return most_queries
