"""What each batch of an MLA group looks like: vLLM's description, and the schedule of our decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from pagedkv.mla.tables import Tables, allocate, fill
from pagedkv.vllm_plugin import log

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


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

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._quantised: bool = layer.impl.cache_format is not None
        # Captured batches may be larger than any that is scheduled.
        largest_capture = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._most_seqs: int = max(vllm_config.scheduler_config.max_num_seqs, largest_capture)
        self._tables: dict[int, Tables] = {}
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

    def _all_tables(self, max_query_len: int) -> Tables:
        """Tables for as many sequences as a step can have: one set for each bound of their query lengths."""
        if max_query_len not in self._tables:
            self._tables[max_query_len] = allocate(
                torch.empty(0, dtype=self.model_config.dtype, device=self.device),
                latent_size=self.mla_dims.kv_lora_rank,
                rope_size=self.mla_dims.qk_rope_head_dim,
                num_heads=self.num_heads,
                num_seqs=self._most_seqs,
                max_query_len=max_query_len,
                quantised=self._quantised,
            )
        return self._tables[max_query_len]
