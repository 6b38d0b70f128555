# SPDX-License-Identifier: Apache-2.0
"""What the Mamba kernels must compute: plain loops over tokens in float64, importing nothing but torch.

Notation of Gu and Dao 2023 (section 3.2) and Dao and Gu 2024 (section 2): h is the state [heads, head_size, state].
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

F64 = torch.float64


class Scan(NamedTuple):
    y: Tensor  # [tokens, heads, head_size]
    scale: Tensor  # [tokens, heads]: what an error of a row is relative to, see tolerances.py
    state: Tensor  # [heads, head_size, state], behind the last token


def step_size(dt: Tensor, bias: Tensor | None, *, softplus: bool, limit: tuple[float, float] | None = None) -> Tensor:
    """dt as the recurrence sees it: log(1 + exp(dt + bias)), clamped."""
    dt = dt.to("cpu", F64)
    if bias is not None:
        dt = dt + bias.to("cpu", F64)
    if softplus:
        dt = torch.logaddexp(dt, torch.zeros_like(dt))
    return dt if limit is None else dt.clamp(*limit)


def scan(
    x: Tensor,  # [tokens, heads, head_size]
    dt: Tensor,  # [tokens, heads] or [tokens, heads, head_size], from step_size
    A: Tensor,  # [heads], or [heads, head_size, state]
    B: Tensor,  # [tokens, groups, state]
    C: Tensor,  # [tokens, groups, state]
    *,
    D: Tensor | None = None,  # [heads] or [heads, head_size]
    z: Tensor | None = None,  # as x
    initial: Tensor | None = None,  # [heads, head_size, state]
) -> Scan:
    """One sequence: h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t and y_t = (h_t C_t + D x_t) silu(z_t)."""
    x, dt, A, B, C = (tensor.to("cpu", F64) for tensor in (x, dt, A, B, C))
    tokens, heads, head_size = x.shape
    group = torch.arange(heads) // (heads // B.shape[1])
    dt = dt if dt.dim() == 3 else dt[..., None].expand(x.shape)
    A = A if A.dim() == 3 else A[:, None, None]
    h = torch.zeros(heads, head_size, B.shape[2], dtype=F64) if initial is None else initial.to("cpu", F64).clone()
    y = torch.zeros_like(x)
    squares = torch.zeros_like(x)
    for t in range(tokens):
        h = torch.exp(dt[t, :, :, None] * A) * h + (dt[t] * x[t])[:, :, None] * B[t, group, None, :]
        terms = h * C[t, group, None, :]
        y[t], squares[t] = terms.sum(-1), terms.square().sum(-1)
    if D is not None:
        skip = x * D.to("cpu", F64).reshape(heads, -1)
        y, squares = y + skip, squares + skip.square()
    squares += y.square()
    if z is not None:
        z = z.to("cpu", F64)
        gate = z * torch.sigmoid(z)
        y, squares = y * gate, squares * gate.square()
    return Scan(y, squares.sum(-1).sqrt(), h)


def gated_rms_norm(
    x: Tensor,  # [rows, channels]
    weight: Tensor,  # [channels]
    z: Tensor | None,  # as x
    *,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> Tensor:
    """x / rms(x) * weight within each group of channels; silu(z) multiplies the result, or x before."""
    x, weight = x.to("cpu", F64), weight.to("cpu", F64)
    gate = torch.ones_like(x)
    if z is not None:
        z = z.to("cpu", F64)
        gate = z * torch.sigmoid(z)
    if not norm_before_gate:
        x = x * gate
    groups = x.reshape(len(x), -1, group_size)
    out = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(x.shape) * weight
    return out * gate if norm_before_gate else out


def conv_states(x: Tensor, starts: list[int], width: int) -> Tensor:
    """The last `width` tokens of each sequence, zeros in front of a shorter one: [sequences, channels, width].

    Args:
        x: [tokens, channels].
        starts: First token of each sequence, and the number of tokens.
        width: Tokens to keep.
    """
    states = torch.zeros(len(starts) - 1, x.shape[1], width, dtype=x.dtype)
    for sequence, (begin, end) in enumerate(itertools.pairwise(starts)):
        for back in range(min(width, end - begin)):
            states[sequence, :, width - 1 - back] = x[end - 1 - back].cpu()
    return states


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor, history: Tensor) -> Tensor:
    """silu(bias + sum over j of weight_j x_{t - width + 1 + j}) of one sequence: [tokens, channels].

    Args:
        x: [tokens, channels].
        weight: [channels, width].
        bias: [channels].
        history: [channels, width - 1], the tokens before the first, zeros for a new sequence.
    """
    x, weight, bias, history = (tensor.to("cpu", F64) for tensor in (x, weight, bias, history))
    line = torch.cat([history.T, x])
    width = weight.shape[1]
    out = torch.stack([bias + (line[t : t + width] * weight.T).sum(0) for t in range(len(x))])
    return out * torch.sigmoid(out)
