"""What the launchers tell the compiler about the strides of their tensors."""

from __future__ import annotations

import math

import triton
import triton.language as tl


def hidden_alignment(*strides: int) -> int:
    """Return 8, 4 or 2 if that divides every stride (in elements) and 16 does not, else 1.

    Triton specialises an integer argument on divisibility by 16 only. A head of 40 or 72 channels has rows that are
    16-byte aligned (8 elements of two bytes) and would be read element by element without this.
    """
    common = math.gcd(16, *strides)
    return 1 if common == 16 else common


@triton.jit
def multiple(stride, ALIGN: tl.constexpr):
    """Return `stride`, known to the compiler as a multiple of ALIGN, which the caller guarantees.

    A product with a constant survives every pass; the attribute that `tl.multiple_of` sets does not.
    """
    return stride // ALIGN * ALIGN
