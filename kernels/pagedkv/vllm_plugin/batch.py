# SPDX-License-Identifier: Apache-2.0
"""A batch of a step, as the arguments of the kernel calls that serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from vllm.v1.attention.backend import AttentionMetadata

if TYPE_CHECKING:
    import torch


class Part(TypedDict):
    """Neighbouring sequences of a batch that one kernel call serves, as its arguments. S sequences, M blocks each."""

    causal: bool
    """False for cross attention."""
    max_query_len: int
    """1 for sequences that decode."""
    max_seq_len: int
    """An upper bound, in tokens."""
    query_start_loc: torch.Tensor
    """[S + 1] int32; begins where the part begins in the query."""
    seq_lens: torch.Tensor
    """[S] int32: context and query together; in cross attention the tokens of the encoder."""
    block_table: torch.Tensor
    """[S, M] int32."""
    batch_invariant: bool
    """Whether a sequence must get the same bits whatever batch it is in."""


@dataclass
class PagedKVMetadata(AttentionMetadata):
    """One batch of one KV cache group."""

    num_actual_tokens: int
    """Query tokens without the padding rows of query and output."""
    whole: Part
    """All sequences."""
    parts: list[Part]
    """The sequences that decode, those that verify drafts, and the others; any may be missing. Fewer query tokens have
    cheaper programs, so a batch that mixes them is served by several calls."""
