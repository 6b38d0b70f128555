# SPDX-License-Identifier: Apache-2.0
"""Registers for oracles of instructions: random bits, and those at which something changes."""

import random

import numpy as np

# fmt: off
INTEGERS = (
    0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000,
    0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFF0, 0xFFFF8000, 0xFFFFFFFF,
)
FLOATS = (
    0x3F800000, 0xBF800000, 0x3FC00000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x00000001, 0x007FFFFF,
    0x7F7FFFFF, 0x4B000000, 0x3C003C00, 0xC000BC00, 0x7C00FC00, 0x7E000001, 0x4F000000, 0x4F7FFFFF, 0x4F800000,
    0xCF000000, 0x40490FDB,
)
# fmt: on
EDGES = (*INTEGERS, *FLOATS)
"""Sizes and signs of integers; ones, infinities, NaN, subnormals and the ends of int32 as fp32 and as pairs of fp16."""

WAVES = 4


def data(seed):
    """[WAVES, 64] uint32: edges and random bits."""
    gen = random.Random(seed)
    numbers = [gen.choice(EDGES) if gen.random() < 0.5 else gen.getrandbits(32) for _ in range(WAVES * 64)]
    return np.array(numbers, np.uint32).reshape(WAVES, 64)
