# SPDX-License-Identifier: Apache-2.0
"""Matrix products (MFMA, 16x16 and 32x32, one block; gfx12's WMMA) and the transposed LDS read, of a wave's registers.

Layouts: CDNA3 ISA, section "Matrix arithmetic instructions"; RDNA4 ISA, section "WMMA". Lane l holds row (of A) or
column (of B) l % side, and the k from l // side * width on, `width` of them in consecutive places of its registers. Of
the result a lane holds runs of rows, of 4 (MFMA) or 8 (WMMA): register r of lane l is row
lanes / side * run * (r // run) + run * (l // side) + r % run, column l % side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import W16, Array, D, F, H, U, float8_values

if TYPE_CHECKING:
    from collections.abc import Sequence


def elements(registers: Sequence[Array], kind: str, *, fnuz: bool) -> Array:
    """[waves, lanes, elements of a lane] in float64 of registers [waves, lanes].

    Args:
        registers: What each lane holds, in order.
        kind: f32, xf32, f16, bf16, fp8 or bf8. The rounding of xf32 inputs is not documented; nearest even is assumed.
        fnuz: Which 8-bit formats.
    """
    words = np.ascontiguousarray(np.stack(registers, -1))
    if kind == "f32":
        return words.view(F).astype(D)
    if kind == "xf32":
        return ((words + U(0xFFF) + ((words >> U(13)) & U(1))) & U(0xFFFFE000)).view(F).astype(D)
    if kind == "f16":
        return words.view(H).astype(D)
    if kind == "bf16":
        return (words.view(W16).astype(U) << U(16)).view(F).astype(D)
    return float8_values(kind, fnuz)[words.view(np.uint8)].astype(D)


def multiply(side: int, a: Array, b: Array, added: Sequence[Array] | float) -> list[Array]:
    """A @ B + C of each wave: exact products, summed in float64 and rounded to float32 once.

    Hardware may round between; results agree within the tolerance of a dot product, not in every bit.

    Args:
        side: 16 or 32.
        a: From `elements`.
        b: From `elements`.
        added: Registers of C, side * side / lanes of them, or one number.

    Returns:
        Registers of the result.
    """
    rows, columns = _by_row(a, side), _by_row(b, side)
    product = np.matmul(rows, columns.transpose(0, 2, 1))
    waves, lanes, _ = a.shape
    count, run = side * side // lanes, 4 if lanes == 64 else 8
    parts = product.reshape(waves, count // run, lanes // side, run, side)
    held = parts.transpose(1, 3, 0, 2, 4).reshape(count, waves, lanes)
    result = []
    for r in range(count):
        start = added if isinstance(added, int | float) else added[r].view(F).astype(D)
        result.append((held[r] + start).astype(F).view(U))
    return result


def _by_row(x: Array, side: int) -> Array:
    """[waves, side, K] of [waves, lanes, width]."""
    waves, lanes, width = x.shape
    return x.reshape(waves, lanes // side, side, width).transpose(0, 2, 1, 3).reshape(waves, side, -1)


def transpose(x: Array) -> Array:
    """`ds_read_b64_tr_b16` and `_b8`: [waves, 64, n]. 16 lanes read n rows of 16; afterwards each holds one column."""
    n = x.shape[2]
    return x.reshape(x.shape[0], 4, n, 16 // n, n).transpose(0, 1, 3, 4, 2).reshape(x.shape)
