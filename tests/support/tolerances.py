# SPDX-License-Identifier: Apache-2.0
"""How far a result may lie from the float64 reference: one table, the same in CI and locally.

Write and gather move bytes: their results are compared bit by bit and have no tolerance.

Attention is judged by `|out - ref|_2 / |ref|_2` over the channels of each (token, head). Dividing by the norm of the
row keeps the test sharp at any context length: an output that averages n keys shrinks like 1/sqrt(n), and an absolute
tolerance that fits n = 1 would let any wrong block pass at n = 2000. With unit roundoff u of the dtype (2^-24 fp32,
2^-11 fp16, 2^-8 bf16) and unit-normal data:

* fp16, bf16: each weight is rounded to the dtype before it meets V (relative error uniform in +-u, independent: rms
  u/sqrt(3) of the row), and so is the result (again u/sqrt(3)). Together 0.82 u rms; rows of at least 32 channels stay
  below 2.5 times their rms. Scores are exact products summed in fp32 and add nothing visible. Bound 2 u.
* fp32: no rounding of weights, but the scores: d <= 256 sums of unit products round with rms u d / 2, scaled by
  1/sqrt(d): 8 u; the argument of exp2 (|x| <= 16) adds 16 u and exp2 itself 2 u. Root sum of squares 18 u, times 2.5.
  Bound 45 u. (A tf32 product would err by 2^-11 / 2^-24 = 8192 u.)

Soft-capped scores, cap 5: the argument of exp2 is `c - 2 c / (e + 1)` with c = 5 log2(e) = 7.2. The exponential errs by
2 u of itself, which moves the quotient by at most c u, division and subtraction by c u each: 3 c u = 22 u on the
argument, ln 2 of that on a weight: 15 u. Beside 18 u in fp32: root sum of squares 24 u, times 2.5: 60 u. In fp16 and
bf16 nothing visible.

A cache with FP8 codes has no tolerance of its own: every code is exact in fp32, fp16 and bf16, and scales are applied
in fp32, which adds 1 u there. Where each token has a scale, V is rounded to the dtype after scaling: the third rounding
of u/sqrt(3), so 1 u rms instead of 0.82 u; bound 2.5 u.

The sum of exponentials: its logarithm errs as the sum does relatively, which in fp32 is what a weight errs by, 18 u,
and by the rounding of numbers up to 16 (the maximum in base 2 and the result): 16 u each. Together 29 u, times 2.5:
72 u. The scores are exact products summed in fp32 whatever the dtype, so that holds for all.

MLA decode is the same sum over more channels. fp16, bf16: as above, 2 u. fp32: d <= 640 (512 + 128), so that scores err
by u d / 2 / sqrt(d) = 12.6 u rms, exp2 and its argument as above: root sum of squares 20.5 u, times 2.5. Bound 51 u.

The selective scan (tests/mamba) is judged per row of channels too, relative to the root of the sum of squares of what
is added up in the row: h C over the state, D x, and the result. The norm of the result alone would not do, for D x may
cancel most of h C. States are judged by rows of `state` elements, relative to their norm.

* fp16, bf16, rounded: B times its decay, the state that a chunk starts from, the product C B times its decay, and
  the result: four times u/sqrt(3), 1.15 u. Where one term rules a row its rounding is common to all channels, so rows
  reach 2.5 times their rms. Bound 3 u.
* fp32: dt = log(1 + exp) errs by u, absolutely; in the tests it is 0.05 at least, so 20 u at most, 10 u rms. Exponents
  reach 11, where half a unit in the last place is 8 u; 32 tokens, beyond which the decay has hidden everything, add up
  to sqrt(32) 8 u / sqrt(3) = 26 u. The sum over a state of 128 adds 6 u. Root sum of squares 28 u, times 2.5. Bound
  70 u.
* tf32: what CUDA makes of the fp32 products, u = 2^-11 (ten bits as fp16). Both operands of each of the three products
  are rounded, and nothing else: sqrt(6 / 3) u, times 2.5. Bound 3.5 u.

The delta rules (tests/mamba) are judged as the scan is: outputs relative to the root of the sum of squares of S q over
the keys, and of the result; rows of a state relative to their norm.

* fp16, bf16, rounded: q and k when they are divided by their norms, the inverse of a chunk, w and u, the new values,
  the state that a chunk starts from, the products q k, and the result: eight times u/sqrt(3), 1.63 u, times 2.5. Bound
  4 u. The errors of earlier tokens do not add up: I - beta k k^T shrinks them, and so does the decay.
* fp32 (the interpreter alone: vLLM refuses it): exponents as of the scan, and sums over 128 keys. Bound 70 u.
* A step token by token is computed in fp32 whatever the dtype: the decay errs by 3 u, a sum over 128 keys by 3 u twice;
  root sum of squares 5 u, times 2. Bound 10 u; in fp16 and bf16 only the result is rounded, bound 1.5 u. Errors of n
  tokens of which no state is judged in between add up as squares do: root n times 10 u.

The gated norm: the sum of squares is a mean of up to 512 positive terms, the gate one exponential and one division.
fp32: 3 u from the sum and the root, 2 u from the exponential, 3 u from the rest. Bound 8 u. fp16, bf16: only the result
is rounded, u/sqrt(3), times 2.5. Bound 1.5 u.

The causal convolution adds up to five terms, then gates. fp32: five products and sums, each u/2 rms of a result that
they rarely exceed twofold, 2 u; the gate 3 u; together 4 u, times 2. Bound 8 u. fp16, bf16: vLLM's kernel multiplies in
the dtype and adds in fp32: four products rounded, at most twice the row in root sum of squares, and the result:
sqrt(4 / 3 + 1 / 3) u = 1.3 u, times 2. Bound 2.6 u.

Huge scores, up to 3e5 (unit-normal data of 64 channels, scale 1e4): the sum of products errs by u d / 2 = 32 u and that
times 1e4, its scaling and the argument of exp2 by 4.3e5 u each: root sum of squares 6.9e5 u, sqrt(2) of that on the
difference of two scores. Where two keys share the weight, w (1 - w) |a - b| is at most half of the norm of the result:
4.9e5 u, times 2.5: 1.2e6 u = 0.07. All other rows are exact as ever.

A merge alone, of parts and sums that are exact: the exponent (up to 16) 16 u, times log2(e) 23 u, exponential, quotient
and products 4 u: root sum of squares 28 u, times 2.5: 70 u; in fp16 and bf16 the one rounding of the result, u/sqrt(3)
rms, times 2.5: 1.5 u. Its sum of exponentials errs by 29 u as the parts' do, by the weights' 28 u and by the last
rounding, 16 u: root sum of squares 43 u, times 2.5: 108 u.

Attention in parts that are merged: an error d of the logarithm of the ratio of weights w and 1 - w moves the result by
w (1 - w) d |a - b| for parts a and b; those are independent, so that is at most d of the norm of the result. d is 41 u
from two sums of exponentials (29 u each) and 28 u from the merge; with the 18 u of the parts' own weights and the 15 u
of a soft cap, root sum of squares 55 u, times 2.5: 138 u. Each further merge adds 28 u and the 16 u of the sum before
it: with six parts 85 u, times 2.5: 213 u. Parts are fp32 whatever the query, so in fp16 and bf16 nothing visible.
"""

from __future__ import annotations

UNIT_ROUNDOFF = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}

ROW_RELATIVE: dict[tuple[str, str], float] = {
    ("attention", "float32"): 45 * UNIT_ROUNDOFF["float32"],
    ("attention", "float16"): 2 * UNIT_ROUNDOFF["float16"],
    ("attention", "bfloat16"): 2 * UNIT_ROUNDOFF["bfloat16"],
    ("attention of capped scores", "float32"): 60 * UNIT_ROUNDOFF["float32"],
    ("attention of capped scores", "float16"): 2 * UNIT_ROUNDOFF["float16"],
    ("attention of capped scores", "bfloat16"): 2 * UNIT_ROUNDOFF["bfloat16"],
    ("attention of scaled rows", "float32"): 45 * UNIT_ROUNDOFF["float32"],
    ("attention of scaled rows", "float16"): 2.5 * UNIT_ROUNDOFF["float16"],
    ("attention of scaled rows", "bfloat16"): 2.5 * UNIT_ROUNDOFF["bfloat16"],
    ("mla", "float32"): 51 * UNIT_ROUNDOFF["float32"],
    ("mla", "float16"): 2 * UNIT_ROUNDOFF["float16"],
    ("mla", "bfloat16"): 2 * UNIT_ROUNDOFF["bfloat16"],
    ("scan", "float32"): 70 * UNIT_ROUNDOFF["float32"],
    ("scan", "tf32"): 3.5 * UNIT_ROUNDOFF["tf32"],
    ("scan", "float16"): 3 * UNIT_ROUNDOFF["float16"],
    ("scan", "bfloat16"): 3 * UNIT_ROUNDOFF["bfloat16"],
    ("delta", "float32"): 70 * UNIT_ROUNDOFF["float32"],
    ("delta", "float16"): 4 * UNIT_ROUNDOFF["float16"],
    ("delta", "bfloat16"): 4 * UNIT_ROUNDOFF["bfloat16"],
    ("delta step", "float32"): 10 * UNIT_ROUNDOFF["float32"],
    ("delta step", "float16"): 1.5 * UNIT_ROUNDOFF["float16"],
    ("delta step", "bfloat16"): 1.5 * UNIT_ROUNDOFF["bfloat16"],
    ("conv", "float32"): 8 * UNIT_ROUNDOFF["float32"],
    ("conv", "float16"): 2.6 * UNIT_ROUNDOFF["float16"],
    ("conv", "bfloat16"): 2.6 * UNIT_ROUNDOFF["bfloat16"],
    ("gated_norm", "float32"): 8 * UNIT_ROUNDOFF["float32"],
    ("gated_norm", "float16"): 1.5 * UNIT_ROUNDOFF["float16"],
    ("gated_norm", "bfloat16"): 1.5 * UNIT_ROUNDOFF["bfloat16"],
    ("attention of huge scores", "float32"): 1.2e6 * UNIT_ROUNDOFF["float32"],
    ("attention in two parts", "float32"): 138 * UNIT_ROUNDOFF["float32"],
    ("attention in two parts", "float16"): 2 * UNIT_ROUNDOFF["float16"],
    ("attention in two parts", "bfloat16"): 2 * UNIT_ROUNDOFF["bfloat16"],
    ("attention in six parts", "float32"): 213 * UNIT_ROUNDOFF["float32"],
    ("attention in six parts", "float16"): 2 * UNIT_ROUNDOFF["float16"],
    ("attention in six parts", "bfloat16"): 2 * UNIT_ROUNDOFF["bfloat16"],
    ("merge", "float32"): 70 * UNIT_ROUNDOFF["float32"],
    ("merge", "float16"): 1.5 * UNIT_ROUNDOFF["float16"],
    ("merge", "bfloat16"): 1.5 * UNIT_ROUNDOFF["bfloat16"],
}
"""(op, dtype) -> largest |out - ref|_2 / |ref|_2 of a (token, head) row, or what is said above in place of |ref|_2."""

LSE_ABSOLUTE = 72 * UNIT_ROUNDOFF["float32"]
"""Largest difference of the logarithm of a sum of exponentials, whatever the dtype of the query."""

LSE_MERGED_ABSOLUTE = 108 * UNIT_ROUNDOFF["float32"]
"""Absolute tolerance of an lse that is merged from two parts."""
