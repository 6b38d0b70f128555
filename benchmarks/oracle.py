"""What the results must be: plain torch, float64 where numbers are computed; nothing of pagedkv or of vLLM."""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of the dtypes that are measured."""


def attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_len: int, query_len: int
) -> Tensor:
    """Return causal attention in float64, on the device of the inputs; the scale is head_size ** -0.5.

    Args:
        query: `[num_seqs * query_len, num_q_heads, head_size]`; the last `query_len` positions of each sequence.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_size]`.
        value_cache: Like `key_cache`.
        block_table: `[num_seqs, max_blocks]`.
        seq_len: Tokens of every sequence.
        query_len: Query tokens of every sequence.
    """
    num_tokens, num_q_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_q_heads // num_kv_heads
    out = torch.empty(num_tokens, num_q_heads, head_size, dtype=torch.float64, device=query.device)
    position = torch.arange(seq_len, device=query.device)
    hidden = position[None, :] > position[seq_len - query_len :, None]
    for seq, blocks in enumerate(block_table.long()):
        rows = slice(seq * query_len, (seq + 1) * query_len)
        keys = key_cache[blocks].flatten(0, 1)[:seq_len]
        values = value_cache[blocks].flatten(0, 1)[:seq_len]
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            scores = query[rows, heads].double().transpose(0, 1) @ keys[:, head].double().T / math.sqrt(head_size)
            weights = torch.softmax(scores.masked_fill_(hidden, -math.inf), dim=-1)
            out[rows, heads] = (weights @ values[:, head].double()).transpose(0, 1)
    return out


def row_error(out: Tensor, golden: Tensor) -> float:
    """Return the largest |out - golden| / |golden| over (token, head) rows; infinite where `out` is not finite."""
    error = ((out.double() - golden).norm(dim=-1) / golden.norm(dim=-1)).max().item()
    return error if math.isfinite(error) else math.inf


def attention_bound(dtype: torch.dtype) -> float:
    """Return the largest accepted `row_error`, 2 u: weights and result rounded once each (tests/tolerances.py)."""
    return 2 * UNIT_ROUNDOFF[dtype]


def copy_error(out: Tensor, golden: Tensor) -> float:
    """Return the share of elements that differ in any bit; a copy has no tolerance."""
    different = (out.view(torch.int16) != golden.view(torch.int16)).sum().item()
    return different / golden.numel()
