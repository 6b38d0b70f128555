"""Our launchers on the configurations that we promise, each in the form in which a server would call it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.cache_gather import gather_kv_cache
from pagedkv.cache_write import write_kv_cache
from pagedkv.paged_attention import paged_attention

from .case import DTYPES, Case, dtype_name
from .tensors import Batch, Layout

if TYPE_CHECKING:
    from collections.abc import Callable

_ATTENTION = ("attention_kernel", "reduce_kernel")


def our_cases() -> list[Case]:
    """Each operation over block sizes, head sizes, layouts and dtypes."""
    return [*_decode(), *_prefill(), *_copies()]


def _decode() -> list[Case]:
    shapes = [(64, 2048), (128, 2048), (128, 544), (256, 544), (64, 16), (128, 784)]
    cases = [_attention(_batch(head_size, block_size), "interleaved") for head_size, block_size in shapes]
    cases.append(_attention(_batch(128, 544), "packed"))
    cases.append(_attention(_batch(128, 544, dtype="fp16"), "interleaved"))
    cases.append(_attention(_batch(128, 544, big=False), "planes"))
    return cases


def _prefill() -> list[Case]:
    shapes = [(64, 2048), (128, 544), (256, 544)]
    return [_attention(_batch(head_size, block_size, query_len=512), "packed") for head_size, block_size in shapes]


def _copies() -> list[Case]:
    return [make(_batch(head_size, 544), "packed") for head_size in (64, 128, 256) for make in (_write, _gather)]


def _batch(head_size: int, block_size: int, *, dtype: str = "bf16", query_len: int = 1, big: bool = True) -> Batch:
    return Batch(
        DTYPES[dtype],
        head_size,
        num_heads=32,
        num_kv_heads=8,
        block_size=block_size,
        query_len=query_len,
        big=big,
    )


def _attention(batch: Batch, layout: Layout) -> Case:
    key_cache, value_cache = batch.caches(layout)
    query, out = batch.query(), batch.query()
    decode = batch.query_len == 1

    def launch() -> None:
        paged_attention(
            query,
            key_cache,
            value_cache,
            out,
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            max_query_len=batch.query_len,
            max_seq_len=batch.seq_len,
            scale=batch.scale,
        )

    return _ours("decode" if decode else "prefill", batch, layout, _ATTENTION if decode else _ATTENTION[:1], launch)


def _write(batch: Batch, layout: Layout) -> Case:
    key_cache, value_cache = batch.caches(layout)
    rows = (batch.num_tokens, batch.num_kv_heads, batch.head_size)
    key, value = (torch.empty(rows, dtype=batch.dtype) for _ in range(2))
    slots = torch.zeros(batch.num_tokens, dtype=torch.int64)

    def launch() -> None:
        write_kv_cache(key, value, key_cache, value_cache, slots)

    return _ours("cache_write", batch, layout, ("_write_kernel",), launch)


def _gather(batch: Batch, layout: Layout) -> Case:
    key_cache, value_cache = batch.caches(layout)
    rows = (batch.num_tokens, batch.num_kv_heads, batch.head_size)
    key, value = (torch.empty(rows, dtype=batch.dtype) for _ in range(2))
    token_to_seq, seq_starts = (torch.zeros(size, dtype=torch.int32) for size in (batch.num_tokens, batch.num_seqs))

    def launch() -> None:
        gather_kv_cache(
            key_cache,
            value_cache,
            key,
            value,
            block_table=batch.block_table,
            cu_seq_lens=batch.query_start_loc,
            token_to_seq=token_to_seq,
            seq_starts=seq_starts,
        )

    return _ours("cache_gather", batch, layout, ("_gather_kernel",), launch)


def _ours(operation: str, batch: Batch, layout: Layout, kernels: tuple[str, ...], launch: Callable[[], None]) -> Case:
    cache = "" if batch.big else "-small"
    return Case(
        name=f"{operation}-{dtype_name(batch.dtype)}-hd{batch.head_size}-bs{batch.block_size}-{layout}{cache}",
        side="ours",
        operation=operation,
        batch=batch,
        kernels=kernels,
        launch=launch,
        layout=layout,
        dense_rows=batch.head_size * batch.dtype.itemsize % 16 == 0,
    )
