"""What a plan of looks can and cannot see: closed form for one look, simulation for several. Pure; seeded.

`python -m hileval power` prints it per model, from the d that the model's own baseline shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.stats import norm

from hileval.gates import statistics
from hileval.gates.statistics import looks
from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class Plan:
    """Looks at one run.

    Attributes:
        looks: Numbers of questions, ascending; the last is all there will be.
        alpha: Chance to call a drop where there is none, over all looks.
        margin: Drop that a pass excludes, as a share.
        beta: Chance, at each look, to pass a model that dropped by the margin.
    """

    looks: tuple[int, ...]
    alpha: float
    margin: float
    beta: float


Ending = Literal["fail", "pass", "inconclusive"]


def decide(base: statistics.Outcomes, new: statistics.Outcomes, plan: Plan) -> tuple[Ending, int]:
    """How the plan ends on these outcomes, and after how many questions: the first look that can say something does."""
    found = looks(base, new, plan.looks, plan.alpha)
    for look in found:
        if look.dropped:
            return "fail", look.n
        if statistics.excludes(base[:, : look.n], new[:, : look.n], plan.margin, plan.beta):
            return "pass", look.n
    return "inconclusive", found[-1].n if found else 0


@dataclass(frozen=True, slots=True)
class Seen:
    """Shares of simulated merges that end so, and what they cost."""

    drop: float
    fail: float
    passed: float
    inconclusive: float
    questions: float
    """Mean number of questions asked."""
    replays: int


def simulate(
    plan: Plan, *, accuracy: float, d: float, drop: float, base_runs: int, new_runs: int, replays: int, seed: int
) -> Seen:
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
    endings: list[tuple[Ending, int]] = []
    for _ in range(replays):
        chance = rng.permutation(p)
        base = rng.random((base_runs, n)) < chance
        kept = rng.random(n) >= drop / accuracy
        endings.append(decide(base, _run(rng, new_runs, chance * kept), plan))
    names = [ending for ending, _ in endings]
    return Seen(
        drop=drop,
        fail=names.count("fail") / replays,
        passed=names.count("pass") / replays,
        inconclusive=names.count("inconclusive") / replays,
        questions=sum(asked for _, asked in endings) / replays,
        replays=replays,
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


def sample_size(drop: float, base_runs: int, new_runs: int, d: float, alpha: float, power: float) -> int:
    """Fewest questions with which one look fails a drop with probability `power` (inverse of `smallest_drop`)."""
    low, high = 1, 1
    while smallest_drop(high, base_runs, new_runs, d, alpha, power) > drop:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if smallest_drop(middle, base_runs, new_runs, d, alpha, power) > drop:
            low = middle + 1
        else:
            high = middle
    return low


def _run(rng: Generator, runs: int, chance: statistics.Pmf) -> statistics.Outcomes:
    return rng.random((runs, len(chance))) < chance
