# SPDX-License-Identifier: Apache-2.0
"""KV cache pages of vLLM: the spec to request, and the `PagedCache` of the pool that vLLM hands out.

vLLM shows a layer's pool as `[B, H, N, C]`: blocks, head slots, tokens and content, in the physical order of one layout
for the whole model (`vllm/v1/kv_cache_layout.py`). In packing

* `rows`     H counts KV heads, and C is K and V of one head and token. Every layout will do.
* `native`, `shuffle`   H counts two parts, K and V, and C is one side of one token. But the `[N, C]` of a part is one
             run of elements with the axes of the packing, so only layouts with N and C innermost will do. Preferred is
             the one that makes planes of the parts, which vLLM allows without state layers: the kernels of other
             libraries compute addresses of their own and take nothing else.

A cache with scales per token and head keeps them in the page, as fp32: after K and V of each cell in `rows`, else
after the codes of each part, `[num_kv_heads, N]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from pagedkv.cache.cache import PagedCache, Quantisation
from pagedkv.checks import positive
from pagedkv.errors import ArgumentError
from pagedkv.layout import vector_elements
from pagedkv.vllm_plugin.errors import PageError, ScaleError, UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

    from pagedkv.fp8.formats import FormatName
    from pagedkv.layout import Packing
    from pagedkv.routing.request import CacheLayout, Sides

SCALE_BYTES = 4
"""Bytes of one fp32 scale of a token and head."""


def layouts(packing: Packing) -> tuple[KVCacheLayout, ...] | None:
    """Layouts in which vLLM may arrange pages of this packing, the preferred ones first; None for any."""
    if packing == "rows":
        return None
    return KVCacheLayout.LHBNC, KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC


def sides(packing: Packing, order: KVCacheLayout) -> Sides:
    """How the blocks of K and V lie in a pool of this order: in planes where K and V come before the blocks."""
    return "planes" if packing != "rows" and order is KVCacheLayout.LHBNC else "interleaved"


def complete_spec(spec: AttentionSpec, packing: Packing) -> AttentionSpec:
    """Add to vLLM's spec of a layer how many bytes a page needs for its packing and its scales.

    Raises:
        UnsupportedFeatureError: K and V are of unlike sizes.
    """
    if spec.head_size != spec.head_size_v:
        raise UnsupportedFeatureError(f"keys with {spec.head_size} and values with {spec.head_size_v} channels")
    if spec.state_content_bytes is not None:
        return spec
    scale_bytes = SCALE_BYTES if spec.kv_quant_mode == KVQuantMode.FP8_PER_TOKEN_HEAD else 0
    if packing == "rows":
        if not scale_bytes:
            return spec
        return replace(spec, state_content_bytes=spec.state_content_size_bytes + 2 * scale_bytes)
    cell = spec.head_size * spec.dtype.itemsize + scale_bytes
    return replace(spec, num_head_slots=2, state_content_bytes=spec.num_kv_heads * cell)


@dataclass(frozen=True)
class Page:
    """What the pages of one layer hold."""

    layout: CacheLayout
    """Layout of the route, which chose writer and readers by it."""
    format: FormatName | None = None
    """Format of the codes of a quantised cache."""
    scales_inside: bool = False
    """Whether the pages hold a scale for each token and head."""

    def cache(self, view: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> PagedCache:
        """Make the cache that our operations take out of vLLM's view of a layer's pool.

        Args:
            view: `[B, H, N, C]` in the dtype of vLLM's spec; any strides that the packing allows.
            scales: Scales of K and of V, each `[]`, `[1]` or `[num_kv_heads]` fp32, for a quantised cache whose pages
                hold no scales.

        Raises:
            PageError: The axes or strides of the view are not those of this layout.
        """
        layout = self.layout
        view = view if self.format is None else view.view(torch.uint8)
        rows = layout.packing == "rows"
        cell = layout.head_size + (SCALE_BYTES if self.scales_inside else 0)
        slots, content = (layout.num_kv_heads, 2 * cell) if rows else (2, layout.num_kv_heads * cell)
        if view.dim() != 4 or view.shape[1:] != (slots, layout.block_size, content):
            expected = f"[blocks, {slots}, {layout.block_size}, {content}] ({layout.packing})"
            raise PageError(f"axes {list(view.shape)}", expected)
        dense = view.stride(3) == 1 and (rows or view.stride(2) == content)
        if not dense or (layout.sides == "planes" and view.stride(0) != layout.block_size * content):
            raise PageError(f"strides {list(view.stride())}", f"dense pages of {layout.packing}, {layout.sides}")
        key, value, *own_scales = self._rows(view) if rows else self._parts(view)
        if self.format is None:
            return PagedCache(key, value, layout.packing)
        return PagedCache(key, value, layout.packing, Quantisation(self.format, *(own_scales or scales or ())))

    def _rows(self, view: torch.Tensor) -> list[torch.Tensor]:
        d = self.layout.head_size
        cells = view.transpose(1, 2)
        sides = [cells[..., :d], cells[..., d : 2 * d]]
        return [*sides, *cells[..., 2 * d :].view(torch.float32).unbind(-1)] if self.scales_inside else sides

    def _parts(self, view: torch.Tensor) -> list[torch.Tensor]:
        blocks, _, tokens, content = view.shape
        h, d, x = self.layout.num_kv_heads, self.layout.head_size, vector_elements(view.element_size())
        parts = [part.view(blocks, tokens * content) for part in view.unbind(1)]
        key, value = (part[:, : tokens * h * d] for part in parts)
        value_shape = (h, d, tokens) if self.layout.packing == "native" else (h, tokens // x, d, x)
        sides = [key.view(blocks, h, d // x, tokens, x), value.view(blocks, *value_shape)]
        if not self.scales_inside:
            return sides
        scales = (part[:, tokens * h * d :].view(torch.float32) for part in parts)
        return [*sides, *(scale.view(blocks, h, tokens).transpose(1, 2) for scale in scales)]


def refuse_scales(layer_name: str, layer: object, *names: str) -> None:
    """Look once at the scales of a loaded vLLM layer, which are attributes of these names; this waits for the device.

    Raises:
        ScaleError: One is not finite and positive: every answer would be garbage.
    """
    for name in names:
        scale = getattr(layer, name, None)
        if scale is None:  # vLLM gives each layer scales; without them its first step fails
            continue
        try:
            positive(name, scale)
        except ArgumentError:
            raise ScaleError(layer_name, name, scale.tolist()) from None
