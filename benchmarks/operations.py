# SPDX-License-Identifier: Apache-2.0
"""Make a case runnable: inputs, both sides over the same inputs, NaN-poisoned outputs, and the check of each side."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.attention.paged import paged_attention
from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.write import write_kv_cache
from pagedkv.gdn.decode import Drafts, allocate_drafts, gdn_decode
from pagedkv.gdn.prefill import gdn_prefill
from pagedkv.mla.decode import mla_decode
from pagedkv.mla.launch import MlaShape
from pagedkv.mla.tables import allocate, fill
from pagedkv.ssd.prefill import ssd_prefill

from . import oracle, peers, pools
from .cases import PAGED_2D

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pagedkv.cache.cache import PagedCache

    from .cases import BenchmarkCase

SOFTCAP = 5.0
"""Cap of unit-normal scores, low enough to change them."""


@dataclasses.dataclass
class MeasuredSide:
    """Ours or the peer: one `run` covers every set of inputs."""

    run: Callable[[], None]
    poison: Callable[[], None]
    """Fill every output with NaN."""
    error: Callable[[], float]
    """Worst error over all sets of inputs, against the oracle."""


@dataclasses.dataclass
class MeasuredWork:
    """Both sides of a case. `peer` is a function because what stops it must not stop ours."""

    ours: MeasuredSide
    peer: Callable[[], MeasuredSide]
    bound: float
    """Largest error that is right."""
    sets: int
    vendor: Callable[[], MeasuredSide] | None = None
    """The vendor's library, where it has the operation; it reads K and V in an order of its own."""


def side(sets: list[tuple], call: Callable, outputs: list[Tensor], error: Callable[[], float]) -> MeasuredSide:
    """Return the side that calls `call` on every set and writes to `outputs`."""

    def run() -> None:
        for each in sets:
            call(*each)

    def poison() -> None:
        for out in outputs:
            out.fill_(float("nan"))

    return MeasuredSide(run, poison, error)


def prepare(case: BenchmarkCase, device: str, dtype: torch.dtype, cache_bytes: int) -> MeasuredWork:
    """Return the work of a case over as many sets of unit-normal inputs as it takes to exceed `cache_bytes`."""
    sets = max(1, -(-cache_bytes // case.cache_bytes()))
    kinds = {"gather": _gather, "write": _write, "mla": _mla, "scan": _scan, "gdn": _gdn, "gdn decode": _gdn_decode}
    make = kinds.get(case.op, _attention)
    torch.manual_seed(case.seq_len * 31 + case.num_seqs)
    return make(case, device, dtype, sets)


def _gather(case: BenchmarkCase, device: str, dtype: torch.dtype, sets: int) -> MeasuredWork:
    num_tokens = case.num_seqs * case.seq_len
    shape = (num_tokens, case.num_kv_heads, case.head_size)
    cu = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32) * case.seq_len
    seq = torch.arange(case.num_seqs, device=device, dtype=torch.int32).repeat_interleave(case.seq_len)
    begin = torch.zeros(case.num_seqs, device=device, dtype=torch.int32)
    tables = [pools.block_table(case, device) for _ in range(sets)]
    caches = [pools.new(case, device, dtype, table.numel()) for table in tables]

    def make(call: Callable, read: list[PagedCache]) -> MeasuredSide:
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

    def peer() -> MeasuredSide:
        # vLLM gathers rows and shuffle.
        return make(peers.gather(), [pools.packed(c, "shuffle") if c.packing == "native" else c for c in caches])

    return MeasuredWork(make(gather_kv_cache, caches), peer, 0.0, sets)


def _write(case: BenchmarkCase, device: str, dtype: torch.dtype, sets: int) -> MeasuredWork:
    num_tokens = case.num_seqs * case.seq_len
    num_blocks = -(-num_tokens // case.block_size)
    shape = (num_tokens, case.num_kv_heads, case.head_size)
    new = [[torch.randn(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(sets)]
    slots = [slots_of(case, device) for _ in range(sets)]

    def make(call: Callable) -> MeasuredSide:
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

    return MeasuredWork(make(write_kv_cache), lambda: make(peers.write()), 0.0, sets)


def slots_of(case: BenchmarkCase, device: str) -> Tensor:
    """Return the slot of each token of a write: no order at all, or blocks in no order filled one after the other."""
    num_tokens = case.num_seqs * case.seq_len
    run = case.block_size if case.runs else 1
    first = torch.randperm(-(-num_tokens // case.block_size) * case.block_size // run, device=device) * run
    return (first[:, None] + torch.arange(run, device=device)).flatten()[:num_tokens]


def _judged(inputs: list[tuple], shape: tuple[int, ...], error: Callable[..., float]) -> Callable[..., MeasuredSide]:
    """Return a function that makes a side of a call and its data, with outputs of a shape beside the queries.

    Its result is judged over `inputs`, whatever copies of them `data` holds for a peer that reads another packing.
    """

    def make(call: Callable[..., None], data: list[tuple]) -> MeasuredSide:
        outs = [query.new_empty(shape) for query, *_ in inputs]

        def worst() -> float:
            return max(error(*each, out) for each, out in zip(inputs, outs, strict=True))

        return side([(*each, out) for each, out in zip(data, outs, strict=True)], call, outs, worst)

    return make


def _attention(case: BenchmarkCase, device: str, dtype: torch.dtype, sets: int) -> MeasuredWork:
    """Return the work of decode, prefill and mixed batches."""
    num_tokens = sum(query_len for _, query_len in case.lens)
    shape = (num_tokens, case.num_q_heads, case.head_size)
    starts = list(itertools.accumulate((query_len for _, query_len in case.lens), initial=0))
    inputs = []
    for _ in range(sets):
        table = pools.block_table(case, device)
        metadata = {
            "block_table": table,
            "seq_lens": torch.tensor([seq_len for seq_len, _ in case.lens], device=device, dtype=torch.int32),
            "query_start_loc": torch.tensor(starts, device=device, dtype=torch.int32),
        }
        query = torch.randn(shape, device=device, dtype=dtype)
        inputs.append((query, pools.new(case, device, dtype, table.numel()), metadata))
    options: dict = {"sliding_window": case.window}
    if case.capped:
        options |= {"softcap": SOFTCAP, "sinks": torch.randn(case.num_q_heads, device=device)}

    def error(*inputs_and_out: Any) -> float:
        return _attention_error(case, *inputs_and_out, options)

    make = _judged(inputs, shape, error)

    def peer() -> MeasuredSide:
        if case.peer == PAGED_2D:
            data = [(query, pools.packed(cache, "native"), metadata) for query, cache, metadata in inputs]
            return make(peers.paged_attention_2d(case, inputs[0][0]), data)
        data = [(query, pools.in_rows(cache), metadata) for query, cache, metadata in inputs]
        return make(peers.unified_attention(case, inputs[0][0], options), data)

    bound = oracle.attention_bound(dtype, scaled_rows=case.scales == "token")

    def ours(query: Tensor, cache: PagedCache, batches: list[dict], out: Tensor) -> None:
        for batch in batches:
            paged_attention(
                query, cache, out, scale=case.head_size**-0.5, num_splits=case.num_splits, **batch, **options
            )

    return MeasuredWork(
        make(ours, [(*each, _batches(case, metadata)) for *each, metadata in inputs]),
        peer,
        bound,
        sets,
        (lambda: _vendor(case, inputs, error)) if case.vendor else None,
    )


def _vendor(case: BenchmarkCase, inputs: list[tuple], error: Callable[..., float]) -> MeasuredSide:
    """Return torch's attention by the vendor's library, over K and V that were taken out of the cache before."""

    def sequences(rows: Tensor, heads: int) -> Tensor:
        return rows.reshape(case.num_seqs, -1, heads, case.head_size)[:, : case.seq_len].transpose(1, 2)

    data = []
    for query, cache, metadata in inputs:
        blocks = metadata["block_table"].long().flatten()
        sides = [sequences(rows[blocks], case.num_kv_heads).contiguous() for rows in pools.rows(cache)]
        data.append((sequences(query, case.num_q_heads), *sides))
    outs: list[Tensor] = [query for query, *_ in inputs]  # until there are any: what is judged is never the query

    def run() -> None:
        for place, each in enumerate(data):
            outs[place] = peers.vendor_attention(*each)

    def poison() -> None:
        for (query, *_), out in zip(inputs, outs, strict=True):
            if out is not query:
                out.fill_(float("nan"))

    def worst() -> float:
        flat = [out.transpose(1, 2).reshape(query.shape) for (query, *_), out in zip(inputs, outs, strict=True)]
        return max(error(*each, out) for each, out in zip(inputs, flat, strict=True))

    return MeasuredSide(run, poison, worst)


def _batches(case: BenchmarkCase, metadata: dict[str, Tensor]) -> list[dict]:
    """Return what our calls know of their sequences: all, or of a mixed batch its decodes, and the rest."""
    batches = [(slice(0, case.num_seqs), case.seq_len, case.query_len)]
    if case.prefill_tokens:
        batches.append((slice(case.num_seqs, case.num_seqs + 1), case.prefill_tokens, case.prefill_tokens))
    return [
        {
            "block_table": metadata["block_table"][seqs],
            "seq_lens": metadata["seq_lens"][seqs],
            "query_start_loc": metadata["query_start_loc"][seqs.start : seqs.stop + 1],
            "max_query_len": query_len,
            "max_seq_len": seq_len,
        }
        for seqs, seq_len, query_len in batches
    ]


def _attention_error(
    case: BenchmarkCase, query: Tensor, cache: PagedCache, metadata: dict, out: Tensor, options: dict
) -> float:
    """Judge by what the case says, not by what was passed to the sides."""
    expected: dict = {"window": case.window}
    if case.capped:
        expected |= {"softcap": SOFTCAP, "sinks": options["sinks"]}
    golden = oracle.attention(query, *pools.stored(cache), metadata["block_table"], case.lens, **expected)
    return oracle.row_error(out, golden)


def _mla(case: BenchmarkCase, device: str, dtype: torch.dtype, sets: int) -> MeasuredWork:
    """Return the work of MLA decode: queries of latent and rope channels over a cache of such rows.

    Our tables are filled before the clock starts: they serve all layers of a step, as the peer's lengths and blocks do.
    """
    shape = (case.num_seqs, case.num_q_heads, case.head_size)
    starts = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32)
    lens = torch.full((case.num_seqs,), case.seq_len, device=device, dtype=torch.int32)
    inputs = []
    for _ in range(sets):
        table = pools.block_table(case, device)
        inputs.append((torch.randn(shape, device=device, dtype=dtype), pools.latent(case, device, dtype, table), table))
    rope = case.head_size - case.latent_size
    sizes = {"latent_size": case.latent_size, "rope_size": rope, "element_bytes": dtype.itemsize}
    step = MlaShape(**sizes, num_heads=case.num_q_heads, max_query_len=1, quantised=case.scales != "none")
    tables = allocate(inputs[0][0], step, case.num_seqs)
    fill(tables, lens, starts)

    def error(query: Tensor, cache: oracle.Stored, table: Tensor, out: Tensor) -> float:
        value = dataclasses.replace(cache, elements=cache.elements[..., : case.latent_size])
        return oracle.row_error(out, oracle.attention(query, cache, value, table, case.lens))

    make = _judged(inputs, (*shape[:2], case.latent_size), error)

    quantised = inputs[0][1].dtype and {"cache_format": pools.native(), "cache_scale": inputs[0][1].scale}

    def ours(query: Tensor, cache: Tensor, table: Tensor, out: Tensor) -> None:
        mla_decode(
            query,
            cache,
            out,
            block_table=table,
            seq_lens=lens,
            query_start_loc=starts,
            max_query_len=1,
            scale=case.head_size**-0.5,
            tables=tables,
            **(quantised or {}),
        )

    def peer() -> MeasuredSide:
        codes = [(query, stored.elements.view(stored.dtype or dtype), table) for query, stored, table in inputs]
        return make(peers.mla_decode(case, inputs[0][0], lens, inputs[0][1].scale), codes)

    def blocks_of_the_vendor(stored: oracle.Stored, table: Tensor) -> Tensor:
        rows = stored.elements[table.long()].flatten(1, 2)[:, : case.seq_len]
        whole = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -case.seq_len % peers.VENDOR_BLOCK))
        return whole.reshape(-1, peers.VENDOR_BLOCK, 1, case.head_size)

    def vendor() -> MeasuredSide:
        rows = [(query, blocks_of_the_vendor(stored, table)) for query, stored, table in inputs]
        return make(peers.vendor_mla(case, lens), rows)

    data = [(query, stored.elements[:, :, 0], table) for query, stored, table in inputs]
    has_vendor = case.vendor and torch.version.hip is None  # FlashMLA is NVIDIA's alone
    return MeasuredWork(make(ours, data), peer, oracle.attention_bound(dtype), sets, vendor if has_vendor else None)


def _scan(case: BenchmarkCase, device: str, dtype: torch.dtype, sets: int) -> MeasuredWork:
    """Return the work of a Mamba-2 prefill of sequences that each go on from a state."""
    tokens, rows = case.num_seqs * case.seq_len, (case.num_q_heads, case.head_size)
    starts = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32) * case.seq_len
    A = -0.05 - 0.2 * torch.rand(case.num_q_heads, device=device)  # a few nats in a chunk
    D = torch.randn(case.num_q_heads, device=device)
    inputs = []
    for _ in range(sets):
        x = torch.randn(tokens, *rows, device=device, dtype=dtype)
        B, C = torch.randn(2, tokens, case.num_kv_heads, case.state_size, device=device, dtype=dtype)
        dt = (0.1 + 0.4 * torch.rand(tokens, case.num_q_heads, device=device)).to(dtype)
        initial = torch.randn(case.num_seqs, *rows, case.state_size, device=device)
        inputs.append((x, dt, B, C, initial, torch.empty_like(initial)))

    def make(call: Callable[..., None], *, judge_states: bool = False) -> MeasuredSide:
        outs = [torch.empty_like(x) for x, *_ in inputs]
        states = [each[-1] for each in inputs]

        def worst() -> float:
            # Sets are further sequences of one recurrence: its steps are many and small.
            given = (torch.cat(each) for each in zip(*(each[:5] for each in inputs), strict=True))
            after = torch.cat(states) if judge_states else None
            return oracle.scan_error(torch.cat(outs), *given, A=A, D=D, states=after)

        sets_of = [(*given, out) for given, out in zip(inputs, outs, strict=True)]
        return side(sets_of, call, [*outs, *states] if judge_states else outs, worst)

    def ours(x, dt, B, C, initial, states, out) -> None:
        ssd_prefill(x, dt, A, B, C, out, states, starts=starts, D=D, initial_states=initial)

    def peer() -> MeasuredSide:
        return make(peers.ssd(case, starts, A=A, D=D))

    return MeasuredWork(make(ours, judge_states=True), peer, oracle.scan_bound(dtype), sets)


def _gdn(case: BenchmarkCase, device: str, dtype: torch.dtype, sets: int) -> MeasuredWork:
    """Return the work of a gated delta net's prefill, from the convolution's output and a pool of states.

    States after the sequences go to blocks of their own, so that a replay does what the one before it did.
    """
    tokens, count, heads = case.num_seqs * case.seq_len, case.num_seqs, case.num_q_heads
    widths = (*[case.num_kv_heads * case.state_size] * 2, heads * case.head_size)
    starts = torch.arange(count + 1, device=device, dtype=torch.int32) * case.seq_len
    A_log = 3 * torch.rand(heads, device=device) - 1  # decays from nearly 1 to nearly 0 a token
    decay = (heads, case.state_size) if case.by_key else (heads,)
    dt_bias = torch.randn(decay, device=device)
    sources = torch.randperm(count, device=device, dtype=torch.int32)
    targets = sources + count
    known = torch.ones(count, device=device, dtype=torch.bool)
    inputs = []
    for _ in range(sets):
        mixed = torch.randn(tokens, sum(widths), device=device, dtype=dtype)
        gates = (torch.randn(tokens, *each, device=device, dtype=dtype) for each in (decay, (heads,)))
        inputs.append((mixed, *gates, torch.randn(2 * count, heads, case.head_size, case.state_size, device=device)))

    def views(mixed: Tensor) -> tuple[Tensor, ...]:
        q, k, v = mixed.split(widths, dim=1)
        return q.unflatten(1, (-1, case.state_size)), k.unflatten(1, (-1, case.state_size)), v.unflatten(1, (heads, -1))

    def make(call: Callable[..., None]) -> MeasuredSide:
        outs = [torch.empty(tokens, heads, case.head_size, device=device, dtype=dtype) for _ in inputs]
        pools = [pool.clone() for *_, pool in inputs]
        after = [pool[count:] for pool in pools]

        def worst() -> float:
            given = [(*views(mixed), a, b, pool[sources.long()]) for mixed, a, b, pool in inputs]
            together = (torch.cat(each) for each in zip(*given, strict=True))
            found = torch.cat([states[sources.long()] for states in after])
            return oracle.delta_error(torch.cat(outs), *together, A_log=A_log, dt_bias=dt_bias, states=found)

        sets_of = [(*given[:3], pool, out) for given, pool, out in zip(inputs, pools, outs, strict=True)]
        return side(sets_of, call, [*outs, *after], worst)

    def ours(mixed, a, b, pool, out) -> None:
        options = {"starts": starts, "sources": sources, "targets": targets, "known": known}
        gdn_prefill(*views(mixed), a, b, out, pool, A_log=A_log, dt_bias=dt_bias, **options)

    def peer() -> MeasuredSide:
        make_peer = peers.kda if case.by_key else peers.gdn
        return make(make_peer(case, starts, sources.long(), known, A_log=A_log, dt_bias=dt_bias))

    def vendor() -> MeasuredSide:
        return make(peers.gdn(case, starts, sources.long(), known, A_log=A_log, dt_bias=dt_bias, flashinfer=True))

    has_vendor = case.vendor and importlib.util.find_spec("flashinfer") is not None
    return MeasuredWork(make(ours), peer, oracle.delta_bound(dtype), sets, vendor if has_vendor else None)


@dataclasses.dataclass
class GdnStep:
    """A step of the gated delta rule: what a layer has after its convolution."""

    mixed: Tensor
    """[tokens, channels]."""
    rows: list[Tensor]
    """q, k and v: views of `mixed`."""
    dense: list[Tensor]
    """The same with tokens next to each other."""
    a: Tensor
    b: Tensor
    starts: Tensor
    accepted: Tensor
    """Tokens of the step before that count."""
    lens: Tensor


@dataclasses.dataclass
class GdnLayer:
    """A layer of the gated delta rule with states and drafts of one side."""

    steps: list[GdnStep]
    """The last one is measured."""
    initial: Tensor
    """[sequences, heads, values, keys], before the first step."""
    pool: Tensor
    indices: Tensor
    """[sequences, states of a sequence] int32; block 0 belongs to no sequence, as in vLLM."""
    drafts: Drafts | None
    out: Tensor

    @classmethod
    def of(cls, steps: list[GdnStep], initial: Tensor, states: int) -> GdnLayer:
        """Return a layer with room for so many states of a sequence."""
        sequences, device, (_, k, v) = len(initial), initial.device, steps[-1].rows
        order = torch.randperm(sequences, device=device, dtype=torch.int32)[:, None]
        indices = 1 + order * states + torch.arange(states, device=device, dtype=torch.int32)
        pool = initial.new_empty(1 + sequences * states, *initial.shape[1:])
        most = len(k) // sequences - 1
        drafts = allocate_drafts(k, pool, len(pool), most) if most else None
        return cls(steps, initial, pool, indices, drafts, torch.empty_like(v, memory_format=torch.contiguous_format))

    def tokens(self) -> list[Tensor]:
        """Return q, k, v, a and b of all steps, sequence by sequence, and the states before them."""
        sequences = len(self.initial)
        steps = zip(*((*step.rows, step.a, step.b) for step in self.steps), strict=True)
        by_sequence = [torch.cat([each.unflatten(0, (sequences, -1)) for each in parts], dim=1) for parts in steps]
        return [*(each.flatten(0, 1) for each in by_sequence), self.initial]


def _gdn_steps(case: BenchmarkCase, device: str, dtype: torch.dtype) -> list[GdnStep]:
    """Return the step that is measured, and where it has drafts one before it, whose drafts are all accepted."""
    heads, key_heads, tokens = case.num_q_heads, case.num_kv_heads, case.num_seqs * case.query_len
    sizes = (case.state_size, case.state_size, case.head_size)
    widths = [count * size for count, size in zip((key_heads, key_heads, heads), sizes, strict=True)]
    starts = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32) * case.query_len
    index = torch.ones(case.num_seqs, device=device, dtype=torch.int32)
    steps = []
    for number in range(min(case.query_len, 2)):
        mixed = torch.randn(tokens, sum(widths), device=device, dtype=dtype)
        rows = [each.unflatten(1, (-1, size)) for each, size in zip(mixed.split(widths, dim=1), sizes, strict=True)]
        a, b = torch.randn(2, tokens, heads, device=device, dtype=dtype)
        before = number * case.query_len
        dense = [row.contiguous() for row in rows]
        accepted, lens = index * max(1, before), index * (before + case.query_len)
        steps.append(GdnStep(mixed, rows, dense, a, b, starts, accepted, lens))
    return steps


def _gdn_decode(case: BenchmarkCase, device: str, dtype: torch.dtype, sets: int) -> MeasuredWork:
    """Return the work of a step of the gated delta rule, with all of the last step's drafts accepted.

    A step changes its states, so that each replay has other ones. So a side is judged by a step from the first states,
    after it was looked whether the replays wrote every output.
    """
    shape = (case.num_seqs, case.num_q_heads, case.head_size, case.state_size)
    parameters = {"A_log": torch.rand(shape[1], device=device).log(), "dt_bias": torch.randn(shape[1], device=device)}
    works = [(_gdn_steps(case, device, dtype), torch.randn(shape, device=device)) for _ in range(sets)]

    def ours(step: GdnStep, layer: GdnLayer, out: Tensor) -> None:
        verify: dict = {}
        if layer.drafts is not None:
            verify = {"drafts": layer.drafts, "seq_lens": step.lens, "query_start_loc": step.starts}
            verify |= {"num_accepted_tokens": step.accepted, "max_query_len": case.query_len}
        given = {"state_indices": layer.indices[:, 0], "pad_index": 0, **parameters}
        gdn_decode(*step.rows, step.a, step.b, out, layer.pool, **given, **verify)

    def peer() -> MeasuredSide:
        return _gdn_side(peers.gdn_decode(case, **parameters), works, case.query_len, parameters)

    return MeasuredWork(_gdn_side(ours, works, 1, parameters), peer, oracle.delta_bound(dtype, step=True), sets)


def _gdn_side(call: Callable, works: list[tuple], states: int, parameters: dict[str, Tensor]) -> MeasuredSide:
    """Return the side that calls `call(step, layer, out)`, whose sequences have so many states each."""
    layers = [GdnLayer.of(*work, states) for work in works]

    def begin() -> None:
        for layer in layers:
            layer.pool[layer.indices[:, 0].long()] = layer.initial
            for step in layer.steps[:-1]:
                call(step, layer, torch.empty_like(layer.out))

    def measured(layer: GdnLayer) -> None:
        call(layer.steps[-1], layer, layer.out)

    # One recurrence for all layers: its steps are many and small.
    outs = [layer.out for layer in layers]
    run = side([(layer,) for layer in layers], measured, outs, list)

    def worst() -> float:
        if any(out.isnan().any() for out in outs):
            return float("inf")
        begin()
        run.poison()
        run.run()
        given = (torch.cat(each) for each in zip(*(layer.tokens() for layer in layers), strict=True))
        return oracle.delta_error(torch.cat(outs), *given, **parameters)

    begin()
    return dataclasses.replace(run, error=worst)
