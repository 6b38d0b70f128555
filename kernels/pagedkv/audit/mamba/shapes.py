"""CPU tensors with the shapes of a serving batch of Mamba2 layers, for launches that only compile.

The layer is Bamba's and Granite 4's: 128 heads of 64 channels, state of 128, one group, chunks of 256, bfloat16, the
state kept in float32. Memory is reserved and never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

DTYPE = torch.bfloat16
SEQUENCES = 16
SEQUENCE_TOKENS = 512
POOL_BLOCKS = 520
"""Blocks of the state pool: 520 x 128 x 64 x 128 x 4 B pass 2 GiB, from where Triton addresses a tensor otherwise."""


@dataclass(frozen=True)
class Layer:
    """One Mamba2 layer; Mamba1 is a layer of one head and a state of 16."""

    heads: int = 128
    head_size: int = 64
    state: int = 128
    groups: int = 1
    chunk: int = 256
    conv_width: int = 4

    @property
    def tokens(self) -> int:
        """Of a prefill step."""
        return SEQUENCES * SEQUENCE_TOKENS

    @property
    def chunks(self) -> int:
        """Of a prefill step, none of them shared by two sequences."""
        return self.tokens // self.chunk

    @property
    def conv_channels(self) -> int:
        """Channels that go through the convolution: x, B and C."""
        return self.heads * self.head_size + 2 * self.groups * self.state

    def x(self, *lead: int) -> torch.Tensor:
        """[*lead, heads, head_size]."""
        return torch.empty(*lead, self.heads, self.head_size, dtype=DTYPE)

    def projection(self, *lead: int) -> torch.Tensor:
        """[*lead, groups, state]: B or C."""
        return torch.empty(*lead, self.groups, self.state, dtype=DTYPE)

    def per_head(self, *lead: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[*lead, heads]."""
        return torch.empty(*lead, self.heads, dtype=dtype)

    def chunk_states(self, *lead: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[*lead, heads, head_size, state]."""
        return torch.empty(*lead, self.heads, self.head_size, self.state, dtype=dtype)

    @cached_property
    def query_start_loc(self) -> torch.Tensor:
        """[sequences + 1], int32."""
        return torch.arange(SEQUENCES + 1, dtype=torch.int32) * SEQUENCE_TOKENS

    @cached_property
    def cu_chunk_seqlens(self) -> torch.Tensor:
        """[chunks + 1], int32: where each chunk begins."""
        return torch.arange(self.chunks + 1, dtype=torch.int32) * self.chunk

    @cached_property
    def last_chunks(self) -> torch.Tensor:
        """[sequences], int32: index of each sequence's last chunk."""
        return torch.arange(1, SEQUENCES + 1, dtype=torch.int32) * (SEQUENCE_TOKENS // self.chunk) - 1

    @cached_property
    def slots(self) -> torch.Tensor:
        """[sequences], int32: block of the pool that holds each sequence's state."""
        return torch.arange(1, SEQUENCES + 1, dtype=torch.int32)
