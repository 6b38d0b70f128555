# SPDX-License-Identifier: Apache-2.0
"""CPU tensors with the shapes, strides and sizes of a serving batch, for launches that only compile.

Nothing is computed, so the values do not matter; what Triton specialises on does: divisibility of pointers and strides
by 16, strides equal to 1, and whether a tensor's storage is below 2 GiB. The last decides between buffer instructions
(32-bit offsets) and global ones (64-bit). A serving KV cache is far above 2 GiB, one in a unit test far below, and so
both kinds of code exist in the world. The memory is reserved and never touched.
"""

from __future__ import annotations

import math
import mmap
import warnings
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from pagedkv import layout
from pagedkv.cache.cache import PagedCache, Quantisation

if TYPE_CHECKING:
    from pagedkv.configurations import Scales
    from pagedkv.fp8.formats import FormatName
    from pagedkv.layout import Name

_BIG = 2**31
"""Bytes at which Triton's AMD backend stops using buffer instructions for a tensor."""


@dataclass(frozen=True)
class Batch:
    """One batch over one paged cache."""

    dtype: torch.dtype
    head_size: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    block_size: int
    query_len: int = 1
    """Tokens of each sequence in this step: 1 is decode."""
    seq_len: int = 8192
    num_seqs: int = 16
    big: bool = True
    """Whether the cache is 2 GiB or more, as in serving."""

    def labels(self, operation: str, layout: str) -> dict[str, str]:
        """Labels of a finding about an operation on this batch and a cache of that layout."""
        return {
            "operation": operation,
            "dtype": self.dtype_name,
            "head_size": str(self.head_size),
            "block_size": str(self.block_size),
            "layout": layout,
            "cache": "2GiB+" if self.big else "small",
        }

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in ids of cases."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this step, over all sequences."""
        return self.num_seqs * self.query_len

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return 1 / math.sqrt(self.head_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: enough for one sequence, or enough for K and V together to pass 2 GiB each."""
        enough = -(-self.seq_len // self.block_size)
        if not self.big:
            return enough
        block_bytes = self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return max(enough, _BIG // block_bytes + 16)

    @cached_property
    def block_table(self) -> torch.Tensor:
        """[num_seqs, max_num_blocks], int32."""
        blocks = -(-self.seq_len // self.block_size)
        return torch.zeros(self.num_seqs, -(-blocks // 16) * 16, dtype=torch.int32)

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """[num_seqs], int32."""
        return torch.full((self.num_seqs,), self.seq_len, dtype=torch.int32)

    @cached_property
    def query_start_loc(self) -> torch.Tensor:
        """[num_seqs + 1], int32."""
        return torch.arange(self.num_seqs + 1, dtype=torch.int32) * self.query_len

    def sequences(self) -> dict[str, Any]:
        """Arguments of attention that describe them, by the names of our launchers."""
        return {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "max_query_len": self.query_len,
        }

    def query(self) -> torch.Tensor:
        """[num_tokens, num_heads, head_size]; the output has the same shape."""
        return torch.empty(self.num_tokens, self.num_heads, self.head_size, dtype=self.dtype)

    def rows(self) -> torch.Tensor:
        """[num_tokens, num_kv_heads, head_size]: K or V of this step."""
        return torch.empty(self.num_tokens, self.num_kv_heads, self.head_size, dtype=self.dtype)

    def pool(self, *shape: int) -> torch.Tensor:
        """A cache of this shape: a piece of the one big reservation, or memory of its own size."""
        if not self.big:
            return torch.empty(shape, dtype=self.dtype)
        return _reservation().view(self.dtype)[: math.prod(shape)].view(shape)

    def paged_cache(self, name: Name, quantised: FormatName | None = None, scales: Scales = "tensor") -> PagedCache:
        """K and V where the layout `name` puts them, quantised if so asked."""
        dtype = torch.uint8 if quantised else self.dtype
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_size)
        plan = layout.describe(name, *shape, x=layout.vector_elements(dtype.itemsize))
        pool = _reservation().view(dtype) if self.big else torch.empty(plan.elements, dtype=dtype)
        key, value = (pool.as_strided(side.shape, side.strides, side.offset) for side in (plan.key, plan.value))
        if quantised is None:
            return PagedCache(key, value, plan.packing)
        per_scale = {"tensor": (1,), "head": (self.num_kv_heads,), "token": shape[:3]}[scales]
        key_scale, value_scale = torch.empty(2, *per_scale)
        return PagedCache(key, value, plan.packing, Quantisation(quantised, key_scale, value_scale))


@cache
def _reservation() -> torch.Tensor:
    """Address space for the largest cache, int8.

    Read-only, so that it counts as no memory (a fork would otherwise have to find all of it a second time), and so that
    a launcher that wrote to a cache from Python would be noticed.
    """
    pages = mmap.mmap(-1, 4 * _BIG, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(pages, dtype=torch.int8)
