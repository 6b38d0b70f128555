# SPDX-License-Identifier: Apache-2.0
"""Online softmax in base 2 (Milakov and Gimelshein, arXiv 1805.02867): the one update that every kernel here uses.

The state of a row is the largest score it has seen and the sum of `2^(score - largest)`; both begin as `-inf` and 0, or
with a sink as that score and 1. Whoever adds up values beside it multiplies what it has by `decay` first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import current_target

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


FP16_WEIGHT_EXPONENT = tl.constexpr(15.0)
"""The largest weight of a product in fp16 is 2^15 and not 1. fp16 ends at 65,504, is exact to 11 bits down to 2^-14 and
holds nothing below 2^-24: relative to 1, a key 17 nats above all others would be the only one that counts."""


@triton.constexpr_function
def compiled_for(*arches):
    """Return whether the kernel is compiled for one of these gfx names; of none for any of AMD's."""
    target = None if INTERPRETED else current_target()
    return target is not None and target.backend == "hip" and (not arches or target.arch in arches)


@triton.constexpr_function
def _adds_half(dtype):
    """Return whether `narrow` to this type adds to the bits, where there is no conversion."""
    return dtype == tl.bfloat16 and compiled_for("gfx90a", "gfx942")


@triton.jit
def reciprocal(x):
    """Return 1 / x of fp32, on AMD to one unit in the last place, and 0 where it is no normal number.

    There a quotient that is rounded right takes ten times the instructions (`v_div_scale_f32` and what follows).
    """
    return libdevice.fast_dividef(1.0, x) if compiled_for() else 1.0 / x


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Return fp32 numbers in another type, rounded to the nearest.

    CDNA2 and CDNA3 have no conversion to bf16, and the compiler writes five instructions a number: ties to even, NaN
    apart. Here half a unit in the last place is added to the bits, which below the sign are the magnitude: a tie goes
    away from zero, so for either sign the error is half a unit at most, as with ties to even. Zeros keep their sign,
    infinities stay, and what is nearer to 2^128 than to the largest bf16 becomes infinite. That is one addition, and a
    permutation for two numbers.

    A NaN stays one where the lower half of its bits is 0, as in those that arithmetic makes and those of bf16. Others
    may become a zero or an infinity: load such numbers by `widen`, unless the result is NaN by another way (a NaN among
    weights makes their fp32 sum NaN too).
    """
    if _adds_half(DTYPE):
        bits = x.to(tl.int32, bitcast=True) + 0x8000
        out = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        out = x.to(DTYPE)
    return out


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """Return numbers of any type as fp32, and each NaN as one that `narrow` to DTYPE keeps.

    Arithmetic passes the bits of a NaN on, so what is computed of such numbers needs no second look.
    """
    out = x.to(tl.float32)
    if _adds_half(DTYPE) and x.dtype != tl.bfloat16:
        out = tl.where(tl.abs(out) >= 0.0, out, float("nan"))
    return out


@triton.jit
def finite(maximum):
    """Return what to subtract from scores of that maximum: 0 where nothing was seen, for -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def online_softmax(scores, maximum, total, scale=1.0, WEIGHT_EXPONENT: tl.constexpr = 0.0):
    """Take another tile of scores into the state of each row.

    Args:
        scores: [BLOCK_M, BLOCK_N] fp32, base 2; -inf where a row does not see a column.
        maximum: [BLOCK_M] fp32, the largest score so far.
        total: [BLOCK_M] fp32, the sum of weights so far.
        scale: Factor > 0 of the scores, one or [BLOCK_M]: it costs nothing here, where each weight is one multiply-add.
        WEIGHT_EXPONENT: Weights are multiplied by 2 to this power (FP16_WEIGHT_EXPONENT for products in fp16), and
            `log_sum` takes it out of the sum.

    Returns:
        weights [BLOCK_M, BLOCK_N] relative to the new maximum, decay [BLOCK_M] of earlier sums, maximum, total.
    """
    factor = tl.zeros_like(maximum) + scale
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
    base = finite(new_maximum)
    weights = tl.exp2(scores * factor[:, None] - (base - WEIGHT_EXPONENT)[:, None])
    decay = tl.exp2(maximum - base)
    total = total * decay + tl.sum(weights, axis=1)
    return weights, decay, new_maximum, total


@triton.jit
def log_sum(maximum, total, WEIGHT_EXPONENT: tl.constexpr = 0.0):
    """Return the divisor of each row's sum of values (1 where it saw nothing) and its log-sum-exp in base 2."""
    divisor = tl.where(total > 0.0, total, 1.0)
    return divisor, maximum + (tl.log2(divisor) - WEIGHT_EXPONENT)


@triton.jit
def merge_parts(partial, partial_lse, part, inside, channel, in_width, WIDTH: tl.constexpr, maximum, total, acc):
    """Merge further partial results of each row into its state, weighted by their sums of exponentials.

    Args:
        partial: [parts, WIDTH] fp32, contiguous: results over a part of the KV each.
        partial_lse: [parts] fp32, base 2; -inf for a part that saw nothing, whose weight is 0.
        part: [BLOCK_M, BLOCK_SPLITS] which parts.
        inside: [BLOCK_M, BLOCK_SPLITS] whether there is such a part.
        channel: [CHANNELS] which channels.
        in_width: [CHANNELS] whether there is such a channel.
        WIDTH: Channels of a part.
        maximum: [BLOCK_M] fp32, as `total` the state of `online_softmax`.
        total: [BLOCK_M] fp32.
        acc: [BLOCK_M, CHANNELS] fp32, the weighted sum so far.

    Returns:
        maximum, total, acc.
    """
    scores = tl.load(partial_lse + part, mask=inside, other=float("-inf"))
    rows = tl.load(
        partial + (part * WIDTH)[:, :, None] + channel[None, None, :],
        mask=inside[:, :, None] & in_width[None, None, :],
        other=0.0,
    )
    weights, decay, maximum, total = online_softmax(scores, maximum, total)
    acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * rows, axis=1)
    return maximum, total, acc
