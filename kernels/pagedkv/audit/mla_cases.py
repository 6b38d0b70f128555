"""MLA decode, ours and vLLM's, at the shape of DeepSeek-V2 and V3: 512 latent and 64 rope channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.mla.decode import mla_decode

from . import vllm_kernels
from .case import Case, dtype_name
from .tensors import Batch

if TYPE_CHECKING:
    from pagedkv.fp8.formats import FormatName

LATENT, ROPE = 512, 64
KERNELS = ("mla_schedule_kernel", "mla_decode_kernel", "mla_reduce_kernel")


def our_mla_cases() -> list[Case]:
    """16 heads (a tensor-parallel share), 128 heads, an uneven number, several tokens, other block sizes, FP8 codes."""
    return [
        _ours(torch.bfloat16, 16),
        _ours(torch.bfloat16, 128),
        _ours(torch.float16, 16, block_size=784),
        _ours(torch.bfloat16, 16, query_len=2),
        _ours(torch.bfloat16, 24, block_size=1),
        _ours(torch.bfloat16, 128, query_len=2, block_size=64),
        _ours(torch.bfloat16, 16, quantised="e4m3fnuz"),
        _ours(torch.bfloat16, 128, quantised="e4m3fn"),
    ]


def vllm_mla_cases() -> list[Case]:
    """Their Triton decode, which ROCm runs where AITER does not."""
    cases = []
    for num_heads in (16, 128):
        batch = _batch(torch.bfloat16, num_heads)
        launch = vllm_kernels.mla_decode(batch, LATENT)
        kernels = ("_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")
        cases.append(Case(_name(batch), "vllm", f"mla-{num_heads}", batch, kernels, launch, "latent"))
    return cases


def _batch(dtype: torch.dtype, num_heads: int, block_size: int = 16, query_len: int = 1) -> Batch:
    return Batch(dtype, LATENT + ROPE, num_heads=num_heads, num_kv_heads=1, block_size=block_size, query_len=query_len)


def _name(batch: Batch, quantised: str | None = None) -> str:
    special = f"-q{batch.query_len}" if batch.query_len > 1 else ""
    special += f"-{quantised}" if quantised else ""
    return f"mla-{dtype_name(batch.dtype)}-h{batch.num_heads}-d{LATENT}+{ROPE}-bs{batch.block_size}{special}"


def _ours(
    dtype: torch.dtype,
    num_heads: int,
    *,
    block_size: int = 16,
    query_len: int = 1,
    quantised: FormatName | None = None,
) -> Case:
    batch = _batch(dtype, num_heads, block_size, query_len)
    shape = (batch.num_blocks, block_size, LATENT + ROPE)
    codes = Batch(torch.uint8, LATENT + ROPE, num_heads=num_heads, num_kv_heads=1, block_size=block_size)
    cache = (codes if quantised else batch).pool(*shape)
    query = batch.query()
    out = query.new_empty(*query.shape[:2], LATENT)
    scale = torch.ones(1) if quantised else None

    def launch() -> None:
        mla_decode(
            query,
            cache,
            out,
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            max_query_len=query_len,
            scale=batch.scale,
            cache_format=quantised,
            cache_scale=scale,
        )

    special = "-special" if quantised or query_len > 1 else ""
    return Case(_name(batch, quantised), "ours", f"mla-{num_heads}{special}", batch, KERNELS, launch, "latent")
