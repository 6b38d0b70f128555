# SPDX-License-Identifier: Apache-2.0
"""What a tile of K and V does to the state of a program's rows: scores, online softmax, weighted values.

OPTIONS are the kernel's `AttentionOptions`. `attend_channels` is the path of every cache but FP8 caches on devices that
convert two codes at once; those take `attend_pairs`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.softmax import narrow, online_softmax, reciprocal
from pagedkv.attention.tiles import load_value_tile
from pagedkv.fp8.scales import half_of, operand


@triton.jit
def attend_tile(state, queries, tile, stride_channel, OPTIONS: tl.constexpr, FULL: tl.constexpr):
    """Take a tile into the state of the rows; in a FULL tile every row sees every token."""
    if OPTIONS.FP8_PAIRS:
        state = attend_pairs(state, queries, tile, OPTIONS, FULL)
    else:
        state = attend_channels(state, queries, tile, stride_channel, OPTIONS, FULL)
    return state


@triton.jit
def attend_channels(state, queries, tile, stride_channel, OPTIONS: tl.constexpr, FULL: tl.constexpr):
    """Take a tile into the state: sum of values, maximum, total, and the largest scale of a value so far.

    The sum of values is relative to that scale, which is 1 unless there is a scale for each token.
    """
    KV_SCALES: tl.constexpr = OPTIONS.KV_SCALES
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    NATIVE_FP8: tl.constexpr = OPTIONS.NATIVE_FP8
    acc, maximum, total, largest = state
    q = queries.q
    if OPTIONS.PRE_LOAD_V:
        # Codes are decoded while the product of the scores runs, not between the two products (H100: 8 % faster).
        v = load_value_tile(tile.value_at, stride_channel, tile.near, tile.loaded, OPTIONS, FULL)
        v = operand(v, KV_SCALES, FP8_FORMAT, NATIVE_FP8, q.dtype)
    scores = tl.dot(q, operand(tile.k, KV_SCALES, FP8_FORMAT, NATIVE_FP8, q.dtype), input_precision="ieee")
    scores, factor = scaled_scores(scores, queries, tile, OPTIONS)
    scores = softcap_and_alibi(scores, queries, tile.token, OPTIONS)
    if not FULL:
        scores = tl.where(tile.seen, scores, float("-inf"))
    weights, decay, maximum, total = online_softmax(scores, maximum, total, factor, OPTIONS.WEIGHT_EXPONENT)
    if not OPTIONS.PRE_LOAD_V:
        v = load_value_tile(tile.value_at, stride_channel, tile.near, tile.loaded, OPTIONS, FULL)
    if KV_SCALES == "per_token":
        weights, decay, largest = scaled_weights(weights, decay, largest, tile.value_scale_at, tile.loaded)
    if not OPTIONS.PRE_LOAD_V:
        v = operand(v, KV_SCALES, FP8_FORMAT, NATIVE_FP8, q.dtype)
    # A scale may be any NaN, which the sum of weights does not see.
    weights = weights.to(v.dtype) if KV_SCALES == "per_token" else narrow(weights, v.dtype)
    acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return acc, maximum, total, largest


@triton.jit
def scaled_scores(scores, queries, tile, OPTIONS: tl.constexpr):
    """Return the scores and the factor that the softmax must still apply: 1 where they have their scale already."""
    factor = queries.scale
    if OPTIONS.KV_SCALES == "per_token":
        scores *= (tl.load(tile.key_scale_at, mask=tile.loaded, other=0.0) * factor)[None, :]
        factor = 1.0
    elif OPTIONS.USE_SOFTCAP or OPTIONS.USE_ALIBI_SLOPES:
        scores *= factor[:, None] if OPTIONS.KV_SCALES == "per_head" else factor
        factor = 1.0
    return scores, factor


@triton.jit
def softcap_and_alibi(scores, queries, token, OPTIONS: tl.constexpr):
    """Return the scores after soft cap and ALiBi. In decode all rows have the same position."""
    if OPTIONS.USE_SOFTCAP:
        # cap * tanh(x), as 1 - 2 / (e^2x + 1): neither end overflows to NaN.
        scores = queries.cap_log2e - 2 * queries.cap_log2e * reciprocal(tl.exp2(scores) + 1)
    if OPTIONS.USE_ALIBI_SLOPES:
        position = queries.position
        distance = (token - position)[None, :] if OPTIONS.DECODE else token[None, :] - position[:, None]
        scores += queries.slope[:, None] * distance.to(tl.float32)
    return scores


@triton.jit
def scaled_weights(weights, decay, largest, value_scale_at, loaded):
    """Return weights * scales of the values, decay and the largest scale so far, to which both are relative."""
    value_scales = tl.load(value_scale_at, mask=loaded, other=0.0)
    larger = tl.maximum(largest, tl.max(tl.abs(value_scales), axis=0))
    unit = 1.0 / larger
    return weights * (value_scales * unit)[None, :], decay * (largest * unit), larger


@triton.jit
def attend_pairs(state, queries, tile, OPTIONS: tl.constexpr, FULL: tl.constexpr):
    """Like `attend_channels`, where K and V hold int16 pairs of codes, half as many as channels.

    Codes of one byte would change their register layout on the way to the product, pairs need not; even and odd
    channels are products of their own, with q those of the queries in fp16. The state: sums of values of even and of
    odd channels, maximum, total (in each of 16 columns: a sum by a product needs no exchange between lanes), and the
    largest scale of a value so far, which the sums are relative to.
    """
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    NATIVE_FP8: tl.constexpr = OPTIONS.NATIVE_FP8
    even, odd, maximum, total, largest = state
    q_even, q_odd = queries.q
    scores = tl.dot(q_even, half_of(tile.k, False, FP8_FORMAT, NATIVE_FP8))
    scores = tl.dot(q_odd, half_of(tile.k, True, FP8_FORMAT, NATIVE_FP8), scores)
    factor = queries.scale
    if OPTIONS.KV_SCALES == "per_token":
        scores *= tl.load(tile.key_scale_at, mask=tile.loaded, other=0.0)[None, :]
    if OPTIONS.USE_SOFTCAP or OPTIONS.USE_ALIBI_SLOPES:
        scores *= queries.scale[:, None]
        factor = 1.0
    scores = softcap_and_alibi(scores, queries, tile.token, OPTIONS)
    if not FULL:
        scores = tl.where(tile.seen, scores, float("-inf"))
    weights, decay, maximum, _ = online_softmax(scores, maximum, maximum, factor, OPTIONS.WEIGHT_EXPONENT)
    ones = tl.full([scores.shape[1], 16], 1.0, tl.float16)
    total = tl.dot(weights.to(tl.float16), ones, total * decay[:, None])
    if OPTIONS.KV_SCALES == "per_token":
        weights, decay, largest = scaled_weights(weights, decay, largest, tile.value_scale_at, tile.loaded)
    weights = weights.to(tl.float16)
    v = load_value_tile(tile.value_at, 1, tile.loaded, tile.loaded, OPTIONS, FULL)
    even = tl.dot(weights, half_of(v, False, FP8_FORMAT, NATIVE_FP8), even * decay[:, None])
    odd = tl.dot(weights, half_of(v, True, FP8_FORMAT, NATIVE_FP8), odd * decay[:, None])
    return even, odd, maximum, total, largest
