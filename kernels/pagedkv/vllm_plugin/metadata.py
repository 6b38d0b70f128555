# SPDX-License-Identifier: Apache-2.0
"""Builds the metadata of a batch for vLLM: the kernel calls that serve it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from pagedkv.attention.warm_up import ServiceBounds
from pagedkv.vllm_plugin import NAME, log, routes
from pagedkv.vllm_plugin.batch import PagedKVMetadata, Part
from pagedkv.vllm_plugin.errors import refuse

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from pagedkv.vllm_plugin.impl import PagedKVImpl


class PagedKVMetadataBuilder(AttentionMetadataBuilder[PagedKVMetadata]):
    """Splits a batch by the number of query tokens; there is no other plan to compute on the host."""

    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Tell the layers which pool vLLM has decided on, and log each kind of them once.

        Raises:
            UnsupportedFeatureError: No kernel serves a layer in such a pool; or batches will come that vLLM's selection
                does not ask about.
            ScaleError: A layer was loaded with a scale that is not finite and positive.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _refuse_late_surprises(vllm_config)
        _tell_of_drafters(vllm_config)
        # Asks vLLM to put sequences with this many query tokens or fewer first: 1, or 1 + drafted tokens.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.batch_invariant = envs.VLLM_BATCH_INVARIANT
        layers = vllm_config.compilation_config.static_forward_context
        order = vllm_config.cache_config.get_resolved_kv_cache_layout()
        impls = [layers[name].impl for name in layer_names]
        scheduler = vllm_config.scheduler_config
        service = ServiceBounds(
            max_seqs=scheduler.max_num_seqs,
            max_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
            max_seq_len=_longest(vllm_config, impls),
            batch_invariant=self.batch_invariant,
        )
        for impl in impls:
            impl.set_pool(kv_cache_spec.block_size, order)
            impl.expect(service)
        for name in layer_names:
            layers[name].impl.refuse_scales(name, layers[name])
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
            # With 2 a decode step is served as a prompt is: a token gets the same bits in a step of its own, at the end
            # of a chunk, among drafts, and after a prefix that the cache holds.
            max_query_len=max(common.max_query_len, 2) if self.batch_invariant else common.max_query_len,
            max_seq_len=max(common.max_seq_len, 1),  # 0 where no request of the step came with input for an encoder
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            batch_invariant=self.batch_invariant,
        )
        if self.batch_invariant:
            return PagedKVMetadata(common.num_actual_tokens, whole, [whole])
        query_lens = common.query_start_loc_cpu.diff()
        ends = []
        for most in (1, self.reorder_batch_threshold):
            longer = (query_lens > most).nonzero()
            ends.append(int(longer[0]) if len(longer) else len(query_lens))
        longest = min(self.reorder_batch_threshold, common.max_query_len)
        bounds = [(0, ends[0], 1), (*ends, longest), (ends[1], len(query_lens), common.max_query_len)]
        parts = [_sequences(whole, first, end, most) for first, end, most in bounds if first < end]
        return PagedKVMetadata(common.num_actual_tokens, whole, parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedKVMetadata:
        """Describe the dummy batch of a capture: in one part, because later batches divide elsewhere.

        Raises:
            UnsupportedFeatureError: see `build`.
        """
        metadata = self.build(0, common_attn_metadata)
        metadata.parts = [metadata.whole]
        return metadata

    def update_draft_decode_metadata(self, metadata: PagedKVMetadata) -> None:
        """Nothing: lengths and blocks are views of vLLM's own buffers, and the bounds hold for every draft."""


def _sequences(whole: Part, first: int, end: int, max_query_len: int) -> Part:
    """The sequences first .. end - 1 of a batch."""
    return {
        **whole,
        "max_query_len": max_query_len,
        "query_start_loc": whole["query_start_loc"][first : end + 1],
        "seq_lens": whole["seq_lens"][first:end],
        "block_table": whole["block_table"][first:end],
    }


def _longest(vllm_config: VllmConfig, impls: list[PagedKVImpl]) -> int:
    """Most tokens that a query of these layers may see: of its sequence, or in cross attention of an encoder."""
    longest: int = vllm_config.model_config.max_model_len
    if any(impl.route.request.attn_type == AttentionType.ENCODER_DECODER.value for impl in impls):
        encoder = vllm_config.model_config.hf_config
        bound = vllm_config.scheduler_config.max_num_encoder_input_tokens
        longest = max(longest, getattr(encoder, "max_source_positions", bound))  # as vLLM's own capture takes it
    return longest


def _refuse_late_surprises(vllm_config: VllmConfig) -> None:
    """Refuse at the start what `build` or vLLM would refuse in the midst of serving.

    Raises:
        UnsupportedFeatureError: The configuration allows such batches.
    """
    drafts = vllm_config.speculative_config
    # There vLLM knows by name the metadata of which drafts are made, and looks at the second one of a step.
    unknown_to_vllm = (
        drafts is not None
        and getattr(drafts.attention_backend, "name", "") == NAME
        and drafts.num_speculative_tokens > 1
        and not drafts.parallel_drafting
        and current_platform.is_rocm()
        and not vllm_config.use_v2_model_runner
    )
    refuse(
        {
            "several drafts a step on ROCm under model runner V1 (leave attention_backend out of --speculative-config, "
            'or say "auto" there to build_llm, which does not change who serves the model itself; or unset '
            "VLLM_USE_V2_MODEL_RUNNER)": unknown_to_vllm,
            "diffusion models, which mix causal and other sequences in a batch": vllm_config.diffusion_config
            is not None,
        }
    )


def _tell_of_drafters(vllm_config: VllmConfig) -> None:
    """Warn of a drafter with layers that vLLM serves by a backend of its own choice, not by the model's."""
    drafts = vllm_config.speculative_config
    if (
        drafts is not None
        and not current_platform.is_cpu()
        and drafts.uses_draft_kv_cache()
        and drafts.attention_backend is None
    ):
        log.warning(
            "pagedkv does not serve the layers of the drafter: vLLM chooses a backend for them anew. To do: say "
            '"attention_backend": "%s" in --speculative-config.',
            NAME,
        )
