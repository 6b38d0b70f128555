# SPDX-License-Identifier: Apache-2.0
"""Mamba's recurrence token by token in float64, importing nothing but torch (Dao and Gu 2024, section 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

F64 = torch.float64


class Scan(NamedTuple):
    """One sequence."""

    y: Tensor  # [tokens, heads, head_size]
    scale: Tensor  # [tokens, heads]: root of the sum of squares of what is added up in a row, and of the result
    state: Tensor  # [heads, head_size, state], after the last token


def step_size(dt: Tensor, bias: Tensor | None, *, softplus: bool, limit: tuple[float, float] | None = None) -> Tensor:
    """Return dt as the recurrence sees it: log(1 + exp(dt + bias)), clamped."""
    dt = dt.to(F64)
    if bias is not None:
        dt = dt + bias.to(dt)
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
    x, dt, A, B, C = (tensor.to(x.device, F64) for tensor in (x, dt, A, B, C))
    tokens, heads, head_size = x.shape
    group = torch.arange(heads, device=x.device) // (heads // B.shape[1])
    dt = dt if dt.dim() == 3 else dt[..., None].expand(x.shape)
    A = A if A.dim() == 3 else A[:, None, None]
    h = x.new_zeros(heads, head_size, B.shape[2]) if initial is None else initial.to(x, copy=True)
    y = torch.zeros_like(x)
    squares = torch.zeros_like(x)
    for t in range(tokens):
        h = torch.exp(dt[t, :, :, None] * A) * h + (dt[t] * x[t])[:, :, None] * B[t, group, None, :]
        terms = h * C[t, group, None, :]
        y[t], squares[t] = terms.sum(-1), terms.square().sum(-1)
    if D is not None:
        skip = x * D.to(x).reshape(heads, -1)
        y, squares = y + skip, squares + skip.square()
    squares += y.square()
    if z is not None:
        z = z.to(x)
        gate = z * torch.sigmoid(z)
        y, squares = y * gate, squares * gate.square()
    return Scan(y, squares.sum(-1).sqrt(), h)
