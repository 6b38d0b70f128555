# SPDX-License-Identifier: Apache-2.0
"""What each operator promises to take, one contract for each operator that vLLM's ROCm backends call.

A contract holds facts that the operator's own source states: its checks, the strides that it takes and the ones that it
assumes, the shapes that it was compiled for. `source` says where they were read. A call that breaks a promise gives
wrong rows, reads outside its tensors or ends the process; a call that a contract does not describe is no verdict at all
(`UnknownCallError`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from operators.calls import (
    Judge,
    Seen,
    as_if_dense,
    by_rows,
    native_key,
    native_value,
    shuffled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

AITER = "ROCm/aiter"
VLLM = "vllm-project/vllm v0.32.0"

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fnuz, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz)
CACHED = (*HALVES, torch.float32, torch.uint8, *FP8)


@dataclass(frozen=True)
class Contract:
    """An operator, and what a call of it must keep.

    Attributes:
        operator: Its name in reports.
        places: Where callers find it, `module:attribute`; `ops.` names a namespace of torch.ops.
        parameters: Its parameters, in order.
        judge: Notes broken promises and the bytes that it touches.
        source: Where the promises were read.
        answer: What the stand-in returns, from the arguments.
        launched: Whether it is a Triton kernel, called as `kernel[grid](...)`.
    """

    operator: str
    places: tuple[str, ...]
    parameters: tuple[str, ...]
    judge: Callable[[Judge], None]
    source: str
    answer: Callable[[Mapping[str, Any]], Any]
    launched: bool = False


CONTRACTS: dict[str, Contract] = {}


def _nothing(_: Mapping[str, Any]) -> None:
    return None


def contract(
    operator: str,
    *places: str,
    takes: str,
    source: str,
    answer: Callable[[Mapping[str, Any]], Any] = _nothing,
    launched: bool = False,
) -> Callable[[Callable[[Judge], None]], Callable[[Judge], None]]:
    """Register the contract of an operator."""

    def register(judge: Callable[[Judge], None]) -> Callable[[Judge], None]:
        CONTRACTS[operator] = Contract(operator, places, tuple(takes.split()), judge, source, answer, launched)
        return judge

    return register


# What several contracts have in common.


def _query(call: Judge, name: str = "query") -> Seen:
    """Queries `[tokens, heads, channels]`; operators take the stride of tokens, and assume the two inner ones."""
    query = call.tensor(name, 3)
    call.know(query.dtype in (*HALVES, torch.float32, *FP8), f"{name} of {query}")
    call.promise("dense-heads", query.dense(1), f"{name} has gaps between heads or channels: {query}")
    if call.layer:
        heads = (call.layer.num_heads, call.layer.head_size)
        call.promise("heads", query.shape[1:] == heads, f"{name} {query} is not of the layer's {heads} heads")
    return query


def _scales(call: Judge, *names: str) -> None:
    """Scales of one number, float32."""
    for name in names:
        scale = call[name]
        if scale is not None:
            call.know(isinstance(scale, Seen), f"{name} that is no tensor")
            call.promise("scale-dtype", scale.dtype == torch.float32, f"{name} is {scale}, not float32")


def _layer_constants(call: Judge, *, scale: Any, window: int | None, sinks: Any, softcap: float) -> None:
    """The constants of a layer reach the operator."""
    layer = call.layer
    if layer is None:
        return
    if scale is not None:
        call.promise("scale", math.isclose(scale, layer.scale), f"scale {scale}, and the layer has {layer.scale}")
    call.promise("window", window == layer.window, f"window of {window} tokens, and the layer has {layer.window}")
    call.promise("sinks", (sinks is not None) == layer.sinks, f"sinks: {sinks}, and the layer has {layer.sinks}")
    call.promise("softcap", softcap == layer.softcap, f"soft cap {softcap}, and the layer has {layer.softcap}")


def _touches_latent_rows(call: Judge, cache: Seen, channels: int, *, writes: bool = False) -> None:
    """The operator addresses latent rows `[blocks, tokens, channels]` by the strides of blocks and tokens."""
    blocks, tokens, width = cache.shape
    strides = (*cache.strides[:2], 0, 1)  # one head; channels are taken to be dense
    rows = by_rows(replace(cache, shape=(blocks, tokens, 1, width), strides=strides))
    call.touches("latent", rows, cache, writes=writes, blocks=blocks, tokens=tokens, heads=1, channels=channels)


def _window(size: Any) -> int | None:
    """Tokens that a row sees, from the (left, right) of flash attention; None for all."""
    return None if size is None or size[0] < 0 else int(size[0]) + 1


def _sequences(call: Judge, table: str, lens: str, *, block_size: int, blocks: int, starts: str | None = None) -> int:
    """A block table with a row for each sequence, wide enough for its length, that names blocks of the pool."""
    rows, lengths = call.tensor(table, 2), call.tensor(lens, 1)
    call.promise("int32", rows.dtype == torch.int32, f"{table} is {rows}")
    call.promise("int32", lengths.dtype == torch.int32, f"{lens} is {lengths}")
    number = rows.shape[0]
    call.promise("one-row-each", lengths.shape[0] >= number, f"{table} has {number} rows and {lens} {lengths.shape[0]}")
    call.promise("dense-table", rows.strides[1] == 1, f"{table} has gaps in its rows: {rows}")
    if starts is not None:
        offsets = call.tensor(starts, 1)
        call.promise("int32", offsets.dtype == torch.int32, f"{starts} is {offsets}")
        call.promise(
            "starts-and-end",
            offsets.shape[0] == number + 1,
            f"{starts} has {offsets.shape[0]} offsets for {number} sequences; the end of the last one lies outside",
        )
    if rows.values is not None and lengths.values is not None:
        for row, length in zip(rows.values, lengths.values, strict=False):
            needed = -(-length // block_size)
            call.promise("wide-enough", needed <= len(row), f"{length} tokens need {needed} blocks of {len(row)} named")
            named = row[:needed]
            inside = all(0 <= block < blocks for block in named)
            call.promise("blocks-of-the-pool", inside, f"{table} names {named} in a pool of {blocks}")
    return number


def _longest(call: Judge, starts: str, longest: str) -> None:
    """The bound of query lengths that a launch is made for holds."""
    offsets, most = call.tensor(starts, 1), call[longest]
    if offsets.values and len(offsets.values) > 1:
        real = max(end - begin for begin, end in zip(offsets.values, offsets.values[1:], strict=False))
        call.promise("longest", real <= most, f"{longest} is {most}, and a sequence of {starts} has {real} tokens")


def _rows_cache(call: Judge, key: str, value: str, *, writes: bool = False) -> Seen:
    """K and V as `[blocks, tokens, heads, channels]`, read by the strides of K."""
    k, v = call.tensor(key, 4), call.tensor(value, 4)
    call.know(k.dtype in CACHED, f"{key} of {k}")
    call.promise("channels-last", k.strides[3] == v.strides[3] == 1, f"channels are not innermost: {k}, {v}")
    for side, view in (("key", k), ("value", v)):
        blocks, tokens, heads, channels = view.shape
        extent = {"blocks": blocks, "tokens": tokens, "heads": heads, "channels": channels}
        call.touches(side, by_rows(view), view, writes=writes, **extent)
    return k


def _same_strides(call: Judge, key: Seen, value: Seen, dimensions: int) -> None:
    same = key.strides[:dimensions] == value.strides[:dimensions]
    call.promise("strides-of-key", same, f"V is addressed with the strides of K: {key}, {value}")


def _native_cache(call: Judge, key: str, value: str, *, writes: bool = False, dense: bool = False) -> tuple[Seen, Seen]:
    """K `[blocks, heads, channels / x, tokens, x]`, V `[blocks, heads, channels, tokens]`."""
    k, v = call.tensor(key, 5), call.tensor(value, 4)
    call.know(k.dtype in CACHED, f"{key} of {k}")
    blocks, heads, packs, tokens, x = k.shape
    call.promise("x", x * k.size == 16, f"packs of {x} {k.dtype}, not 16 bytes")
    call.promise("sides-agree", v.shape == (blocks, heads, packs * x, tokens), f"K is {k} and V {v}")
    extent = {"blocks": blocks, "tokens": tokens, "heads": heads, "channels": packs * x}
    places = (as_if_dense(k), as_if_dense(v)) if dense else (k, v)
    call.touches("key", native_key(places[0]), k, writes=writes, **extent)
    call.touches("value", native_value(places[1]), v, writes=writes, **extent)
    return k, v


def _shuffled_cache(call: Judge, key: Seen, value: Seen, *, writes: bool = False) -> None:
    """Both sides in the SHUFFLE packing of views `[blocks, tokens, heads, channels]`, block strides honoured."""
    blocks, tokens, heads, channels = key.shape
    x = 16 // key.size
    call.promise("x", tokens % x == channels % x == 0, f"{key} cannot be packed by {x}")
    for side, view in (("key", key), ("value", value)):
        call.promise("dense-block", view.dense(1), f"the {side}s of a block have gaps: {view}")
        cells = shuffled(view, side, tokens=tokens, channels=channels, x=x)
        extent = {"blocks": blocks, "tokens": tokens, "heads": heads, "channels": channels}
        call.touches(side, cells, view, writes=writes, **extent)


def _new_tokens(call: Judge, blocks: int, tokens: int, slots: str = "slot_mapping") -> None:
    """Rows to write, and slots of the pool for them."""
    key, value, mapping = call.tensor("key", 3), call.tensor("value", 3), call.tensor(slots, 1)
    call.promise("rows", key.shape[0] >= mapping.shape[0], f"{mapping.shape[0]} slots for {key.shape[0]} rows of K")
    call.promise("dense-heads", key.dense(1) and value.dense(1), f"K or V has gaps between heads: {key}, {value}")
    call.promise("int64", mapping.dtype == torch.int64, f"{slots} is {mapping}")
    for slot in mapping.values or ():
        call.promise("slots-of-the-pool", slot < blocks * tokens, f"slot {slot} of {blocks * tokens}")


# vLLM's C++ operators.

_NATIVE_HEADS, _NATIVE_BLOCKS, _NATIVE_CACHES = (64, 128), (16, 32), ("auto", "fp8", "fp8_e4m3")


@contract(
    "_rocm_C.paged_attention",
    "ops._rocm_C:paged_attention",
    takes="out exp_sum max_logits tmp_out query key_cache value_cache num_kv_heads scale block_tables seq_lens "
    "query_start_loc block_size max_seq_len alibi_slopes kv_cache_dtype k_scale v_scale fp8_out_scale mfma_type "
    "interleaved_v",
    source=f"{VLLM} csrc/rocm/attention.cu",
)
def paged_attention(call: Judge) -> None:
    """Block and head sizes are template arguments; V is addressed with the strides of K, inner ones are assumed."""
    call.know(not call["interleaved_v"], "the interleaved V of vLLM 0.33")
    query = _query(call)
    key, value = _native_cache(call, "key_cache", "value_cache")
    call.promise("query-dtype", query.dtype in HALVES, f"query is {query.dtype}")
    call.promise("head-size", query.shape[2] in _NATIVE_HEADS, f"head size {query.shape[2]}, compiled {_NATIVE_HEADS}")
    size = call["block_size"]
    call.promise("block-size", size in _NATIVE_BLOCKS, f"block size {size}, compiled for {_NATIVE_BLOCKS}")
    call.promise("block-size", size == key.shape[3], f"block size {size}, and the cache has {key.shape[3]}")
    group = query.shape[1] // call["num_kv_heads"]
    call.promise("group", 1 <= group <= 16, f"{group} query heads a KV head, at most 16")
    kind = call["kv_cache_dtype"]
    call.promise("cache-dtype", kind in _NATIVE_CACHES, f"kv_cache_dtype {kind!r}, compiled for {_NATIVE_CACHES}")
    _same_strides(call, key, value, 2)
    call.promise("dense-block", key.dense(2) and value.dense(2), f"a head of a block has gaps: {key}, {value}")
    number = _sequences(
        call, "block_tables", "seq_lens", block_size=size, blocks=key.shape[0], starts="query_start_loc"
    )
    parts = -(-call["max_seq_len"] // 256)
    call.promise("partitions", parts <= 8 * 64, f"{parts} partitions of 256 tokens, the reduction takes 512")
    scratch = (number, query.shape[1], parts)
    for name, shape in (("exp_sum", scratch), ("max_logits", scratch), ("tmp_out", (*scratch, query.shape[2]))):
        held = call.tensor(name)
        call.promise("scratch", held.elements >= math.prod(shape), f"{name} {held} for {shape}")
    _scales(call, "k_scale", "v_scale")
    _layer_constants(call, scale=call["scale"], window=None, sinks=None, softcap=0.0)


@contract(
    "_C_cache_ops.reshape_and_cache",
    "ops._C_cache_ops:reshape_and_cache",
    takes="key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale interleaved_v",
    source=f"{VLLM} csrc/cache_kernels.cu: reshape_and_cache takes no stride of the caches",
)
def reshape_and_cache(call: Judge) -> None:
    """It multiplies sizes to find a block: the caches must be dense, whatever their strides say."""
    call.know(not call["interleaved_v"], "the interleaved V of vLLM 0.33")
    key, value = _native_cache(call, "key_cache", "value_cache", writes=True, dense=True)
    call.promise("dense-cache", key.dense() and value.dense(), f"caches with gaps or planes: {key}, {value}")
    _new_tokens(call, key.shape[0], key.shape[3])
    _scales(call, "k_scale", "v_scale")


@contract(
    "_C_cache_ops.reshape_and_cache_flash",
    "ops._C_cache_ops:reshape_and_cache_flash",
    takes="key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
    source=f"{VLLM} csrc/cache_kernels.cu: reshape_and_cache_flash",
)
def reshape_and_cache_flash(call: Judge) -> None:
    """Strides of blocks, tokens and heads are those of K, and V must have the same."""
    key = _rows_cache(call, "key_cache", "value_cache", writes=True)
    _same_strides(call, key, call.tensor("value_cache"), 3)
    _new_tokens(call, key.shape[0], key.shape[1])
    _scales(call, "k_scale", "v_scale")


@contract(
    "_C_cache_ops.concat_and_cache_mla",
    "ops._C_cache_ops:concat_and_cache_mla",
    takes="kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale skip_scale",
    source=f"{VLLM} csrc/cache_kernels.cu: concat_and_cache_mla",
)
def concat_and_cache_mla(call: Judge) -> None:
    """Latent rows `[blocks, tokens, channels]` by the strides of blocks and tokens."""
    call.know(not call["skip_scale"], "latent rows without a scale")
    cache, latent, rope = call.tensor("kv_cache", 3), call.tensor("kv_c", 2), call.tensor("k_pe", 2)
    width = latent.shape[1] + rope.shape[1]
    call.promise("width", cache.shape[2] == width, f"{cache} does not hold rows of {width}")
    call.promise("channels-last", cache.strides[2] == 1, f"{cache}")
    _touches_latent_rows(call, cache, width, writes=True)
    _scales(call, "scale")


@contract(
    "_C_cache_ops.gather_and_maybe_dequant_cache",
    "ops._C_cache_ops:gather_and_maybe_dequant_cache",
    takes="src_cache dst block_table cu_seq_lens token_to_seq num_tokens kv_cache_dtype scale seq_starts",
    source=f"{VLLM} csrc/cache_kernels.cu: gather_and_maybe_dequant_cache",
)
def gather_and_maybe_dequant_cache(call: Judge) -> None:
    """Rows of the context, from latent rows by the strides of blocks and tokens."""
    cache, out = call.tensor("src_cache", 3), call.tensor("dst", 2)
    call.promise("width", cache.shape[2] == out.shape[1], f"{cache} into {out}")
    call.promise("fits", call["num_tokens"] <= out.shape[0], f"{call['num_tokens']} rows into {out}")
    for name in ("block_table", "cu_seq_lens", "token_to_seq", "seq_starts"):
        held = call[name]
        if held is not None:
            call.promise("int32", held.dtype == torch.int32, f"{name} is {held}")
    _touches_latent_rows(call, cache, cache.shape[2])


# aiter.


def _flash_answer(args: Mapping[str, Any]) -> Any:
    query, value, out = args["q"], args["v"], args.get("out")
    out = query.new_zeros((*query.shape[:2], value.shape[2])) if out is None else out
    lse = query.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32)
    return (out, lse) if args.get("return_lse") else out


@contract(
    "aiter.flash_attn_varlen_func",
    "aiter:flash_attn_varlen_func",
    takes="q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_q dropout_p softmax_scale "
    "logits_soft_cap causal window_size bias alibi_slopes deterministic return_lse return_attn_probs "
    "how_v3_bf16_cvt block_table out cu_seqlens_q_padded cu_seqlens_k_padded sink_ptr",
    source=f"{AITER} aiter/ops/mha.py",
    answer=_flash_answer,
)
def flash_attn_varlen_func(call: Judge) -> None:
    """Prompts of several lengths in a row. V may be narrower than Q and K (MLA)."""
    query, key, value = call.tensor("q", 3), call.tensor("k", 3), call.tensor("v", 3)
    call.know(query.dtype in (*HALVES, *FP8), f"q of {query}")
    call.promise("dtypes", query.dtype == key.dtype == value.dtype, f"q, k and v are {query}, {key}, {value}")
    call.promise("channels-last", all(each.strides[2] == 1 for each in (query, key, value)), f"{query}, {key}, {value}")
    call.promise("group", query.shape[1] % key.shape[1] == 0, f"{query.shape[1]} query heads, {key.shape[1]} KV heads")
    call.promise("widths", query.shape[2] == key.shape[2] <= 256, f"{query} and {key}; at most 256 channels")
    call.promise("channels-by-8", query.shape[2] % 8 == value.shape[2] % 8 == 0, f"{query}, {value}")
    for starts, rows, longest in (("cu_seqlens_q", query, "max_seqlen_q"), ("cu_seqlens_k", key, "max_seqlen_k")):
        offsets = call.tensor(starts, 1)
        call.promise("int32", offsets.dtype == torch.int32, f"{starts} is {offsets}")
        if offsets.values:
            call.promise("starts-at-0", offsets.values[0] == 0, f"{starts} begins with {offsets.values[0]}")
            last = offsets.values[-1]
            call.promise("rows", last <= rows.shape[0], f"{starts} ends with {last}, there are {rows.shape[0]} rows")
        _longest(call, starts, longest)
    numbers = [call.tensor(name).shape[0] for name in ("cu_seqlens_q", "cu_seqlens_k")]
    call.promise("as-many-sequences", numbers[0] == numbers[1], f"{numbers} offsets of queries and of keys")
    if call.layer:
        # A part of the context is not causal, and a window cannot reach from one part into another.
        part = not call["causal"]
        shared = {"scale": call["softmax_scale"], "sinks": call["sink_ptr"], "softcap": call["logits_soft_cap"] or 0.0}
        _layer_constants(call, window=call.layer.window if part else _window(call["window_size"]), **shared)
    if call["return_lse"] and call["sink_ptr"] is not None:
        step = call.memory.setdefault("parts with sinks", [])
        step.append(call.operator)
        text = f"part {len(step)} of one row counts the sinks again: they belong to one part"
        call.promise("sinks-once", len(step) == 1, text)


@contract(
    "aiter.unified_attention",
    "aiter.ops.triton.unified_attention:unified_attention",
    takes="q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table "
    "softcap q_descale k_descale v_descale alibi_slopes output_scale qq_bias sinks shuffled_kv_cache",
    source=f"{AITER} 02c43589 aiter/ops/triton/attention/unified_attention.py",
)
def unified_attention(call: Judge) -> None:
    """Causal alone; every stride but that of channels is an argument."""
    call.know(not call["shuffled_kv_cache"], "a cache in the SHUFFLE packing")
    call.promise("causal", call["causal"], "it knows the causal mask alone")
    query, key = _query(call, "q"), _rows_cache(call, "k", "v")
    call.promise("group", query.shape[1] % key.shape[2] == 0, f"{query.shape[1]} query heads, {key.shape[2]} KV heads")
    out = call.tensor("out", 3)
    call.promise("out", out.shape == query.shape and out.dense(1), f"out is {out} for {query}")
    blocks, tokens = key.shape[:2]
    _sequences(call, "block_table", "seqused_k", block_size=tokens, blocks=blocks, starts="cu_seqlens_q")
    _longest(call, "cu_seqlens_q", "max_seqlen_q")
    sinks = call["sinks"]
    if sinks is not None:
        call.promise("sink-each-head", sinks.shape == (query.shape[1],), f"sinks {sinks} for {query.shape[1]} heads")
    if key.dtype in FP8:
        for name in ("k_descale", "v_descale"):
            call.promise("descales", call[name] is not None, f"an FP8 cache without {name}")
    _scales(call, "q_descale", "k_descale", "v_descale")
    shared = {"scale": call["softmax_scale"], "sinks": sinks, "softcap": call["softcap"]}
    _layer_constants(call, window=_window(call["window_size"]), **shared)


@contract(
    "aiter.paged_attention_v1",
    "ops.aiter:paged_attention_v1",
    takes="out workspace_buffer query key_cache value_cache scale block_tables cu_query_lens context_lens "
    "max_context_len alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale v_scale fp8_out_scale "
    "partition_size mtp sliding_window",
    source=f"{AITER} 3d1f4fe4 csrc/cpp_itfs/pa/pa_v1.py",
)
def paged_attention_v1(call: Judge) -> None:
    """V is addressed with the strides of K; a wave of the kernel holds 16 channels, and a program four waves."""
    query, key = _query(call), _rows_cache(call, "key_cache", "value_cache")
    call.know(call["kv_cache_layout"] == "NHD", f"the layout {call['kv_cache_layout']!r}")
    call.promise("query-dtype", query.dtype in HALVES, f"query is {query.dtype}")
    call.promise("head-size", query.shape[2] % 64 == 0, f"head size {query.shape[2]} is no multiple of 64")
    call.promise("block-size", key.shape[1] in _NATIVE_BLOCKS, f"block size {key.shape[1]}, made for {_NATIVE_BLOCKS}")
    kind = call["kv_cache_dtype"]
    text = f"kv_cache_dtype {kind!r}, it raises for all but {_NATIVE_CACHES}"
    call.promise("cache-dtype", kind in _NATIVE_CACHES, text)
    _same_strides(call, key, call.tensor("value_cache"), 3)
    number = _sequences(
        call, "block_tables", "context_lens", block_size=key.shape[1], blocks=key.shape[0], starts="cu_query_lens"
    )
    parts = -(-call["max_context_len"] // call["partition_size"])
    rows = number * query.shape[1] * parts
    needed = rows * (query.shape[2] * query.size + 2 * 4)
    held = call.tensor("workspace_buffer")
    call.promise("scratch", held.elements * held.size >= needed, f"{held.elements} bytes of scratch for {needed}")
    _scales(call, "k_scale", "v_scale")
    window = call["sliding_window"] or None
    _layer_constants(call, scale=call["scale"], window=window, sinks=None, softcap=call["logits_soft_cap"])


def _packed(call: Judge, key: str, value: str) -> Seen:
    """K `[blocks, heads, channels / x, tokens, x]` and V `[blocks, heads, tokens / x, channels, x]`."""
    k, v = call.tensor(key, 5), call.tensor(value, 5)
    blocks, heads, packs, tokens, x = k.shape
    call.promise("x", x * k.size == 16, f"packs of {x} {k.dtype}, not 16 bytes")
    call.promise("sides-agree", v.shape == (blocks, heads, tokens // x, packs * x, x), f"K is {k} and V {v}")
    extent = {"blocks": blocks, "tokens": tokens, "heads": heads, "channels": packs * x}
    _same_strides(call, k, v, 2)
    call.promise("dense-block", k.dense(1) and v.dense(1), f"a block has gaps: {k}, {v}")
    call.promise(
        "planes",
        k.strides[0] == math.prod(k.shape[1:]) and v.strides[0] == math.prod(v.shape[1:]),
        f"blocks of a side do not follow each other: {k}, {v}",
    )
    for side, view in (("key", k), ("value", v)):
        call.touches(side, shuffled(view, side, tokens=tokens, channels=packs * x, x=x), view, **extent)
    return k


@contract(
    "aiter.pa_fwd_asm",
    "aiter:pa_fwd_asm",
    takes="Q K V block_tables context_lens block_tables_stride0 max_qlen K_QScale V_QScale out_ qo_indptr "
    "high_precision kernelName",
    source=f"{AITER} 075a4def csrc/py_itfs_cu/asm_pa.cu: pa_fwd",
)
def pa_fwd_asm(call: Judge) -> None:
    """Assembly for 128 channels alone. The scale of the scores is 1 / sqrt(128): it takes none."""
    query, key = _query(call, "Q"), _packed(call, "K", "V")
    call.promise("head-size", query.shape[2] == 128, f"head size {query.shape[2]}, the assembly has 128 alone")
    if call.layer:
        own = 1 / math.sqrt(query.shape[2])
        text = f"it scales by {own:.4f}, and the layer by {call.layer.scale:.4f}"
        call.promise("scale", math.isclose(call.layer.scale, own, rel_tol=1e-6), text)
        _layer_constants(call, scale=None, window=None, sinks=None, softcap=0.0)
    _sequences(call, "block_tables", "context_lens", block_size=key.shape[3], blocks=key.shape[0])
    if key.size == 1:
        scale = call.tensor("K_QScale")
        wanted = (key.shape[0], key.shape[1], key.shape[3])
        call.promise("scale-each-token", scale.shape == wanted, f"scales {scale} for {wanted}")


@contract(
    "aiter.paged_attention_common",
    "aiter:paged_attention_common",
    takes="Q K V exp_sums max_logits tmp_out block_tables context_lens block_tables_stride0 scale max_qlen "
    "max_seq_len K_QScale_hip V_QScale_hip K_QScale_asm V_QScale_asm out_ qo_indptr high_precision kernelName "
    "kv_cache_dtype kv_cache_tensor_dtype",
    source=f"{AITER} aiter/ops/attention.py: paged_attention_common, _should_use_asm_kernel",
)
def paged_attention_common(call: Judge) -> None:
    """Assembly for 128 channels and many heads, else the HIP kernel: a call must be good for both.

    It is the HIP kernel alone that takes the scale of the scores, so a layer of 128 channels must have 1 / sqrt(128).
    """
    query, key = _query(call, "Q"), _packed(call, "K", "V")
    call.promise("query-dtype", query.dtype in HALVES, f"query is {query.dtype}")
    call.promise("head-size", query.shape[2] in (64, 128, 256), f"head size {query.shape[2]}")
    call.promise("block-size", key.shape[3] in _NATIVE_BLOCKS, f"block size {key.shape[3]}, made for {_NATIVE_BLOCKS}")
    kind = call["kv_cache_dtype"]
    call.promise("cache-dtype", kind in _NATIVE_CACHES, f"kv_cache_dtype {kind!r}, made for {_NATIVE_CACHES}")
    number = _sequences(call, "block_tables", "context_lens", block_size=key.shape[3], blocks=key.shape[0])
    parts = -(-call["max_seq_len"] // 256)
    scratch = (number, query.shape[1], parts)
    for name, shape in (("exp_sums", scratch), ("max_logits", scratch), ("tmp_out", (*scratch, query.shape[2]))):
        held = call.tensor(name)
        call.promise("scratch", held.elements >= math.prod(shape), f"{name} {held} for {shape}")
    if key.size == 1 and query.shape[2] == 128:
        scale, wanted = call.tensor("K_QScale_asm"), (key.shape[0], key.shape[1], key.shape[3])
        call.promise("scale-each-token", scale.shape == wanted, f"scales {scale} for {wanted}")
    _layer_constants(call, scale=call["scale"], window=None, sinks=None, softcap=0.0)


@contract(
    "aiter.fused_qk_rope_reshape_and_cache",
    "aiter.ops.triton.fused_kv_cache:fused_qk_rope_reshape_and_cache",
    takes="q k v key_cache value_cache slot_mapping pos cos sin k_scale v_scale is_neox flash_layout apply_scale offs "
    "q_out k_out output_zeros zeros_out upcast_operand",
    source=f"{AITER} aiter/ops/triton/fusions/fused_kv_cache.py: its assertions",
)
def fused_qk_rope_reshape_and_cache(call: Judge) -> None:
    """It asserts powers of two for the head size and for the block size, and a bfloat16 or FP8 cache."""
    query, rows = call.tensor("q", 3), call.tensor("k", 3)
    if call["flash_layout"]:
        key = _rows_cache(call, "key_cache", "value_cache", writes=True)
        tokens, heads = key.shape[1], key.shape[2]
    else:
        key, _ = _native_cache(call, "key_cache", "value_cache", writes=True)
        tokens, heads = key.shape[3], key.shape[1]
    allowed = (torch.bfloat16, *FP8, torch.uint8)
    call.promise("cache-dtype", key.dtype in allowed, f"a cache of {key.dtype}: it asserts bfloat16 or FP8")
    call.promise("block-size", tokens & (tokens - 1) == 0, f"block size {tokens} is no power of two")
    call.promise("head-size", query.shape[2] & (query.shape[2] - 1) == 0, f"head size {query.shape[2]}")
    call.promise("heads", rows.shape[1] == heads, f"{rows} into a cache of {heads} heads")
    slots = call.tensor("slot_mapping", 1)
    call.promise("rows", query.shape[0] == rows.shape[0] <= slots.shape[0], f"{query}, {rows} and {slots}")
    width = call.tensor("cos").shape[-1]
    call.promise("rotary", width in (query.shape[2], query.shape[2] // 2), f"rotary width {width} for {query}")


def _metadata_sizes(args: Mapping[str, Any]) -> Any:
    """Shapes and types of the buffers of a schedule, the compute units of an MI300X counted."""
    units, batch = 304, args.get("batch_size", args.get("max_batch", 1))
    tiles = batch * -(-(args["max_seqlen_qo"] * args["num_head_qo"]) // 16)
    return (
        (2, torch.uint64),
        (units + 1, torch.int32),
        ((tiles + units, 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
        (tiles + 2 * units, torch.int32),
    )


@contract(
    "aiter.get_mla_metadata_info_v1",
    "aiter:get_mla_metadata_info_v1",
    takes="batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode num_kv_splits intra_batch_mode "
    "max_split_per_batch",
    source=f"{AITER} aiter/ops/attention.py",
    answer=_metadata_sizes,
)
def get_mla_metadata_info_v1(call: Judge) -> None:
    """Sizes of a schedule's buffers, for the heads that the kernel will get."""
    heads = call["num_head_qo"]
    call.promise("heads-by-8", heads % 8 == 0, f"{heads} heads: it asserts a multiple of 8")
    call.memory["heads of the schedule's buffers"] = heads


@contract(
    "aiter.get_mla_metadata_v1",
    "aiter:get_mla_metadata_v1",
    takes="seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k is_causal "
    "work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map page_size "
    "kv_granularity max_seqlen_qo uni_seqlen_qo fast_mode topk max_split_per_batch intra_batch_mode "
    "is_cp_round_robin mla_version dtype_q_nope dtype_q_rope dtype_kv_nope dtype_kv_rope dtype_q dtype_kv",
    source=f"{AITER} aiter/ops/attention.py, csrc/kernels/mla/metadata/v1_2_device.cuh",
)
def get_mla_metadata_v1(call: Judge) -> None:
    """The schedule of a step, for a number of heads, into buffers that were made for as many."""
    heads = call["num_heads_per_head_k"] * call["num_heads_k"]
    made = call.memory.get("heads of the schedule's buffers")
    call.promise("buffers", made in (None, heads), f"a schedule of {heads} heads in buffers made for {made}")
    for name in ("seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens"):
        call.promise("int32", call.tensor(name, 1).dtype == torch.int32, f"{name} is {call[name]}")
    offsets = [call.tensor(name).shape[0] for name in ("seqlens_qo_indptr", "seqlens_kv_indptr")]
    call.promise("as-many-sequences", offsets[0] == offsets[1], f"{offsets} offsets of queries and of keys")
    _longest(call, "seqlens_qo_indptr", "max_seqlen_qo")
    call.memory["schedule", call.tensor("work_metadata_ptrs").address] = heads


@contract(
    "aiter.mla_decode_fwd",
    "aiter.mla:mla_decode_fwd",
    takes="q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size nhead_kv sm_scale "
    "logit_cap num_kv_splits num_kv_splits_indptr work_meta_data work_indptr work_info_set reduce_indptr "
    "reduce_final_map reduce_partial_map q_scale kv_scale intra_batch_mode return_logits return_lse g_kv_indptr "
    "cp_world_size cp_rank causal",
    source=f"{AITER} 000edf30 aiter/mla.py",
    answer=lambda args: (None, args["q"].new_zeros(args["q"].shape[:2], dtype=torch.float32)),
)
def mla_decode_fwd(call: Judge) -> None:
    """Decode over latent rows: as many heads in q, in o and in the schedule, in multiples that kernels exist for."""
    query, out, rows = call.tensor("q", 3), call.tensor("o", 3), call.tensor("kv_buffer", 4)
    heads = query.shape[1]
    call.promise("heads", out.shape[:2] == query.shape[:2], f"q is {query} and o {out}")
    call.promise("packed-query", query.dense() and out.dense(), f"q or o has gaps: {query}, {out}")
    call.promise("width", rows.shape[3] == query.shape[2], f"q is {query} and rows are {rows}")
    call.promise("one-row-pages", rows.shape[1:3] == (1, 1) and rows.dense(), f"pages of one dense row: {rows}")
    call.promise("no-softcap", not call["logit_cap"], f"logit_cap {call['logit_cap']}: it asserts none")
    schedule = call["work_meta_data"]
    if schedule is not None:
        planned = call.memory.get(("schedule", schedule.address))
        text = f"heads of the metadata ({planned}) are not the heads of q ({heads})"
        call.promise("heads-of-the-metadata", planned == heads, text)
        exists = heads == 16 or heads in range(32, 129, 16)
        call.promise("head-counts", exists, f"{heads} heads: a scheduled kernel has 16, or 32 to 128 by 16")
    else:
        call.promise("head-counts", heads % 16 == 0, f"{heads} heads: a kernel has multiples of 16")
    queries, offsets = call.tensor("qo_indptr", 1), call.tensor("kv_indptr", 1)
    pages = call.tensor("kv_indices", 1)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"):
        call.promise("int32", call.tensor(name).dtype == torch.int32, f"{name} is {call[name]}")
    call.promise("as-many-sequences", queries.shape == offsets.shape, f"{queries} and {offsets}")
    _longest(call, "qo_indptr", "max_seqlen_q")
    if offsets.values and pages.values:
        end = offsets.values[-1]
        call.promise("pages", end <= len(pages.values), f"{end} rows of {len(pages.values)} named")
        inside = all(0 <= page < rows.shape[0] for page in pages.values[:end])
        call.promise("rows-of-the-pool", inside, f"kv_indices names rows outside {rows.shape[0]}")
        expected = call.memory.get("rows of the step")
        if expected is not None:
            same = pages.values[:end] == expected
            call.promise("rows-of-the-step", same, "kv_indices names other rows than the table")
    last = call.tensor("kv_last_page_lens").values
    call.promise("last-pages", last is None or set(last) <= {1}, f"last pages of {last} rows, pages have one")
    if rows.size == 1:
        for name in ("q_scale", "kv_scale"):
            call.promise("descales", call[name] is not None, f"FP8 rows without {name}")
    _scales(call, "q_scale", "kv_scale")
    if call.layer:
        close = math.isclose(call["sm_scale"], call.layer.scale)
        call.promise("scale", close, f"scale {call['sm_scale']}, and the layer has {call.layer.scale}")


@contract(
    "aiter.mla_gluon",
    "aiter.ops.triton.gluon.mla_gluon:mla_gluon",
    takes="q_nope q_pe kv_c o page_table seq_info sm_scale k_pe kv_pe_offset use_2d_view kv_scale min_kv_seq_len",
    source=f"{AITER} 008bed9a aiter/ops/triton/gluon/mla_gluon.py",
)
def mla_gluon(call: Judge) -> None:
    """At most 16 heads over flat rows of at most 2 GiB; gfx950 alone."""
    query, rope, rows = call.tensor("q_nope", 3, 4), call.tensor("q_pe", 3, 4), call.tensor("kv_c", 2)
    heads = query.shape[-2]
    call.promise("head-counts", heads <= 16, f"{heads} heads: kernels for small batches have up to 16")
    call.promise("width", rows.shape[1] == query.shape[-1] + rope.shape[-1], f"{query}, {rope}, {rows}")
    call.promise("rope-offset", call["kv_pe_offset"] == query.shape[-1], f"kv_pe_offset {call['kv_pe_offset']}")
    call.promise("two-gib", rows.elements * rows.size <= 1 << 31, f"{rows} is over 2 GiB: bounds are not checked there")
    call.promise("out", call.tensor("o").shape == query.shape, f"o is {call['o']} for {query}")


def _prefill_sizes(args: Mapping[str, Any]) -> Any:
    units, tiles = 304, args["batch_size"] * -(-args["max_qlen"] // args["qlen_granularity"])
    return (
        (2, torch.uint64),
        (units + 1, torch.int32),
        ((tiles * args["num_head_k"], 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
        (tiles + units, torch.int32),
    )


@contract(
    "aiter.get_ps_metadata_info_v1",
    "aiter:get_ps_metadata_info_v1",
    takes="batch_size num_head_k max_qlen qlen_granularity",
    source=f"{AITER} aiter/ops/attention.py",
    answer=_prefill_sizes,
)
def get_ps_metadata_info_v1(call: Judge) -> None:
    """Sizes of the buffers of a prefill's schedule."""
    call.memory["heads of the prefill's buffers"] = call["num_head_k"]


def _prefill_schedule(args: Mapping[str, Any]) -> None:
    for name in ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map"):
        args[name].zero_()


@contract(
    "aiter.get_ps_metadata_v1",
    "aiter:get_ps_metadata_v1",
    takes="seqlens_qo_indptr pages_kv_indptr context_lens gqa_ratio num_heads_k work_metadata_ptrs work_indptr "
    "work_info reduce_indptr reduce_final_map reduce_partial_map qhead_granularity qlen_granularity "
    "kvlen_granularity block_size is_causal",
    source=f"{AITER} aiter/ops/attention.py",
    answer=_prefill_schedule,
)
def get_ps_metadata_v1(call: Judge) -> None:
    """The schedule of a prefill, made on the host."""
    made, heads = call.memory.get("heads of the prefill's buffers"), call["num_heads_k"]
    call.promise("buffers", made in (None, heads), f"a schedule of {heads} heads in buffers made for {made}")
    call.promise("heads-by-16", heads % 16 == 0, f"{heads} heads: the assembly takes multiples of 16")
    call.memory["heads of the prefill's schedule"] = heads


@contract(
    "aiter.mla_prefill_ps_asm_fwd",
    "aiter:mla_prefill_ps_asm_fwd",
    takes="Q K V qo_indptr kv_indptr kv_page_indices work_indptr work_info_set max_seqlen_q softmax_scale is_causal "
    "splitData splitLse output q_scale k_scale v_scale",
    source=f"{AITER} aiter/ops/attention.py: mla_prefill_ps_asm_fwd",
)
def mla_prefill_ps_asm_fwd(call: Judge) -> None:
    """FP8 queries, keys and values of as many heads as the schedule; bfloat16 out, through a raw pointer."""
    query, key, value, out = (call.tensor(name, 3) for name in ("Q", "K", "V", "output"))
    call.promise("fp8", all(each.dtype in FP8 for each in (query, key, value)), f"{query}, {key}, {value}")
    heads = {each.shape[1] for each in (query, key, value, out)}
    call.promise("heads", len(heads) == 1, f"heads of q, k, v and out: {sorted(heads)}")
    planned = call.memory.get("heads of the prefill's schedule")
    call.promise("heads-of-the-metadata", heads == {planned}, f"heads {sorted(heads)}, the schedule is for {planned}")
    call.promise("out", out.dtype == torch.bfloat16 and out.dense(), f"out is {out}: written as dense bfloat16")


@contract(
    "aiter.mla_reduce_v1",
    "aiter:mla_reduce_v1",
    takes="partial_output partial_lse reduce_indptr reduce_final_map reduce_partial_map max_seqlen_q num_kv_splits "
    "final_output final_lse",
    source=f"{AITER} 000edf30 aiter/mla.py: _mla_decode_reduce_v1_dispatch",
)
def mla_reduce_v1(call: Judge) -> None:
    """Parts of rows of as many heads as the output."""
    parts, lse, out = call.tensor("partial_output", 3), call.tensor("partial_lse", 2), call.tensor("final_output", 3)
    call.promise("heads", parts.shape[1:] == out.shape[1:], f"parts {parts} of {out}")
    call.promise("heads", lse.shape == parts.shape[:2], f"log-sum-exp {lse} of {parts}")
    call.promise("float32", parts.dtype == lse.dtype == torch.float32, f"{parts}, {lse}")


# vLLM's own Triton kernels, at their Python launchers: what they take of the Python half. Their arithmetic is another
# test's (tests/vllm_kernels).

_FA = "vllm.v1.attention.backends.rocm_aiter_fa"
_OPS = "vllm.v1.attention.ops"


@contract(
    "cp_mha_gather_cache",
    f"{_FA}:cp_mha_gather_cache",
    takes="key_cache value_cache key value block_tables k_scales v_scales cu_seqlens_kv token_to_batch seq_starts "
    "dequant kv_cache_layout total_tokens",
    source=f"{VLLM} vllm/v1/attention/backends/rocm_aiter_fa.py",
)
def cp_mha_gather_cache(call: Judge) -> None:
    """The context of a chunked prompt, gathered from the cache in the packing that it was written in."""
    key, value, packing = call.tensor("key_cache", 4), call.tensor("value_cache", 4), call["kv_cache_layout"]
    call.know(packing in ("NHD", "SHUFFLE"), f"the packing {packing!r}")
    if packing == "NHD":
        _rows_cache(call, "key_cache", "value_cache")
    else:
        _shuffled_cache(call, key, value)
    width = key.shape[3]
    call.promise("head-size", width & (width - 1) == 0, f"head size {width} is no power of two")
    rows, total = call.tensor("key", 3), call["total_tokens"]
    call.promise("fits", total <= rows.shape[0], f"{total} rows into {rows}")
    call.promise("dense-rows", rows.dense() and call.tensor("value", 3).dense(), f"{rows}")
    call.promise("heads", rows.shape[1:] == key.shape[2:], f"{key} into {rows}")
    sequences = call.tensor("token_to_batch", 1)
    call.promise("rows", sequences.shape[0] >= total, f"{sequences.shape[0]} tokens of {total} have a sequence")
    starts, offsets = call.tensor("seq_starts", 1), call.tensor("cu_seqlens_kv", 1)
    number = call.tensor("block_tables", 2).shape[0]
    enough = starts.shape[0] >= number and offsets.shape[0] == number + 1
    call.promise("as-many-sequences", enough, f"{starts}, {offsets} for {number} rows of the table")
    quantised = key.dtype in FP8
    call.promise("dequant", bool(call["dequant"]) == quantised, f"dequant={call['dequant']} for {key.dtype}")
    lengths, table = offsets.values, call.tensor("block_tables").values
    if lengths and table and starts.values:
        for row, start, begin, end in zip(table, starts.values, lengths, lengths[1:], strict=False):
            needed = -(-(start + end - begin) // key.shape[1])
            call.promise("wide-enough", end == begin or needed <= len(row), f"{needed} blocks of {len(row)} named")


@contract(
    "reshape_and_cache_shuffle_triton",
    f"{_FA}:reshape_and_cache_shuffle_triton",
    takes="key value key_cache value_cache slot_mapping kv_cache_dtype k_scales v_scales",
    source=f"{VLLM} vllm/v1/attention/backends/rocm_aiter_fa.py",
)
def reshape_and_cache_shuffle(call: Judge) -> None:
    """New tokens into the SHUFFLE packing; block strides are arguments, a block is dense."""
    key = call.tensor("key_cache", 4)
    _shuffled_cache(call, key, call.tensor("value_cache", 4), writes=True)
    _new_tokens(call, key.shape[0], key.shape[1])


@contract(
    "merge_attn_states",
    f"{_FA}:merge_attn_states",
    "vllm.model_executor.layers.attention.mla_attention:merge_attn_states",
    takes="output prefix_output prefix_lse suffix_output suffix_lse output_lse prefill_tokens_with_context "
    "output_scale",
    source=f"{VLLM} vllm/v1/attention/ops/merge_attn_states.py",
)
def merge_attn_states(call: Judge) -> None:
    """Two parts of the same rows, with the log-sum-exp `[heads, tokens]` of each."""
    out = call.tensor("output", 3)
    for part in ("prefix", "suffix"):
        rows, lse = call.tensor(f"{part}_output", 3), call.tensor(f"{part}_lse", 2)
        call.promise("rows", rows.shape == out.shape, f"{part} {rows} into {out}")
        call.promise("lse", lse.shape == (out.shape[1], out.shape[0]), f"{part} log-sum-exp {lse} of {rows}")
        call.promise("float32", lse.dtype == torch.float32, f"{part} log-sum-exp {lse}")


@contract(
    "triton_reshape_and_cache_flash",
    "vllm.v1.attention.backends.rocm_attn:triton_reshape_and_cache_flash",
    takes="key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale interleaved_v_pack_factor",
    source=f"{VLLM} vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
)
def triton_reshape_and_cache_flash(call: Judge) -> None:
    """Native packing by the strides of K; rows likewise."""
    call.know(not call["interleaved_v_pack_factor"], "the interleaved V of vLLM 0.33")
    if len(call.tensor("key_cache", 4, 5).shape) == 4:
        reshape_and_cache_flash(call)
        return
    key, value = _native_cache(call, "key_cache", "value_cache", writes=True)
    _same_strides(call, key, value, 2)
    inner = key.strides[3:] == (key.shape[4], 1) and value.strides[3] == 1
    call.promise("dense-block", inner, f"tokens of a head have gaps: {key}, {value}")
    _new_tokens(call, key.shape[0], key.shape[3])


@contract(
    "prefix_prefill",
    f"{_OPS}.chunked_prefill_paged_decode:context_attention_fwd",
    takes="q k v o kv_cache_dtype k_cache v_cache b_loc b_start_loc b_seq_len max_seq_len max_input_len k_scale "
    "v_scale alibi_slopes sliding_window sm_scale skip_decode fp8_out_scale sinks is_block_table_ptr causal "
    "interleaved_v_pack_factor",
    source=f"{VLLM} vllm/v1/attention/ops/prefix_prefill.py",
)
def prefix_prefill(call: Judge) -> None:
    """New rows over themselves and over a cache in the native packing; every stride is an argument."""
    call.know(not call["interleaved_v_pack_factor"], "the interleaved V of vLLM 0.33")
    query = _query(call, "q")
    call.promise("new-rows", isinstance(call["k"], Seen), "it mixes new K and V with the cached ones, and got none")
    key, _ = _native_cache(call, "k_cache", "v_cache")
    starts = {"block_size": key.shape[3], "blocks": key.shape[0], "starts": "b_start_loc"}
    _sequences(call, "b_loc", "b_seq_len", **starts)
    _longest(call, "b_start_loc", "max_input_len")
    out = call.tensor("o", 3)
    call.promise("out", out.shape == query.shape, f"o is {out} for {query}")
    window = call["sliding_window"] or None
    _layer_constants(call, scale=call["sm_scale"], window=window, sinks=call["sinks"], softcap=0.0)


@contract(
    "kernel_paged_attention_2d",
    f"{_OPS}.chunked_prefill_paged_decode:kernel_paged_attention_2d",
    takes="output_ptr query_ptr key_cache_ptr value_cache_ptr sink_ptr block_tables_ptr seq_lens_ptr alibi_slopes_ptr "
    "scale k_scale v_scale out_scale_inv num_query_heads num_queries_per_kv num_queries_per_kv_padded "
    "block_table_stride query_stride_0 query_stride_1 output_stride_0 output_stride_1 BLOCK_SIZE "
    "PHYSICAL_BLOCK_SIZE HEAD_SIZE HEAD_SIZE_PADDED USE_ALIBI_SLOPES SLIDING_WINDOW x stride_k_cache_0 "
    "stride_k_cache_1 stride_k_cache_2 stride_k_cache_3 stride_k_cache_4 stride_v_cache_0 stride_v_cache_1 "
    "stride_v_cache_2 stride_v_cache_3 filter_by_query_len query_start_len_ptr USE_SINKS USE_FP8 "
    "INTERLEAVED_V_PACK_FACTOR",
    source=f"{VLLM} vllm/v1/attention/ops/chunked_prefill_paged_decode.py",
    launched=True,
)
def kernel_paged_attention_2d(call: Judge) -> None:
    """A tile of the cache is a power of two and fits the LDS of 64 KiB; strides are those of the caches."""
    call.know(not call["INTERLEAVED_V_PACK_FACTOR"], "the interleaved V of vLLM 0.33")
    key, value = _native_cache(call, "key_cache_ptr", "value_cache_ptr")
    given = tuple(call[f"stride_k_cache_{axis}"] for axis in range(5))
    call.promise("strides", given == key.strides, f"strides {given} of {key}")
    given = tuple(call[f"stride_v_cache_{axis}"] for axis in range(4))
    call.promise("strides", given == value.strides, f"strides {given} of {value}")
    tile, physical = call["BLOCK_SIZE"], call["PHYSICAL_BLOCK_SIZE"]
    call.promise("tile", tile & (tile - 1) == 0, f"a tile of {tile} tokens is no power of two")
    lds = 2 * tile * call["HEAD_SIZE_PADDED"] * 2
    call.promise("lds", tile <= 128, f"a tile of {tile} tokens, {lds // 1024} KiB of K and V: LDS has 64")
    call.promise("block-size", physical == key.shape[3], f"blocks of {physical}, and the cache has {key.shape[3]}")
    starts = {"block_size": physical, "blocks": key.shape[0], "starts": "query_start_len_ptr"}
    _sequences(call, "block_tables_ptr", "seq_lens_ptr", **starts)
    window = call["SLIDING_WINDOW"] or None
    _layer_constants(call, scale=call["scale"], window=window, sinks=call["sink_ptr"], softcap=0.0)


@contract(
    "triton_unified_attention",
    f"{_OPS}.triton_unified_attention:unified_attention",
    takes="q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table "
    "softcap q_descale k_descale v_descale alibi_slopes sinks output_scale",
    source=f"{VLLM} vllm/v1/attention/ops/triton_unified_attention.py",
)
def triton_unified_attention(call: Judge) -> None:
    """vLLM's kernel takes the mask as an argument and every stride of the cache."""
    _query(call, "q")
    key = _rows_cache(call, "k", "v")
    starts = {"block_size": key.shape[1], "blocks": key.shape[0], "starts": "cu_seqlens_q"}
    number = _sequences(call, "block_table", "seqused_k", **starts)
    for name in ("k_descale", "v_descale"):
        scale = call.tensor(name)
        call.promise("descales", scale.shape == (number, key.shape[2]), f"{name} {scale} for {number} sequences")
    shared = {"scale": call["softmax_scale"], "sinks": call["sinks"], "softcap": call["softcap"]}
    _layer_constants(call, window=_window(call["window_size"]), **shared)


def _expand(args: Mapping[str, Any]) -> None:
    """Block numbers to numbers of rows, as vLLM's kernel does it: the next operator reads them."""
    size, offsets = args["KERNEL_BLOCK_SIZE"], args["cu_num_tokens"].tolist()
    for row, begin, end in zip(args["block_table"].tolist(), offsets, offsets[1:], strict=False):
        rows = [row[token // size] * size + token % size for token in range(end - begin)]
        args["page_indices"][begin:end] = torch.tensor(rows, dtype=args["page_indices"].dtype)


@contract(
    "_expand_page_indices_kernel",
    "vllm.v1.attention.backends.mla.rocm_aiter_mla:_expand_page_indices_kernel",
    takes="page_indices block_table block_table_stride_0 block_table_stride_1 cu_num_tokens num_real_tokens "
    "KERNEL_BLOCK_SIZE BLOCK_SIZE CLAMP_TAIL",
    source=f"{VLLM} vllm/v1/attention/backends/mla/rocm_aiter_mla.py",
    answer=_expand,
    launched=True,
)
def expand_page_indices(call: Judge) -> None:
    """A number of a row for each token of a sequence; the buffer holds them all."""
    call.know(not call["CLAMP_TAIL"], "sequences that are padded to a length of the kernel")
    table, rows = call.tensor("block_table", 2), call.tensor("page_indices", 1)
    offsets = call.tensor("cu_num_tokens", 1)
    given = (call["block_table_stride_0"], call["block_table_stride_1"])
    call.promise("strides", given == table.strides, f"strides {given} of {table}")
    size, lengths = call["KERNEL_BLOCK_SIZE"], offsets.values or ()
    if lengths and table.values:
        call.promise("fits", lengths[-1] <= rows.shape[0], f"{lengths[-1]} rows into {rows}")
        expected: list[int] = []
        for row, begin, end in zip(table.values, lengths, lengths[1:], strict=False):
            needed = -(-(end - begin) // size)
            call.promise("wide-enough", needed <= len(row), f"{end - begin} tokens need {needed} of {len(row)} blocks")
            expected += [row[token // size] * size + token % size for token in range(min(end - begin, len(row) * size))]
        call.memory["rows of the step"] = tuple(expected)


def places() -> dict[str, Contract]:
    """Contracts by the place where callers find the operator."""
    return {place: known for known in CONTRACTS.values() for place in known.places}
