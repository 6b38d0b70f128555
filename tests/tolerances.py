"""How far a result may lie from the float64 reference: one table, the same in CI and at the desk.

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
"""

from __future__ import annotations

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

ROW_RELATIVE: dict[tuple[str, str], float] = {
    ("attention", "float32"): 45 * UNIT_ROUNDOFF["float32"],
    ("attention", "float16"): 2 * UNIT_ROUNDOFF["float16"],
    ("attention", "bfloat16"): 2 * UNIT_ROUNDOFF["bfloat16"],
}
"""(op, dtype) -> largest |out - ref|_2 / |ref|_2 of a (token, head) row."""
