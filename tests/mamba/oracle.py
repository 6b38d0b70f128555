# SPDX-License-Identifier: Apache-2.0
"""What the Mamba kernels must compute: plain loops in float64. The recurrences are `pagedkv`'s references."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pagedkv.gdn.reference import Delta, gated_delta_rule, log_decay
from pagedkv.ssd import reference
from pagedkv.ssd.reference import F64, Scan


def step_size(dt: Tensor, *bounds: Tensor | None, **options: object) -> Tensor:
    """`reference.step_size`, on the CPU."""
    return reference.step_size(dt.cpu(), *bounds, **options)


def scan(x: Tensor, *operands: Tensor, **options: Tensor | None) -> Scan:
    """`reference.scan`, on the CPU."""
    return reference.scan(x.cpu(), *operands, **options)


def delta(*operands: Tensor, initial: Tensor | None = None, normalised: bool = True) -> Delta:
    """`gated_delta_rule` with the state after each token, on the CPU."""
    operands = tuple(tensor.cpu() for tensor in operands)
    return gated_delta_rule(*operands, initial, normalised=normalised, every_state=True)


def delta_gate(raw: Tensor, *operands: Tensor | float | None) -> Tensor:
    """`log_decay`, on the CPU."""
    return log_decay(raw.cpu(), *operands)


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
