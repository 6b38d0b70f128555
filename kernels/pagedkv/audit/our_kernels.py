# SPDX-License-Identifier: Apache-2.0
"""Cases of our kernels: every configuration that we promise, launched as a server would."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pagedkv.attention.merge import merge_attention
from pagedkv.attention.paged import paged_attention
from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.rotary import rotate_and_write
from pagedkv.cache.write import write_kv_cache
from pagedkv.configurations import CONFIGURATIONS, Configuration
from pagedkv.gdn.decode import allocate_drafts, gdn_decode
from pagedkv.gdn.prefill import gdn_prefill
from pagedkv.layout import packing_of
from pagedkv.mla.decode import mla_decode
from pagedkv.ssd.prefill import ssd_prefill

from .cases import Case
from .tensors import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.configurations import Scales
    from pagedkv.fp8.formats import FormatName
    from pagedkv.layout import Name

_QUERY_LEN = {"copy": 512, "decode": 1, "extend": 512, "prefill": 512}
"""Tokens of a sequence in one step of each phase. Extend and prefill differ in context alone: they compile alike."""


MLA_LATENT, MLA_ROPE = 512, 64
"""Channels of the latent and of the rotary key of DeepSeek-V2 and V3."""


def cases() -> list[Case]:
    """What is promised, the shapes of vLLM's cases, a cache below 2 GiB, rotated writes, MLA decode, scans, deltas."""
    promised = {case.name: case for case in map(_case, (*CONFIGURATIONS, *_beside_vllm()))}
    small = _case(Configuration("attention", "decode", "bfloat16", 32, 8, 128, 544, "nhd"), big=False)
    return [
        *promised.values(),
        small,
        *_rotated_cases(),
        *_mla_cases(),
        *_scan_cases(),
        *_delta_cases(),
        *_gdn_decode_cases(),
    ]


def _case(configuration: Configuration, *, big: bool = True) -> Case:
    """The launch that stands for one configuration.

    Args:
        configuration: What is promised.
        big: Whether the cache is 2 GiB or more, as in serving.
    """
    batch = Batch(
        getattr(torch, configuration.dtype),
        configuration.head_size,
        num_heads=configuration.num_q_heads,
        num_kv_heads=configuration.num_kv_heads,
        block_size=configuration.block_size,
        query_len=_QUERY_LEN[configuration.phase],
        big=big,
    )
    make = {"write": _write, "gather": _gather, "attention": _attention, "merge": _merge}[configuration.op]
    attends = configuration.op == "attention"
    names = {"attention": "attention_kernel", "merge": "merge_kernel"}
    kernels: tuple[str, ...] = (names.get(configuration.op, f"_{configuration.op}_kernel"),)
    if not attends and packing_of(configuration.layout) != "rows":
        kernels = (f"packed_{configuration.op}_kernel",)
    if (configuration.splits or 1) > 1:
        kernels += ("reduce_kernel",)
    return Case(
        source="ours",
        name=configuration.id + ("" if big else "-small"),
        kernels=kernels,
        optional=("reduce_kernel",) if attends and configuration.splits is None else (),
        launch=make(configuration, batch),
        labels=batch.labels(configuration.phase if attends else configuration.op, configuration.layout),
        scattered=_scattered(configuration, batch),
    )


def _scattered(configuration: Configuration, batch: Batch) -> tuple[str, ...]:
    """What cannot come in 16-byte loads: rows of another length."""
    sides = ("key_cache", "value_cache")
    if configuration.head_size * batch.dtype.itemsize % 16:
        return (*sides, "key", "value")
    if configuration.quantised and configuration.head_size % 16:
        return sides
    if configuration.op == "gather" and configuration.quantised:
        return sides  # some rows are too short for all lanes to read 16 codes
    return ()


def _beside_vllm() -> list[Configuration]:
    """Serving shapes of hybrid models: GQA 32 to 8, the block sizes of Jamba (2048) and Qwen3-Next (544)."""
    shapes = [(64, 2048), (128, 2048), (128, 544), (256, 544)]
    return [
        *(Configuration("attention", "decode", "bfloat16", 32, 8, *shape, "interleaved") for shape in shapes),
        *(Configuration("attention", "prefill", "bfloat16", 32, 8, *shape, "packed") for shape in shapes),
    ]


def _attention(configuration: Configuration, batch: Batch) -> Callable[[], object]:
    query, per_head = batch.query(), torch.empty(batch.num_heads)
    return partial(
        paged_attention,
        query,
        batch.paged_cache(configuration.layout, configuration.quantised, configuration.scales),
        batch.query(),
        **batch.sequences(),
        max_seq_len=batch.seq_len,
        scale=batch.scale,
        causal=configuration.causal,
        sliding_window=configuration.window,
        softcap=configuration.softcap,
        alibi_slopes=per_head if configuration.alibi else None,
        sinks=per_head if configuration.sinks else None,
        lse=torch.empty(query.shape[:2]) if configuration.lse else None,
        num_splits=configuration.splits,
        batch_invariant=configuration.batch_invariant,
    )


def _merge(configuration: Configuration, batch: Batch) -> Callable[[], object]:
    """Partial results in fp32, as `merge_attention` takes them."""
    out, lse = batch.query(), torch.empty(batch.num_tokens, batch.num_heads)
    parts = [torch.empty(shape) for shape in (out.shape, lse.shape) * 2]
    return partial(
        merge_attention, out, lse if configuration.lse else None, *parts, query_start_loc=batch.query_start_loc
    )


def _write(configuration: Configuration, batch: Batch) -> Callable[[], object]:
    cache = batch.paged_cache(configuration.layout, configuration.quantised, configuration.scales)
    return partial(write_kv_cache, batch.rows(), batch.rows(), cache, torch.zeros(batch.num_tokens, dtype=torch.int64))


def _rotated_cases() -> list[Case]:
    """Decode steps: both styles, whole heads, half and quarter ones (Bamba, Qwen3-Next), each packing, FP8 codes."""
    return [
        _rotated(128, 16, "nhd", 128),
        _rotated(128, 784, "interleaved", 64),
        _rotated(256, 544, "interleaved", 64, dtype=torch.float16),
        _rotated(128, 16, "native", 128, neox=False),
        _rotated(128, 16, "shuffle", 128, quantised="e4m3fnuz"),
        _rotated(128, 784, "packed", 128, neox=False, quantised="e4m3fn", scales="token"),
    ]


def _rotated(
    head_size: int,
    block_size: int,
    layout: Name,
    rotary_dim: int,
    *,
    neox: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    quantised: FormatName | None = None,
    scales: Scales = "head",
) -> Case:
    batch = Batch(dtype, head_size, num_heads=32, num_kv_heads=8, block_size=block_size)
    launch = partial(
        rotate_and_write,
        batch.query(),
        batch.rows(),
        batch.rows(),
        batch.paged_cache(layout, quantised, scales),
        torch.zeros(batch.num_tokens, dtype=torch.int64),
        torch.empty(8192, rotary_dim, dtype=dtype),
        torch.zeros(batch.num_tokens, dtype=torch.int64),
        neox=neox,
    )
    special = f"-{quantised}-{scales}" if quantised else ""
    style = f"{'neox' if neox else 'gptj'}{rotary_dim}"
    name = f"rotated-{batch.dtype_name}-q32kv8-d{head_size}-bs{block_size}-{layout}-{style}{special}"
    return Case("ours", name, ("rotated_write_kernel",), launch, batch.labels("rotated-write", layout))


def _gather(configuration: Configuration, batch: Batch) -> Callable[[], object]:
    return partial(
        gather_kv_cache,
        batch.paged_cache(configuration.layout, configuration.quantised, configuration.scales),
        batch.rows(),
        batch.rows(),
        block_table=batch.block_table,
        cu_seq_lens=batch.query_start_loc,
        token_to_seq=torch.zeros(batch.num_tokens, dtype=torch.int32),
        seq_starts=torch.zeros(batch.num_seqs, dtype=torch.int32),
    )


def mla_batch(
    dtype: torch.dtype, num_heads: int, *, block_size: int = 16, query_len: int = 1, big: bool = True
) -> Batch:
    """A step of MLA decode, whose one KV head is latent and rope together."""
    size = MLA_LATENT + MLA_ROPE
    shape = {"num_heads": num_heads, "num_kv_heads": 1, "block_size": block_size, "query_len": query_len}
    return Batch(dtype, size, **shape, big=big)


def mla_name(batch: Batch, quantised: str | None = None) -> str:
    """Name of a case of MLA decode."""
    special = f"-q{batch.query_len}" if batch.query_len > 1 else ""
    special += f"-{quantised}" if quantised else ""
    special += "" if batch.big else "-small"
    return f"mla-{batch.dtype_name}-h{batch.num_heads}-d{MLA_LATENT}+{MLA_ROPE}-bs{batch.block_size}{special}"


def _mla_cases() -> list[Case]:
    """16 heads (a tensor-parallel share), 128 heads, an uneven number, several tokens, other block sizes, FP8 codes."""
    return [
        _mla(mla_batch(torch.bfloat16, 16)),
        _mla(mla_batch(torch.bfloat16, 128)),
        _mla(mla_batch(torch.float16, 16, block_size=784)),
        _mla(mla_batch(torch.bfloat16, 16, query_len=2)),
        _mla(mla_batch(torch.bfloat16, 24, block_size=1)),
        _mla(mla_batch(torch.bfloat16, 128, query_len=2, block_size=64)),
        # Native on gfx942, and on gfx950; on the other each is decoded in software.
        *(_mla(mla_batch(torch.bfloat16, heads), name) for name in ("e4m3fnuz", "e4m3fn") for heads in (16, 128)),
        # Below 2 GiB, 1.86 million tokens of a layer: what most servers run.
        _mla(mla_batch(torch.bfloat16, 16, big=False)),
        _mla(mla_batch(torch.bfloat16, 128, big=False)),
        _mla(mla_batch(torch.bfloat16, 128, block_size=64, big=False)),
    ]


def _mla(batch: Batch, quantised: FormatName | None = None) -> Case:
    codes = mla_batch(torch.uint8, batch.num_heads, block_size=batch.block_size)
    query = batch.query()
    launch = partial(
        mla_decode,
        query,
        (codes if quantised else batch).pool(batch.num_blocks, batch.block_size, batch.head_size),
        query.new_empty(*query.shape[:2], MLA_LATENT),
        **batch.sequences(),
        scale=batch.scale,
        cache_format=quantised,
        cache_scale=torch.ones(1) if quantised else None,
    )
    operation = f"mla-{batch.num_heads}" + ("-special" if quantised or batch.query_len > 1 else "")
    kernels = ("mla_schedule_kernel", "mla_decode_kernel", "mla_reduce_kernel")
    return Case("ours", mla_name(batch, quantised), kernels, launch, batch.labels(operation, "latent"))


def _scan_cases() -> list[Case]:
    """Mamba2 layers: Zamba2, Bamba and Granite 4, Nemotron-H, Falcon-H1; no initial states, in pieces, fp16, fp32."""
    return [
        _scan(heads=64, head_size=64, state=64, groups=1),
        _scan(heads=128, head_size=64, state=128, groups=1),
        _scan(heads=128, head_size=64, state=128, groups=8),
        _scan(heads=24, head_size=128, state=256, groups=1),
        _scan(heads=128, head_size=64, state=128, groups=1, initial=False),
        _scan(heads=128, head_size=64, state=128, groups=1, piece=256),
        _scan(heads=128, head_size=80, state=128, groups=1, dtype=torch.float16),
        _scan(heads=24, head_size=64, state=256, groups=1, dtype=torch.float32, gate=True),
    ]


def _scan(
    *,
    heads: int,
    head_size: int,
    state: int,
    groups: int,
    dtype: torch.dtype = torch.bfloat16,
    initial: bool = True,
    gate: bool = False,
    piece: int | None = None,
) -> Case:
    """A prefill of 8,192 tokens in 16 sequences, each in two segments; states are kept in fp32.

    With `piece` they are asked for after so many tokens.
    """
    tokens, sequences = 8192, 16
    pieces = sequences if piece is None else tokens // piece
    x = torch.empty(tokens, heads, head_size, dtype=dtype)
    B, C = torch.empty(2, tokens, groups, state, dtype=dtype)
    ends = torch.arange(1, sequences + 1, dtype=torch.int32) * (pieces // sequences)
    launch = partial(
        ssd_prefill,
        x,
        torch.empty(tokens, heads, dtype=dtype),
        torch.empty(heads),
        B,
        C,
        torch.empty_like(x),
        torch.empty(pieces, heads, head_size, state),
        starts=torch.arange(pieces + 1, dtype=torch.int32) * (tokens // pieces),
        last_pieces=None if piece is None else ends - 1,
        D=torch.empty(heads),
        z=torch.empty_like(x) if gate else None,
        dt_bias=torch.empty(heads),
        dt_softplus=True,
        initial_states=torch.empty(sequences, heads, head_size, state) if initial else None,
        num_segments=2,
    )
    kind = str(dtype).removeprefix("torch.")
    special = "-z" * gate + "-new" * (not initial) + "-pieces" * (piece is not None)
    name = f"scan-{kind}-h{heads}x{head_size}-n{state}-g{groups}{special}"
    labels = {"operation": "scan", "dtype": kind, "head_size": str(head_size), "block_size": str(piece or 0)}
    kernels = ("ssd_carry_kernel", "ssd_prefill_kernel")
    return Case("ours", name, kernels, launch, labels | {"layout": f"n{state}", "cache": "small"})


def _delta_cases() -> list[Case]:
    """Gated delta nets: Qwen3.5 whole and on a rank of 8, in segments, in pieces, other heads, fp16; Kimi Linear."""
    return [
        _delta(key_heads=16, heads=32),
        _delta(key_heads=16, heads=32, segments=2),
        _delta(key_heads=2, heads=8, segments=8),
        _delta(key_heads=16, heads=48, segments=2, piece=256),
        _delta(key_heads=16, heads=32, size=64, segments=2),
        _delta(key_heads=16, heads=32, dtype=torch.float16, segments=2),
        _delta(key_heads=32, heads=32, segments=2, by_key=True),
        _delta(key_heads=4, heads=4, segments=8, piece=256, by_key=True, lower_bound=-5.0),
        _delta(key_heads=32, heads=32, size=64, dtype=torch.float16, by_key=True),
    ]


def _delta(
    *,
    key_heads: int,
    heads: int,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    segments: int = 1,
    piece: int | None = None,
    by_key: bool = False,
    lower_bound: float | None = None,
) -> Case:
    """A prefill of 8,192 tokens in 16 sequences, views of the convolution's output; states are a pool in fp32.

    With `piece` they are asked for after so many tokens.
    """
    tokens, sequences = 8192, 16
    pieces = sequences if piece is None else tokens // piece
    mixed = torch.empty(tokens, (2 * key_heads + heads) * size, dtype=dtype)
    q, k, v = (rows.unflatten(1, (-1, size)) for rows in mixed.split([size * key_heads] * 2 + [size * heads], dim=1))
    ends = torch.arange(1, sequences + 1, dtype=torch.int32) * (pieces // sequences)
    size_of_decay = (size,) if by_key else ()
    launch = partial(
        gdn_prefill,
        q,
        k,
        v,
        torch.empty(tokens, heads, *size_of_decay, dtype=dtype),
        torch.empty(tokens, heads, dtype=dtype),
        torch.empty(tokens, heads, size, dtype=dtype),
        torch.empty(2 * pieces, heads, size, size),
        A_log=torch.empty(heads),
        dt_bias=torch.empty(heads, *size_of_decay),
        starts=torch.arange(pieces + 1, dtype=torch.int32) * (tokens // pieces),
        sources=torch.arange(sequences, dtype=torch.int32),
        targets=torch.arange(pieces, dtype=torch.int32),
        known=torch.ones(sequences, dtype=torch.bool),
        last_pieces=None if piece is None else ends - 1,
        lower_bound=lower_bound,
        num_segments=segments,
    )
    kind = str(dtype).removeprefix("torch.")
    special = "-segments" * (segments > 1) + "-pieces" * (piece is not None) + "-by-key" * by_key
    name = f"gdn-{kind}-k{key_heads}v{heads}-d{size}{special}"
    labels = {"operation": "gdn", "dtype": kind, "head_size": str(size), "block_size": str(piece or 0)}
    cut = ["gdn_carry_kernel"] * (segments > 1) + ["gdn_join_kernel"] * (segments > 2)
    of_chunks = ("kda_chunks_kernel",) if by_key else ("gdn_chunks_kernel",)
    kernels = (*of_chunks, *cut, "gdn_prefill_kernel")
    return Case("ours", name, kernels, launch, labels | {"layout": "pool", "cache": "small"})


def _gdn_decode_cases() -> list[Case]:
    """Decode of the gated delta rule: Qwen3-Next, a rank of TP 8, a state in bf16, drafts; Kimi Linear with drafts.

    With drafts the next step replays those that count, or finds the state after each in a slot.
    """
    return [
        _gdn_decode(),
        _gdn_decode(key_heads=2, heads=4, size=64),
        _gdn_decode(stored=torch.bfloat16),
        _gdn_decode(drafts=3),
        _gdn_decode(drafts=3, dtype=torch.float16, stored=torch.float16),
        _gdn_decode(drafts=3, each=True),
        _gdn_decode(drafts=3, key_heads=32, by_key=True),
        _gdn_decode(drafts=3, key_heads=32, by_key=True, each=True),
        _gdn_decode(dtype=torch.float32, by_key=True),
    ]


def _gdn_decode(
    *,
    key_heads: int = 16,
    heads: int = 32,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype = torch.float32,
    drafts: int = 0,
    by_key: bool = False,
    each: bool = False,
) -> Case:
    """A step of 64 sequences, from the convolution's output and a pool of states."""
    sequences = 64
    tokens = sequences * (1 + drafts)
    widths = [key_heads * size, key_heads * size, heads * size]
    q, k, v = (each.unflatten(1, (-1, size)) for each in torch.empty(tokens, sum(widths), dtype=dtype).split(widths, 1))
    states = torch.empty(2 * sequences, heads, size, size, dtype=stored)
    size_of_decay = (size,) if by_key else ()
    index = torch.arange(sequences, dtype=torch.int32)
    verify = {
        "query_start_loc": torch.arange(sequences + 1, dtype=torch.int32) * (1 + drafts),
        "num_accepted_tokens": index,
        "max_query_len": 1 + drafts,
    }
    if not each:
        verify |= {"drafts": allocate_drafts(k, states, len(states), drafts, by_key=by_key), "seq_lens": index}
    launch = partial(
        gdn_decode,
        q,
        k,
        v,
        torch.empty(tokens, heads, *size_of_decay, dtype=dtype),
        torch.empty(tokens, heads, dtype=dtype),
        torch.empty_like(v),
        states,
        A_log=torch.empty(heads),
        dt_bias=torch.empty(heads, *size_of_decay),
        state_indices=index[:, None].expand(-1, 1 + drafts).contiguous() if each else index,
        **(verify if drafts else {}),
    )
    kind, kept = (str(each).removeprefix("torch.") for each in (dtype, stored))
    special = "-drafts" * bool(drafts) + "-each" * each + "-by-key" * by_key
    name = f"gdn-decode-{kind}-k{key_heads}h{heads}-d{size}-{kept}{special}"
    labels = {"operation": "gdn-decode", "dtype": kind, "head_size": str(size), "block_size": "0"}
    return Case("ours", name, ("gdn_decode_kernel",), launch, labels | {"layout": "states", "cache": "small"})
