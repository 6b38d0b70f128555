"""What vLLM must know to select and size MLA on its CPU platform, and how it is put in the place of vLLM's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from pagedkv.vllm_plugin.mla_impl import PagedKVMLAImpl

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


class PagedKVMLABackend(CPUMLABackend):
    """MLA with any latent size that the kernels take and any block size; pages may be padded."""

    forward_includes_kv_cache_update: bool = False
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

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
