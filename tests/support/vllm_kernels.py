# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of vLLM's ROCm backends, imported from the installed vLLM, called with the arguments of ours.

A kernel that moved, or takes other arguments, ends the session: nothing is known of it.

On a CPU, the platform of vLLM says during an import and a call that it is ROCm, so that launchers take the tiles,
warps and FP8 format of AMD. On a GPU nothing stands in for anything: what runs is what that GPU gets.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import pytest
import torch
from support.pools import batch

from pagedkv.audit import imports
from pagedkv.device import INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.mla_steps import Step
    from support.pools import Batch
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache

OPS = "vllm.v1.attention.ops"
BACKENDS = "vllm.v1.attention.backends"

FP8 = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}
"""vLLM's FP8 format of an arch."""


DTYPES = ("float32", "float16") if INTERPRETED else ("float16", "bfloat16")
"""The interpreter computes no bf16. Compiled, vLLM's products of fp32 are those of tf32, by Triton's default."""


CACHE_SHAPES = (
    ("float16", 16, 2, 64),
    ("bfloat16", 48, 3, 128),
    ("float32", 544, 2, 64),
    ("bfloat16", 784, 1, 256),
    ("float16", 2048, 1, 128),
    ("bfloat16", 2144, 2, 64),
)
"""dtype, tokens of a block, KV heads, channels of a head of the caches that are written and gathered."""


def cache_id(shape: tuple[str, int, int, int]) -> str:
    """The name of one of CACHE_SHAPES in the id of a test."""
    return "{}-bs{}-h{}-d{}".format(*shape)


def attention_id(shape: tuple[int, int, int, int]) -> str:
    """The name of a shape in the id of a test: tokens of a block, query heads, KV heads, channels of a head."""
    return "bs{}-q{}kv{}-d{}".format(*shape)


def attention_batch(device: str, layout: str, shape: tuple[int, int, int, int], dtype: str, **more: Any) -> Batch:
    """A batch of a shape: tokens of a block, query heads, KV heads, channels of a head."""
    block_size, num_q_heads, num_kv_heads, head_size = shape
    return batch(
        layout_name=layout,
        dtype=dtype,
        device=device,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        **more,
    )


class _Arch:
    """The arch whose platform stands in on a CPU; `--amdgcn` sets it."""

    name = "gfx950"


def fp8_format() -> str:
    """The FP8 format that vLLM takes here, as our formats are called."""
    if torch.cuda.is_available():
        kind = importlib.import_module("vllm.platforms").current_platform.fp8_dtype()
        return "e4m3fnuz" if kind is torch.float8_e4m3fnuz else "e4m3fn"
    return FP8[_Arch.name]


def take_arch(name: str) -> None:
    """Let a CPU stand for this arch."""
    _Arch.name = name


@contextlib.contextmanager
def on_rocm() -> Iterator[None]:
    """On a CPU, let vLLM's platform say that it is ROCm on the arch."""
    platform = type(importlib.import_module("vllm.platforms").current_platform)
    if torch.cuda.is_available():
        yield
        return
    capability = importlib.import_module("vllm.platforms.interface").DeviceCapability
    answers = {
        "is_rocm": True,
        "is_cpu": False,
        "has_device_capability": True,
        "get_device_capability": capability(9, 4 if _Arch.name == "gfx942" else 5),
        "fp8_dtype": getattr(torch, f"float8_{fp8_format()}"),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(platform, name, return_value=answer))
        yield


@functools.cache
def _with_triton() -> None:
    """Import vLLM's Triton as on a machine with a driver: its CPU build puts placeholders in place of kernels.

    It looks for a backend named "cpu", which Triton itself does not have (vllm/triton_utils/importing.py).
    """
    from triton.backends import backends

    cpu = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))
    with mock.patch.dict(backends, cpu=cpu):
        utils = importlib.import_module("vllm.triton_utils")
    if not utils.HAS_TRITON:
        _moved("vllm.triton_utils", "holds placeholders: something imported vLLM before")


@functools.cache
def module(name: str) -> types.ModuleType:
    """A module of vLLM, imported as on ROCm; where there is none of that name the session ends."""
    _with_triton()
    # What vLLM loads by platform is loaded as this machine is; only the kernels themselves are asked for as on ROCm.
    for base in ("vllm._custom_ops", "vllm._aiter_ops", "vllm.model_executor.layers.attention"):
        importlib.import_module(base)
    current = importlib.import_module("vllm.platforms").current_platform
    # This backend defines its kernels where the platform says ROCm alone; other modules choose options of AMD by it.
    says = name == f"{BACKENDS}.rocm_aiter_fa" or current.is_rocm()
    try:
        with mock.patch.object(type(current), "is_rocm", return_value=says), on_rocm():
            return importlib.import_module(name)
    except ImportError as error:
        _moved(name, f"cannot be imported: {error}")


def find(place: str) -> Any:
    """A launcher, `module:name`; where it is not there the session ends."""
    where, _, name = place.partition(":")
    try:
        return operator.attrgetter(name)(module(where))
    except AttributeError:
        _moved(place, "is not there")


def _moved(place: str, what: str) -> NoReturn:
    """End the session as after a wrong call, which no step counts as a result: a kernel that moved is not wrong."""
    version = importlib.import_module("vllm").__version__
    pytest.exit(
        f"vLLM {version}: {place} {what}\n"
        "  to do: look where this vLLM has the kernel, and change tests/support/vllm_kernels.py",
        returncode=pytest.ExitCode.USAGE_ERROR,
    )


def _launch(name: str, **arguments: Any) -> None:
    launcher: Callable[..., None] = find(name)
    try:
        inspect.signature(launcher).bind(**arguments)
    except TypeError as error:
        _moved(name, f"takes other arguments: {error}")
    with on_rocm(), imports.without_cuda():
        launcher(**arguments)


def _in_rows(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """K and V of a shuffle cache under the shape of rows, as vLLM's backend hands them to its shuffle kernels.

    The strides of a row mean nothing then; of the block, that of the pool.
    """
    if cache.packing != "shuffle":
        return cache.key, cache.value
    shape = (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size)
    rest = (cache.num_kv_heads * cache.head_size, cache.head_size, 1)
    key, value = (side.as_strided(shape, (side.stride(0), *rest)) for side in (cache.key, cache.value))
    return key, value


def _codes(side: Tensor, cache: PagedCache) -> Tensor:
    """A side of a cache as vLLM's kernels take it: FP8 codes under their own dtype."""
    return side if cache.quantisation is None else side.view(getattr(torch, f"float8_{cache.quantisation.format}"))


def gather(
    cache: PagedCache,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    *,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    seq_starts: Tensor,
) -> None:
    """`cp_mha_gather_cache_kernel`, as `gather_kv_cache` is called."""
    sides = [_codes(side, cache) for side in _in_rows(cache)]
    scales = _scales(cache)
    _launch(
        f"{BACKENDS}.rocm_aiter_fa:cp_mha_gather_cache",
        key_cache=sides[0],
        value_cache=sides[1],
        key=key,
        value=value,
        block_tables=block_table,
        k_scales=scales[0],
        v_scales=scales[1],
        cu_seqlens_kv=cu_seq_lens,
        token_to_batch=token_to_seq,
        seq_starts=seq_starts,
        dequant=cache.quantisation is not None,
        kv_cache_layout="SHUFFLE" if cache.packing == "shuffle" else "NHD",
        total_tokens=len(token_to_seq),
    )


def _scales(cache: PagedCache) -> tuple[Tensor | None, Tensor | None]:
    """The scales of whole sides, one element each; None where the cache is not quantised."""
    scaled = cache.quantisation
    return (None, None) if scaled is None else (scaled.key_scale.view(1), scaled.value_scale.view(1))


def _scales_or_one(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """The same, and 1 for both where the cache is not quantised."""
    one = torch.ones(1, device=cache.key.device)
    key, value = _scales(cache)
    return (one, one) if key is None or value is None else (key, value)


def _cache_dtype(cache: PagedCache) -> str:
    return "auto" if cache.quantisation is None else "fp8"


def write(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """`reshape_and_cache_kernel_flash`, or `reshape_and_cache_shuffle_kernel`, as `write_kv_cache` is called."""
    shuffle = cache.packing == "shuffle"
    sides = _in_rows(cache)
    scales = _scales(cache)
    if shuffle:
        sides = tuple(_codes(side, cache) for side in sides)
    place = (
        f"{BACKENDS}.rocm_aiter_fa:reshape_and_cache_shuffle_triton"
        if shuffle
        else f"{OPS}.triton_reshape_and_cache_flash:triton_reshape_and_cache_flash"
    )
    names = ("k_scales", "v_scales") if shuffle else ("k_scale", "v_scale")
    _launch(
        place,
        key=key,
        value=value,
        key_cache=sides[0],
        value_cache=sides[1],
        slot_mapping=slots,
        kv_cache_dtype=_cache_dtype(cache),
        **dict(zip(names, scales, strict=True)),
    )


def _rocm_platform() -> Any:
    """vLLM's ROCm platform; where it cannot be imported, a stand-in with the one function that decode asks."""
    name = "vllm.platforms.rocm"
    if torch.version.hip:
        return importlib.import_module(name)
    stand_in: Any = types.ModuleType(name)
    stand_in.use_rocm_custom_paged_attention = None
    return sys.modules.setdefault(name, stand_in)


def _cached(cache: PagedCache, new: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """K and V of the step's own tokens, the format of the cache, and its scales, as two launchers call them alike."""
    key_scale, value_scale = _scales_or_one(cache)
    quantised = {"kv_cache_dtype": _cache_dtype(cache), "k_scale": key_scale, "v_scale": value_scale}
    return dict(zip(("key", "value"), new or (None, None), strict=True)) | quantised


def paged_attention(
    query: Tensor,
    cache: PagedCache,
    out: Tensor,
    *,
    scale: float,
    new: tuple[Tensor, Tensor] | None = None,
    offer_native: bool = False,
    **batch_and_options: Any,
) -> None:
    """`chunked_prefill_paged_decode`: `kernel_paged_attention_2d`, and `_fwd_kernel` for sequences of several queries.

    Args:
        query: As of ours; so are `cache`, `out` and `scale`.
        cache: In the native packing.
        out: Output.
        scale: Factor of the scores.
        new: K and V of the step's own tokens; without them the kernel reads those from the cache, too.
        offer_native: Whether the platform is to offer the HIP kernel for every shape, which is not taken otherwise.
        **batch_and_options: `block_table`, `seq_lens`, `query_start_loc`, `max_query_len` and `max_seq_len`, and of
            `sliding_window` and `sinks`.
    """
    with mock.patch.object(_rocm_platform(), "use_rocm_custom_paged_attention", return_value=offer_native):
        _launch(
            f"{OPS}.chunked_prefill_paged_decode:chunked_prefill_paged_decode",
            query=query,
            output=out,
            key_cache=cache.key,
            value_cache=cache.value,
            sm_scale=scale,
            **_cached(cache, new),
            **batch_and_options,
        )


def prefix_prefill(
    query: Tensor,
    cache: PagedCache,
    out: Tensor,
    *,
    scale: float,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    max_seq_len: int,
    new: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> None:
    """`context_attention_fwd` alone, with every sequence, also those of one query; arguments of `paged_attention`."""
    cached = _cached(cache, new)
    _launch(
        f"{OPS}.prefix_prefill:context_attention_fwd",
        q=query,
        k=cached.pop("key"),
        v=cached.pop("value"),
        o=out,
        k_cache=cache.key,
        v_cache=cache.value,
        b_loc=block_table,
        b_start_loc=query_start_loc,
        b_seq_len=seq_lens,
        max_seq_len=max_seq_len,
        max_input_len=max_query_len,
        sm_scale=scale,
        **cached,
        **options,
    )


SEGMENTS = 16
"""NUM_PAR_SOFTMAX_SEGMENTS of the Triton backend."""


def unified_attention(
    query: Tensor,
    cache: PagedCache,
    out: Tensor,
    *,
    scale: float,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    split: bool = False,
) -> None:
    """`kernel_unified_attention`; with `split` over segments of each sequence, and then `reduce_segments`.

    The scratch of the segments is NaN before.
    """
    modes = module("vllm.v1.kv_cache_interface").KVQuantMode
    key, value = (_codes(side, cache) for side in (cache.key, cache.value))
    scaled = cache.quantisation
    one = torch.ones(1, device=query.device)
    per_head = (len(seq_lens), cache.num_kv_heads)
    more: dict[str, Any] = {"k_descale": one.expand(per_head), "v_descale": one.expand(per_head)}
    if scaled is not None and scaled.per_token:
        more |= {"kv_quant_mode": modes.FP8_PER_TOKEN_HEAD}
        more |= {"k_scale_cache": scaled.key_scale, "v_scale_cache": scaled.value_scale}
    elif scaled is not None:
        descales = [each.expand(per_head) for each in _scales(cache) if each is not None]
        more |= {"kv_quant_mode": modes.FP8_PER_TENSOR, "k_descale": descales[0], "v_descale": descales[1]}
    rows = (len(query), query.shape[1], SEGMENTS)
    width = 1 << (query.shape[2] - 1).bit_length()
    scratch = torch.full((*rows, width + 2), float("nan"), device=query.device)
    _launch(
        f"{OPS}.triton_unified_attention:unified_attention",
        q=query,
        k=key,
        v=value,
        out=out,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max_query_len,
        seqused_k=seq_lens,
        max_seqlen_k=max_seq_len,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        block_table=block_table,
        softcap=softcap or 0,
        q_descale=None,
        sinks=sinks,
        seq_threshold_3D=len(seq_lens) if split else None,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=scratch[..., :width].contiguous(),
        softmax_segm_max=scratch[..., -2].contiguous(),
        softmax_segm_expsum=scratch[..., -1].contiguous(),
        **more,
    )


def mla_decode(
    data: Step, *, splits: int, cache_scale: Tensor | None = None, fill: float = float("nan")
) -> tuple[Tensor, Tensor]:
    """`_fwd_grouped_kernel_stage1` and `_fwd_kernel_stage2` over a cache `[num_blocks, block_size, latent + rope]`.

    The scratch of the splits is NaN before. Returns output and log-sum-exp, which hold `fill` before.
    """
    query, rows = data.query, data.query.shape[:2]
    out = torch.full((*rows, data.latent), fill, dtype=query.dtype, device=query.device)
    lse = torch.full(rows, fill, device=query.device)
    one = torch.ones((), device=query.device) if cache_scale is None else cache_scale
    paged = data.cache.unsqueeze(2)
    _launch(
        f"{OPS}.triton_decode_attention:decode_attention_fwd",
        q=query,
        k_buffer=paged,
        v_buffer=paged[..., : data.latent],
        o=out,
        lse=lse,
        req_to_token=data.block_table,
        b_seq_len=data.seq_lens,
        attn_logits=torch.full((*rows, splits, data.latent + 1), float("nan"), device=query.device),
        num_kv_splits=splits,
        sm_scale=data.scale,
        page_size=data.cache.shape[1],
        k_scale=one,
        v_scale=one,
        is_mla=True,
    )
    return out, lse


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedCache,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    *,
    neox: bool,
) -> None:
    """aiter's fused rotation and write, through the function by which ROCM_ATTN calls it; Q and K turn in place."""
    one = torch.ones(1, device=query.device)
    _launch(
        "vllm._aiter_ops:rocm_aiter_ops.triton_rope_and_cache",
        query=query,
        key=key,
        value=value,
        positions=positions,
        cos_sin_cache=cos_sin,
        is_neox=neox,
        key_cache=cache.key,
        value_cache=cache.value,
        layer_slot_mapping=slots,
        k_scale=one,
        v_scale=one,
        flash_layout=False,
        apply_scale=False,
    )
