"""A kernel small enough to know by heart: it warms the compiler up before forking, and shows that the machine can work.

It multiplies two 64 x 64 bf16 tiles. Each lane of its 256 reads 16 elements of each operand, 32 bytes, hence two
16-byte loads a lane and operand; the second dot operand goes through 64 x 64 x 2 = 8192 bytes of LDS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIDE = 64


@triton.jit
def probe_kernel(
    a_ptr,  # [SIDE, SIDE]
    b_ptr,  # [SIDE, SIDE]
    out_ptr,  # [SIDE, SIDE], float32
    SIDE: tl.constexpr,
):
    """Compute out = a @ b."""
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    place = rows * SIDE + columns
    tl.store(out_ptr + place, tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place)))


def probe(side: int = SIDE) -> None:
    """Launch the kernel on bf16 tiles of `side` x `side`."""
    tile = torch.empty(side, side, dtype=torch.bfloat16)
    probe_kernel[(1,)](tile, tile, torch.empty(side, side), SIDE=side)
