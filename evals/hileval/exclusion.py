"""Which drops a comparison excludes: an interval that stays honest where nearly every answer is right. Pure.

A bound by Student's t claims too much here: with one loss in a hundred the differences are so skewed that its 99 %
bound is passed by 1 drop in 20 rather than 1 in 100. So the question is turned round (test inversion): if a share
`delta` of the questions were lost for good, how likely would a difference as small as the observed one be? The answer
is exact for a deterministic engine, where it becomes Clopper and Pearson's bound (1934); run-to-run noise is added as
the stored runs show it, question by question.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from hileval import stats

EDGE = 1e-9


def drop_interval(base: stats.Outcomes, new: stats.Outcomes, alpha: float) -> tuple[float, float]:
    """Confidence interval of the drop, each bound at level 1 - alpha; negative is an improvement.

    Args:
        base: K stored runs, [K, n].
        new: M new runs, [M, n].
        alpha: Chance that the drop lies above the upper bound, and again that it lies below the lower.
    """
    before, after = stats.paired(base, new)
    questions = before.shape[1]
    observed, unit = _observed(before, after)
    values, weights = noise(before, after)

    def at_most(delta: float) -> float:
        return _at_most(delta, observed - values, weights, unit, questions)

    def at_least(delta: float) -> float:
        return 1.0 - _at_most(delta, observed - 1 - values, weights, unit, questions)

    upper = 1.0 if at_most(1.0) > alpha else brentq(lambda delta: at_most(delta) - alpha, -1.0, 1.0, xtol=EDGE)
    lower = -1.0 if at_least(-1.0) > alpha else brentq(lambda delta: at_least(delta) - alpha, -1.0, 1.0, xtol=EDGE)
    return float(lower), float(upper)


def excludes(base: stats.Outcomes, new: stats.Outcomes, margin: float, level: float) -> bool:
    """Whether a drop of `margin` would show so little with a chance of at most `level`: the upper bound, asked once."""
    observed, unit = _observed(base, new)
    values, weights = noise(base, new)
    return _at_most(margin, observed - values, weights, unit, base.shape[1]) <= level


def noise(base: stats.Outcomes, new: stats.Outcomes) -> tuple[stats.Pmf, stats.Pmf]:
    """What the difference of the two means would be if nothing changed: values in 1/(K M) questions, and weights.

    K >= 2: a question right in g of K stored runs is right with p = g/K in any run, and as many such questions are
    counted as make the variance unbiased, K/(K-1) of them. K = 1 says nothing about noise, so the new run must: a
    question gained is noise, and as many are lost the same way.
    """
    runs, drawn = len(base), len(new)
    if runs == 1:
        steps = 2 * round(float((new & ~base).mean(axis=0).sum()))
        return drawn * (2.0 * np.arange(steps + 1) - steps), binom.pmf(np.arange(steps + 1), steps, 0.5)
    counts = np.bincount(base.sum(axis=0), minlength=runs + 1)
    pmf: stats.Pmf = np.ones(1)
    lowest = 0
    for right in range(1, runs):
        times = math.ceil(counts[right] * runs / (runs - 1))
        if times:
            share = right / runs
            above = np.zeros(runs * times * drawn + 1)
            above[::drawn] = binom.pmf(np.arange(runs * times + 1), runs * times, share)
            below = np.zeros(drawn * times * runs + 1)
            below[::runs] = binom.pmf(np.arange(drawn * times + 1), drawn * times, share)
            pmf = np.convolve(pmf, np.convolve(above, below[::-1]))
            lowest -= drawn * times * runs
    return np.arange(len(pmf)) + float(lowest), pmf


def _observed(base: stats.Outcomes, new: stats.Outcomes) -> tuple[int, int]:
    """The drop in whole units of 1/(K M) questions, and how many units a question has."""
    return int(base.sum()) * len(new) - int(new.sum()) * len(base), len(base) * len(new)


def _at_most(delta: float, room: stats.Pmf, weights: stats.Pmf, unit: int, questions: int) -> float:
    """P(losses + noise <= observed) where `room` is observed - noise, and a share delta is lost (gained below 0)."""
    whole = np.floor(room / unit + EDGE)
    chances = binom.cdf(whole, questions, delta) if delta >= 0 else binom.sf(-whole - 1, questions, -delta)
    return float(weights @ chances)
