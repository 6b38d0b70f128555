# SPDX-License-Identifier: Apache-2.0
"""Parts of the softmax alone: how numbers are rounded, and how far a reciprocal is off."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.attending import HALF

from pagedkv.attention.softmax import narrow, reciprocal, widen

pytestmark = pytest.mark.device
TOKENS = 4096


NANS = (0x7FC00000, 0x7F800001, 0x7F808000, 0x7FFF8000, 0x7FFFFFFF)  # quiet, signalling, and with every bit


@triton.jit
def parts_kernel(numbers, narrowed, inverse, TOKENS: tl.constexpr):
    token = tl.arange(0, TOKENS)
    DTYPE: tl.constexpr = narrowed.dtype.element_ty
    tl.store(narrowed + token, narrow(widen(tl.load(numbers + token), DTYPE), DTYPE))
    tl.store(inverse + token, reciprocal(tl.load(numbers + token)))


def run(numbers, device):
    """`[TOKENS]` fp32 numbers, of which the first are given and the rest 1, narrowed and inverted."""
    given = torch.ones(TOKENS, device=device)
    given[: len(numbers)] = numbers.to(device)
    narrowed, inverse = torch.full((TOKENS,), 7.0, dtype=getattr(torch, HALF), device=device), torch.full_like(given, 7)
    parts_kernel[(1,)](given, narrowed, inverse, TOKENS=TOKENS)
    return narrowed[: len(numbers)].cpu(), inverse[: len(numbers)].cpu()


def test_numbers_are_rounded_to_the_nearest(device):
    """Half a unit in the last place is the bound of rounding to even too; where it is a tie, both neighbours are."""
    gen = torch.Generator().manual_seed(3)
    numbers = torch.exp2(-14 * torch.rand(TOKENS, generator=gen)) * (1 + torch.rand(TOKENS, generator=gen))
    numbers[:8] = torch.tensor([0.0, 1.0, 2.0**-14, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-9 + 2**-20, 255.5, 32768.0])
    numbers[1::2] *= -1
    narrowed, _ = run(numbers, device)
    half = torch.finfo(narrowed.dtype).eps / 2
    exponent = torch.frexp(numbers.double()).exponent - 1
    error = (narrowed.double() - numbers.double()).abs()
    assert (error <= half * torch.exp2(exponent.double())).all()


def test_zeros_and_infinities_keep_their_sign(device):
    """So do the largest fp32 numbers, which are beyond the range of every narrower type."""
    largest, infinity = torch.finfo(torch.float32).max, float("inf")
    narrowed, _ = run(torch.tensor([0.0, -0.0, infinity, -infinity, largest, -largest]), device)
    assert narrowed.tolist() == [0.0, 0.0, infinity, -infinity, infinity, -infinity]
    assert torch.signbit(narrowed).tolist() == [False, True] * 3


def test_a_nan_of_any_bits_stays_nan(device):
    bits = torch.tensor([sign | nan for nan in NANS for sign in (0, 0x80000000)], dtype=torch.int64)
    narrowed, _ = run(bits.to(torch.uint32).view(torch.float32), device)
    assert narrowed.isnan().all()


def test_a_reciprocal_is_off_by_a_unit_at_most(device):
    numbers = 1 + torch.exp2(126 * torch.rand(TOKENS, generator=torch.Generator().manual_seed(5)))
    numbers[:3] = torch.tensor([1.0, 2.0, float("inf")])
    _, inverse = run(numbers, device)
    exact = 1 / numbers.double()
    assert ((inverse.double() - exact).abs() <= 2**-23 * exact).all()
    assert inverse[:3].tolist() == [1.0, 0.5, 0.0]
