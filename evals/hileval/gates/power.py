# SPDX-License-Identifier: Apache-2.0
"""Statistical power of a rule: closed form for one look, seeded simulation for several. Pure.

`python -m hileval power` prints it per model, from the d that the model's own baseline shows.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import norm

from hileval.gates import statistics
from hilgate.errors import MisuseError
from hilgate.model import Noun


class Power(Noun):
    """Shares of simulated merges that end so, and what they cost."""

    failed: float
    passed: float
    undecided: float
    questions: float
    """Mean number of questions asked."""


def simulate(
    plan: statistics.Plan,
    *,
    accuracy: float,
    d: float,
    drop: float,
    base_runs: int,
    new_runs: int,
    replays: int,
    seed: int,
) -> Power:
    """Replay merges: each has its own baseline, its own new runs and its own lost questions.

    A share 2 d of the questions is a coin toss in every run (which gives discordance d), the others are always right or
    always wrong; a drop makes a random share drop/accuracy of all questions wrong for good. Coin tosses are the worst
    case of a given d: they put the noise on the fewest questions.

    Raises:
        MisuseError: d leaves no room for the accuracy, or the drop is larger than it.
    """
    n = plan.looks[-1]
    tossed, right = round(2 * d * n), round((accuracy - d) * n)
    if tossed + right > n or right < 0 or not 0 <= drop <= accuracy:
        raise MisuseError(
            f"accuracy {accuracy:.1%}, d {d:.1%}, drop {drop:.1%} do not go together",
            remedy="d is at most the accuracy, and at most 1 - accuracy",
        )
    rng = np.random.default_rng(seed)
    p = np.concatenate([np.full(tossed, 0.5), np.ones(right), np.zeros(n - tossed - right)])
    endings = []
    for _ in range(replays):
        chance = rng.permutation(p)
        base = rng.random((base_runs, n)) < chance
        kept = rng.random(n) >= drop / accuracy
        new = rng.random((new_runs, n)) < chance * kept
        endings.append(statistics.first_decision(base, new, plan))
    decisions = [decided for decided, _ in endings]
    return Power(
        failed=decisions.count("fail") / replays,
        passed=decisions.count("pass") / replays,
        undecided=decisions.count(None) / replays,
        questions=sum(look.n for _, look in endings if look) / replays,
    )


def smallest_drop(n: int, base_runs: int, new_runs: int, d: float, alpha: float, power: float) -> float:
    """Drop, as a share, that one look fails with probability `power`.

    delta = (z(1 - alpha) sqrt(v0) + z(power) sqrt(v0 + delta / M)) / sqrt(n) with v0 = (d / 2) (1 / K + 1 / M): the
    difference of the means has variance v0 per question where nothing changed, and a lost question adds its own
    (Connor 1987 for K = M = 1). Where d is so small that one flip decides, it is no less than what the discreteness of
    the exact test needs: ceil(log(alpha) / log(K-to-1 odds)) losses.
    """
    v0 = d / 2 * (1 / base_runs + 1 / new_runs)
    a, b = float(norm.ppf(1 - alpha)) * math.sqrt(v0), float(norm.ppf(power))
    delta = 0.0
    for _ in range(200):
        delta = (a + b * math.sqrt(v0 + delta / new_runs)) / math.sqrt(n)
    odds = math.comb(base_runs + new_runs, new_runs)
    return max(delta, math.ceil(-math.log(alpha) / math.log(odds)) / n)
