# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule token by token in float64, importing nothing but torch (Yang, Kautz and Hatamizadeh 2024)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

F64 = torch.float64


class Delta(NamedTuple):
    """One sequence."""

    y: Tensor  # [tokens, heads, values]
    scale: Tensor  # [tokens, heads]: root of the sum of squares of what is added up in a row, and of the result
    states: Tensor  # [tokens, heads, values, keys] after each token, or [1, heads, values, keys] after the last one


def log_decay(raw: Tensor, A_log: Tensor, bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Logarithm of a decay: -exp(A_log) softplus(raw + bias), or lower_bound sigmoid(exp(A_log) (raw + bias)).

    Args:
        raw: [tokens, heads] or [tokens, heads, keys].
        A_log: [heads].
        bias: [heads] or [heads, keys].
        lower_bound: Negative; None for the first form.
    """
    raw, A, bias = (tensor.to(raw.device, F64) for tensor in (raw, A_log, bias))
    A = A.exp().reshape(-1, *[1] * (raw.dim() - 2))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(A * (raw + bias))
    return -A * torch.nn.functional.softplus(raw + bias)


def gated_delta_rule(
    q: Tensor,  # [tokens, key heads, keys]
    k: Tensor,  # [tokens, key heads, keys]
    v: Tensor,  # [tokens, heads, values]
    g: Tensor,  # [tokens, heads], or of Kimi Delta Attention [tokens, heads, keys]: logarithm of the decay
    beta: Tensor,  # [tokens, heads]
    state: Tensor | None = None,  # [heads, values, keys] before the first token; None for zeros
    *,
    normalised: bool = True,
    every_state: bool = False,
) -> Delta:
    """One sequence: S_t = S_{t-1} exp(g_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and y_t = S_t q_t / sqrt(keys).

    A decay for each key is Kimi Linear's (2025, section 3).

    Args:
        q: Of a key head, which heads / key heads neighbouring heads share.
        k: Keys, as q.
        v: Values.
        g: At most 0.
        beta: Write strength.
        state: Of each head.
        normalised: Whether q and k are divided by their norms; 1e-6 is added to the sum of squares.
        every_state: Whether to return the state after each token, not only after the last one.
    """
    q, k, v, g, beta = (tensor.to(v.device, F64) for tensor in (q, k, v, g, beta))
    if normalised:
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    tokens, heads = v.shape[:2]
    q, k = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (q / q.shape[-1] ** 0.5, k))
    decay = g.exp().reshape(tokens, heads, 1, *g.shape[2:] or (1,))
    state = q.new_zeros(heads, v.shape[-1], k.shape[-1]) if state is None else state.to(v)
    y, squares, states = torch.zeros_like(v), torch.zeros_like(v), []
    for t in range(tokens):
        state = decay[t] * state
        change = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + change[..., None] * k[t, :, None, :]
        terms = state * q[t, :, None, :]
        y[t], squares[t] = terms.sum(-1), terms.square().sum(-1)
        if every_state:
            states.append(state)
    return Delta(y, (squares + y.square()).sum(-1).sqrt(), torch.stack(states or [state]))
