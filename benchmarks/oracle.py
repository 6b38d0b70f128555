# SPDX-License-Identifier: Apache-2.0
"""Reference results: plain torch, float64 where numbers are computed; of pagedkv references alone, nothing of vLLM."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedkv.gdn import reference as delta
from pagedkv.ssd import reference as ssd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of each measured dtype."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One side (K or V) of a cache, `[num_blocks, block_size, num_kv_heads, head_size]`, as it was stored."""

    elements: Tensor
    """Values; with `scale` uint8 codes."""
    dtype: torch.dtype | None = None
    """The FP8 format of the codes."""
    scale: Tensor | None = None
    """What a code's value is multiplied by: `[]` or `[num_blocks, block_size, num_kv_heads]`."""

    def read(self, blocks: Tensor, seq_len: int, head: int) -> Tensor:
        """Return the first `seq_len` tokens `[seq_len, head_size]` of these blocks in float64."""
        rows = self.elements[:, :, head][blocks].flatten(0, 1)[:seq_len]
        if self.scale is None or self.dtype is None:
            return rows.double()
        scale = self.scale[:, :, head][blocks].flatten()[:seq_len, None] if self.scale.dim() else self.scale
        return rows.contiguous().view(self.dtype).double() * scale.double()


def attention(
    query: Tensor,
    key: Stored,
    value: Stored,
    block_table: Tensor,
    lens: Sequence[tuple[int, int]],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention in float64, on the device of the inputs; the scale is head_size ** -0.5.

    Args:
        query: `[num_tokens, num_q_heads, head_size]`; of each sequence the last `query_len` positions.
        key: The K side of the cache.
        value: The V side.
        block_table: `[num_seqs, max_blocks]`.
        lens: (seq_len, query_len) of each sequence.
        window: Tokens that a query sees, its own included; None for all before it.
        softcap: Scores x become softcap * tanh(x / softcap) (Gemma 2, arXiv 2408.00118); None leaves them.
        sinks: `[num_q_heads]`, one more score of each head, without a value (gpt-oss; arXiv 2309.17453).
    """
    num_tokens, num_q_heads, head_size = query.shape
    num_kv_heads, value_size = key.elements.shape[2], value.elements.shape[3]
    group = num_q_heads // num_kv_heads
    out = torch.empty(num_tokens, num_q_heads, value_size, dtype=torch.float64, device=query.device)
    begin = 0
    for blocks, (seq_len, query_len) in zip(block_table.long(), lens, strict=True):
        rows = slice(begin, begin + query_len)
        begin += query_len
        position = torch.arange(seq_len, device=query.device)
        ahead = position[None, :] - position[seq_len - query_len :, None]
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        used = blocks[: -(-seq_len // key.elements.shape[1])]
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            keys, values = key.read(used, seq_len, head), value.read(used, seq_len, head)
            scores = query[rows, heads].double().transpose(0, 1) @ keys.T / math.sqrt(head_size)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill_(hidden, -math.inf)
            if sinks is not None:
                sink = sinks[heads].double()[:, None, None].expand(-1, query_len, 1)
                weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
            else:
                weights = torch.softmax(scores, dim=-1)
            out[rows, heads] = (weights @ values).transpose(0, 1)
    return out


def row_error(out: Tensor, golden: Tensor) -> float:
    """Return the largest |out - golden| / |golden| over (token, head) rows; infinite where `out` is not finite."""
    error = ((out.double() - golden).norm(dim=-1) / golden.norm(dim=-1)).max().item()
    return error if math.isfinite(error) else math.inf


def attention_bound(dtype: torch.dtype, *, scaled_rows: bool = False) -> float:
    """Return the largest accepted `row_error` (tests/support/tolerances.py).

    2 u: weights and result rounded once each. 2.5 u where each token has a scale: V too is rounded after scaling. One
    scale for all of an FP8 cache rounds nothing as long as it is a power of two.
    """
    return (2.5 if scaled_rows else 2) * UNIT_ROUNDOFF[dtype]


def scan_error(
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    initial: Tensor,
    *,
    A: Tensor,
    D: Tensor,
    states: Tensor | None = None,
) -> float:
    """Return the largest error of a (token, head) row against Mamba-2's recurrence, token by token in float64.

    With `states`, the states after the sequences are judged too.

    Args:
        out: `[sequences * tokens, heads, head_size]`, sequences of one length.
        x: As `out`.
        dt: `[sequences * tokens, heads]`.
        B: `[sequences * tokens, groups, state]`.
        C: As `B`.
        initial: `[sequences, heads, head_size, state]`.
        A: `[heads]`.
        D: `[heads]`.
        states: As `initial`.

    Returns:
        Relative to the root of the sum of squares of what is added up in a row, and to the norm of a head's state;
        infinite where a result is not finite.
    """
    out, x, dt, B, C = _as_heads(len(initial), out, x, dt, B, C)
    A, D = (each.repeat(len(initial)) for each in (A, D))
    golden = ssd.scan(x, dt, A, B, C, D=D, initial=initial.flatten(0, 1))
    worst = ((out - golden.y).norm(dim=-1) / golden.scale).max()
    if states is not None:
        worst = torch.maximum(_state_error(states, golden.state), worst)
    return worst.item() if torch.isfinite(worst) else math.inf


def _as_heads(sequences: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield `[tokens, sequences * heads, ...]` of each `[sequences * tokens, heads, ...]`.

    One recurrence then computes all sequences: its steps are many and small.
    """
    for tensor in tensors:
        yield tensor.unflatten(0, (sequences, -1)).transpose(0, 1).flatten(1, 2)


def _state_error(states: Tensor, golden: Tensor) -> Tensor:
    """Return the largest error of a head's state, `[sequences, heads, ...]`, relative to the norm of the golden one."""
    off = (states.flatten(0, 1) - golden).flatten(1)
    return (off.norm(dim=-1) / golden.flatten(1).norm(dim=-1)).max()


def scan_bound(dtype: torch.dtype) -> float:
    """Return the largest accepted `scan_error`: 3 u (tests/support/tolerances.py)."""
    return 3 * UNIT_ROUNDOFF[dtype]


def delta_error(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor | None = None,
) -> float:
    """Return the largest error of a (token, head) row, or of a head's state, against the gated delta rule in float64.

    Args:
        out: `[sequences * judged tokens, heads, value size]`, sequences of one length, of each the last tokens.
        q: `[sequences * tokens, key heads, key size]`.
        k: As `q`.
        v: `[sequences * tokens, heads, value size]`.
        a: `[sequences * tokens, heads]`.
        b: As `a`.
        initial: `[sequences, heads, value size, key size]`.
        A_log: `[heads]`.
        dt_bias: `[heads]`.
        states: As `initial`, after the sequences.

    Returns:
        Relative as `scan_error`.
    """
    decay = delta.log_decay(a, A_log, dt_bias)
    q, k, v, g, beta, out = _as_heads(len(initial), q, k, v, decay, b.double().sigmoid(), out)
    golden = delta.gated_delta_rule(q, k, v, g, beta, initial.flatten(0, 1))
    worst = ((out - golden.y[-len(out) :]).norm(dim=-1) / golden.scale[-len(out) :]).max()
    if states is not None:
        worst = torch.maximum(_state_error(states, golden.states[-1]), worst)
    return worst.item() if torch.isfinite(worst) else math.inf


def delta_bound(dtype: torch.dtype, *, step: bool = False) -> float:
    """Return the largest accepted `delta_error`: 4 u, of one step 1.5 u (tests/support/tolerances.py)."""
    return (1.5 if step else 4) * UNIT_ROUNDOFF[dtype]


def copy_error(out: Tensor, golden: Tensor) -> float:
    """Return the share of elements that differ in any bit; a copy has no tolerance."""
    different = (out.view(torch.int16) != golden.view(torch.int16)).sum().item()
    return different / golden.numel()
