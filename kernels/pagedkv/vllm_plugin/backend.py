"""What vLLM must know to select and size the backend, and what each batch looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from pagedkv.vllm_plugin import NAME, log
from pagedkv.vllm_plugin.errors import UnsupportedFeatureError
from pagedkv.vllm_plugin.impl import HEAD_SIZES, SERVED_KV_CACHE_DTYPES, PagedKVImpl

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheDType
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


class PagedKVBackend(AttentionBackend):
    """Paged causal attention for decoder layers, any KV layout whose last dimension is dense."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(SERVED_KV_CACHE_DTYPES)

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
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the kernels serve this head_size."""
        return head_size in HEAD_SIZES

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Served: the window is an argument of the kernel."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder self-attention only."""
        return attn_type == AttentionType.DECODER


@dataclass
class PagedKVMetadata(AttentionMetadata):
    """One batch of one KV cache group. S sequences, T query tokens, M entries per block table row."""

    num_actual_tokens: int
    """T without the padding rows of query and output."""
    max_query_len: int
    max_seq_len: int
    """An upper bound, in tokens."""
    query_start_loc: torch.Tensor
    """[S + 1] int32."""
    seq_lens: torch.Tensor
    """[S] int32, context and query together."""
    block_table: torch.Tensor
    """[S, M] int32."""


class PagedKVMetadataBuilder(AttentionMetadataBuilder[PagedKVMetadata]):
    """Passes on what the kernels need; there is no plan to compute on the host."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        log.info("pagedkv serves %d attention layers, %d tokens per block", len(layer_names), kv_cache_spec.block_size)

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002 - vLLM documents it as always 0
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002 - there is no slow part to leave out
    ) -> PagedKVMetadata:
        """Describe one batch.

        Raises:
            UnsupportedFeatureError: The batch needs another mask than causal, or only a shard of each context.
        """
        common = common_attn_metadata
        refused = {
            "non-causal attention": common.causal is not True,
            "bidirectional prefixes of multimodal prompts": common.mm_req_doc_ranges is not None,
            "reference sliding window attention": common.rswa_prefix_lens is not None,
            "decode context parallelism": common.dcp_local_seq_lens is not None,
        }
        for feature, asked in refused.items():
            if asked:
                raise UnsupportedFeatureError(feature)
        return PagedKVMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
        )
