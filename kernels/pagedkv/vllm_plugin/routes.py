# SPDX-License-Identifier: Apache-2.0
"""Translate vLLM's attention layers to requests of the router, and its routes back.

The route is the one decision: its layout is what `pages` makes the cache of write and attention from, and its refusal
is the plugin's. Only what the router has no word for is refused elsewhere.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, max_decode_query_len

from pagedkv.device import current
from pagedkv.routing import NoKernelError, Request, RequestError, route
from pagedkv.routing.candidates import load
from pagedkv.routing.features import INTERPRETED_BFLOAT16, asked_dtype
from pagedkv.vllm_plugin.errors import UnsupportedFeatureError, refuse

if TYPE_CHECKING:
    from pagedkv.fp8.formats import FormatName
    from pagedkv.routing import Route
    from pagedkv.routing.request import Dtype, KvScales, Sides

PROVIDERS = frozenset({"pagedkv"})
"""Whose kernels the plugin launches."""


class CacheDtype(NamedTuple):
    """What one of vLLM's names of a cache dtype means."""

    kind: str
    """`auto`; `e4m3`, of which the device has one of two formats; or `e5m2`."""
    scales: KvScales
    """`head` where vLLM may give one for the tensor or one per KV head: a kernel that serves the second serves the
    first.
    """


CACHE_DTYPES = {
    "auto": CacheDtype("auto", "none"),
    "float16": CacheDtype("auto", "none"),
    "bfloat16": CacheDtype("auto", "none"),
    "fp8": CacheDtype("e4m3", "head"),
    "fp8_e4m3": CacheDtype("e4m3", "head"),
    "fp8_e5m2": CacheDtype("e5m2", "head"),
    "fp8_per_token_head": CacheDtype("e4m3", "token"),
}
"""vLLM's names of cache dtypes that the router has a word for."""


def fp8_format(kv_cache_dtype: str) -> FormatName | None:
    """Format of the codes that vLLM's name of a cache dtype means; None if it is not quantised.

    What vLLM calls fp8 and e4m3 is the kind that its platform computes with: e4m3fnuz on gfx942, e4m3fn elsewhere.

    Raises:
        UnsupportedFeatureError: The router has no word for it; it is not quantised and not the dtype of the model; or
            the device of the kernels computes with the other kind, so that a scale of the checkpoint would be off by a
            factor of 2.
    """
    if kv_cache_dtype not in CACHE_DTYPES:
        raise UnsupportedFeatureError(f"KV cache dtype {kv_cache_dtype!r}")
    kind = CACHE_DTYPES[kv_cache_dtype].kind
    if kind == "auto":
        if kv_cache_dtype not in {"auto", _model_dtype()}:
            raise UnsupportedFeatureError(f"KV cache dtype {kv_cache_dtype!r} of a model in {_model_dtype()}")
        return None
    if kind == "e5m2":
        return "e5m2"
    found: FormatName = "e4m3fnuz" if current_platform.is_fp8_fnuz() else "e4m3fn"
    arch = current()
    if arch.native_fp8 not in {"", found}:
        raise UnsupportedFeatureError(
            f"KV cache dtype {kv_cache_dtype!r} in the format {found} on {arch.name}, which has {arch.native_fp8}"
        )
    return found


def describe(*, kv_cache_dtype: str, attn_type: str, **layer: Any) -> Request:
    """Return the router's request for one layer, while vLLM makes the layer.

    dtype, block size and bounds are those of vLLM's configuration. The block size of a hybrid and the layout of the
    pool are decided later: whoever learns them replaces these fields.

    Args:
        kv_cache_dtype: vLLM's name of it.
        attn_type: vLLM's name of it.
        **layer: Further fields of the request.

    Raises:
        UnsupportedFeatureError: Some feature has a value that no kernel could serve.
    """
    config = get_current_vllm_config()
    kind = AttentionType(attn_type).value
    mine = layer["packing"]
    to_do = f"KV connectors with PAGEDKV_PACKING={mine}: whoever takes a block reads rows (unset PAGEDKV_PACKING)"
    refuse({to_do: mine != "rows" and config.kv_transfer_config is not None})
    refuse_what_the_interpreter_gets_wrong()
    try:
        return Request(
            arch=current().name,
            phase="mixed",
            dtype=_model_dtype(),
            kv_cache_dtype=fp8_format(kv_cache_dtype) or "auto",
            kv_scales=CACHE_DTYPES[kv_cache_dtype].scales,
            block_size=config.cache_config.block_size,
            sides="interleaved",
            q_len=max_decode_query_len(config),
            causal=kind == AttentionType.DECODER.value,
            attn_type=kind,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_seq_len=config.model_config.max_model_len,
            **layer,
        )
    except RequestError as error:
        raise UnsupportedFeatureError(_refused(error)) from error


def refuse_what_the_interpreter_gets_wrong() -> None:
    """Refuse a layer of a model in bfloat16 under Triton's interpreter, while vLLM makes it.

    The kernels would refuse its tensors, at the first request: a server has then started and ends.

    Raises:
        UnsupportedFeatureError: It is one.
    """
    to_do = "bfloat16 under Triton's interpreter, which computes it wrongly (start vLLM with --dtype float32)"
    refuse({to_do: asked_dtype(_model_dtype(), current().name) == INTERPRETED_BFLOAT16})


def leave_products_unpadded() -> None:
    """Have vLLM compile the model of a layer, while it makes it, without padded products, unless a user asks for them.

    Inductor pads a product of which a size is no multiple of 8 (in 16 bits) where that was faster when it timed both,
    so noise decides. The rows of a padded product lie further apart. vLLM compiles a model in pieces and each for the
    strides of the model as it was written, compares none at run time, and so the next piece reads other rows. Seen of
    granite-4.0-h on an H100: 292 columns became 296, and answers were off by 2 nats (vLLM 0.32, torch 2.11).
    """
    options = get_current_vllm_config().compilation_config.inductor_compile_config
    options.setdefault("shape_padding", False)


@functools.cache
def find(request: Request) -> Route:
    """The route of one kind of layer; the router is asked once for each.

    Raises:
        UnsupportedFeatureError: No kernel of ours serves it; every feature that they lack is named.
    """
    try:
        return route(request, PROVIDERS)
    except NoKernelError as error:
        lacks = (str(mismatch) for rejection in error.rejected for mismatch in rejection.mismatches)
        raise UnsupportedFeatureError("; ".join(dict.fromkeys(lacks))) from error


def route_in_pool(request: Request, block_size: int, sides: Sides) -> Route:
    """The route of a layer whose pool vLLM has now decided on.

    Raises:
        UnsupportedFeatureError: see `find`; or the packing cannot have such blocks.
    """
    try:
        return find(replace(request, block_size=block_size, sides=sides))
    except RequestError as error:
        raise UnsupportedFeatureError(_refused(error)) from error


def admits(feature: str, value: object) -> bool:
    """Whether every kernel that a layer needs takes one value of one feature, whatever else is asked."""
    order = next(iter(load().values()))  # each arch has every kernel, in its own order
    kernels = [preferred.kernel for task in ("decode", "prefill", "write") for preferred in order[task]]
    ours = [kernel for kernel in kernels if kernel.provider in PROVIDERS and feature in kernel.limits]
    return all(kernel.limits[feature].admits(value) for kernel in ours)


def summary(found: Route) -> dict[str, str | None]:
    """Kernel of each task and the layout, for the workers' report."""
    return {choice.task: choice.kernel for choice in found.choices} | {"layout": str(found.layout)}


def log_line(found: Route) -> str:
    """The same for the log: kernels, packing and why."""
    asked = found.request
    options = [f"{key} {getattr(asked, key)}" for key in ("window", "softcap") if getattr(asked, key) is not None]
    options += [key for key in ("alibi", "sinks") if getattr(asked, key)]
    options += [] if asked.causal else [asked.attn_type]
    options += [] if asked.kv_cache_dtype == "auto" else [f"cache {asked.kv_cache_dtype}"]
    heads = f"{asked.num_q_heads} heads on {asked.num_kv_heads}, head size {asked.head_size}"
    tasks = ", ".join(f"{choice.task} {choice.kernel}" for choice in found.choices if choice.kernel)
    why = f"{found.decode.basis}: {found.decode.why}"
    return f"{', '.join([heads, *options])} ({found.layout}): {tasks}; {why}"


def _model_dtype() -> Dtype:
    """That of weights and activations, which is torch's default while vLLM makes a model."""
    return cast("Dtype", str(torch.get_default_dtype()).removeprefix("torch."))


def _refused(error: RequestError) -> str:
    return f"{error.field} {error.got}, takes {error.expected}" + (f" ({error.remedy})" if error.remedy else "")
