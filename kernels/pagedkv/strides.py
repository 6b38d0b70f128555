"""What the launchers may promise the compiler about the strides of their tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def alignment(*tensors: Tensor) -> int:
    """Return the largest power of two <= 16 that divides every stride (in elements) but the last of every tensor.

    Triton specialises an integer argument on divisibility by 16 only; a head of 40 or 72 channels has rows that are
    16-byte aligned (8 elements of two bytes) and would be read two bytes at a time without this.
    """
    common = math.gcd(16, *(stride for tensor in tensors for stride in tensor.stride()[:-1]))
    return common & -common
