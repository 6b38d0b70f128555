"""What vLLM must know to select and size the backend, and what each batch looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypedDict

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


class Part(TypedDict):
    """Neighbouring sequences of a batch that one kernel call serves, as its arguments. S sequences, M blocks each."""

    max_query_len: int
    """1 for sequences that decode."""
    max_seq_len: int
    """An upper bound, in tokens."""
    query_start_loc: torch.Tensor
    """[S + 1] int32; begins where the part begins in the query."""
    seq_lens: torch.Tensor
    """[S] int32, context and query together."""
    block_table: torch.Tensor
    """[S, M] int32."""


@dataclass
class PagedKVMetadata(AttentionMetadata):
    """One batch of one KV cache group."""

    num_actual_tokens: int
    """Query tokens without the padding rows of query and output."""
    parts: list[Part]
    """The sequences that decode, then the others; either may be missing. A decode step has cheaper programs, so a batch
    that mixes both is served by two calls."""


class PagedKVMetadataBuilder(AttentionMetadataBuilder[PagedKVMetadata]):
    """Splits a batch into decode and the rest; there is no other plan to compute on the host."""

    reorder_batch_threshold: int | None = 1
    """Asks vLLM to put sequences with a single query token first."""

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
        query_lens = common.query_start_loc_cpu.diff()
        longer = (query_lens > 1).nonzero()
        decodes = int(longer[0]) if len(longer) else len(query_lens)
        bounds = [(0, decodes, 1), (decodes, len(query_lens), common.max_query_len)]
        return PagedKVMetadata(
            num_actual_tokens=common.num_actual_tokens,
            parts=[
                Part(
                    max_query_len=max_query_len,
                    max_seq_len=common.max_seq_len,
                    query_start_loc=common.query_start_loc[first : end + 1],
                    seq_lens=common.seq_lens[first:end],
                    block_table=common.block_table_tensor[first:end],
                )
                for first, end, max_query_len in bounds
                if first < end
            ],
        )
