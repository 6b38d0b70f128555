"""vLLM's own attention kernels, compiled beside ours as evidence. Nothing of theirs is copied: they are imported.

Their `chunked_prefill_paged_decode` asks the ROCm platform about the GPU, so the decode kernel is launched directly
with the arguments that function computes; `unified_attention` is called as it is.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import torch
from triton.backends import backends

from .errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .tensors import Batch

_OPS = "vllm.v1.attention.ops"
_TILE_CAP = 128
"""Their decode tile: the block size, capped, where it is a power of two (vLLM PR 38502) ..."""
_TILE_OTHERWISE = 32
"""... and this where it is not, such as 544."""
_MLA_SPLITS = 4
"""Any number: their MLA kernel compiles alike for all above 1."""


def decode_tile(block_size: int) -> int:
    """Tile that vLLM 0.32 gives its decode kernel for a block size."""
    return min(block_size, _TILE_CAP) if block_size & (block_size - 1) == 0 else _TILE_OTHERWISE


def load() -> None:
    """Import the kernels; call once, before forking.

    Raises:
        CannotRunHereError: vLLM is missing, too different, or has replaced its Triton kernels with placeholders.
    """
    _ops("chunked_prefill_paged_decode")
    kernel = getattr(_ops("triton_unified_attention"), "kernel_unified_attention", None)
    if not hasattr(kernel, "device_caches"):
        raise CannotRunHereError(
            "vLLM imported, but its attention kernels are placeholders: it found no Triton driver it trusts.\n"
            "  to do: import pagedkv.audit before anything imports vllm.triton_utils"
        )


def paged_attention_2d(batch: Batch, tile: int) -> Callable[[], None]:
    """A launch of `kernel_paged_attention_2d` on a packed ROCM_ATTN cache (kernels.md 1.2).

    Args:
        batch: Shapes and dtype.
        tile: Tokens per tile; `decode_tile` gives theirs.
    """
    x = 16 // batch.dtype.itemsize
    planes = batch.pool(2, batch.num_blocks, batch.block_size * batch.num_kv_heads * batch.head_size)
    key_cache = planes[0].view(batch.num_blocks, batch.num_kv_heads, batch.head_size // x, batch.block_size, x)
    value_cache = planes[1].view(batch.num_blocks, batch.num_kv_heads, batch.head_size, batch.block_size)
    group = batch.num_heads // batch.num_kv_heads
    query, out = batch.query(), batch.query()
    one = torch.ones(1)

    def launch() -> None:
        kernel = _ops("chunked_prefill_paged_decode").kernel_paged_attention_2d
        kernel[(batch.num_seqs, batch.num_kv_heads)](
            output_ptr=out,
            query_ptr=query,
            key_cache_ptr=key_cache,
            value_cache_ptr=value_cache,
            sink_ptr=None,
            block_tables_ptr=batch.block_table,
            seq_lens_ptr=batch.seq_lens,
            alibi_slopes_ptr=None,
            scale=batch.scale,
            k_scale=one,
            v_scale=one,
            out_scale_inv=1.0,
            num_query_heads=batch.num_heads,
            num_queries_per_kv=group,
            num_queries_per_kv_padded=max(_power_of_2(group), 16),
            block_table_stride=batch.block_table.stride(0),
            query_stride_0=query.stride(0),
            query_stride_1=query.stride(1),
            output_stride_0=out.stride(0),
            output_stride_1=out.stride(1),
            BLOCK_SIZE=tile,
            PHYSICAL_BLOCK_SIZE=batch.block_size,
            HEAD_SIZE=batch.head_size,
            HEAD_SIZE_PADDED=_power_of_2(batch.head_size),
            USE_ALIBI_SLOPES=False,
            SLIDING_WINDOW=0,
            x=x,
            **{f"stride_k_cache_{axis}": stride for axis, stride in enumerate(key_cache.stride())},
            **{f"stride_v_cache_{axis}": stride for axis, stride in enumerate(value_cache.stride())},
            filter_by_query_len=True,
            query_start_len_ptr=batch.query_start_loc,
            USE_SINKS=False,
            USE_FP8=False,
        )

    return launch


def unified_attention(batch: Batch, *, segments: int) -> Callable[[], None]:
    """A call of `unified_attention` on the cache that vLLM 0.32 gives it.

    Args:
        batch: Shapes and dtype.
        segments: Parts of a sequence handled by separate programs (their "3D" kernel); 0 for the "2D" kernel.
    """
    cache = batch.paged_cache("packed")
    key_cache, value_cache = cache.key, cache.value
    query, out = batch.query(), batch.query()
    scratch = {}
    if segments:
        rows = (batch.num_tokens, batch.num_heads, segments)
        scratch = {
            "seq_threshold_3D": batch.num_seqs,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": torch.empty(*rows, _power_of_2(batch.head_size)),
            "softmax_segm_max": torch.empty(rows),
            "softmax_segm_expsum": torch.empty(rows),
        }

    def launch() -> None:
        _ops("triton_unified_attention").unified_attention(
            q=query,
            k=key_cache,
            v=value_cache,
            out=out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.query_len,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.seq_len,
            softmax_scale=batch.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            **scratch,
        )

    return launch


def mla_decode(batch: Batch, latent_size: int) -> Callable[[], None]:
    """A launch of their grouped MLA decode as their ROCm platform configures it, and of its reduce.

    Their launcher asks the platform once, at import, whether it is ROCm; here the answer is put in its place.

    Args:
        batch: Shapes and dtype; head_size is latent and rope together.
        latent_size: Channels that are key and value.
    """
    ops = _ops("triton_decode_attention")
    cache = batch.pool(batch.num_blocks, batch.block_size, 1, batch.head_size)
    query = batch.query()
    out = query.new_empty(*query.shape[:2], latent_size)
    logits = torch.empty(batch.num_tokens, batch.num_heads, _MLA_SPLITS, latent_size + 1)
    lse, one = torch.empty(query.shape[:2]), torch.ones(())

    def launch() -> None:
        with mock.patch.object(ops, "is_hip_", new=True):
            ops.decode_attention_fwd(
                query,
                cache,
                cache[..., :latent_size],
                out,
                lse,
                batch.block_table,
                batch.seq_lens,
                logits,
                _MLA_SPLITS,
                batch.scale,
                batch.block_size,
                k_scale=one,
                v_scale=one,
                is_mla=True,
            )

    return launch


def _ops(name: str) -> ModuleType:
    """A module of vLLM's attention operations.

    A CPU build of vLLM replaces Triton by placeholders unless a backend named "cpu" is registered (its
    `triton_utils/importing.py`), so one is, for as long as the import takes.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    try:
        return importlib.import_module(f"{_OPS}.{name}")
    except ImportError as error:
        raise CannotRunHereError(
            f"vLLM's kernels cannot be imported ({error}).\n"
            "  to do: install the vLLM of requirements/vllm.txt, or leave its rows out with --side ours"
        ) from error
    finally:
        del backends["cpu"]


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
