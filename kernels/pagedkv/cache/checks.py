# SPDX-License-Identifier: Apache-2.0
"""Checks of a paged cache, which all launchers share: axes of its packing, one dtype, dense rows, scales that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.checks import DTYPES, at_most, dense, device, dtype, positive, shape, slots_exist
from pagedkv.errors import ArgumentError
from pagedkv.fp8.formats import FORMATS
from pagedkv.layout import KEY_AXES, VALUE_AXES

if TYPE_CHECKING:
    from pagedkv.cache.cache import PagedCache, Quantisation

_NAMES = {"b": "num_blocks", "t": "block_size", "h": "num_kv_heads", "c": "head_size"}


def whole(cache: PagedCache) -> None:
    """Check a cache, once for each signature: axes of its packing, one dtype, dense rows, scales that fit.

    Raises:
        ArgumentError: it is not such a cache.
    """
    signature = cache.signature
    if vars(cache).get("checked") == signature:
        return
    key_axes, value_axes = KEY_AXES[cache.packing], VALUE_AXES[cache.packing]
    shape("cache.key", cache.key, (None,) * len(key_axes), f"{_spelled(key_axes)} ({cache.packing})")
    quantised = cache.quantisation is not None
    dtype(
        "cache.key",
        cache.key,
        (torch.uint8,) if quantised else DTYPES,
        "View the FP8 codes as uint8." if quantised else "Pass the Quantisation of a quantised cache.",
    )
    if 0 in cache.key.shape:
        raise ArgumentError(
            "shape",
            "cache.key",
            got=tuple(cache.key.shape),
            expected="no empty axis",
            remedy="Allocate at least one block.",
        )
    extents = {"b": cache.num_blocks, "t": cache.block_size, "h": cache.num_kv_heads, "c": cache.head_size}
    for group, inside in (("C", "c"), ("T", "t")):
        if (group in key_axes or group in value_axes) and extents[inside] % cache.x:
            raise ArgumentError(
                "shape",
                "cache.key",
                got=f"{_NAMES[inside]} {extents[inside]}",
                expected=f"a multiple of {cache.x}, the elements in 16 bytes, in packing {cache.packing!r}",
                remedy="Take packing 'rows', which has no such bound.",
            )
    for name, side, axes in (("cache.key", cache.key, key_axes), ("cache.value", cache.value, value_axes)):
        split = {g: extents[i] // cache.x for g, i in (("C", "c"), ("T", "t")) if g in axes}
        split |= {i: cache.x for g, i in (("C", "c"), ("T", "t")) if g in axes}
        expected = tuple((extents | split)[axis] for axis in axes)
        shape(name, side, expected, f"{_spelled(axes)} ({cache.packing})")
        dense(name, side)
    dtype("cache.value", cache.value, (cache.key.dtype,), "View the pool once for K and V: they share one dtype.")
    device(("cache.key", cache.key), {"cache.value": cache.value})
    if cache.quantisation is not None:
        _scales(cache, cache.quantisation)
    vars(cache)["checked"] = signature  # past the frozen fields, as a cached property is kept


def beside(name: str, tensor: torch.Tensor, cache: PagedCache) -> None:
    """Check the dtype of a tensor that is copied to or from a cache.

    Raises:
        ArgumentError: it is not the dtype of an unquantised cache, or beside a quantised one not a floating-point one.
    """
    if cache.quantisation is None:
        dtype(name, tensor, (cache.key.dtype,), "Take the dtype of the cache: only a quantised one converts.")
    else:
        dtype(name, tensor, DTYPES, "Cast it to a floating-point dtype.")


def step(key: torch.Tensor, value: torch.Tensor, cache: PagedCache, slot_mapping: torch.Tensor, *, debug: bool) -> None:
    """Check K and V of a step, `[num_tokens, num_kv_heads, head_size]`, the cache that takes them, and their slots.

    Raises:
        ArgumentError: one is wrong; with `debug` also for scales that `scales` refuses, and for a slot outside of the
            pool or named twice.
    """
    whole(cache)
    axes = "[num_tokens, num_kv_heads, head_size]"
    shape("key", key, (None, cache.num_kv_heads, cache.head_size), axes)
    shape("value", value, tuple(key.shape), axes)
    shape("slot_mapping", slot_mapping, (None,), "[n], one slot per token")
    at_most("slot_mapping", slot_mapping.shape[0], key.shape[0], "num_tokens of key")
    for name, tensor in (("key", key), ("value", value)):
        beside(name, tensor, cache)
        dense(name, tensor)
    dtype(
        "slot_mapping",
        slot_mapping,
        (torch.int64,),
        "Cast with .to(torch.int64): slots of a large pool exceed 32 bits.",
    )
    device(("cache.key", cache.key), {"key": key, "value": value, "slot_mapping": slot_mapping})
    if debug:
        scales(cache)
        slots_exist(slot_mapping, cache.num_blocks * cache.block_size)


def scales(cache: PagedCache) -> None:
    """Check the scales that a caller gave (reads device memory); those of each token are computed by the write.

    Raises:
        ArgumentError: one is not finite and positive.
    """
    if cache.quantisation is not None and not cache.quantisation.per_token:
        positive("cache.quantisation.key_scale", cache.quantisation.key_scale)
        positive("cache.quantisation.value_scale", cache.quantisation.value_scale)


def _spelled(axes: str) -> str:
    split = {"C": "head_size // x", "T": "block_size // x"}
    names = _NAMES | split | {group.lower(): "x" for group in split if group in axes}
    return "[" + ", ".join(names[axis] for axis in axes) + "]"


def _scales(cache: PagedCache, quantisation: Quantisation) -> None:
    """Check format, shape, dtype and device of a quantised cache's scales."""
    if quantisation.format not in FORMATS:
        raise ArgumentError(
            "scale",
            "cache.quantisation.format",
            got=repr(quantisation.format),
            expected=f"one of {', '.join(FORMATS)}",
            remedy="Take e4m3fnuz on gfx942, e4m3fn on gfx950 and CUDA.",
        )
    kinds: tuple[tuple[int, ...], ...] = (
        (),
        (1,),
        (cache.num_kv_heads,),
        (cache.num_blocks, cache.block_size, cache.num_kv_heads),
    )
    key_scale, value_scale = quantisation.key_scale, quantisation.value_scale
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        where = f"cache.quantisation.{name}"
        if tuple(scale.shape) not in kinds or (scale.dim() == 3) != quantisation.per_token:
            raise ArgumentError(
                "scale",
                where,
                got=tuple(scale.shape),
                expected=f"[] or [1], [num_kv_heads] = ({cache.num_kv_heads},), or [num_blocks, block_size, "
                f"num_kv_heads] = {kinds[3]}; the last for both K and V or for neither",
                remedy="Pass the layer's scale as it is; do not expand it.",
            )
        dtype(where, scale, (torch.float32,), "Cast with .float().")
        device(("cache.key", cache.key), {where: scale})
