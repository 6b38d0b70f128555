"""What is compiled: every configuration we promise, vLLM's kernels beside it, and the defect that must be caught."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import vllm_kernels
from .case import Case, dtype_name
from .mla_cases import our_mla_cases, vllm_mla_cases
from .our_kernels import our_cases
from .tensors import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

PR_38502_TILE = 2048
"""The defect's tile: the whole physical block of Jamba."""


def all_cases() -> list[Case]:
    """Every case, ours first."""
    return [*our_cases(), *our_mla_cases(), *vllm_cases(), *vllm_mla_cases(), pr_38502()]


def vllm_cases() -> list[Case]:
    """Theirs, at the shapes that decide: their largest tile (128), their other one (32), and each head size."""
    cases = []
    for head_size, block_size in ((64, 2048), (128, 2048), (128, 544), (256, 544)):
        batch = Batch(torch.bfloat16, head_size, num_heads=32, num_kv_heads=8, block_size=block_size)
        tile = vllm_kernels.decode_tile(block_size)
        cases += [
            _theirs(
                "decode",
                "x-packed",
                batch,
                ("kernel_paged_attention_2d",),
                vllm_kernels.paged_attention_2d(batch, tile),
            ),
            _theirs(
                "decode",
                "packed",
                batch,
                ("kernel_unified_attention", "reduce_segments"),
                vllm_kernels.unified_attention(batch, segments=16),
            ),
        ]
    for head_size, block_size in ((64, 2048), (128, 544), (256, 544)):
        batch = Batch(torch.bfloat16, head_size, num_heads=32, num_kv_heads=8, block_size=block_size, query_len=512)
        launch = vllm_kernels.unified_attention(batch, segments=0)
        cases.append(_theirs("prefill", "packed", batch, ("kernel_unified_attention",), launch))
    return cases


def pr_38502() -> Case:
    """The decode kernel of vLLM with the tile it had before PR 38502.

    A tile of 2048 tokens x head size 64 x 2 bytes of bf16 is 262144 bytes of LDS, four times what gfx942 has. If this
    audit lets it pass, the audit is broken.
    """
    batch = Batch(torch.bfloat16, head_size=64, num_heads=32, num_kv_heads=8, block_size=PR_38502_TILE)
    return Case(
        name="pr-38502-tile-2048-d64",
        side="vllm",
        operation="proof",
        layout="x-packed",
        batch=batch,
        kernels=("kernel_paged_attention_2d",),
        launch=vllm_kernels.paged_attention_2d(batch, PR_38502_TILE),
        expected_lds=PR_38502_TILE * 64 * 2,
    )


def _theirs(operation: str, layout: str, batch: Batch, kernels: tuple[str, ...], launch: Callable[[], None]) -> Case:
    return Case(
        name=f"{operation}-{dtype_name(batch.dtype)}-q{batch.num_heads}kv{batch.num_kv_heads}"
        f"-d{batch.head_size}-bs{batch.block_size}-{layout}",
        side="vllm",
        operation=operation,
        layout=layout,
        batch=batch,
        kernels=kernels,
        launch=launch,
    )
