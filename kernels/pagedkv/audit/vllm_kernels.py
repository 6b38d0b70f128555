# SPDX-License-Identifier: Apache-2.0
"""Cases of vLLM's attention kernels, compiled beside ours as evidence. Nothing of theirs is copied: they are imported.

Their `chunked_prefill_paged_decode` asks the ROCm platform about the GPU, so the decode kernel is launched directly
with the arguments that function computes; `unified_attention` is called as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import torch

from pagedkv.arch import next_power_of_two

from .cases import Case
from .imports import vllm_attention
from .our_kernels import MLA_LATENT, mla_batch, mla_name
from .tensors import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_38502_TILE = 2048
"""The defect's tile: the whole physical block of Jamba."""
_MLA_SPLITS = 4
"""Any number: their MLA kernel compiles alike for all above 1."""


def cases() -> list[Case]:
    """Theirs, at the shapes that decide: their largest tile (128), their other one (32), and each head size.

    The decode tile of vLLM 0.32 is the block size, capped, where it is a power of two (vLLM PR 38502), and else 32.
    """
    made = []
    for head_size, block_size, tile in ((64, 2048, 128), (128, 2048, 128), (128, 544, 32), (256, 544, 32)):
        batch = _batch(head_size, block_size)
        launch = paged_attention_2d(batch, tile)
        made.append(_case("decode", "x-packed", batch, ("kernel_paged_attention_2d",), launch))
        launch = unified_attention(batch, segments=16)
        made.append(_case("decode", "packed", batch, ("kernel_unified_attention", "reduce_segments"), launch))
    for head_size, block_size in ((64, 2048), (128, 544), (256, 544)):
        batch = _batch(head_size, block_size, query_len=512)
        launch = unified_attention(batch, segments=0)
        made.append(_case("prefill", "packed", batch, ("kernel_unified_attention",), launch))
    kernels = ("_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")
    for num_heads in (16, 128):  # their Triton decode, which ROCm runs where AITER does not
        batch = mla_batch(torch.bfloat16, num_heads)
        labels = batch.labels(f"mla-{num_heads}", "latent")
        made.append(Case("vllm", mla_name(batch), kernels, mla_decode(batch), labels))
    return [*made, pr_38502()]


def pr_38502() -> Case:
    """The decode kernel of vLLM with the tile it had before PR 38502.

    A tile of 2048 tokens x head size 64 x 2 bytes of bf16 is 262144 bytes of LDS, four times what gfx942 has. If this
    audit lets it pass, the audit is broken.
    """
    batch = _batch(64, _PR_38502_TILE)
    return Case(
        source="vllm",
        name="pr-38502-tile-2048-d64",
        kernels=("kernel_paged_attention_2d",),
        launch=paged_attention_2d(batch, _PR_38502_TILE),
        labels=batch.labels("proof", "x-packed"),
        expected_lds=_PR_38502_TILE * 64 * 2,
    )


def _batch(head_size: int, block_size: int, *, query_len: int = 1) -> Batch:
    return Batch(torch.bfloat16, head_size, num_heads=32, num_kv_heads=8, block_size=block_size, query_len=query_len)


def _case(operation: str, layout: str, batch: Batch, kernels: tuple[str, ...], launch: Callable[[], None]) -> Case:
    heads = f"q{batch.num_heads}kv{batch.num_kv_heads}"
    name = f"{operation}-{batch.dtype_name}-{heads}-d{batch.head_size}-bs{batch.block_size}-{layout}"
    return Case("vllm", name, kernels, launch, batch.labels(operation, layout))


def paged_attention_2d(batch: Batch, tile: int) -> Callable[[], None]:
    """A launch of `kernel_paged_attention_2d` on a packed ROCM_ATTN cache (kernels.md 1.2).

    Args:
        batch: Shapes and dtype.
        tile: Tokens per tile.
    """
    x = 16 // batch.dtype.itemsize
    planes = batch.pool(2, batch.num_blocks, batch.block_size * batch.num_kv_heads * batch.head_size)
    key_cache = planes[0].view(batch.num_blocks, batch.num_kv_heads, batch.head_size // x, batch.block_size, x)
    value_cache = planes[1].view(batch.num_blocks, batch.num_kv_heads, batch.head_size, batch.block_size)
    group = batch.num_heads // batch.num_kv_heads
    query, out, one = batch.query(), batch.query(), torch.ones(1)

    def launch() -> None:
        kernel = vllm_attention("chunked_prefill_paged_decode").kernel_paged_attention_2d
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
            num_queries_per_kv_padded=max(next_power_of_two(group), 16),
            block_table_stride=batch.block_table.stride(0),
            query_stride_0=query.stride(0),
            query_stride_1=query.stride(1),
            output_stride_0=out.stride(0),
            output_stride_1=out.stride(1),
            BLOCK_SIZE=tile,
            PHYSICAL_BLOCK_SIZE=batch.block_size,
            HEAD_SIZE=batch.head_size,
            HEAD_SIZE_PADDED=next_power_of_two(batch.head_size),
            USE_ALIBI_SLOPES=False,
            SLIDING_WINDOW=0,
            x=x,
            **{f"stride_k_cache_{axis}": stride for axis, stride in enumerate(key_cache.stride())},
            **{f"stride_v_cache_{axis}": stride for axis, stride in enumerate(value_cache.stride())},
            filter_by_query_len=True,
            query_start_len_ptr=batch.query_start_loc,
            USE_SINKS=False,
            USE_FP8=False,
            **(
                {"INTERLEAVED_V_PACK_FACTOR": 0} if "INTERLEAVED_V_PACK_FACTOR" in kernel.arg_names else {}
            ),  # vLLM 0.33
        )

    return launch


def unified_attention(batch: Batch, *, segments: int) -> Callable[[], None]:
    """A call of `unified_attention` on the cache that vLLM 0.32 gives it.

    Args:
        batch: Shapes and dtype.
        segments: Parts of a sequence handled by separate programs (their "3D" kernel); 0 for the "2D" kernel.
    """
    cache, query, out = batch.paged_cache("packed"), batch.query(), batch.query()
    scratch = {}
    if segments:
        rows = (batch.num_tokens, batch.num_heads, segments)
        scratch = {
            "seq_threshold_3D": batch.num_seqs,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": torch.empty(*rows, next_power_of_two(batch.head_size)),
            "softmax_segm_max": torch.empty(rows),
            "softmax_segm_expsum": torch.empty(rows),
        }

    def launch() -> None:
        vllm_attention("triton_unified_attention").unified_attention(
            q=query,
            k=cache.key,
            v=cache.value,
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


def mla_decode(batch: Batch) -> Callable[[], None]:
    """Launch their grouped MLA decode as their ROCm platform configures it, and its reduce.

    Their launcher asks the platform once, at import, whether it is ROCm; here the answer is put in its place.

    Args:
        batch: Shapes and dtype; head_size is latent and rope together.
    """
    cache = batch.pool(batch.num_blocks, batch.block_size, 1, batch.head_size)
    query = batch.query()
    out = query.new_empty(*query.shape[:2], MLA_LATENT)
    logits = torch.empty(batch.num_tokens, batch.num_heads, _MLA_SPLITS, MLA_LATENT + 1)
    lse, one = torch.empty(query.shape[:2]), torch.ones(())

    def launch() -> None:
        ops = vllm_attention("triton_decode_attention")
        with mock.patch.object(ops, "is_hip_", new=True):
            ops.decode_attention_fwd(
                query,
                cache,
                cache[..., :MLA_LATENT],
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
