"""One case made runnable: inputs, both sides over the same inputs, NaN-poisoned outputs, and the check of each side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.write import write_kv_cache

from . import oracle, peers, pools
from .attention import attention
from .mla import mla
from .sides import Side, Work, side

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.cache.cache import PagedCache

    from .cases import Case


def prepare(case: Case, device: str, dtype: torch.dtype, cache_bytes: int) -> Work:
    """Return the work of a case over as many sets of unit-normal inputs as it takes to exceed `cache_bytes`."""
    sets = max(1, -(-cache_bytes // case.cache_bytes()))
    make = {"gather": _gather, "write": _write, "mla": mla}.get(case.op, attention)
    torch.manual_seed(case.seq_len * 31 + case.num_seqs)
    return make(case, device, dtype, sets)


def _gather(case: Case, device: str, dtype: torch.dtype, sets: int) -> Work:
    num_tokens = case.num_seqs * case.seq_len
    shape = (num_tokens, case.num_kv_heads, case.head_size)
    cu = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32) * case.seq_len
    seq = torch.arange(case.num_seqs, device=device, dtype=torch.int32).repeat_interleave(case.seq_len)
    begin = torch.zeros(case.num_seqs, device=device, dtype=torch.int32)
    tables = [pools.block_table(case, device) for _ in range(sets)]
    caches = [pools.new(case, device, dtype, table.numel()) for table in tables]

    def make(call: Callable, read: list[PagedCache]) -> Side:
        outs = [[torch.empty(shape, device=device, dtype=dtype) for _ in range(2)] for _ in read]

        def judge() -> float:
            pairs = [
                oracle.copy_error(out, rows[table.long()].flatten(1, 2)[:, : case.seq_len].flatten(0, 1).contiguous())
                for cache, pair, table in zip(caches, outs, tables, strict=True)
                for rows, out in zip(pools.rows(cache), pair, strict=True)
            ]
            return max(pairs)

        data = [(cache, *pair, table, cu, seq, begin) for cache, pair, table in zip(read, outs, tables, strict=True)]
        return side(data, call, [out for pair in outs for out in pair], judge)

    def peer() -> Side:
        # vLLM gathers rows and shuffle.
        return make(peers.gather(), [pools.packed(c, "shuffle") if c.packing == "native" else c for c in caches])

    return Work(make(gather_kv_cache, caches), peer, 0.0, sets)


def _write(case: Case, device: str, dtype: torch.dtype, sets: int) -> Work:
    num_tokens = case.num_seqs * case.seq_len
    num_blocks = -(-num_tokens // case.block_size)
    shape = (num_tokens, case.num_kv_heads, case.head_size)
    new = [[torch.randn(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(sets)]
    slots = [torch.randperm(num_blocks * case.block_size, device=device)[:num_tokens] for _ in range(sets)]

    def make(call: Callable) -> Side:
        caches = [pools.new(case, device, dtype, num_blocks, poisoned=True) for _ in range(sets)]

        def judge() -> float:
            errors = []
            for cache, pair, slot in zip(caches, new, slots, strict=True):
                for written, source in zip(pools.rows(cache), pair, strict=True):
                    golden = torch.full(written.shape, float("nan"), device=device, dtype=dtype).flatten(0, 1)
                    golden[slot] = source
                    errors.append(oracle.copy_error(written.reshape(golden.shape), golden))
            return max(errors)

        data = [(*pair, cache, slot) for pair, cache, slot in zip(new, caches, slots, strict=True)]
        return side(data, call, [out for cache in caches for out in (cache.key, cache.value)], judge)

    return Work(make(write_kv_cache), lambda: make(peers.write()), 0.0, sets)
