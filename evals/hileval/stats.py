"""Pure statistics of the gate: exact paired test, intervals, and the drop it can see.

No I/O and no opinion: the rule that turns these numbers into an outcome is `gate.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.stats import binom, binomtest, t
from statsmodels.stats.proportion import proportion_confint

from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Paired:
    """Outcomes of the same questions before and after, reduced to what the tests need."""

    n: int
    """Questions."""
    lost: int
    """Right before, wrong now."""
    gained: int
    """Wrong before, right now."""

    @property
    def drop(self) -> float:
        """Baseline exact match minus new exact match, as a share; negative is an improvement."""
        return (self.lost - self.gained) / self.n


def pair(before: Sequence[bool], after: Sequence[bool]) -> Paired:
    """Reduce two outcome vectors of the same questions in the same order.

    Raises:
        RecordsError: the vectors are empty or differ in length.
    """
    if len(before) != len(after) or not before:
        raise RecordsError(
            f"{len(before)} outcomes before and {len(after)} after cannot be paired",
            remedy="compare runs of the same questions",
        )
    lost = sum(b and not a for b, a in zip(before, after, strict=True))
    gained = sum(a and not b for b, a in zip(before, after, strict=True))
    return Paired(n=len(before), lost=lost, gained=gained)


def mcnemar(paired: Paired) -> float:
    """Exact one-sided p-value of "accuracy did not drop".

    Under the null a discordant question is as likely to be lost as gained, so the losses among the discordant ones are
    Binomial(lost + gained, 1/2) (McNemar 1947, exact form). Questions that did not change carry no information, so the
    accuracy itself need not be known. No discordant question: p = 1.
    """
    discordant = paired.lost + paired.gained
    if discordant == 0:
        return 1.0
    return float(binomtest(paired.lost, discordant, 0.5, alternative="greater").pvalue)


def drop_upper(paired: Paired, alpha: float) -> float:
    """One-sided upper confidence bound (level 1 - alpha) of the drop, as a share.

    Student's t over the per-question differences (-1, 0, 1). Their standard deviation is floored at sqrt(1/(2n)), half
    a flip: without the floor a run without any flip would claim that no drop is possible.
    """
    n = paired.n
    if n < 2:
        return 1.0
    mean = paired.drop
    variance = ((paired.lost + paired.gained) / n - mean**2) * n / (n - 1)
    deviation = max(math.sqrt(max(variance, 0.0)), math.sqrt(0.5 / n))
    return min(1.0, mean + float(t.ppf(1 - alpha, n - 1)) * deviation / math.sqrt(n))


def interval(correct: int, n: int, alpha: float) -> tuple[float, float]:
    """Two-sided Wilson interval (level 1 - alpha) of a share (Wilson 1927; statsmodels)."""
    low, high = proportion_confint(correct, n, alpha=alpha, method="wilson")
    return float(low), float(high)


def excess(count: int, n: int, expected_rate: float) -> float:
    """Exact one-sided p-value that `count` of `n` comes from at most `expected_rate`."""
    return float(binomtest(count, n, min(1.0, expected_rate), alternative="greater").pvalue)


def losses_to_fail(alpha: float) -> int:
    """Fewest losses without any gain that the paired test calls a drop: 2^-k <= alpha."""
    return math.ceil(-math.log2(alpha))


def power(n: int, drop: float, noise: float, alpha: float) -> float:
    """Probability that the paired test fails a true drop.

    Args:
        n: Questions.
        drop: True loss of exact match, as a share.
        noise: Share of questions that flip for no reason (half of them each way); 0 for a deterministic engine.
        alpha: Level of the test.

    Losses are Binomial(n, drop + noise/2) and gains Binomial(n, noise/2), taken as independent, which is exact for
    noise = 0 and good while both rates are small.
    """
    total = 0.0
    for gained in range(n + 1):
        weight = float(binom.pmf(gained, n, noise / 2))
        if weight < 1e-12:
            if gained > n * noise / 2:
                break
            continue
        lost = next((k for k in range(n + 1) if mcnemar(Paired(n, k, gained)) <= alpha), n + 1)
        total += weight * float(binom.sf(lost - 1, n, min(1.0, drop + noise / 2)))
    return total
