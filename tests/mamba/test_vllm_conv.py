# SPDX-License-Identifier: Apache-2.0
"""vLLM's causal convolution in Triton: prefill of packed sequences and decode, both on a pool of histories."""

from __future__ import annotations

import itertools

import pytest
import torch
from mamba import oracle
from mamba.data import DTYPES, check
from support.pools import assert_same_bits

from pagedkv.audit import imports

pytestmark = pytest.mark.device

STARTS = [0, 2, 3, 20, 85, 90]
"""Lengths 2 and 1 (shorter than the history), 17 and 65 (not multiples of the 8 tokens of a program), and padding."""

SLOTS = [4, 1, 6, 3, 0]
"""0 is vLLM's null block: its sequence is padding. 2, 5 and 7 belong to nobody."""

KNOWN = [True, False, True, False, True]
"""Whether a sequence continues one."""

CHANNELS = 300


def layer(width: int, dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, bias, and the pool [8, channels, width - 1], channels last, NaN but for the histories that are known."""
    torch.manual_seed(width)
    kind = getattr(torch, dtype)
    states = torch.full((8, width - 1, CHANNELS + 8), float("nan"), dtype=kind, device=device)[..., :CHANNELS]
    states = states.transpose(1, 2)
    for slot, known in zip(SLOTS, KNOWN, strict=True):
        if slot and known:
            states[slot] = torch.randn(CHANNELS, width - 1).to(states)
    return torch.randn(CHANNELS, width).to(device, kind), torch.randn(CHANNELS).to(device, kind), states


class GridFirst:
    """A kernel whose grid is computed from the tensors themselves.

    vLLM's grid fills two of them on the way (which sequence and which piece of it each program takes); the interpreter
    would show it its own wrappers instead.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            return self.kernel[grid(dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs)](*args, **kwargs)

        return launch


@pytest.fixture
def conv(monkeypatch):
    module = imports.vllm("causal_conv1d")
    monkeypatch.setattr(module, "_causal_conv1d_fwd_kernel", GridFirst(module._causal_conv1d_fwd_kernel))
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4], ids=lambda width: f"width{width}")
def test_causal_conv1d_fn(dtype, width, device, conv, record_property):
    weight, bias, states = layer(width, dtype, device)
    rows = torch.full((STARTS[-1], CHANNELS + 24), float("nan"), dtype=weight.dtype, device=device)
    rows[:, :CHANNELS] = torch.randn(STARTS[-1], CHANNELS).to(rows)
    x = rows[:, :CHANNELS]
    before = states.clone()
    out = conv.causal_conv1d_fn(
        x.T,
        weight,
        bias,
        states,
        torch.tensor(STARTS).int().to(device),
        cache_indices=torch.tensor(SLOTS).int().to(device),
        has_initial_state=torch.tensor(KNOWN).to(device),
    ).T
    for (begin, end), slot, known in zip(itertools.pairwise(STARTS), SLOTS, KNOWN, strict=True):
        if slot == 0:
            assert out[begin:end].isnan().all(), "padding was computed"
            continue
        history = before[slot] if known else torch.zeros_like(before[slot])
        golden = oracle.causal_conv(x[begin:end], weight, bias, history)
        check(out[begin:end], golden, "conv", dtype, record_property)
        before[slot] = torch.cat([history.T, x[begin:end]])[-(width - 1) :].T
    assert_same_bits(states, before, "histories")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4], ids=lambda width: f"width{width}")
def test_causal_conv1d_update(dtype, width, device, conv, record_property):
    weight, bias, states = layer(width, dtype, device)
    for slot in SLOTS[:-1]:
        states[slot] = torch.randn(CHANNELS, width - 1).to(states)
    x = torch.randn(len(SLOTS), CHANNELS).to(device, weight.dtype)
    before, out = states.clone(), torch.empty_like(x)
    conv.causal_conv1d_update(
        x, states, weight, bias, "silu", conv_state_indices=torch.tensor(SLOTS).int().to(device), out=out
    )
    for row, slot in enumerate(SLOTS):
        if slot == 0:
            assert out[row].isnan().all(), "padding was computed"
            continue
        golden = oracle.causal_conv(x[row : row + 1], weight, bias, before[slot])
        check(out[row : row + 1], golden, "conv", dtype, record_property)
        before[slot] = torch.cat([before[slot][:, 1:], x[row][:, None]], dim=1)
    assert_same_bits(states, before, "histories")
