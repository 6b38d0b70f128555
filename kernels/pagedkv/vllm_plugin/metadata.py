"""Metadata of a batch: the arguments of the kernel calls that serve it, and vLLM's builder of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from pagedkv.vllm_plugin import log, routes
from pagedkv.vllm_plugin.errors import refuse

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


class Part(TypedDict):
    """Neighbouring sequences of a batch that one kernel call serves, as its arguments. S sequences, M blocks each."""

    causal: bool
    """False for cross attention."""
    max_query_len: int
    """1 for sequences that decode."""
    max_seq_len: int
    """An upper bound, in tokens."""
    query_start_loc: torch.Tensor
    """[S + 1] int32; begins where the part begins in the query."""
    seq_lens: torch.Tensor
    """[S] int32: context and query together; in cross attention the tokens of the encoder."""
    block_table: torch.Tensor
    """[S, M] int32."""


@dataclass
class PagedKVMetadata(AttentionMetadata):
    """One batch of one KV cache group."""

    num_actual_tokens: int
    """Query tokens without the padding rows of query and output."""
    whole: Part
    """All sequences."""
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
        """Tell the layers which pool vLLM has decided on, and log each kind of them once.

        Raises:
            UnsupportedFeatureError: No kernel serves a layer in such a pool.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        order = vllm_config.cache_config.get_resolved_kv_cache_layout()
        impls = [layers[name].impl for name in layer_names]
        for impl in impls:
            impl.set_pool(kv_cache_spec.block_size, order)
        for route, count in Counter(impl.route for impl in impls).items():
            log.info("pagedkv serves %d layers of %s", count, routes.log_line(route))

    @classmethod
    def get_cudagraph_support(
        cls,
        vllm_config: VllmConfig,
        kv_cache_spec: KVCacheSpec,  # noqa: ARG003 - no spec makes a difference
    ) -> AttentionCGSupport:
        """Which batches a captured graph may hold: any, where vLLM says how long their queries can become.

        A graph keeps the grid and the kernel of its capture; lengths, blocks and tokens come from the device anew. That
        is right for every later batch within the bounds of the capture. vLLM's model runner V2 captures mixed batches
        of encoder-decoder models with the query length of its dummy batch as bound, which may be 1 and then promises
        a decode step; with those models only batches of equal query lengths are captured.
        """
        if vllm_config.model_config.is_encoder_decoder:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002 - vLLM documents it as always 0
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002 - there is no slow part to leave out
    ) -> PagedKVMetadata:
        """Describe one batch, without waiting for the device.

        Raises:
            UnsupportedFeatureError: The batch needs a mask of its own, or only a shard of each context.
        """
        common = common_attn_metadata
        refused = {
            "a mix of causal and non-causal sequences": not isinstance(common.causal, bool),
            "bidirectional prefixes of multimodal prompts": common.mm_req_doc_ranges is not None,
            "reference sliding window attention": common.rswa_prefix_lens is not None,
            "decode context parallelism": common.dcp_local_seq_lens is not None,
        }
        refuse(refused)
        common.max_query_len = int(common.max_query_len)  # numpy's in chunked local attention
        whole = Part(
            causal=common.causal,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
        )
        query_lens = common.query_start_loc_cpu.diff()
        longer = (query_lens > 1).nonzero()
        decodes = int(longer[0]) if len(longer) else len(query_lens)
        bounds = [(0, decodes, 1), (decodes, len(query_lens), common.max_query_len)]
        parts = [_sequences(whole, first, end, longest) for first, end, longest in bounds if first < end]
        return PagedKVMetadata(common.num_actual_tokens, whole, parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedKVMetadata:
        """Describe the dummy batch of a capture: in one part, because later batches divide elsewhere.

        Raises:
            UnsupportedFeatureError: see `build`.
        """
        metadata = self.build(0, common_attn_metadata)
        metadata.parts = [metadata.whole]
        return metadata


def _sequences(whole: Part, first: int, end: int, max_query_len: int) -> Part:
    """The sequences first .. end - 1 of a batch."""
    return Part(
        causal=whole["causal"],
        max_query_len=max_query_len,
        max_seq_len=whole["max_seq_len"],
        query_start_loc=whole["query_start_loc"][first : end + 1],
        seq_lens=whole["seq_lens"][first:end],
        block_table=whole["block_table"][first:end],
    )
