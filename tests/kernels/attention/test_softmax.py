# SPDX-License-Identifier: Apache-2.0
"""Parts of the softmax alone: how weights are rounded, and how far a reciprocal is off."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.attending import HALF

from pagedkv.attention.softmax import narrow, reciprocal

pytestmark = pytest.mark.device
TOKENS = 4096


@triton.jit
def parts_kernel(weights, narrowed, numbers, inverse, TOKENS: tl.constexpr):
    token = tl.arange(0, TOKENS)
    tl.store(narrowed + token, narrow(tl.load(weights + token), narrowed.dtype.element_ty))
    tl.store(inverse + token, reciprocal(tl.load(numbers + token)))


def run(weights, numbers, device):
    dtype = getattr(torch, HALF)
    narrowed, inverse = torch.full((TOKENS,), 7.0, dtype=dtype, device=device), torch.full_like(numbers, 7.0)
    parts_kernel[(1,)](weights, narrowed, numbers, inverse, TOKENS=TOKENS)
    return narrowed, inverse


def test_weights_are_rounded_to_the_nearest(device):
    """Half a unit in the last place is the bound of rounding to even too; where it is a tie, both neighbours are."""
    gen = torch.Generator().manual_seed(3)
    weights = torch.exp2(-14 * torch.rand(TOKENS, generator=gen)) * (1 + torch.rand(TOKENS, generator=gen))
    weights[:8] = torch.tensor([0.0, 1.0, 2.0**-14, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-9 + 2**-20, 255.5, 32768.0])
    narrowed, _ = run(weights.to(device), torch.ones(TOKENS, device=device), device)
    half = torch.finfo(narrowed.dtype).eps / 2
    exponent = torch.frexp(weights.double()).exponent - 1
    error = (narrowed.double().cpu() - weights.double()).abs()
    assert (error <= half * torch.exp2(exponent.double())).all()


def test_what_is_no_number_stays_none(device):
    weights = torch.full((TOKENS,), float("nan"))
    weights[1::2] = float("inf")
    narrowed, _ = run(weights.to(device), torch.ones(TOKENS, device=device), device)
    assert narrowed[::2].isnan().all()
    assert (narrowed[1::2] == float("inf")).all()


def test_a_reciprocal_is_off_by_a_unit_at_most(device):
    numbers = 1 + torch.exp2(126 * torch.rand(TOKENS, generator=torch.Generator().manual_seed(5)))
    numbers[:3] = torch.tensor([1.0, 2.0, float("inf")])
    _, inverse = run(numbers.to(device), numbers.to(device), device)
    exact = 1 / numbers.double()
    assert ((inverse.double().cpu() - exact).abs() <= 2**-23 * exact).all()
    assert inverse[:3].tolist() == [1.0, 0.5, 0.0]
