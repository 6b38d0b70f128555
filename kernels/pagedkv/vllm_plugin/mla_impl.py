"""One MLA layer: latent rows into a cache with any block and row stride, decode with our kernels.

The prefill, which attends to unabsorbed keys and values outside the cache, stays vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from pagedkv.mla_checks import LARGEST_LATENT, LARGEST_ROPE
from pagedkv.mla_decode import mla_decode
from pagedkv.mla_tables import Tables, allocate, fill
from pagedkv.vllm_plugin.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
    from vllm.v1.attention.backend import AttentionLayer


class PagedKVMLAImpl(CPUMLAImpl):
    """Runs one layer with `pagedkv.mla_decode`.

    Attributes:
        writes: Calls that wrote rows to the cache. A replayed GPU graph does not count.
        attentions: Decode calls, likewise; a step that only begins prompts makes none.
    """

    can_return_lse_for_decode: bool = True

    def __init__(self, *arguments: Any, **features: Any) -> None:
        """Take the layer's constants, as vLLM passes them.

        Raises:
            UnsupportedFeatureError: The layer needs a feature that is not served.
        """
        super().__init__(*arguments, **features)
        refused = {
            f"a latent size of {self.kv_lora_rank}": self.kv_lora_rank > LARGEST_LATENT,
            f"{self.qk_rope_head_dim} rope channels": self.qk_rope_head_dim > LARGEST_ROPE,
            f"KV cache dtype {self.kv_cache_dtype!r}": self.kv_cache_dtype != "auto",
            "sparse MLA": self.indexer is not None,
        }
        for feature, asked in refused.items():
            if asked:
                raise UnsupportedFeatureError(feature)
        self.writes = 0
        self.attentions = 0

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,  # noqa: ARG002 - "auto"
        k_scale: torch.Tensor,  # noqa: ARG002 - of a quantised cache
    ) -> None:
        """Write the latent rows of one step.

        Args:
            kv_c_normed: [T, kv_lora_rank]; T may include padding rows.
            k_pe: [T, 1, qk_rope_head_dim].
            kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], any strides; empty while profiling.
            slot_mapping: [N] with N <= T; -1 writes nothing.
            kv_cache_dtype: Unused.
            k_scale: Unused.
        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten().long()
        written = slots >= 0
        block, token = slots[written] // kv_cache.shape[1], slots[written] % kv_cache.shape[1]
        rows = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=-1)[: len(slots)]
        kv_cache[block, token] = rows[written].to(kv_cache.dtype)
        self.writes += 1

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,  # noqa: ARG002 - holds the scales of a quantised cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the decode tokens of a step, which come first, one of each sequence.

        Args:
            q: [D, num_heads, kv_lora_rank + qk_rope_head_dim], or its two parts.
            kv_c_and_k_pe_cache: As in `do_kv_cache_update`.
            attn_metadata: The step; its tables are made by its first layer and kept for the others.
            layer: Unused.

        Returns:
            [D, num_heads, kv_lora_rank] and the natural log-sum-exp [D, num_heads] fp32.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode, num_seqs = attn_metadata.decode, attn_metadata.num_decodes
        metadata = {
            "seq_lens": decode.seq_lens[:num_seqs],
            "query_start_loc": attn_metadata.query_start_loc[: num_seqs + 1],
        }
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        mla_decode(
            query,
            kv_c_and_k_pe_cache,
            out,
            block_table=decode.block_table[:num_seqs],
            **metadata,
            max_query_len=1,
            scale=self.scale,
            lse=lse,
            tables=self._tables(query, attn_metadata, **metadata),
        )
        self.attentions += 1
        return out, lse

    def _tables(
        self, query: torch.Tensor, step: MLACommonMetadata, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> Tables:
        """Return the schedule of the step. All layers of a group share `step`, and their shapes are alike."""
        tables: Tables | None = getattr(step, "pagedkv_tables", None)
        if tables is None:
            tables = allocate(
                query,
                latent_size=self.kv_lora_rank,
                rope_size=self.qk_rope_head_dim,
                num_heads=query.shape[1],
                num_seqs=seq_lens.shape[0],
                max_query_len=1,
            )
            fill(tables, seq_lens, query_start_loc)
            step.pagedkv_tables = tables
        return tables
