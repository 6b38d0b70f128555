# SPDX-License-Identifier: Apache-2.0
"""The oracle of reading a paged cache, and of rotating its keys: plain torch loops, importing nothing of ours.

Caches are the logical `[num_blocks, block_size, num_kv_heads, head_size]` values whatever their packing, indexed by
block and by token in the block. What a write stores is this read backwards.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context(cache: Tensor, block_row: Tensor, start: int, end: int) -> Tensor:
    """Return the rows `start .. end - 1` of the sequence in `block_row`: `[end - start, num_kv_heads, head_size]`."""
    block_size = cache.shape[1]
    rows = [cache[int(block_row[p // block_size]), p % block_size] for p in range(start, end)]
    return torch.stack(rows) if rows else cache.new_empty((0, *cache.shape[2:]))


def gather(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    seq_starts: Tensor,
) -> None:
    """Fill rows n < len(token_to_seq) of `key` and `value`, `[num_tokens, num_kv_heads, head_size]`, from the cache."""
    for n, seq in enumerate(token_to_seq.tolist()):
        position = n - int(cu_seq_lens[seq]) + int(seq_starts[seq])
        key[n] = context(key_cache, block_table[seq], position, position + 1)[0]
        value[n] = context(value_cache, block_table[seq], position, position + 1)[0]


def rotate(rows: Tensor, positions: Tensor, cos_sin: Tensor, *, neox: bool) -> Tensor:
    """Return `rows` `[num_tokens, heads, head_size]` in float64, turned by the angles of their positions.

    `cos_sin` `[max_position, rotary_dim]` holds cosines, then sines; pairs are halves (`neox`) or neighbours.
    """
    rows, half = rows.double(), cos_sin.shape[1] // 2
    out = rows.clone()
    for i in range(half):
        a, b = (i, i + half) if neox else (2 * i, 2 * i + 1)
        pair = torch.complex(rows[..., a], rows[..., b])
        angle = torch.complex(cos_sin[positions, i].double(), cos_sin[positions, half + i].double())
        out[..., a], out[..., b] = torch.view_as_real(pair * angle[:, None]).unbind(-1)
    return out
