# SPDX-License-Identifier: Apache-2.0
"""Compile what the fused rotation and write will launch before a service begins; and tensors to warm up with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.cache.rotary import FEWEST_TOKENS, rotate_and_write
from pagedkv.device import current
from pagedkv.launch import tuning
from pagedkv.prepared import first_warm_up

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache


def warm_up(
    query: Tensor,  # [num_tokens, num_q_heads, head_size]
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,
    cache: PagedCache,
    positions: Tensor,  # [num_tokens] int64
    cos_sin: Tensor,  # [max_position, rotary_dim]
    *,
    neox: bool,
) -> int:
    """Launch the fused kernel of a layer for every number of tokens, without slots: nothing is written to `cache`.

    Args:
        query: A query of the layer, with the strides that it will have; so `key`, `value`, `cache` and `positions`.
        key: K as the layer passes it.
        value: V as the layer passes it.
        cache: The cache of the layer.
        positions: Positions of any step.
        cos_sin: That of `rotate_and_write`.
        neox: That of `rotate_and_write`.

    Returns:
        How many launches differ; 0 where this process has warmed up a layer that looks the same.
    """
    if not first_warm_up("rotation", query, key, value, positions, cos_sin, cache.signature, neox):
        return 0
    count, launches = FEWEST_TOKENS, 0
    most = max(count, tuning(current(query).name).write.block_m)
    rows = [longer(tensor, most).zero_() for tensor in (query, key, value, positions)]
    nowhere = positions.new_full((most,), -1)
    while count <= most:
        turned, keys, values, places = (tensor[:count] for tensor in rows)
        rotate_and_write(turned, keys, values, cache, places, cos_sin, nowhere[:count], neox=neox)
        count, launches = 2 * count, launches + 1
    return launches


def longer(tensor: Tensor, rows: int) -> Tensor:
    """Return an uninitialised tensor of so many rows with the strides and the alignment of `tensor`."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    extent = sum((n - 1) * stride for n, stride in zip((rows, *tensor.shape[1:]), tensor.stride(), strict=True)) + 1
    memory = tensor.new_empty(offset + extent)
    return memory.as_strided((rows, *tensor.shape[1:]), tensor.stride(), offset)
