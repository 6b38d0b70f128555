# SPDX-License-Identifier: Apache-2.0
"""MLA for vLLM: decode with our kernels on its CPU platform and on GPUs, and what vLLM must know to select and size it.

The prefill, which attends to unabsorbed keys and values outside the cache, stays vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pagedkv.device import INTERPRETED, current
from pagedkv.launch import tuning
from pagedkv.mla.checks import LARGEST_LATENT, LARGEST_ROPE
from pagedkv.mla.decode import mla_decode
from pagedkv.mla.launch import MlaShape
from pagedkv.mla.tables import Tables, allocate, fill
from pagedkv.mla.warm_up import warm_up
from pagedkv.vllm_plugin import log
from pagedkv.vllm_plugin.errors import VersionError, refuse
from pagedkv.vllm_plugin.pages import refuse_scales

try:
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    from pagedkv.vllm_plugin.routes import (
        fp8_format,
        leave_products_unpadded,
        refuse_what_the_interpreter_gets_wrong,
    )
except ImportError as error:  # see backend.py
    raise VersionError.of_this_vllm(str(error)) from error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backend import AttentionLayer
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

    from pagedkv.fp8.formats import FormatName

ALTERNATIVE = "to do: unset PAGEDKV_MLA, which leaves TRITON_MLA to vLLM"
"""Text that vLLM prints after its reasons not to select us."""


@dataclass
class PagedKVMLADecode(MLACommonDecodeMetadata):
    """The sequences of a batch that decode, which come first: S of them."""

    query_start_loc: torch.Tensor
    """[S + 1] int32."""
    max_query_len: int
    """1, or 1 + drafted tokens."""
    tables: Tables
    """Which program attends to what, for all layers of the group."""


class PagedKVMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Adds the schedule tables to vLLM's metadata: filled once a step, for all layers of the group.

    The tables of every step are the same memory, so that a captured graph of decode finds those of the step in which it
    is replayed. vLLM replays one only with as many sequences as it was captured with; those that pad it have no work.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        static_context = vllm_config.compilation_config.static_forward_context
        self._quantised: bool = static_context[layer_names[0]].impl.cache_format is not None
        # Captured batches may be larger than any that is scheduled.
        largest_capture = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._most_seqs: int = max(vllm_config.scheduler_config.max_num_seqs, largest_capture)
        self._tables: dict[int, Tables] = {}
        for name in layer_names:
            static_context[name].impl.expect(self.reorder_batch_threshold)
            if self._quantised:
                refuse_scales(name, static_context[name], "_k_scale")
        log.info("pagedkv decodes %d MLA layers, %d tokens per block", len(layer_names), kv_cache_spec.block_size)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_host: Any,
    ) -> PagedKVMLADecode:
        """Describe the decode sequences of a step and fill their tables, without waiting for the device."""
        tables = self._all_tables(max_query_len).of(seq_lens_device.shape[0])
        fill(tables, seq_lens_device, query_start_loc_device)
        return PagedKVMLADecode(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
            tables=tables,
        )

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata[PagedKVMLADecode]) -> None:
        """Fill the tables anew, for lengths that a draft has moved on the device."""
        decode = metadata.decode
        fill(decode.tables, decode.seq_lens, decode.query_start_loc)

    def _all_tables(self, max_query_len: int) -> Tables:
        """Tables for as many sequences as a step can have: one set for each bound of their query lengths."""
        if max_query_len not in self._tables:
            self._tables[max_query_len] = allocate(
                torch.empty(0, device=self.device),
                MlaShape(
                    latent_size=self.mla_dims.kv_lora_rank,
                    rope_size=self.mla_dims.qk_rope_head_dim,
                    element_bytes=self.model_config.dtype.itemsize,
                    num_heads=self.num_heads,
                    max_query_len=max_query_len,
                    quantised=self._quantised,
                ),
                self._most_seqs,
            )
        return self._tables[max_query_len]


class MLADecode:
    """The part of a layer that is ours, whoever does the rest.

    Attributes:
        cache_format: Format of the codes of a quantised cache.
        writes: Calls that wrote rows to the cache. A replayed GPU graph does not count.
        attentions: Decode calls, likewise; a step that only begins prompts makes none.
    """

    can_return_lse_for_decode: bool = True
    supports_pcp: bool = False
    served_kv_cache_dtypes: ClassVar[tuple[str, ...]]

    kv_lora_rank: int
    qk_rope_head_dim: int
    kv_cache_dtype: str
    dcp_world_size: int
    scale: float
    indexer: object | None

    def __init__(
        self,
        *,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        attn_type: str,
        **constants: Any,
    ) -> None:
        """Take the layer's constants, as vLLM passes them.

        Raises:
            UnsupportedFeatureError: The layer needs a feature that is not served.
        """
        refused = {
            "ALiBi in MLA": alibi_slopes,
            "a sliding window in MLA": sliding_window,
            "a soft cap in MLA": logits_soft_cap,
            f"attention type {attn_type!r} in MLA": attn_type != AttentionType.DECODER,
            f"MLA on {current().name}": tuning(current().name).mla is None,
        }
        refuse(refused)
        refuse_what_the_interpreter_gets_wrong()
        leave_products_unpadded()
        features = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, "attn_type": attn_type}
        super().__init__(**features, **constants)
        latent, rope = self.kv_lora_rank, self.qk_rope_head_dim
        refused = {
            f"a latent size of {latent}": not 32 <= latent <= LARGEST_LATENT or latent % 8,
            f"{rope} rope channels": not 16 <= rope <= LARGEST_ROPE or rope % 8,
            f"KV cache dtype {self.kv_cache_dtype!r} of MLA": self.kv_cache_dtype not in self.served_kv_cache_dtypes,
            "sparse MLA": self.indexer is not None,
            "decode context parallelism": self.dcp_world_size > 1,
        }
        refuse(refused)
        self.cache_format: FormatName | None = fp8_format(self.kv_cache_dtype)
        self.supports_quant_query_input = False  # codes are decoded to the query's dtype
        self.writes = 0
        self.attentions = 0
        self._most_queries: int | None = None

    def expect(self, most_queries: int) -> None:
        """Take the largest bound of query lengths; the layer is compiled for all bounds at its first decode step.

        That step is one of vLLM's own before it captures graphs; where it captures none, the first of a service.

        Args:
            most_queries: 1, or 1 + drafted tokens.
        """
        self._most_queries = most_queries

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[PagedKVMLADecode],
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the tokens of the sequences that decode, which come first in a step.

        Args:
            q: [D, num_heads, kv_lora_rank + qk_rope_head_dim], or its two parts; D may include padding rows.
            kv_c_and_k_pe_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], any block and row strides.
            attn_metadata: The step.
            layer: The vLLM layer; holds the scale of a quantised cache.

        Returns:
            [D, num_heads, kv_lora_rank] and the natural log-sum-exp [D, num_heads] fp32; padding rows are 0.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        # vLLM takes the largest magnitude over all rows where it quantises the result, padding too.
        out = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        lse = query.new_zeros(query.shape[:2], dtype=torch.float32)
        codes = self.cache_format is not None
        cache = kv_c_and_k_pe_cache.view(torch.uint8) if codes else kv_c_and_k_pe_cache
        options: dict[str, Any] = {
            "block_table": decode.block_table,
            "scale": self.scale,
            "cache_format": self.cache_format,
            "cache_scale": layer._k_scale if codes else None,  # noqa: SLF001 - vLLM's own place for it
        }
        if self._most_queries is not None and len(query) and not INTERPRETED and not _capturing(query):
            warm_up(query, cache, out, lse, most_queries=self._most_queries, **options)
            self._most_queries = None
        mla_decode(
            query,
            cache,
            out,
            seq_lens=decode.seq_lens,
            query_start_loc=decode.query_start_loc,
            max_query_len=decode.max_query_len,
            lse=lse,
            tables=decode.tables,
            **options,
        )
        self.attentions += 1
        return out, lse


def _capturing(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class PagedKVMLAImpl(MLADecode, CPUMLAImpl):
    """On vLLM's CPU platform, whose write knows no padded pages: the write is ours too."""

    served_kv_cache_dtypes = ("auto", "float16", "bfloat16")

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,  # noqa: ARG002 - not quantised
        k_scale: torch.Tensor,  # noqa: ARG002 - of a quantised cache
        skip_scale: bool = False,  # noqa: ARG002 - likewise, since vLLM 0.33
    ) -> None:
        """Write the latent rows of one step.

        Args:
            kv_c_normed: [T, kv_lora_rank]; T may include padding rows.
            k_pe: [T, 1, qk_rope_head_dim].
            kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], any strides; empty while profiling.
            slot_mapping: [N] with N <= T; -1 writes nothing.
            kv_cache_dtype: Unused.
            k_scale: Unused.
            skip_scale: Unused.
        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten().long()
        written = slots >= 0
        block, token = slots[written] // kv_cache.shape[1], slots[written] % kv_cache.shape[1]
        rows = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=-1)[: len(slots)]
        kv_cache[block, token] = rows[written].to(kv_cache.dtype)
        self.writes += 1


class PagedKVGPUMLAImpl(MLADecode, MLACommonImpl[MLACommonMetadata]):
    """On ROCm and CUDA; the write stays vLLM's, whose kernel takes the strides of the cache."""

    served_kv_cache_dtypes = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")

    def do_kv_cache_update(self, *arguments: Any, **named: Any) -> None:
        """Write the latent rows of one step, as vLLM does."""
        super().do_kv_cache_update(*arguments, **named)
        self.writes += 1


class _Served:
    """What vLLM must know of both backends alike."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any: the impl refuses what its kernels do not take, with the reason."""
        return []

    @staticmethod
    def get_builder_cls() -> type[PagedKVMLAMetadataBuilder]:
        """The class that describes a batch."""
        return PagedKVMLAMetadataBuilder


class PagedKVMLABackend(_Served, CPUMLABackend):
    """MLA with any latent size that the kernels take and any block size; pages may be padded."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(PagedKVMLAImpl.served_kv_cache_dtypes)

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


class PagedKVGPUMLABackend(_Served, MLACommonBackend):
    """The same on ROCm and CUDA, under the name TRITON_MLA, which it inherits with vLLM's part of the work."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]  # of vLLM's prefill
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(PagedKVGPUMLAImpl.served_kv_cache_dtypes)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:  # noqa: ARG004
        """Multiples of 16: those in which vLLM gathers the context of a prefill."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[PagedKVGPUMLAImpl]:
        """The class that runs a layer."""
        return PagedKVGPUMLAImpl

    @classmethod
    def validate_configuration(cls, *asked: object, **features: object) -> list[str]:
        """Return why vLLM may not select this backend for a layer, and then what to do; empty if it may."""
        reasons = super().validate_configuration(*asked, **features)
        return [*reasons, ALTERNATIVE] if reasons else []
