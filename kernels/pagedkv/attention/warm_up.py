# SPDX-License-Identifier: Apache-2.0
"""Compile what a layer will launch before a service begins: attention and writes of every batch that may come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.attention.launch import bound, bound_of_queries
from pagedkv.attention.merge import reduced_at_once
from pagedkv.attention.paged import launch_of, paged_attention
from pagedkv.cache.warm_up import longer
from pagedkv.cache.write import write_kv_cache
from pagedkv.device import current
from pagedkv.launch import tuning
from pagedkv.prepared import first_warm_up

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from torch import Tensor

    from pagedkv.cache.cache import PagedCache


@dataclass(frozen=True)
class ServiceBounds:
    """Bounds of the batches that a service gives its layers."""

    max_seqs: int
    """Sequences of a step."""
    max_tokens: int
    """Query tokens of a step."""
    max_seq_len: int
    batch_invariant: bool


@dataclass(frozen=True)
class _Step:
    num_tokens: int
    num_seqs: int
    most_queries: int
    longest: int


MOST_ROWS = 4096
"""Tokens of the largest step that is tried: more make more programs, and of so many no launch is split."""


def _up_to(most: int, least: int = 1) -> Iterator[int]:
    """Yield the powers of two from `least` on below `most`, then that."""
    value = least
    while value < most:
        yield value
        value *= 2
    yield most


def warm_up(
    query: Tensor,  # [num_tokens, num_q_heads, head_size]
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,
    cache: PagedCache,
    out: Tensor,
    service: ServiceBounds,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> int:
    """Launch every kernel of a layer once, on sequences without queries: nothing is read from `cache` or written.

    What differs between two layers that Triton compiles for (strides, alignment, dtypes) is taken from the tensors.

    Args:
        query: A query of the layer, with the strides that it will have; so `key`, `value`, `cache` and `out`.
        key: K with the strides that the layer writes.
        value: V with the strides that the layer writes.
        cache: The cache of the layer.
        out: Result with the strides that the layer writes.
        service: What may come.
        sliding_window: That of `paged_attention`.
        options: Further arguments of `paged_attention`.

    Returns:
        How many launches of attention differ; 0 where this process has warmed up a layer that looks the same.
    """
    layer = (query, key, value, out, cache.signature, service, sliding_window)
    if not first_warm_up("attention", *layer, **options):
        return 0
    rows = max(service.max_seqs, min(service.max_tokens, MOST_ROWS))
    query, key, value, out = (longer(tensor, rows) for tensor in (query, key, value, out))
    index = query.new_zeros(rows + 1, dtype=torch.int32)
    table = query.new_zeros((rows, 1), dtype=torch.int32)
    for count in (1, rows):
        write_kv_cache(key[:count], value[:count], cache, index.new_full((count,), -1, dtype=torch.int64))
    arch = current(query)
    seen: set[Hashable] = set()
    at_once = tuning(arch.name).reduce.block_splits
    for step in _steps(service, rows):
        launch = launch_of(
            arch,
            query,
            cache,
            **asdict(step),
            sliding_window=sliding_window,
            num_splits=None,
            batch_invariant=service.batch_invariant,
        )
        splits, decode = launch.num_splits, step.most_queries == 1
        loaded = reduced_at_once(splits, at_once, decode=decode, batch_invariant=service.batch_invariant)
        reduce = (loaded, splits > loaded) if splits > 1 else None
        looks = (decode, replace(launch, num_splits=min(splits, 2)), reduce)
        if looks in seen:
            continue
        seen.add(looks)
        paged_attention(
            query[: step.num_tokens],
            cache,
            out[: step.num_tokens],
            block_table=table[: step.num_seqs],
            seq_lens=index[: step.num_seqs],
            query_start_loc=index[: step.num_seqs + 1],
            max_query_len=step.most_queries,
            max_seq_len=step.longest,
            sliding_window=sliding_window,
            batch_invariant=service.batch_invariant,
            **options,
        )
    return len(seen)


def _steps(service: ServiceBounds, rows: int) -> Iterator[_Step]:
    for queries in _up_to(service.max_tokens):
        for num_seqs in _up_to(min(service.max_seqs, max(1, service.max_tokens // queries))):
            for length in _up_to(service.max_seq_len, least=16):
                if queries <= length:
                    tokens = min(rows, num_seqs * queries)
                    yield _Step(tokens, num_seqs, bound_of_queries(queries), bound(length))
