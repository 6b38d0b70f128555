"""What vLLM must know to select and size MLA, on its CPU platform and on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from pagedkv.vllm_plugin.mla_builder import PagedKVMLAMetadataBuilder
from pagedkv.vllm_plugin.mla_impl import PagedKVGPUMLAImpl, PagedKVMLAImpl

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType
    from vllm.v1.kv_cache_interface import KVCacheSpec


class PagedKVMLABackend(CPUMLABackend):
    """MLA with any latent size that the kernels take and any block size; pages may be padded."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(PagedKVMLAImpl.served_kv_cache_dtypes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any: the impl refuses what its kernels do not take, with the reason."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:  # noqa: ARG004
        """Any: rows are found by block and row stride."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:  # noqa: ARG003
        """Any."""
        return True

    @staticmethod
    def get_impl_cls() -> type[PagedKVMLAImpl]:
        """The class that runs a layer."""
        return PagedKVMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PagedKVMLAMetadataBuilder]:
        """The class that describes a batch."""
        return PagedKVMLAMetadataBuilder


class PagedKVGPUMLABackend(MLACommonBackend):
    """The same on ROCm and CUDA, under the name TRITON_MLA, which it inherits with vLLM's part of the work."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]  # of vLLM's prefill
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(PagedKVGPUMLAImpl.served_kv_cache_dtypes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any: the impl refuses what its kernels do not take, with the reason."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:  # noqa: ARG004
        """Multiples of 16: those in which vLLM gathers the context of a prefill."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[PagedKVGPUMLAImpl]:
        """The class that runs a layer."""
        return PagedKVGPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PagedKVMLAMetadataBuilder]:
        """The class that describes a batch."""
        return PagedKVMLAMetadataBuilder
