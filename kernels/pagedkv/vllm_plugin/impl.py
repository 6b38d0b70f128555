"""One attention layer: refuse what is not served, write the new keys and values, attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backend import AttentionImpl, AttentionType

from pagedkv.cache import PagedCache
from pagedkv.cache_write import write_kv_cache
from pagedkv.paged_attention import paged_attention
from pagedkv.vllm_plugin.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import AttentionLayer

    from pagedkv.vllm_plugin.backend import PagedKVMetadata

SERVED_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")
SERVED_ATTENTION = (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
HEAD_SIZES = range(32, 257, 8)
"""Head sizes served; the kernels mask what is not a power of two."""


class PagedKVImpl(AttentionImpl["PagedKVMetadata"]):
    """Runs one layer with `pagedkv.cache_write` and `pagedkv.paged_attention`.

    Attributes:
        writes: Calls that wrote keys and values to the cache. A replayed GPU graph does not count.
        attentions: Calls that attended to the cache, likewise.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **other_features: object,
    ) -> None:
        """Take the layer's constants.

        Args:
            num_heads: Query heads.
            head_size: Channels per head, one of HEAD_SIZES.
            scale: Factor on the logits.
            num_kv_heads: Key and value heads; None means as many as query heads.
            alibi_slopes: Not served.
            sliding_window: Keys a query may see, itself included; None sees all.
            kv_cache_dtype: "auto", "float16" or "bfloat16".
            logits_soft_cap: Not served.
            attn_type: Self-attention of a decoder, or its cross attention.
            kv_sharing_target_layer_name: Layer whose cache this one reads; vLLM then skips the write.
            sinks: Not served.
            **other_features: Whatever else a model asks its attention for: not served.

        Raises:
            UnsupportedFeatureError: The layer needs a feature that is not served.
        """
        refused = {
            f"head_size {head_size}": head_size not in HEAD_SIZES,
            "ALiBi": alibi_slopes is not None,
            "logits soft cap": bool(logits_soft_cap),  # vLLM passes 0 for "none" in places
            "attention sinks": sinks is not None,
            f"KV cache dtype {kv_cache_dtype!r}": kv_cache_dtype not in SERVED_KV_CACHE_DTYPES,
            f"attention type {str(getattr(attn_type, 'value', attn_type))!r}": attn_type not in SERVED_ATTENTION,
        } | {f"attention argument {name!r}": value is not None for name, value in other_features.items()}
        for feature, asked in refused.items():
            if asked:
                raise UnsupportedFeatureError(feature)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.writes = 0
        self.attentions = 0

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,  # noqa: ARG002 - holds quantisation scales, which an unquantised cache has not
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new keys and values of one step.

        Args:
            layer: The vLLM layer.
            key: [T, num_kv_heads, head_size]; T may include padding rows.
            value: Like key.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], any strides, last dimension dense.
            slot_mapping: [N] int64 with N <= T; -1 writes nothing.
        """
        tokens = slot_mapping.shape[0]
        write_kv_cache(key[:tokens], value[:tokens], self._cache(kv_cache), slot_mapping)
        self.writes += 1

    def forward(
        self,
        layer: AttentionLayer,  # noqa: ARG002 - as above
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002 - already in the cache
        value: torch.Tensor,  # noqa: ARG002 - likewise
        kv_cache: torch.Tensor,
        attn_metadata: PagedKVMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend every query token to the cached context of its sequence.

        Args:
            layer: The vLLM layer.
            query: [T, num_heads, head_size]; T may include padding rows.
            key: Unused: written to the cache before.
            value: Unused, likewise.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
            attn_metadata: The batch; None while vLLM measures memory, when the output is filled with zeros.
            output: [T, num_heads, head_size], written in place; padding rows are left alone.
            output_scale: Not served.
            output_block_scale: Not served.

        Returns:
            output.

        Raises:
            UnsupportedFeatureError: The output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedFeatureError("fused output quantisation")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        for part in attn_metadata.parts:
            paged_attention(
                query[:tokens],
                self._cache(kv_cache),
                output[:tokens],
                scale=self.scale,
                sliding_window=self.sliding_window,
                **part,
            )
        self.attentions += 1
        return output

    def _cache(self, kv_cache: torch.Tensor) -> PagedCache:
        """The cache as the kernels take it: K and V alternate per token and head."""
        if kv_cache.shape[-1] != 2 * self.head_size:
            raise UnsupportedFeatureError(
                f"a KV cache of {kv_cache.shape[-1]} channels for head_size {self.head_size} (K and V of unlike sizes)"
            )
        return PagedCache(*kv_cache.transpose(1, 2).split(self.head_size, dim=-1))
