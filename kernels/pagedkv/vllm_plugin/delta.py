# SPDX-License-Identifier: Apache-2.0
"""Our gated delta rule in the layers of Qwen3-Next, Qwen3.5 and Kimi-Linear of a process (`PAGEDKV_GDN=1`).

The convolution before it stays vLLM's, on CPUs plain torch. States are read and written where they lie in vLLM's pool.
With drafts, a sequence has a block more for each draft: the state stays in the first, and what the drafts would do to
it is kept in the last, until the next step knows how many count. Beside a prefix cache the state after each draft goes
to its block instead, because vLLM then copies the one that it wants.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from math import ceil, prod
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn.functional import conv1d, silu

from pagedkv.device import INTERPRETED
from pagedkv.gdn.decode import Drafts, gdn_decode
from pagedkv.gdn.prefill import gdn_prefill
from pagedkv.launch import GDN_HEAD_SIZES, MANY_STATES
from pagedkv.prepared import first_warm_up
from pagedkv.vllm_plugin import WORTH_SAYING, check_parameters, log, replace_functions
from pagedkv.vllm_plugin.errors import refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from torch import Tensor

LAYERS = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
KIMI_LAYERS = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
BREAKS = "vllm.compilation.breakable_cudagraph"
BUILDERS = "vllm.v1.attention.backends.gdn_attn"
NULL_BLOCK = 0
"""vLLM's block of sequences that are padding."""
EVERY = slice(None)
WARM_TOKENS = 192
"""Tokens of a prefill that is warmed up: three chunks, one for each segment."""

calls = 0
"""Steps of layers that ours computed in this process."""

_theirs: dict[str, Callable[..., Any]] = {}
"""vLLM's methods that ours call, by name."""


def claim() -> ExitStack:
    """Put our methods in vLLM's classes, if vLLM's take the arguments that we know. A second call changes nothing.

    Returns:
        What restores the earlier ones: `with claim():` uses ours inside the block.

    Raises:
        VersionError: One takes others, or is gone. vLLM's own are then left in place.
    """
    # vLLM decides by the model whether its CUDA graphs break off at attention, and that is after it has loaded plugins,
    # but its attention modules read the decision once, when they are imported. What is imported here can break off, and
    # does nothing else while no such graph is captured.
    with mock.patch.dict(os.environ, VLLM_USE_BREAKABLE_CUDAGRAPH="1"):
        layers, kimi_layers, builders = map(import_module, (LAYERS, KIMI_LAYERS, BUILDERS))
    layer: Any = layers.QwenGatedDeltaNetAttention
    builder: Any = builders.GDNAttentionMetadataBuilder
    methods = {
        layer: (_forward_core, _warmup_prefill_kernels, _can_use_fused_gdn_mtp_decode),
        kimi_layers.KimiGatedDeltaNetAttention: (_forward,),
        builder: (build, update_block_table),
    }
    ours = [(owner, method.__name__, method) for owner, of_owner in methods.items() for method in of_owner]
    for owner, name, method in ours:
        check_parameters(getattr(owner, name, None), method, f"{owner.__module__}.{owner.__name__}.{name}")
    _theirs.update((name, getattr(owner, name)) for owner, name, method in ours if getattr(owner, name) is not method)
    # What calls `_forward_core`, and not kernels of its own.
    return replace_functions([*ours, *((layer, name, layer.forward_cuda) for name in ("forward_cpu", "forward_hip"))])


def build(
    self: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    num_accepted_tokens: Tensor | None = None,
    num_decode_draft_tokens_cpu: Tensor | None = None,
    fast_build: bool = False,
) -> Any:
    """Make vLLM's metadata of a step, with the lengths of sequences that have drafts, which vLLM leaves out."""
    batch = common_attn_metadata
    drafted = (num_accepted_tokens, num_decode_draft_tokens_cpu)
    found = _theirs["build"](self, common_prefix_len, batch, *drafted, fast_build=fast_build)
    found.seq_lens = None
    if found.spec_sequence_masks is not None:
        # Sequences with drafts come first where there are no others, and in graphs their lengths must not be copied.
        alone = found.num_prefills == 0
        found.seq_lens = batch.seq_lens if alone else batch.seq_lens[found.spec_sequence_masks_cpu]
    return _dense(self, found)


def update_block_table(self: Any, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
    """Make metadata of another group of layers, with the lengths of the first."""
    found = _theirs["update_block_table"](self, metadata, blk_table, slot_mapping)
    found.seq_lens = metadata.seq_lens
    return _dense(self, found)


def _dense(builder: Any, found: Any) -> Any:
    """Copy columns of a block table, so that strides, for which Triton compiles, do not follow from its width."""
    for name in ("non_spec_state_indices_tensor", "spec_state_indices_tensor"):
        slots = getattr(found, name)
        if slots is not None and slots.data_ptr() != getattr(builder, name).data_ptr():  # that of graphs is dense
            setattr(found, name, slots.clone(memory_format=torch.contiguous_format))
    if found.prefill_state_indices is not None:
        found.prefill_state_indices = found.non_spec_state_indices_tensor[found.num_decodes :]
    return found


def _can_use_fused_gdn_mtp_decode(self: Any, attn_metadata: Any) -> bool:  # noqa: ARG001 - arguments are vLLM's
    """Return False: a kernel of vLLM's for drafts, which writes a state for each, is not used."""
    return False


def _forward_core(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """Compute convolution and recurrence of a step of one layer.

    Args:
        self: vLLM's layer; its `kv_cache` is the pools of windows of the convolution and of states.
        mixed_qkv: Queries, keys and values side by side before the convolution, [tokens, channels].
        b: Gate of what is written, [tokens, heads].
        a: Gate of the decay, [tokens, heads].
        core_attn_out: Result, [tokens, heads, values]; zeros before.

    Raises:
        UnsupportedFeatureError: The layer is not served.
    """
    _warm_up(self, mixed_qkv)
    if (metadata := _metadata(self)) is not None:
        _step(self, metadata, mixed_qkv, b, a, core_attn_out)


def _forward(self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
    """Compute a step of one layer of Kimi Delta Attention, and its gated norm.

    vLLM decorates its own when it imports the module, which may be before it has decided that graphs break off here.

    Args:
        self: vLLM's layer.
        mixed_qkv: As `_forward_core` takes it.
        g1: Gate of the decay, [1, tokens, heads, keys].
        g2: Gate of the norm, [tokens, heads, values].
        beta: Gate of what is written, [1, tokens, heads].
        core_attn_out: Result, [1, tokens, heads, values].

    Raises:
        UnsupportedFeatureError: The layer is not served.
    """
    broken_off = import_module(BREAKS).eager_break_during_capture(_kimi_step)
    broken_off(self, mixed_qkv, g1, g2, beta, core_attn_out)


def _kimi_step(layer: Any, mixed: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, out: Tensor) -> None:
    _warm_up(layer, mixed, beta.stride(1))
    if (metadata := _metadata(layer)) is not None:
        _step(layer, metadata, mixed, beta[0], g1[0], out[0])
        out.copy_(layer.o_norm(out, g2))


def _metadata(layer: Any) -> Any:
    """Return vLLM's metadata of a step; None of one that measures memory."""
    every = import_module(LAYERS).get_forward_context().attn_metadata
    return every.get(layer.prefix) if isinstance(every, dict) else None


def _step(layer: Any, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    global calls  # noqa: PLW0603 - the workers' report reads it
    calls += 1
    count = metadata.num_actual_tokens
    mixed, b, a, out = mixed[:count], b[:count], a[:count], out[:count]
    if metadata.spec_sequence_masks is None:
        _without_drafts(layer, metadata, mixed, b, a, out)
        return
    if metadata.num_prefills == 0:
        _with_drafts(layer, metadata, mixed, b, a, out)
        return
    for tokens, serve in ((metadata.non_spec_token_indx, _without_drafts), (metadata.spec_token_indx, _with_drafts)):
        rows = out.new_zeros((len(tokens), *out.shape[1:]))
        serve(layer, metadata, mixed[tokens], b[tokens], a[tokens], rows)
        out[tokens] = rows


def _without_drafts(layer: Any, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Serve the sequences without drafts; those of one token come first."""
    slots, starts = metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc
    decodes = metadata.num_decode_tokens
    if not metadata.num_prefills:
        decodes = len(mixed)  # with those that pad a graph
        if not decodes:
            return
        mixed = _convolution(layer, mixed, slots[:decodes], starts)
    else:
        mixed = _convolution(layer, mixed, slots, starts, resumes=metadata.has_initial_state, metadata=metadata)
    if decodes:
        rows = _inputs(layer, mixed, b, a, out, slice(decodes))
        gdn_decode(**rows, state_indices=slots[:decodes], pad_index=NULL_BLOCK)
    if metadata.num_prefills:
        gdn_prefill(
            **_inputs(layer, mixed, b, a, out, slice(decodes, None)),
            starts=metadata.prefill_query_start_loc,
            sources=metadata.prefill_state_indices,
            targets=metadata.prefill_state_indices,
            known=metadata.prefill_has_initial_state,
        )


def _with_drafts(layer: Any, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Serve the sequences with drafts."""
    count = metadata.num_spec_decodes
    slots, starts = metadata.spec_state_indices_tensor[:count], metadata.spec_query_start_loc[: count + 1]
    accepted = metadata.num_accepted_tokens[:count]
    mixed = _convolution(layer, mixed, slots[:, 0], starts, accepted=accepted)
    _verify(layer, _inputs(layer, mixed, b, a, out), slots, starts, accepted, metadata.seq_lens[:count])


def _verify(
    layer: Any, inputs: dict[str, Any], slots: Tensor, starts: Tensor, accepted: Tensor, seq_lens: Tensor
) -> None:
    places: dict[str, Any] = {"state_indices": slots}
    if layer.cache_config.mamba_cache_mode == "none":
        room = _room(layer, inputs["k"], inputs["a"])
        places = {"state_indices": slots[:, 0], "drafts": room, "draft_indices": slots[:, -1], "seq_lens": seq_lens}
    gdn_decode(
        **inputs,
        **places,
        pad_index=NULL_BLOCK,
        query_start_loc=starts,
        num_accepted_tokens=accepted,
        max_query_len=layer.num_spec + 1,
    )


def _inputs(
    layer: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor, part: slice = EVERY, states: Tensor | None = None
) -> dict[str, Any]:
    """Return what both kernels take of some tokens after the convolution: all are views."""
    (head_keys, head_values), values = _sizes(layer), out.shape[1] * out.shape[2]
    keys = (mixed.shape[1] - values) // 2
    q, k, v = mixed[part].split([keys, keys, values], dim=-1)
    return {
        "q": q.unflatten(-1, (-1, head_keys)),
        "k": k.unflatten(-1, (-1, head_keys)),
        "v": v.unflatten(-1, (-1, head_values)),
        "a": a[part],
        "b": b[part],
        "out": out[part],
        "states": layer.kv_cache[1] if states is None else states,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias.view(a.shape[1:]),
        "lower_bound": getattr(layer, "gate_lower_bound", None),
    }


def _sizes(layer: Any) -> tuple[int, int]:
    """Return keys and values of a head; Kimi Delta Attention has as many of both."""
    return (layer.head_dim,) * 2 if hasattr(layer, "gate_lower_bound") else (layer.head_k_dim, layer.head_v_dim)


def _room(layer: Any, k: Tensor, a: Tensor) -> Drafts:
    """Return views of the pages of all blocks, each of which has room for the drafts of a sequence.

    Raises:
        UnsupportedFeatureError: A page is too small.
    """
    states = layer.kv_cache[1]
    blocks, heads, values, keys = states.shape
    ring = 2 * layer.num_spec + 1
    shapes = {"keys": (ring, k.shape[1], keys), "updates": (ring, heads, values), "decays": (ring, *a.shape[1:])}
    page, size = states.stride(0) * states.element_size(), states.element_size()
    begin = first = states.storage_offset() * size
    views = {}
    for name, shape in shapes.items():
        dtype = k.dtype if name == "keys" else torch.float32
        strides = torch.empty(shape, device="meta").stride()
        at = (begin // dtype.itemsize, (blocks, *shape), (page // dtype.itemsize, *strides))
        views[name] = torch.empty(0, dtype=dtype, device=states.device).set_(states.untyped_storage(), *at)
        begin += -(-prod(shape) * dtype.itemsize // 16) * 16
    refuse({f"{layer.num_spec} drafts (unset PAGEDKV_GDN)": begin - first > heads * values * keys * size})
    return Drafts(**views)


def _convolution(
    layer: Any,
    mixed: Tensor,
    slots: Tensor,
    starts: Tensor,
    *,
    resumes: Tensor | None = None,
    accepted: Tensor | None = None,
    metadata: Any = None,
) -> Tensor:
    """Return the convolution of each sequence, and put the window after it in the pool.

    Args:
        layer: vLLM's layer.
        mixed: [tokens, channels].
        slots: Block of each sequence.
        starts: First token of each sequence, and the number of tokens.
        resumes: Whether each sequence of a prefill goes on from a window; None if every sequence does.
        accepted: Tokens of the last step that count, of sequences with drafts.
        metadata: vLLM's, of a prefill.
    """
    vllms: Any = import_module(LAYERS)
    windows = layer.kv_cache[0] if vllms.is_conv_state_dim_first() else layer.kv_cache[0].transpose(-1, -2)
    weight = layer.conv1d.weight.view(layer.conv1d.weight.size(0), layer.conv1d.weight.size(2))
    filters: Any = (weight, layer.conv1d.bias)
    options: dict[str, Any]
    if not mixed.is_cuda:
        return _plain_convolution(layer, mixed, windows, slots, starts, resumes, accepted)
    if metadata is not None:
        options = {"has_initial_state": resumes, "cache_indices": slots, "query_start_loc": starts}
        options |= {"conv_states": windows, "activation": layer.activation, "metadata": metadata}
        return vllms.causal_conv1d_fn(mixed.transpose(0, 1), *filters, **options).transpose(0, 1)
    # Rows of the result lie as those of a prefill, whatever the projection before has beside them.
    options = {"conv_state_indices": slots, "validate_data": False, "out": torch.empty_like(mixed)}
    if accepted is not None:
        options |= {"num_accepted_tokens": accepted, "query_start_loc": starts, "max_query_len": layer.num_spec + 1}
    return vllms.causal_conv1d_update(mixed, windows, *filters, layer.activation, **options)


def _plain_convolution(
    layer: Any,
    mixed: Tensor,
    windows: Tensor,
    slots: Tensor,
    starts: Tensor,
    resumes: Tensor | None,
    accepted: Tensor | None,
) -> Tensor:
    """Return the same in plain torch; vLLM's CPU build lacks it for drafts in float32."""
    taps, out, edges = layer.conv1d.weight.size(-1) - 1, torch.empty_like(mixed), starts.tolist()
    for i, slot in enumerate(slots.tolist()):
        part = slice(edges[i], edges[i + 1])
        rows = mixed[part].T
        if slot == NULL_BLOCK or not rows.numel():
            continue
        last = 0 if accepted is None else int(accepted[i]) - 1
        fresh = resumes is not None and not resumes[i]
        past = rows.new_zeros(len(rows), taps) if fresh else windows[slot, :, last : last + taps].to(rows.dtype)
        seen = torch.cat([past, rows], -1)
        kept = seen[:, -taps:] if accepted is None else seen[:, 1:]
        windows[slot, :, : kept.shape[1]] = kept
        found = conv1d(seen[None], layer.conv1d.weight.to(seen.dtype), layer.conv1d.bias, groups=len(seen))[0].T
        out[part] = silu(found) if layer.activation in ("silu", "swish") else found
    return out


def _warmup_prefill_kernels(self: Any, qkv_or_qkvz: Tensor, v_dim: int) -> None:  # noqa: ARG001 - arguments are vLLM's
    """Warm up, as `_warm_up` does."""
    _warm_up(self, qkv_or_qkvz)


def _blank_rows(layer: Any, mixed: Tensor, tokens: int, stride: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows of tokens as `_inputs` takes them, zeros and room for the result; `stride` is that of `_warm_up`."""
    num_heads, (keys, values) = len(layer.A_log), _sizes(layer)
    b = mixed.new_zeros((tokens, stride or num_heads))[:, :num_heads]
    a = b if stride is None else mixed.new_zeros((tokens, num_heads, keys))
    return mixed.new_zeros((tokens, mixed.shape[1])), b, a, mixed.new_empty((tokens, num_heads, values))


def _warm_up(layer: Any, mixed: Tensor, stride: int | None = None) -> None:
    """Take the memory of the longest prefill, or compile every variant that the layer may launch.

    vLLM's first step, of as many tokens as may come, measures memory, and there is no pool yet. A later one, on the
    pool, comes before vLLM reports ready, unless a graph is being captured.

    Args:
        layer: vLLM's layer.
        mixed: [tokens, channels].
        stride: Numbers from one token's gates of what is written to the next one's; None where they are dense. Each key
            has a gate of the decay where it is given.

    Raises:
        UnsupportedFeatureError: The layer is not served.
    """
    if getattr(layer, "pagedkv_is_warm", False):
        return
    sizes = _sizes(layer)
    heads = f"gated delta nets of {sizes[0]} keys and {sizes[1]} values a head (unset PAGEDKV_GDN)"
    replayed = "ReplaySSM of gated delta nets (unset PAGEDKV_GDN, or --use-replayssm)"
    refuse({heads: not set(sizes) <= set(GDN_HEAD_SIZES), replayed: layer.cache_config.use_replayssm})
    if INTERPRETED or (mixed.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    pools: Any = getattr(layer, "kv_cache", ())
    ready = len(pools) > 1 and pools[1].numel() > 0
    rows = _blank_rows(layer, mixed, WARM_TOKENS if ready else len(mixed), stride)
    nowhere, starts = mixed.new_full((1,), -1, dtype=torch.int32), mixed.new_zeros(2, dtype=torch.int32)
    starts[1] = len(rows[0])
    prefill = {"starts": starts, "sources": nowhere, "targets": nowhere, "known": nowhere > 0}
    if not ready:
        states = mixed.new_empty((1, len(layer.A_log), *reversed(sizes)), dtype=layer.get_state_dtype()[1])
        gdn_prefill(**_inputs(layer, *rows, states=states), **prefill)
        return
    layer.pagedkv_is_warm = True
    drafting = layer.num_spec, layer.cache_config.mamba_cache_mode
    if not first_warm_up("gdn", mixed[:0], pools[1], layer.A_log, layer.dt_bias, sizes, stride, drafting):
        return
    began = time.perf_counter()
    for segments in (1, 2, 3):
        gdn_prefill(**_inputs(layer, *rows), **prefill, num_segments=segments)
    # A step of many states is another variant where tuning data say so. All of its sequences are padding.
    for sequences in (1, ceil(MANY_STATES / pools[1][0].nbytes)):
        blank = _inputs(layer, *_blank_rows(layer, mixed, sequences, stride))
        gdn_decode(**blank, state_indices=nowhere.new_zeros(sequences), pad_index=NULL_BLOCK)
    if layer.num_spec:
        one, first = torch.ones_like(nowhere), _inputs(layer, *rows, slice(1))
        padding = starts.new_zeros((1, layer.num_spec + 1))
        _verify(layer, first, padding, starts.clamp(max=1), one, one)
    if (seconds := time.perf_counter() - began) > WORTH_SAYING:
        log.info("pagedkv compiled the gated delta rule in %.1f s: none of it is left to serving", seconds)
