# SPDX-License-Identifier: Apache-2.0
"""How far a next-token distribution is from another engine's. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

ASKED = 20
"""Likeliest next tokens that an engine is asked for, and that a divergence looks at."""
EXACT_KL = 1e-8
"""Nats of divergence, which is of second order: float32 on a CPU leaves 1e-10 at worst."""

Floor = tuple[float, float, float]
"""Nats of median, 90 % and worst."""
FLOOR: Floor = (EXACT_KL, EXACT_KL, EXACT_KL)

Row = Mapping[int, float]
"""Log-probability of each of the ASKED likeliest next tokens; vLLM adds the prompt's own token, however unlikely."""
Rows = list[list[dict[int, float]]]
"""Such rows of each sequence, one for each of its places."""

LEFT = 1e-6
"""Error of the sum of a row's probabilities in float32."""


def likeliest(row: Row) -> dict[int, float]:
    """The ASKED likeliest tokens of a row, the likeliest first."""
    return dict(sorted(row.items(), key=lambda entry: (-entry[1], entry[0]))[:ASKED])


def divergence(got: Row, want: Row) -> float:
    """Kullback and Leibler's divergence of `got` from `want` in nats: the ASKED likeliest tokens, and the rest as one.

    What a side does not name of the other's tokens is taken to be as near as its own row allows (`_completed`): two
    tokens of one probability that swap the last place cost nothing.

    Returns:
        Infinity where one of all these is NaN or infinite.
    """
    if not got or not want or not all(map(math.isfinite, (*got.values(), *want.values()))):
        return math.inf
    got, want = likeliest(got), likeliest(want)
    p, q = _completed(want, got), _completed(got, want)
    shares = [(p[token], q[token]) for token in p]
    shares.append(tuple(max(1e-9, 1.0 - sum(side)) for side in zip(*shares, strict=True)))
    totals = [sum(side) for side in zip(*shares, strict=True)]
    return max(0.0, math.fsum(p / totals[0] * math.log(p / totals[0] / (q / totals[1])) for p, q in shares if p))


def _completed(row: Row, other: Row) -> dict[int, float]:
    """Probabilities of the tokens of both rows; of those that `other` alone names, what it says as far as that can be.

    Each is at most as likely as the last token that `row` names, and all of them together at most what `row` leaves.
    """
    named = {token: math.exp(value) for token, value in row.items()}
    last = min(named.values())
    missing = {token: min(math.exp(value), last) for token, value in other.items() if token not in row}
    left = max(0.0, 1.0 - sum(named.values())) + LEFT
    total = sum(missing.values())
    fits = min(1.0, left / total) if total else 1.0
    return named | {token: max(1e-30, share * fits) for token, share in missing.items()}
