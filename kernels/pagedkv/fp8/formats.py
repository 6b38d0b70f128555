# SPDX-License-Identifier: Apache-2.0
"""The three 8-bit float formats of a quantised KV cache, in integer arithmetic: the same bits on every platform.

A code is `sign, exponent, mantissa` with m mantissa bits and the value, for exponent field E and mantissa field M,

    (-1)^sign 2^(E - bias) (1 + M / 2^m)      E > 0
    (-1)^sign 2^(1 - bias) M / 2^m            E = 0, a subnormal

* `e4m3fn`    m = 3, bias 7: no infinity, NaN is 0x7f and 0xff, largest value 448 (OCP 8-bit Floating Point
              Specification 1.0; gfx950, sm_90).
* `e4m3fnuz`  m = 3, bias 8: no infinity, no -0, NaN is 0x80 alone, largest value 240 (Noune et al., arXiv 2206.02915;
              gfx942).
* `e5m2`      m = 2, bias 15: the upper byte of an fp16, with infinity and NaN as there, largest value 57344 (OCP).

A GPU converts only the format of its own kind, Triton's interpreter none of them faithfully, and the hardware's casts
disagree about overflow. These two functions need no conversion instruction but the one from fp16, and no fp32
subnormals, which a kernel may flush.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

FormatName = Literal["e4m3fn", "e4m3fnuz", "e5m2"]


@dataclass(frozen=True)
class Format:
    """One 8-bit float format."""

    mantissa_bits: int
    bias: int
    """Bias of the exponent."""
    max: float
    """Largest finite value; what lies beyond is clamped to it."""
    max_code: int
    """Code of the largest number."""
    dtype: torch.dtype
    """Torch's name of the format. Caches and kernels hold the codes as uint8."""


FORMATS: dict[FormatName, Format] = {
    "e4m3fn": Format(mantissa_bits=3, bias=7, max=448.0, max_code=0x7E, dtype=torch.float8_e4m3fn),
    "e4m3fnuz": Format(mantissa_bits=3, bias=8, max=240.0, max_code=0x7F, dtype=torch.float8_e4m3fnuz),
    "e5m2": Format(mantissa_bits=2, bias=15, max=57344.0, max_code=0x7B, dtype=torch.float8_e5m2),
}


@triton.constexpr_function
def _mantissa_bits(name):
    return FORMATS[name].mantissa_bits


@triton.constexpr_function
def _bias(name):
    return FORMATS[name].bias


@triton.constexpr_function
def _max_code(name):
    return FORMATS[name].max_code


@triton.constexpr_function
def max_value(name):
    """Return the largest finite value of the format; for use in kernels."""
    return FORMATS[name].max


@triton.jit
def narrowed(value, DTYPE: tl.constexpr):
    """Return decoded values in DTYPE, which holds them exactly."""
    if DTYPE.is_bf16():
        # Cut off: a rounding cast takes gfx942 several instructions, and the interpreter's is wrong.
        value = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        value = value.to(DTYPE)
    return value


@triton.jit
def decode(code, FP8_FORMAT: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """Return the values of uint8 codes in DTYPE (fp32, fp16 or bf16), each of which holds every value exactly.

    An e5m2 code is the upper byte of an fp16. Shifted into an fp16, exponent and mantissa of an e4m3 code keep their
    places relative to the point, subnormals included; only the bias (15 in fp16) differs, by a factor of a power of
    two.
    """
    EXACT: tl.constexpr = tl.float16 if DTYPE.is_fp16() else tl.float32
    upper = code.to(tl.int16) << 8
    if FP8_FORMAT == "e5m2":
        value = upper.to(tl.float16, bitcast=True).to(EXACT)
    else:
        # The arithmetic shift keeps the sign in bit 15 and leaves a copy of it in bit 14.
        half = ((upper >> 1) & ~0x4000).to(tl.float16, bitcast=True)
        # Exact in fp16 too: the products lie between 2^-10 and 480, and fp16 reaches down to 2^-24.
        value = half.to(EXACT) * (2.0 ** (15 - _bias(FP8_FORMAT)))
        is_nan = (code == 0x80) if FP8_FORMAT == "e4m3fnuz" else (tl.abs(value) > max_value(FP8_FORMAT))
        value = tl.where(is_nan, float("nan"), value)
    return narrowed(value, DTYPE)


@triton.jit
def encode(value, FP8_FORMAT: tl.constexpr):
    """Return the uint8 codes of fp32 values, rounded to nearest, ties to even.

    What is larger than the format's `max`, infinity included, becomes `max`: a cache never holds an infinity. NaN stays
    NaN. A negative value that rounds to zero becomes -0 where the format has one, and 0 in e4m3fnuz, whose 0x80 is NaN.
    """
    MANTISSA: tl.constexpr = _mantissa_bits(FP8_FORMAT)
    # The code of a normal value is the upper part of its fp32 bits, less the difference of the biases.
    CUT: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = (127 - _bias(FP8_FORMAT)) << MANTISSA
    SMALLEST_NORMAL: tl.constexpr = (128 - _bias(FP8_FORMAT)) << 23  # 2^(1 - bias), as the bits of an fp32
    LARGEST_MAGNITUDE: tl.constexpr = (_max_code(FP8_FORMAT) + REBIAS) << CUT
    # A power of two at which the smallest subnormal is one unit in the last place: added to a number below the smallest
    # normal, it leaves the number's multiple of that subnormal, rounded by the addition, in the last bits.
    MAGIC: tl.constexpr = 2.0 ** (1 - _bias(FP8_FORMAT) + CUT)
    MAGIC_BITS: tl.constexpr = (128 - _bias(FP8_FORMAT) + CUT) << 23

    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, LARGEST_MAGNITUDE)
    normal = ((magnitude + (1 << (CUT - 1)) - 1 + ((magnitude >> CUT) & 1)) >> CUT) - REBIAS
    subnormal = (magnitude.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    if FP8_FORMAT == "e4m3fnuz":
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(is_nan, 0x80, code)
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)
