"""Attention backend for vLLM: what it must know to select it and to size the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from pagedkv.routing.request import ELEMENT_BYTES
from pagedkv.vllm_plugin import NAME, pages, routes
from pagedkv.vllm_plugin.impl import PagedKVImpl
from pagedkv.vllm_plugin.metadata import PagedKVMetadataBuilder
from pagedkv.vllm_plugin.settings import packing

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout


class PagedKVBackend(AttentionBackend):
    """Paged attention of decoder layers, to themselves or to an encoder, in any KV layout that the packing allows."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        getattr(torch, name) for name in ELEMENT_BYTES if routes.admits("dtype", name)
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(routes.CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's enum; vLLM looks every selected backend up by it, on the CPU platform too."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PagedKVImpl]:
        """The class that runs a layer."""
        return PagedKVImpl

    @staticmethod
    def get_builder_cls() -> type[PagedKVMetadataBuilder]:
        """The class that describes a batch."""
        return PagedKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:  # noqa: ARG004
        """Any multiple of 16 tokens: hybrid alignment inflates the block to sizes such as 544 or 784."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Complete the description of a layer's pages, as the packing wants them."""
        return pages.complete_spec(spec, packing())

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Layouts that the packing allows, the preferred ones first; None for any."""
        return pages.layouts(packing())

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the kernels serve this head_size."""
        return routes.admits("head_size", head_size)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether the kernels serve a window."""
        return routes.admits("window", 1)

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether the kernels serve sinks."""
        return routes.admits("sinks", value=True)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether the kernels serve scales per KV head."""
        return routes.admits("kv_scales", "head")

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Self-attention and cross attention of a decoder; encoders keep no KV cache and have backends of their own."""
        return routes.admits("attn_type", AttentionType(attn_type).value)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether the kernels serve full attention: whether a batch is causal is an argument."""
        return routes.admits("mask", "full")

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Not served: which sequences decode is read from the host's query lengths."""
        return False
