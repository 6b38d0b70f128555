# SPDX-License-Identifier: Apache-2.0
"""What vector and scalar instructions compute, over NumPy arrays: integers, bits, floats, division, conversions.

Every function takes and gives arrays of any one shape (uint32 unless said) and changes none. Formulas are those of the
CDNA3 ISA document, section "Vector ALU operations"; where ours differs from its text, the function says so.
The transcendental functions compute in float64 and round to float32; hardware may differ by one unit in the last place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

U, I, F, Q, L, D = np.uint32, np.int32, np.float32, np.uint64, np.int64, np.float64  # noqa: E741
H, W16, S16 = np.float16, np.uint16, np.int16
"""Short, because the generated code names one of them in almost every line."""


def pair(low: Array, high: Array) -> Array:
    """uint64 of two registers."""
    return low.astype(Q) | (high.astype(Q) << Q(32))


def low(x: Array) -> Array:
    """Lower register of a 64-bit value."""
    return x.astype(U)


def high(x: Array) -> Array:
    """Upper register of a 64-bit value."""
    return (x >> Q(32)).astype(U)


def select(x: Array, part: str, signed: bool) -> Array:
    """SDWA source: BYTE_0 .. BYTE_3, WORD_0, WORD_1 of each register, with its sign if so asked."""
    shift, bits = _part(part)
    x = (x >> U(shift)) & U((1 << bits) - 1)
    return sign_extend(x, bits).view(U) if signed else x


def place(x: Array, part: str, unused: str, old: Array) -> Array:
    """SDWA destination: put the low bits of `x` at a part of the register; the rest is zero, or the old value's."""
    shift, bits = _part(part)
    mask = (1 << bits) - 1
    moved = (x & U(mask)) << U(shift)
    if unused == "UNUSED_PRESERVE":
        return (old & U(~(mask << shift) & 0xFFFFFFFF)) | moved
    if unused != "UNUSED_PAD":
        raise NotImplementedError(unused)
    return moved


def _part(part: str) -> tuple[int, int]:
    bits = {"BYTE": 8, "WORD": 16}[part[:-2]]
    return int(part[-1]) * bits, bits


def half(x: Array) -> Array:
    """Low 16 bits as float16."""
    return x.astype(W16).view(H)


def half_bits(x: Array) -> Array:
    """Bits of a value rounded to float16; the upper half of the register becomes 0."""
    return x.astype(H).view(W16).astype(U)


def sign_extend(x: Array, bits: int) -> Array:
    """int32 of the low bits."""
    return (x << U(32 - bits)).view(I) >> I(32 - bits)


def high_product(a: Array, b: Array) -> Array:
    """Upper half of an unsigned product."""
    return ((a.astype(Q) * b.astype(Q)) >> Q(32)).astype(U)


def high_product_signed(a: Array, b: Array) -> Array:
    """Upper half of a product of int32."""
    return ((a.astype(L) * b.astype(L)) >> L(32)).astype(I).view(U)


def field(a: Array, start: Array, count: Array) -> Array:
    """Bits `start` .. `start + count - 1`; a count of 32 and more takes all from `start` on."""
    mask = (Q(1) << np.minimum(count, U(32)).astype(Q)) - Q(1)
    return (a >> (start & U(31))) & mask.astype(U)


def field_signed(a: Array, start: Array, count: Array) -> Array:
    """The same with the sign of its highest bit; above bit 31 lies the sign of `a`."""
    shift = (U(32) - np.minimum(count, U(32))).astype(L)
    moved = (a.view(I) >> (start & U(31)).astype(I)).astype(L) << (shift + L(32))
    return np.where(count == 0, L(0), moved >> (shift + L(32))).astype(I).view(U)


def field_signed_64(a: Array, packed: Array) -> Array:
    """int64 of a field of int64: its start is in bits 0 .. 5 of `packed`, how many bits in 16 .. 22."""
    shift = (U(64) - np.minimum((packed >> U(16)) & U(127), U(64))).astype(L)
    return ((a >> (packed & U(63)).astype(L)) << shift) >> shift


def reverse_bits(a: Array) -> Array:
    """Bit 0 becomes bit 31."""
    a = ((a >> U(1)) & U(0x55555555)) | ((a & U(0x55555555)) << U(1))
    a = ((a >> U(2)) & U(0x33333333)) | ((a & U(0x33333333)) << U(2))
    a = ((a >> U(4)) & U(0x0F0F0F0F)) | ((a & U(0x0F0F0F0F)) << U(4))
    return a.byteswap()


def count_bits(x: Array) -> Array:
    """How many bits are 1."""
    return np.bitwise_count(x).astype(U)


_BELOW = ((1 << np.arange(64, dtype=Q)) - Q(1)).astype(Q)
"""For each lane, the lanes before it."""


def count_below(x: Array, upper: bool, lanes: int) -> Array:
    """How many lanes before each lane, of the first or of the last 32, have their bit in x."""
    below = _BELOW[:lanes]
    return count_bits(x & ((below >> Q(32)) if upper else below).astype(U))


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """`v_perm_b32`: each byte of the selector picks a byte of a:b, a sign of one of its words, 0, or 0xff."""
    both = pair(b, a)
    result: Any = U(0)
    for k in range(4):
        pick = (selector >> U(8 * k)) & U(255)
        byte = (both >> (np.minimum(pick, U(7)).astype(Q) * Q(8))).astype(U) & U(255)
        sign = ((both >> ((pick.astype(Q) & Q(3)) * Q(16) + Q(15))) & Q(1)).astype(U) * U(255)
        chosen = np.where(pick < 8, byte, np.where(pick < 12, sign, np.where(pick == 12, U(0), U(255))))
        result = result | (chosen << U(8 * k))
    return np.asarray(result)


def align_bits(a: Array, b: Array, c: Array) -> Array:
    """`v_alignbit_b32`: a:b shifted right."""
    return (pair(b, a) >> (c & U(31)).astype(Q)).astype(U)


def boolean(a: Array, b: Array, c: Array, table: int) -> Array:
    """`v_bitop3`: bit k of the truth table is the result where (a, b, c) spell k."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U)
    for k in range(8):
        if table >> k & 1:
            result = result | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return result


def leading_difference(a: Array) -> Array:
    """`s_flbit_i32`: from the top, how many bits until one differs from the sign; -1 if none does."""
    y = np.where(a.view(I) < 0, ~a, a)
    top = np.zeros(a.shape, U)
    for bit in range(32):
        top = np.where((y >> U(bit)) & U(1), U(31 - bit), top)
    return np.where(y == 0, U(0xFFFFFFFF), top)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Product plus c in float32, rounded once."""
    return _multiply_add(a, b, c).astype(F)


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Product plus c in float64, rounded to odd, so that rounding it once more to fewer bits rounds correctly.

    The product of two float32 is exact. Where the sum is not, what nearest rounding lost (Knuth's two-sum) says on
    which side of it the exact value lies. Only sums whose low 28 bits are 0 can lie half-way between two float32.
    """
    product, wide = np.asarray(a.astype(D) * b.astype(D)), c.astype(D)
    total = np.asarray(product + wide)
    bits = total.view(L)
    if ((bits & L(0x0FFFFFFF)) == 0).any():
        part = total - product
        lost = (product - (total - part)) + (wide - part)
        away = np.where((lost > 0) == (total > 0), L(1), L(-1))
        inexact = (lost != 0) & np.isfinite(total) & np.isfinite(lost) & ((bits & L(1)) == 0)
        return np.where(inexact, bits + away, bits).view(D)
    return total


def flush(a: Array) -> Array:
    """Denormals as 0 of their sign: the transcendental unit takes and gives none (LLVM scales around them)."""
    return np.where(np.abs(a) < F(2.0**-126), np.copysign(F(0), a), a)


def reciprocal(a: Array) -> Array:
    """1 / a."""
    return flush((1.0 / flush(a).astype(D)).astype(F))


def exp2(a: Array) -> Array:
    """2 to the power a."""
    return flush(np.exp2(a.astype(D)).astype(F))


def log2(a: Array) -> Array:
    """Logarithm to base 2."""
    return np.log2(flush(a).astype(D)).astype(F)


def square_root(a: Array) -> Array:
    """Square root."""
    return np.sqrt(flush(a))


def reciprocal_root(a: Array) -> Array:
    """1 / square root of a."""
    return (1.0 / np.sqrt(flush(a).astype(D))).astype(F)


def clamp(a: Array) -> Array:
    """0 .. 1; NaN becomes 0 (the mode DX10_CLAMP, which HSA kernels have)."""
    return np.where(a > 0, np.minimum(a, F(1)), F(0))


def maximum(a: Array, b: Array) -> Array:
    """Larger one of two floats of one type: the number beside a quiet NaN, a signalling NaN made quiet, +0 above -0."""
    return _extreme(a, b, np.fmax, np.bitwise_and)


def minimum(a: Array, b: Array) -> Array:
    """Smaller one of two floats, with the same care for NaN as `maximum`, and -0 below +0."""
    return _extreme(a, b, np.fmin, np.bitwise_or)


def larger_number(a: Array, b: Array) -> Array:
    """Larger one of two floats on gfx12: the number beside any NaN, also a signalling one, +0 above -0."""
    return _extreme(a, b, np.fmax, np.bitwise_and, signals=False)


def smaller_number(a: Array, b: Array) -> Array:
    """Smaller one of two floats on gfx12: the number beside any NaN, also a signalling one, -0 below +0."""
    return _extreme(a, b, np.fmin, np.bitwise_or, signals=False)


def _extreme(a: Array, b: Array, choose: np.ufunc, of_equal: np.ufunc, *, signals: bool = True) -> Array:
    a, b = np.broadcast_arrays(a, b)
    kind: Any = U if a.dtype == F else W16
    quiet: Any = kind(0x400000 if kind is U else 0x200)
    p, q = np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind)
    found = np.where(a == b, of_equal(p, q), choose(a, b).view(kind))  # equal ones differ by the sign of a zero at most
    found = np.where(np.isnan(a), q, found)
    for each, bits in ((b, q), (a, p)) if signals else ():
        signalling = np.isnan(each) & ((bits & quiet) == 0)
        if signalling.any():
            found = np.where(signalling, bits | quiet, found)
    return found.view(a.dtype)


def median(a: Array, b: Array, c: Array) -> Array:
    """Middle one of three; the least of the others where one is NaN."""
    least = minimum(minimum(a, b), c)
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c)))


def middle_number(a: Array, b: Array, c: Array) -> Array:
    """Middle one of three on gfx12; the least of the others where one is NaN."""
    least, most = smaller_number(a, b), larger_number(a, b)
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, smaller_number(least, c), larger_number(least, smaller_number(most, c)))


def to_unsigned(x: Array) -> Array:
    """float32 to uint32: truncated, saturated, NaN to 0."""
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(D)), 0, 2**32 - 1)).astype(U)


def to_signed(x: Array) -> Array:
    """float32 to int32: truncated, saturated, NaN to 0."""
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(D)), -(2**31), 2**31 - 1)).astype(I)


def bfloat16_bits(x: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even; a NaN stays one."""
    bits = x.view(U)
    rounded = (bits + U(0x7FFF) + ((bits >> U(16)) & U(1))) >> U(16)
    return np.where(np.isnan(x), (bits >> U(16)) | U(0x40), rounded)


def ldexp(a: Array, exponent: Any) -> Array:
    """Product of a and 2^exponent in float32."""
    return np.ldexp(a.astype(D), np.clip(exponent, -400, 400)).astype(F)


def exponent_bits(x: Array) -> Array:
    """Biased exponent of float32, int32."""
    return ((x.view(U) >> U(23)) & U(255)).view(I)


def div_scale(x: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """`v_div_scale_f32`: x, which is one of the other two, scaled so that the quotient's iteration stays in range.

    A denominator whose reciprocal and quotient are both denormal goes down by 2^64. AMD's text says up, which overflows
    for every denominator above 2^64 and gives wrong quotients (tests/amdgcn/test_oracles.py).

    Returns:
        The scaled value, and whether `div_fmas` must undo it.
    """
    distance = exponent_bits(numerator) - exponent_bits(denominator)
    tiny = 2.0**-126
    wide = denominator.astype(D)
    reciprocal_denormal, quotient_denormal = np.abs(1.0 / wide) < tiny, np.abs(numerator.astype(D) / wide) < tiny
    up, down = ldexp(x, 64), ldexp(x, -64)
    denominator_up = np.where(x == denominator, up, x)
    numerator_up = np.where(x == numerator, up, x)
    never = np.zeros(x.shape, bool)
    cases: list[tuple[Array, Array, Array]] = [
        ((numerator == 0) | (denominator == 0), np.full(x.shape, np.nan, F), never),
        (distance >= 96, denominator_up, ~never),
        (exponent_bits(denominator) == 0, up, never),
        (reciprocal_denormal & quotient_denormal, np.where(x == denominator, down, x), ~never),
        (reciprocal_denormal, down, never),
        (quotient_denormal, numerator_up, ~never),
        (exponent_bits(numerator) <= 23, up, never),
    ]
    conditions = [case[0] for case in cases]
    return (
        np.select(conditions, [case[1] for case in cases], x).astype(F),
        np.select(conditions, [case[2] for case in cases], never),
    )


def div_fmas(a: Array, b: Array, c: Array, undo: Array) -> Array:
    """`v_div_fmas_f32`: a * b + c, with what `div_scale` did undone before the one rounding.

    AMD's pseudo-code scales by 2^32; with that FLT_MAX / 448 is wrong by 2^32. Undoing the 2^64 of `div_scale`, up for
    a large quotient and down for a small one, gives correctly rounded quotients (tests/amdgcn/test_oracles.py).
    """
    exact = _multiply_add(a, b, c)
    scaled = np.where(exponent_bits(c) > 127, np.ldexp(exact, 64), np.ldexp(exact, -64))
    return np.where(undo, scaled, exact).astype(F)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """`v_div_fixup_f32`: the quotient and its special cases; NaN of two ordinary numbers is an iteration's overflow."""
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    sign = np.where(negative, F(-1), F(1))
    infinite_d, infinite_n = np.isinf(denominator), np.isinf(numerator)
    distance = exponent_bits(numerator) - exponent_bits(denominator)
    cases: list[tuple[Array, Any]] = [
        (np.isnan(numerator), numerator),
        (np.isnan(denominator), denominator),
        ((denominator == 0) & (numerator == 0), F(np.nan)),
        (infinite_d & infinite_n, F(np.nan)),
        ((denominator == 0) | infinite_n, sign * F(np.inf)),
        (infinite_d | (numerator == 0), sign * F(0)),
        (distance < -150, sign * F(0)),
        (np.isnan(quotient), sign * F(np.inf)),
    ]
    chosen = np.select([case[0] for case in cases], [np.broadcast_to(case[1], sign.shape) for case in cases], quotient)
    return np.where(np.isnan(chosen), chosen, np.copysign(chosen, sign)).astype(F)


@lru_cache
def float8_values(name: str, fnuz: bool) -> Array:
    """float32 of each of the 256 codes of an 8-bit format, fp8 (4 exponent bits) or bf8 (5), OCP or fnuz.

    gfx942 has the fnuz formats (no negative zero, 0x80 is NaN, bias one more), gfx950 those of the OCP.
    """
    exponents, mantissas = (4, 3) if name == "fp8" else (5, 2)
    bias = (1 << (exponents - 1)) - (0 if fnuz else 1)
    code = np.arange(256)
    exponent, mantissa = code >> mantissas & ((1 << exponents) - 1), code & ((1 << mantissas) - 1)
    fraction = mantissa / (1 << mantissas)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if fnuz:
        value[0x80] = np.nan
    elif name == "fp8":
        value[(code & 127) == 127] = np.nan
    else:
        value[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(code >> 7, -value, value).astype(F)


def scale_exponent(x: Array) -> Array:
    """2 to the unbiased exponent of a float32: what `v_cvt_scalef32` multiplies with."""
    return np.ldexp(F(1), exponent_bits(x) - 127).astype(F)
