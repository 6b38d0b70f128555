"""One case made runnable: inputs, both sides over the same inputs, NaN-poisoned outputs, and the check of each side."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from pagedkv import layout
from pagedkv.cache import PagedCache
from pagedkv.cache_gather import gather_kv_cache
from pagedkv.cache_write import write_kv_cache
from pagedkv.paged_attention import paged_attention

from . import oracle, peers
from .cases import PAGED_2D

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cases import Case


@dataclasses.dataclass
class Side:
    """Ours or the peer: one `run` covers every set of inputs."""

    run: Callable[[], None]
    poison: Callable[[], None]
    """Fill every output with NaN."""
    error: Callable[[], float]
    """Worst error over all sets of inputs, against the oracle."""


@dataclasses.dataclass
class Work:
    """Both sides of a case. `peer` is a function because what stops it must not stop ours."""

    ours: Side
    peer: Callable[[], Side]
    bound: float
    """Largest error that is right."""
    sets: int


def prepare(case: Case, device: str, dtype: torch.dtype, cache_bytes: int) -> Work:
    """Return the work of a case over as many sets of unit-normal inputs as it takes to exceed `cache_bytes`."""
    sets = max(1, -(-cache_bytes // case.cache_bytes(dtype.itemsize)))
    make = {"gather": _gather, "write": _write}.get(case.op, _attention)
    torch.manual_seed(case.seq_len * 31 + case.num_seqs)
    return make(case, device, dtype, sets)


def _pool(
    case: Case, device: str, dtype: torch.dtype, num_blocks: int, *, poisoned: bool = False
) -> list[torch.Tensor]:
    """Return K and V views `[num_blocks, block_size, num_kv_heads, head_size]` of a new pool in the case's layout."""
    plan = layout.describe(case.layout, num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    storage = torch.empty(plan.elements, device=device, dtype=dtype)
    storage.fill_(float("nan")) if poisoned else storage.normal_()
    return [storage.as_strided(plan.shape, side.strides, side.offset) for side in (plan.key, plan.value)]


def _side(sets: list, call: Callable, outputs: list[torch.Tensor], errors: Callable[[], float]) -> Side:
    def run() -> None:
        for each in sets:
            call(each)

    def poison() -> None:
        for out in outputs:
            out.fill_(float("nan"))

    return Side(run, poison, errors)


def _table(case: Case, device: str) -> torch.Tensor:
    """Return a block table `[num_seqs, blocks of a sequence]` int32 of permuted block ids."""
    per_seq = -(-case.seq_len // case.block_size)
    return torch.randperm(case.num_seqs * per_seq, device=device).view(case.num_seqs, per_seq).int()


def _attention(case: Case, device: str, dtype: torch.dtype, sets: int) -> Work:
    shape = (case.num_seqs * case.query_len, case.num_q_heads, case.head_size)
    inputs = []
    for _ in range(sets):
        table = _table(case, device)
        starts = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32) * case.query_len
        lens = torch.full((case.num_seqs,), case.seq_len, device=device, dtype=torch.int32)
        query = torch.randn(shape, device=device, dtype=dtype)
        metadata = {"block_table": table, "seq_lens": lens, "query_start_loc": starts}
        inputs.append((query, *_pool(case, device, dtype, table.numel()), metadata))

    def judge(outs: list[torch.Tensor]) -> float:
        errors = []
        for (query, key, value, metadata), out in zip(inputs, outs, strict=True):
            golden = oracle.attention(query, key, value, metadata["block_table"], case.seq_len, case.query_len)
            errors.append(oracle.row_error(out, golden))
        return max(errors)

    def side(call: Callable, data: list) -> Side:
        outs = [torch.empty(shape, device=device, dtype=dtype) for _ in data]
        return _side(list(zip(data, outs, strict=True)), call, outs, lambda: judge(outs))

    def ours(each: tuple) -> None:
        (query, key, value, metadata), out = each
        bounds = {"max_query_len": case.query_len, "max_seq_len": case.seq_len, "scale": case.head_size**-0.5}
        paged_attention(query, PagedCache(key, value), out, **metadata, **bounds)

    def peer() -> Side:
        data = inputs
        if case.peer == PAGED_2D:
            launch = peers.paged_attention_2d(case, inputs[0][0])
            data = [(query, *peers.x_packed(key, value), metadata) for query, key, value, metadata in inputs]
        else:
            launch = peers.unified_attention(case, inputs[0][0])
        return side(lambda each: launch(*each[0][:3], each[1], **each[0][3]), data)

    return Work(side(ours, inputs), peer, oracle.attention_bound(dtype), sets)


def _gather(case: Case, device: str, dtype: torch.dtype, sets: int) -> Work:
    num_tokens = case.num_seqs * case.seq_len
    cu = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32) * case.seq_len
    seq = torch.arange(case.num_seqs, device=device, dtype=torch.int32).repeat_interleave(case.seq_len)
    begin = torch.zeros(case.num_seqs, device=device, dtype=torch.int32)
    tables = [_table(case, device) for _ in range(sets)]
    pools = [_pool(case, device, dtype, table.numel()) for table in tables]

    def side(call: Callable) -> Side:
        shape = (num_tokens, case.num_kv_heads, case.head_size)
        outs = [[torch.empty(shape, device=device, dtype=dtype) for _ in range(2)] for _ in pools]

        def judge() -> float:
            pairs = [
                oracle.copy_error(out, cache[table.long()].flatten(1, 2)[:, : case.seq_len].flatten(0, 1).contiguous())
                for caches, rows, table in zip(pools, outs, tables, strict=True)
                for cache, out in zip(caches, rows, strict=True)
            ]
            return max(pairs)

        data = [
            (*caches, *rows, table, cu, seq, begin) for caches, rows, table in zip(pools, outs, tables, strict=True)
        ]
        return _side(data, lambda each: call(*each), [out for rows in outs for out in rows], judge)

    def ours(key_cache: torch.Tensor, value_cache: torch.Tensor, *rest: torch.Tensor) -> None:
        gather_kv_cache(PagedCache(key_cache, value_cache), *rest)

    return Work(side(ours), lambda: side(peers.gather()), 0.0, sets)


def _write(case: Case, device: str, dtype: torch.dtype, sets: int) -> Work:
    num_tokens = case.num_seqs * case.seq_len
    num_blocks = -(-num_tokens // case.block_size)
    shape = (num_tokens, case.num_kv_heads, case.head_size)
    rows = [[torch.randn(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(sets)]
    slots = [torch.randperm(num_blocks * case.block_size, device=device)[:num_tokens] for _ in range(sets)]

    def side(call: Callable) -> Side:
        pools = [_pool(case, device, dtype, num_blocks, poisoned=True) for _ in range(sets)]

        def judge() -> float:
            errors = []
            for caches, new, slot in zip(pools, rows, slots, strict=True):
                for cache, source in zip(caches, new, strict=True):
                    golden = torch.full_like(cache, float("nan"), memory_format=torch.contiguous_format).flatten(0, 1)
                    golden[slot] = source
                    errors.append(oracle.copy_error(cache.reshape(golden.shape), golden))
            return max(errors)

        data = [(*new, *caches, slot) for new, caches, slot in zip(rows, pools, slots, strict=True)]
        return _side(data, lambda each: call(*each), [cache for caches in pools for cache in caches], judge)

    def ours(
        key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        write_kv_cache(key, value, PagedCache(key_cache, value_cache), slots)

    return Work(side(ours), lambda: side(peers.write()), 0.0, sets)
