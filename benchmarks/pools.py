# SPDX-License-Identifier: Apache-2.0
"""KV caches of a case in its layout, and the same as plain rows for the oracle and in the packings that peers read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv import layout
from pagedkv.cache.cache import PagedCache, Quantisation
from pagedkv.device import current
from pagedkv.fp8.formats import FORMATS, FormatName

from .oracle import Stored

if TYPE_CHECKING:
    from torch import Tensor

    from .cases import BenchmarkCase

KEY_SCALE, VALUE_SCALE = 0.25, 0.5
"""Scales of an FP8 cache with one scale a side. Powers of two: vLLM rounds the scaled K and V to bf16, which is then
exact, so one bound fits both sides (`oracle.attention_bound`)."""


def new(case: BenchmarkCase, device: str, dtype: torch.dtype, num_blocks: int, *, poisoned: bool = False) -> PagedCache:
    """Return a cache in the case's layout, unit-normal or all NaN; in the device's FP8 if the case has scales."""
    extents = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    quantised = case.scales != "none"
    x = layout.vector_elements(1 if quantised else dtype.itemsize)
    plan = layout.describe(case.layout, *extents, x=x)
    storage = torch.empty(plan.elements, device=device, dtype=torch.uint8 if quantised else dtype)
    if not quantised:
        storage.fill_(float("nan")) if poisoned else storage.normal_()
    key, value = (storage.as_strided(side.shape, side.strides, side.offset) for side in (plan.key, plan.value))
    if not quantised:
        return PagedCache(key, value, plan.packing)
    scales = [
        _fill(codes, native(), scale if case.scales == "tensor" else None)
        for codes, scale in ((key, KEY_SCALE), (value, VALUE_SCALE))
    ]
    return PagedCache(key, value, plan.packing, Quantisation(native(), *scales))


def native() -> FormatName:
    """Return the FP8 format of the caches: the device's."""
    return current().native_fp8 or "e4m3fn"


def latent(case: BenchmarkCase, device: str, dtype: torch.dtype, table: Tensor) -> Stored:
    """Return a unit-normal latent cache `[num_blocks, block_size, 1, head_size]` for all blocks of a table."""
    extents = (table.numel(), case.block_size, 1, case.head_size)
    if case.scales == "none":
        return Stored(torch.randn(extents, device=device, dtype=dtype))
    codes = torch.empty(extents, device=device, dtype=torch.uint8)
    scale = _fill(codes, native(), KEY_SCALE)
    return Stored(codes, FORMATS[native()].dtype, scale)


def _fill(codes: Tensor, name: FormatName, scale: float | None) -> Tensor:
    """Fill codes `[num_blocks, block_size, num_kv_heads, head_size]` from unit-normal rows; return their scale.

    Without a `scale` each row gets the one with which it fills the range of the format.
    """
    values = torch.randn(codes.shape, device=codes.device)
    if scale is None:
        divisor = values.abs().amax(-1) / FORMATS[name].max
        values /= divisor[..., None]
    else:
        divisor = torch.tensor(scale, device=codes.device)
        values /= divisor
    largest = FORMATS[name].max
    codes.copy_(values.clamp_(-largest, largest).to(FORMATS[name].dtype).view(torch.uint8))
    return divisor


def rows(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Return K and V as `[num_blocks, block_size, num_kv_heads, head_size]`; views where the packing is `rows`."""
    if cache.packing == "rows":
        return cache.key, cache.value
    key = cache.key.permute(0, 3, 1, 2, 4).flatten(3)
    if cache.packing == "native":
        return key, cache.value.permute(0, 3, 1, 2)
    return key, cache.value.permute(0, 2, 4, 1, 3).flatten(1, 2)


def in_rows(cache: PagedCache) -> PagedCache:
    """Return the cache itself if its packing is `rows`, else a dense copy that has it."""
    if cache.packing == "rows":
        return cache
    return PagedCache(*(side.contiguous() for side in rows(cache)), "rows", cache.quantisation)


def packed(cache: PagedCache, packing: layout.Packing) -> PagedCache:
    """Return the cache itself if it has this packing (not `rows`), else a dense copy that has."""
    if cache.packing == packing:
        return cache
    key, value = rows(cache)
    key = key.unflatten(-1, (-1, cache.x)).permute(0, 2, 3, 1, 4).contiguous()
    if packing == "native":
        return PagedCache(key, value.permute(0, 2, 3, 1).contiguous(), packing)
    value = value.unflatten(1, (-1, cache.x)).permute(0, 3, 1, 4, 2).contiguous()
    return PagedCache(key, value, packing)


def stored(cache: PagedCache) -> tuple[Stored, Stored]:
    """Return both sides as the oracle takes them."""
    key, value = rows(cache)
    if cache.quantisation is None:
        return Stored(key), Stored(value)
    dtype = FORMATS[cache.quantisation.format].dtype
    return Stored(key, dtype, cache.quantisation.key_scale), Stored(value, dtype, cache.quantisation.value_scale)


def block_table(case: BenchmarkCase, device: str) -> Tensor:
    """Return a block table `[num_seqs, most blocks of a sequence]` int32 of permuted block ids."""
    most = max(-(-seq_len // case.block_size) for seq_len, _ in case.lens)
    count = len(case.lens)
    return torch.randperm(count * most, device=device).view(count, most).int()
