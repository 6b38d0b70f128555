"""One launch to compile: whose it is, what it does, and what it is expected to compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from .tensors import Batch

Side = Literal["ours", "vllm"]


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""By the names used in ids."""


@dataclass(frozen=True)
class Case:
    """One launch to compile."""

    name: str
    """Operation, dtype and shapes, as in a finding's id."""
    side: Side
    operation: str
    """What ours and theirs have in common: decode, extend, prefill, write, gather."""
    batch: Batch
    kernels: tuple[str, ...]
    """Triton functions that the launch must compile, in this order."""
    launch: Callable[[], None]
    layout: str
    """Of the cache, for the reader."""
    optional: tuple[str, ...] = ()
    """What it may compile after those; nothing else."""
    scattered: tuple[str, ...] = ()
    """Pointers through which no lane can read 16 consecutive bytes in that layout."""
    expected_lds: int = 0
    """For the planted defect: the LDS it must be caught with."""

    def launches(self, kernels: tuple[str, ...]) -> bool:
        """Whether these are the Triton functions that the case should compile."""
        count = len(self.kernels)
        return kernels[:count] == self.kernels and set(kernels[count:]) <= set(self.optional)

    @property
    def shape(self) -> tuple[str, str, int, int]:
        """What must agree for ours and theirs to be compared."""
        return self.operation, self.dtype, self.batch.head_size, self.batch.block_size

    @property
    def labels(self) -> dict[str, str]:
        """What the case is about, in words."""
        return {
            "side": self.side,
            "operation": self.operation,
            "dtype": self.dtype,
            "head_size": str(self.batch.head_size),
            "block_size": str(self.batch.block_size),
            "layout": self.layout,
            "cache": "2GiB+" if self.batch.big else "small",
        }

    @property
    def dtype(self) -> str:
        """Of the cache, as in ids."""
        return dtype_name(self.batch.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in ids."""
    return {value: name for name, value in DTYPES.items()}[dtype]
