# SPDX-License-Identifier: Apache-2.0
"""Attention backend for vLLM: what it must know to select it and to size the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.device import INTERPRETED
from pagedkv.routing.features import asked_dtype
from pagedkv.routing.request import ELEMENT_BYTES
from pagedkv.vllm_plugin import NAME
from pagedkv.vllm_plugin.errors import VersionError
from pagedkv.vllm_plugin.settings import packing

try:
    from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

    from pagedkv.vllm_plugin import pages, routes
    from pagedkv.vllm_plugin.impl import PagedKVImpl
    from pagedkv.vllm_plugin.metadata import PagedKVMetadataBuilder
except ImportError as error:  # which vLLM on ROCm and CUDA would take for a backend that is not installed
    raise VersionError.of_this_vllm(str(error)) from error

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

ALTERNATIVE = (
    "to do: --attention-backend TRITON_ATTN; or, for one kind of layers alone, --attention-config "
    '\'{"backend_per_kind": {KIND: "TRITON_ATTN"}}\', where KIND is full_attention, sliding_window, cross_attention or '
    "encoder_only_attention"
)
"""Text that vLLM prints after its reasons not to select us."""


class PagedKVBackend(AttentionBackend):
    """Paged attention of decoder layers, to themselves or to an encoder, in any KV layout that the packing allows."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        getattr(torch, name)
        for name in ELEMENT_BYTES
        if routes.admits("dtype", asked_dtype(name, "interpreter") if INTERPRETED else name)
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
    def supports_batch_invariance(cls) -> bool:
        """Served: see `PagedKVMetadataBuilder.build`."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Whether a KV connector may move blocks out of the engine: receivers assume the packing `rows`."""
        return packing() == "rows"

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Not served: the query lengths on the host decide which sequences decode."""
        return False

    @classmethod
    def validate_configuration(cls, *asked: object, **features: object) -> list[str]:
        """Return why vLLM may not select this backend for a layer, and then what to select instead; empty if it may."""
        reasons = super().validate_configuration(*asked, **features)
        if features.get("use_non_causal") and features.get("has_sliding_window"):
            reasons.append("sliding window in non-causal attention not supported")
        return [*reasons, ALTERNATIVE] if reasons else []
