"""What is compiled: every configuration we promise, vLLM's kernels beside it, and the defect that must be caught."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from . import vllm_kernels
from .tensors import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

Side = Literal["ours", "vllm"]

PR_38502_TILE = 2048
"""The defect's tile: the whole physical block of Jamba."""


@dataclass(frozen=True)
class Case:
    """One launch to compile."""

    name: str
    """Operation, dtype and shapes, as in a finding's id."""
    side: Side
    operation: str
    """What ours and theirs have in common: decode, prefill, cache_write, cache_gather."""
    batch: Batch
    kernels: tuple[str, ...]
    """Triton functions that the launch must compile; it compiles nothing else."""
    launch: Callable[[], None]
    layout: str = "interleaved"
    """Of the cache, for the reader."""
    dense_rows: bool = True
    """Whether that layout lets a lane read 16 consecutive bytes of a row of K and of V."""
    expected_lds: int = 0
    """For the planted defect: the LDS it must be caught with."""

    @property
    def shape(self) -> tuple[str, str, int, int]:
        """What must agree for ours and theirs to be compared."""
        return self.operation, _dtype(self.batch), self.batch.head_size, self.batch.block_size

    @property
    def labels(self) -> dict[str, str]:
        """What the case is about, in words."""
        return {
            "side": self.side,
            "operation": self.operation,
            "dtype": _dtype(self.batch),
            "head_size": str(self.batch.head_size),
            "block_size": str(self.batch.block_size),
            "layout": self.layout,
            "cache": "2GiB+" if self.batch.big else "small",
        }


def all_cases() -> list[Case]:
    """Every case, ours first."""
    from .our_kernels import our_cases  # noqa: PLC0415 - theirs can be audited while ours does not import

    return [*our_cases(), *vllm_cases(), pr_38502()]


def vllm_cases() -> list[Case]:
    """Theirs, at the shapes that decide: their largest tile (128), their other one (32), and each head size."""
    cases = []
    for head_size, block_size in ((64, 2048), (128, 2048), (128, 544), (256, 544)):
        batch = Batch(torch.bfloat16, head_size, num_heads=32, num_kv_heads=8, block_size=block_size)
        tile = vllm_kernels.decode_tile(block_size)
        cases += [
            _theirs("decode", batch, ("kernel_paged_attention_2d",), vllm_kernels.paged_attention_2d(batch, tile)),
            _theirs(
                "decode",
                batch,
                ("kernel_unified_attention", "reduce_segments"),
                vllm_kernels.unified_attention(batch, segments=16),
            ),
        ]
    for head_size, block_size in ((64, 2048), (128, 544), (256, 544)):
        batch = Batch(torch.bfloat16, head_size, num_heads=32, num_kv_heads=8, block_size=block_size, query_len=512)
        launch = vllm_kernels.unified_attention(batch, segments=0)
        cases.append(_theirs("prefill", batch, ("kernel_unified_attention",), launch))
    return cases


def pr_38502() -> Case:
    """The decode kernel of vLLM with the tile it had before PR 38502.

    A tile of 2048 tokens x head size 64 x 2 bytes of bf16 is 262144 bytes of LDS, four times what gfx942 has. If this
    audit lets it pass, the audit is broken.
    """
    batch = Batch(torch.bfloat16, head_size=64, num_heads=32, num_kv_heads=8, block_size=PR_38502_TILE)
    return Case(
        name="pr-38502-tile-2048-hd64",
        side="vllm",
        operation="proof",
        batch=batch,
        kernels=("kernel_paged_attention_2d",),
        launch=vllm_kernels.paged_attention_2d(batch, PR_38502_TILE),
        expected_lds=PR_38502_TILE * 64 * 2,
    )


def _theirs(operation: str, batch: Batch, kernels: tuple[str, ...], launch: Callable[[], None]) -> Case:
    return Case(
        name=f"{operation}-{_dtype(batch)}-hd{batch.head_size}-bs{batch.block_size}",
        side="vllm",
        operation=operation,
        batch=batch,
        kernels=kernels,
        launch=launch,
    )


def _dtype(batch: Batch) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[batch.dtype]
