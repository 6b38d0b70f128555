# SPDX-License-Identifier: Apache-2.0
"""The oracle of quantised caches: what a code means and which code a number gets, from the definition of the formats.

The 256 values come from the formula in exact fractions, and a number gets the nearest of them by comparison with the
midpoints: neither torch's float8 dtypes nor any bit of an fp32 is involved.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

_MANTISSA_BITS_AND_BIAS = {"e4m3fn": (3, 7), "e4m3fnuz": (3, 8), "e5m2": (2, 15)}


def _value(code: int, name: str) -> float:
    mantissa_bits, bias = _MANTISSA_BITS_AND_BIAS[name]
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = divmod(code & 0x7F, 1 << mantissa_bits)
    if name == "e4m3fnuz" and code == 0x80:
        return float("nan")
    if name == "e4m3fn" and code & 0x7F == 0x7F:
        return float("nan")
    if name == "e5m2" and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    significand = Fraction(mantissa, 1 << mantissa_bits) + (1 if exponent else 0)
    magnitude = float(significand * Fraction(2) ** (max(exponent, 1) - bias))
    return sign * magnitude


def values(name: str) -> Tensor:
    """Return the value of each of the 256 codes of the format `name`: `[256]` float64."""
    return torch.tensor(_values(name), dtype=torch.float64)


@cache
def _values(name: str) -> list[float]:
    return [_value(code, name) for code in range(256)]


def largest(name: str) -> float:
    """Return the largest finite value of the format `name`."""
    table = values(name)
    return float(table[table.isfinite()].max())


def decode(codes: Tensor, name: str) -> Tensor:
    """Return the values of uint8 codes of any shape, in float64."""
    return values(name).to(codes.device)[codes.long()]


def encode(numbers: Tensor, name: str) -> Tensor:
    """Return the code nearest to each number (any shape, any float dtype), as uint8; of two as near, the even code.

    A number beyond the largest finite value, an infinity too, gets that value; NaN gets a NaN code with the sign of the
    NaN, where the format has two. A zero keeps its sign, where the format has two zeros, and so does what rounds to it.
    """
    table = values(name)
    finite = table[:0x80][table[:0x80].isfinite()]  # rising with the code
    middle = (finite[1:] + finite[:-1]) / 2
    magnitude = numbers.double().cpu().abs()
    below = torch.searchsorted(middle, magnitude)  # midpoints < magnitude: a tie gets the lower code
    tie = magnitude == torch.cat([middle, torch.tensor([-1.0])])[below]
    code = below + (tie & (below % 2 == 1)).long()
    code = torch.where(numbers.cpu().isnan(), 0x80 if name == "e4m3fnuz" else 0x7F, code)
    negative = torch.signbit(numbers.double().cpu())
    if name == "e4m3fnuz":
        negative &= (code > 0) & (code < 0x80)
    return (code + 0x80 * negative).to(torch.uint8).to(numbers.device)


def row_scales(rows: Tensor, name: str) -> Tensor:
    """Return the fp32 scale of each row of `[..., head_size]` with which the row fills the range of the format.

    `max(absmax / largest, 1e-6)`. NaN does not count, and an infinity counts as the largest fp32 number.
    """
    absmax = rows.float().abs().nan_to_num(nan=0.0).amax(-1)
    return (absmax.double() / largest(name)).float().clamp(min=1e-6)


def quantise(rows: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return the codes of `rows / scale`, the quotient rounded to fp32; `scale` is fp32 and broadcasts to `rows`."""
    return encode(rows.float() / scale, name)


def dequantise(codes: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return what codes mean, in float64, where the product with an fp32 scale is exact."""
    return decode(codes, name) * scale.double()
