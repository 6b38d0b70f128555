# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer in vLLM: refuse what is not served, write the new keys and values, attend."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from pagedkv.attention.paged import paged_attention
from pagedkv.attention.warm_up import warm_up
from pagedkv.cache.rotary import rotate_and_write
from pagedkv.cache.warm_up import warm_up as warm_up_rotation
from pagedkv.cache.write import write_kv_cache
from pagedkv.device import INTERPRETED
from pagedkv.vllm_plugin import WORTH_SAYING, log, routes
from pagedkv.vllm_plugin.errors import UnsupportedFeatureError, refuse
from pagedkv.vllm_plugin.pages import Page, refuse_scales, sides
from pagedkv.vllm_plugin.settings import packing

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from pagedkv.attention.warm_up import ServiceBounds
    from pagedkv.cache.cache import PagedCache
    from pagedkv.routing import Route
    from pagedkv.vllm_plugin.batch import PagedKVMetadata, Part


class PagedKVImpl(AttentionImpl["PagedKVMetadata"]):
    """Runs one layer with `pagedkv.cache.write` or `rotary`, and `pagedkv.paged_attention`.

    Attributes:
        route: The kernels that serve the layer, and the layout of its cache.
        page: What the layer's pages hold, by that layout.
        writes: Calls that wrote keys and values to the cache. A replayed GPU graph does not count.
        attentions: Calls that attended to the cache, likewise.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **other_features: object,
    ) -> None:
        """Take the layer's constants.

        Args:
            num_heads: Query heads.
            head_size: Channels per head.
            scale: Factor on the logits.
            num_kv_heads: Key and value heads; None means as many as query heads.
            alibi_slopes: One slope per query head, or None.
            sliding_window: Keys a query may see, itself included; None sees all.
            kv_cache_dtype: One of `routes.CACHE_DTYPES`.
            logits_soft_cap: Cap of the logits; None or 0 for none.
            attn_type: Self-attention of a decoder, or its cross attention.
            kv_sharing_target_layer_name: Layer whose cache this one reads; vLLM then skips the write.
            sinks: One logit per query head that only takes weight, [num_heads]; a parameter that is loaded later.
            **other_features: Whatever else a model asks its attention for: not served.

        Raises:
            UnsupportedFeatureError: The layer needs a feature that is not served.
            SettingError: The packing asked for does not exist.
        """
        # What the router has no word for: vLLM's own arguments, and one pair of features.
        cross = attn_type == AttentionType.ENCODER_DECODER
        refused = {"ALiBi in cross attention": cross and alibi_slopes is not None}
        off = (None, -1)  # -1 is what vLLM calls a `chunk_lookback` that is not asked for
        refused |= {f"attention argument {name!r}": value not in off for name, value in other_features.items()}
        refuse(refused)
        routes.leave_products_unpadded()
        self.logits_soft_cap = logits_soft_cap or None  # vLLM passes 0 for "none" in places
        request = routes.describe(
            num_q_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_size=head_size,
            scale=float(scale),
            packing=packing(),
            kv_cache_dtype=kv_cache_dtype,
            window=sliding_window,
            softcap=self.logits_soft_cap,
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
            attn_type=attn_type,
        )
        self._set_route(routes.find(request))
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = request.num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.writes = 0
        self.attentions = 0
        self._sinks: torch.Tensor | None = sinks
        self._service: ServiceBounds | None = None
        self._rotation_is_warm = False

    def expect(self, service: ServiceBounds) -> None:
        """Take the bounds of the service; the layer compiles for them at its first step, which vLLM makes itself.

        Args:
            service: The bounds of vLLM's scheduler.
        """
        self._service = service

    def set_pool(self, block_size: int, order: KVCacheLayout) -> None:
        """Take the pool as vLLM has decided on it, before anything is written to it.

        Args:
            block_size: Tokens of a block as the kernels see it; in hybrids more than the layer was made with.
            order: Physical order of the pool.

        Raises:
            UnsupportedFeatureError: No kernel serves the layer in such a pool.
        """
        request = self.route.request
        self._set_route(routes.route_in_pool(request, block_size, sides(request.packing, order)))

    def refuse_scales(self, layer_name: str, layer: AttentionLayer) -> None:
        """Look once at the scales of the loaded layer.

        Raises:
            ScaleError: The cache is quantised, and one is not finite and positive.
        """
        if self.page.format is not None and not self.page.scales_inside:
            refuse_scales(layer_name, layer, "_k_scale", "_v_scale")

    def _set_route(self, route: Route) -> None:
        """Ask the router for the route of the layer; both write and attention follow it."""
        asked = route.request
        quantised = None if asked.kv_cache_dtype == "auto" else asked.kv_cache_dtype
        self.route = route
        self.page = Page(route.layout, quantised, scales_inside=asked.kv_scales == "token")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:  # noqa: ARG002 - sinks are fp32 anyway
        """Take the sinks as fp32, now that they are loaded."""
        self._sinks = None if self.sinks is None else self.sinks.detach().float()

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new keys and values of one step; in cross attention those of the encoder, once.

        Args:
            layer: The vLLM layer; holds the scales of a quantised cache.
            key: [T, num_kv_heads, head_size]; T may include padding rows.
            value: Like key.
            kv_cache: [B, H, N, C], see `pages`.
            slot_mapping: [N] int64 with N <= T; -1 writes nothing.
        """
        tokens = slot_mapping.shape[0]
        write_kv_cache(key[:tokens], value[:tokens], self._cache(layer, kv_cache), slot_mapping)
        self.writes += 1

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether vLLM may rotate and write in one call: only in self-attention, as cross attention does not rotate."""
        return self.route.request.attn_type == AttentionType.DECODER.value

    def do_rope_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate queries and keys of one step in place, padding rows too, and write the keys with their values.

        Args:
            layer: The vLLM layer; holds the scales of a quantised cache.
            query: [T, num_heads, head_size]; T may include padding rows.
            key: [T, num_kv_heads, head_size].
            value: Like key.
            positions: [T] int64.
            cos_sin_cache: [max_position, rotary_dim], cosines before sines.
            is_neox: Whether pairs are halves of the rotary channels, else neighbours.
            kv_cache: [B, H, N, C], see `pages`.
            layer_slot_mapping: [N] int64 with N <= T; -1 writes nothing.
        """
        cache = self._cache(layer, kv_cache)
        if not (self._rotation_is_warm or INTERPRETED or (query.is_cuda and torch.cuda.is_current_stream_capturing())):
            self._rotation_is_warm = True
            warm_up_rotation(query, key, value, cache, positions, cos_sin_cache, neox=is_neox)
        rotate_and_write(query, key, value, cache, positions, cos_sin_cache, layer_slot_mapping, neox=is_neox)
        self.writes += 1

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedKVMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend every query token to the cached context of its sequence.

        Args:
            layer: The vLLM layer; holds the scales of a quantised cache.
            query: [T, num_heads, head_size]; T may include padding rows.
            key: New keys. They are in the cache already; only their strides are read here.
            value: New values, as key.
            kv_cache: [B, H, N, C], see `pages`.
            attn_metadata: The batch; None while vLLM measures memory, when the output is filled with zeros.
            output: [T, num_heads, head_size], written in place; padding rows are left alone.
            output_scale: Not served.
            output_block_scale: Not served.

        Returns:
            output.

        Raises:
            UnsupportedFeatureError: The output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedFeatureError("fused output quantisation")
        if self._service is not None and kv_cache.numel():
            self._warm_up(layer, query, key, value, kv_cache, output)
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        cache = self._cache(layer, kv_cache)
        for part in attn_metadata.parts:
            self._attend(query[:tokens], cache, output[:tokens], part)
        self.attentions += 1
        return output

    def _warm_up(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Compile what the layer may launch, unless a graph is being captured, or there is no compiler to run."""
        service = self._service
        if service is None or INTERPRETED:
            self._service = None
            return
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._service = None
        if key is None or value is None:
            # Cross attention gets keys with a request's first step alone, and vLLM's own steps have no encoder: what
            # stands in for them looks as the halves of vLLM's one projection do.
            pairs = query.new_empty((len(query), 2 * self.num_kv_heads, self.head_size))
            key, value = pairs.split(self.num_kv_heads, dim=1)
        began = time.perf_counter()
        launches = warm_up(
            query,
            key,
            value,
            self._cache(layer, kv_cache),
            output,
            service,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self._sinks,
            causal=self.route.request.attn_type == AttentionType.DECODER.value,
        )
        if (seconds := time.perf_counter() - began) > WORTH_SAYING:
            log.info("pagedkv compiled %d launches of attention in %.1f s: none is left to serving", launches, seconds)

    def _attend(self, query: torch.Tensor, cache: PagedCache, output: torch.Tensor, part: Part) -> None:
        """Serve one part of a batch: the one place that chooses the kernel."""
        paged_attention(
            query,
            cache,
            output,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self._sinks,
            **part,
        )

    def _cache(self, layer: AttentionLayer, kv_cache: torch.Tensor) -> PagedCache:
        outside = self.page.format is not None and not self.page.scales_inside
        return self.page.cache(kv_cache, (layer._k_scale, layer._v_scale) if outside else None)  # noqa: SLF001
