# SPDX-License-Identifier: Apache-2.0
"""What the Mamba kernels must compute: plain loops in float64. The recurrence is that of `pagedkv.ssd.reference`."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from pagedkv.ssd import reference
from pagedkv.ssd.reference import F64, Scan


def step_size(dt: Tensor, *bounds: Tensor | None, **options: object) -> Tensor:
    """`reference.step_size`, on the CPU."""
    return reference.step_size(dt.cpu(), *bounds, **options)


def scan(x: Tensor, *operands: Tensor, **options: Tensor | None) -> Scan:
    """`reference.scan`, on the CPU."""
    return reference.scan(x.cpu(), *operands, **options)


class Delta(NamedTuple):
    """One sequence of a gated delta rule."""

    y: Tensor  # [tokens, heads, values]
    scale: Tensor  # [tokens, heads]: root of the sum of squares of what is added up in a row, and of the result
    state: Tensor  # [tokens, heads, values, keys], behind each token


def delta(
    q: Tensor,  # [tokens, key heads, keys]
    k: Tensor,  # as q
    v: Tensor,  # [tokens, heads, values]
    g: Tensor,  # [tokens, heads], or of Kimi Delta Attention [tokens, heads, keys]: logarithm of the decay
    beta: Tensor,  # [tokens, heads]
    *,
    initial: Tensor | None = None,  # [heads, values, keys]
    normalised: bool = True,
) -> Delta:
    """S_t = S_{t-1} exp(g_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and y_t = S_t q_t / sqrt(keys).

    Gated delta networks (Yang, Kautz and Hatamizadeh 2024, section 3.1); a decay for each key is Kimi Linear's (2025,
    section 3). q and k are divided by their norms where `normalised` says so; 1e-6 is added to the sum of squares.
    """
    q, k, v, g, beta = (tensor.to("cpu", F64) for tensor in (q, k, v, g, beta))
    if normalised:
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    tokens, heads = v.shape[:2]
    q, k = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (q / q.shape[-1] ** 0.5, k))
    decay = g.exp().reshape(tokens, heads, 1, -1)
    state = q.new_zeros(heads, v.shape[-1], k.shape[-1]) if initial is None else initial.to("cpu", F64)
    y, squares, states = torch.zeros_like(v), torch.zeros_like(v), []
    for t in range(tokens):
        state = decay[t] * state
        change = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + change[..., None] * k[t, :, None, :]
        terms = state * q[t, :, None, :]
        y[t], squares[t] = terms.sum(-1), terms.square().sum(-1)
        states.append(state)
    return Delta(y, (squares + y.square()).sum(-1).sqrt(), torch.stack(states))


def delta_gate(raw: Tensor, A_log: Tensor, bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Logarithm of a decay: -exp(A_log) softplus(raw + bias), or lower_bound sigmoid(exp(A_log) (raw + bias))."""
    raw, A, bias = raw.to("cpu", F64), A_log.to("cpu", F64).exp(), bias.to("cpu", F64)
    A = A.reshape(-1, *[1] * (raw.dim() - 2))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(A * (raw + bias))
    return -A * torch.nn.functional.softplus(raw + bias)


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
