# SPDX-License-Identifier: Apache-2.0
"""Statistics of accuracy gates: exact paired test, sequential looks at one level, confidence bounds of a drop. Pure.

Outcomes are arrays `[runs, questions]` of bool: the same prompts in the same order, True for a right answer. `rule.py`
turns these numbers into a decision; `smallest_drop` says what one look can see.

Sequential looks. Looking again and again at level alpha gives false alarms more often than alpha. Dividing alpha by the
number of looks keeps the level but wastes most of it, because the looks share their questions. Here the whole level is
spent, exactly: given which questions the runs disagree on, the right answers that a look adds are independent of those
before it, so the probability to cross any boundary is a sum of convolutions (Armitage, McPherson and Rowe 1969), and
the boundary of each look is the widest that keeps what is spent so far below the share of alpha that the questions
asked so far are of all (Lan and DeMets 1983, with the linear spending function). What a look could not spend, because
outcomes come in whole questions, the next one may.

Runs that are not independent. The exact test believes that K runs are K draws. Where they share their noise, it calls a
drop 7 to 15 times in 100 where it promises one, so a drop is called only if Student's t test of the questions'
differences calls it too, which asks no more than that questions are independent.

Bounds of a drop. A bound by Student's t claims too much where nearly every answer is right: with one loss in a hundred
the differences are so skewed that its 99 % bound is passed by 1 drop in 20 rather than 1 in 100. So the test is
inverted: if a share `delta` of the questions were lost for good, how likely would a difference as small as the observed
one be? The answer is exact for a deterministic engine, where it becomes Clopper and Pearson's bound (1934); noise is
added as the stored runs show it, question by question, or as the new run's gains do, whichever is more.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtr
from scipy.stats import binom, binomtest, hypergeom, norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Outcomes = NDArray[np.bool_]
    Pmf = NDArray[np.floating]


def strata(base: Outcomes, new: Outcomes) -> NDArray[np.int64]:
    """Number of questions that g of the K + M runs answered right, for each g: counts [K + M + 1]."""
    right = base.sum(axis=0) + new.sum(axis=0)
    return np.bincount(right, minlength=len(base) + len(new) + 1)


def null_pmf(counts: NDArray[np.int64], new_runs: int) -> Pmf:
    """Distribution of the new runs' right answers beyond those of the always-right questions, if nothing changed.

    A question that g of all K + M runs answer right gives each set of runs the same chance to hold those g: the new
    runs hold Hypergeometric(K + M, g, M) of them, independently of other questions. Index k is k right answers;
    questions that every or no run answers right add a constant and are left out.
    """
    runs = len(counts) - 1
    pmf: Pmf = np.ones(1)
    for right in range(1, runs):
        if counts[right]:
            pmf = np.convolve(pmf, _power(runs, right, new_runs, int(counts[right])))
    return pmf


def statistic(counts: NDArray[np.int64], new: Outcomes) -> int:
    """Return the number that `null_pmf` describes: right answers to questions that are not always right."""
    return int(new.sum()) - len(new) * int(counts[-1])


def drop_p(base: Outcomes, new: Outcomes) -> float:
    """Exact one-sided p-value of "the new runs are exchangeable with the baseline's" against a drop.

    Only questions on which the runs disagree carry information, so the accuracy itself need not be known. With one run
    on each side it is the exact one-sided McNemar test (McNemar 1947). No disagreement: p = 1.

    Args:
        base: K stored runs, [K, n].
        new: M new runs, [M, n].
    """
    counts = strata(base, new)
    pmf = null_pmf(counts, len(new))
    return float(min(1.0, pmf[: statistic(counts, new) + 1].sum()))


def drop(base: Outcomes, new: Outcomes) -> float:
    """Mean exact match of the baseline minus that of the new runs, as a share; negative is an improvement."""
    return float(base.mean() - new.mean())


def discordance(base: Outcomes) -> float:
    """d: expected share of questions whose outcome differs between two runs of the same thing.

    The mean of 2 p (1 - p) over questions, unbiased over K runs (factor K / (K - 1)); K is at least 2.
    """
    p = base.mean(axis=0)
    return float(np.mean(2 * p * (1 - p)) * len(base) / (len(base) - 1))


def interval(correct: int, n: int, alpha: float) -> tuple[float, float]:
    """Two-sided Wilson interval (level 1 - alpha) of a share (Wilson 1927)."""
    low, high = binomtest(correct, n).proportion_ci(1 - alpha, method="wilson")
    return float(low), float(high)


class Share:
    """Right answers among all of some runs, with their Wilson interval at 1 - alpha."""

    def __init__(self, runs: Sequence[Outcomes], alpha: float) -> None:
        self.confidence = f"{100 * (1 - alpha):.4g}%"
        self.correct, self.n = sum(int(run.sum()) for run in runs), sum(map(len, runs))
        self.value = self.correct / self.n
        self.low, self.high = interval(self.correct, self.n, alpha)

    def __str__(self) -> str:
        return f"{self.correct}/{self.n} = {self.value:.1%} [{self.low:.1%}, {self.high:.1%}] at {self.confidence}"

    @property
    def numbers(self) -> dict[str, int | float]:
        """Numbers of a check."""
        return {"n": self.n, "exact_match": self.value, "ci_low": self.low, "ci_high": self.high}


def excess(count: int, n: int, expected_rate: float) -> float:
    """Exact one-sided p-value that `count` of `n` comes from at most `expected_rate`."""
    return float(binomtest(count, n, min(1.0, expected_rate), alternative="greater").pvalue)


@functools.lru_cache(maxsize=4096)
def _power(runs: int, right: int, drawn: int, times: int) -> Pmf:
    """Distribution of the new runs' right answers to `times` questions that `right` of all runs answer right."""
    return _repeated(hypergeom.pmf(np.arange(drawn + 1), runs, right, drawn), times)


def _repeated(pmf: Pmf, times: int) -> Pmf:
    """The distribution of the sum of that many independent draws."""
    if times == 1:
        return pmf
    half = _repeated(pmf, times // 2)
    doubled = np.convolve(half, half)
    return np.convolve(doubled, pmf) if times % 2 else doubled


def dropped_at_a_look(base: Outcomes, new: Outcomes, plan: Sequence[int], alpha: float) -> bool:
    """Return whether one of the looks that the answers so far allow calls a drop.

    Args:
        base: K stored runs, [K, n], in the order in which questions are asked.
        new: M new runs, [M, n], of the questions answered so far.
        plan: Numbers of questions at which it is looked, ascending; the last is all there will be.
        alpha: Joint level of all looks of the plan.
    """
    # Of runs of an unchanged model in which no earlier look has called a drop.
    open_pmf: Pmf = np.ones(1)
    spent, begin = 0.0, 0
    for end in plan:
        if end > new.shape[1]:
            break
        open_pmf = np.convolve(open_pmf, null_pmf(strata(base[:, begin:end], new[:, begin:end]), len(new)))
        boundary = _boundary(open_pmf, alpha * end / plan[-1] - spent)
        if statistic(strata(base[:, :end], new[:, :end]), new[:, :end]) < boundary:
            return True
        spent += float(open_pmf[:boundary].sum())
        open_pmf[:boundary] = 0.0
        begin = end
    return False


def differences(base: Outcomes, new: Outcomes) -> NDArray[np.float64]:
    """Per question, the share of stored runs that are right less that of the new ones; the last axis is questions."""
    return np.asarray(np.mean(base, axis=-2) - np.mean(new, axis=-2))


def difference_p(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """One-sided p-value of Student's t test that the differences `x` [..., n] of n questions have no mean above 0.

    Questions are independent; runs need not be. The exact test takes K runs for K draws of a question. Where an engine
    repeats itself, or where two right kernels round differently for good, they are not, and this test sees by itself
    how far the differences scatter. The variance is at least that of half a question, so that one flip proves nothing.
    """
    n = x.shape[-1]
    spread = np.maximum(x.std(axis=-1, ddof=1) if n > 1 else 0.0, math.sqrt(0.5 / n))
    # What scipy.stats.t.sf evaluates, without its checks of each call: simulations ask a hundred thousand times.
    return np.asarray(stdtr(max(1, n - 1), -x.mean(axis=-1) * math.sqrt(n) / spread))


@functools.lru_cache(maxsize=256)
def difference_levels(plan: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """Level of `difference_p` at each look, so that all together call a drop with probability alpha.

    O'Brien and Fleming's shape (1979): a sum of differences crosses at the same height at every look, so that nearly
    all of alpha is left for the last one. The height is found by carrying a normal sum's density from look to look.
    """
    if len(plan) == 1:
        return (alpha,)
    times = np.array(plan) / plan[-1]

    def crossing_beyond_alpha(height: float) -> float:
        grid, step = np.linspace(-8.0, height, 1601, retstep=True)
        density: Pmf = norm.pdf(grid, scale=math.sqrt(times[0]))
        for passed in np.diff(times):
            kernel = norm.pdf(np.arange(-1600, 1601) * step, scale=math.sqrt(passed)) * step
            density = np.convolve(density, kernel)[1600:3201]
        return 1.0 - float(density.sum() - density[-1] / 2) * step - alpha

    height = brentq(crossing_beyond_alpha, 0.0, 8.0, xtol=1e-4)
    return tuple(float(level) for level in norm.sf(height / np.sqrt(times)))


def churn(base: Outcomes, new: Outcomes) -> tuple[float, float, float]:
    """Compare how much new runs differ from stored ones with how much those differ among themselves.

    Returns:
        Share of answers that differ between a new and a stored run, the same between two stored runs (0 for one), and
        the exact one-sided p-value of exchangeable runs.
    """
    runs, total = len(base), len(base) + len(new)
    old, now = base.sum(axis=0), new.sum(axis=0)
    differ = old * (len(new) - now) + now * (runs - old)
    held = np.arange(len(new) + 1)
    pmf: Pmf = np.ones(1)
    for right, times in enumerate(strata(base, new)):
        if times and 0 < right < total:
            question = np.zeros(runs * len(new) + 1)
            pairs = (right - held) * (len(new) - held) + held * (runs - right + held)
            chances = hypergeom.pmf(held, total, right, len(new))
            np.add.at(question, pairs[chances > 0], chances[chances > 0])
            pmf = np.convolve(pmf, _repeated(question, int(times)))
    return float(differ.mean()) / (runs * len(new)), discordance(base) if runs > 1 else 0.0, pmf[differ.sum() :].sum()


def _boundary(pmf: Pmf, budget: float) -> int:
    """Number of lowest values that may call a drop without spending more than `budget`."""
    return int(np.searchsorted(np.cumsum(pmf), budget, side="right"))


EDGE = 1e-9


def drop_interval(base: Outcomes, new: Outcomes, alpha: float) -> tuple[float, float]:
    """Confidence interval of the drop, each bound at level 1 - alpha; negative is an improvement.

    Args:
        base: K stored runs, [K, n].
        new: M new runs, [M, n].
        alpha: Chance that the drop lies above the upper bound, and again that it lies below the lower.
    """
    questions = base.shape[1]
    observed, unit = _observed(base, new)
    values, weights = noise(base, new)

    def at_most_beyond_alpha(delta: float) -> float:
        return _at_most(delta, observed - values, weights, unit, questions) - alpha

    def at_least_beyond_alpha(delta: float) -> float:
        return 1.0 - _at_most(delta, observed - 1 - values, weights, unit, questions) - alpha

    upper = 1.0 if at_most_beyond_alpha(1.0) > 0 else brentq(at_most_beyond_alpha, -1.0, 1.0, xtol=EDGE)
    lower = -1.0 if at_least_beyond_alpha(-1.0) > 0 else brentq(at_least_beyond_alpha, -1.0, 1.0, xtol=EDGE)
    return float(lower), float(upper)


def excludes(base: Outcomes, new: Outcomes, margin: float, level: float) -> bool:
    """Return whether a drop of `margin` would show as little as observed with a chance of at most `level`."""
    observed, unit = _observed(base, new)
    values, weights = noise(base, new)
    return _at_most(margin, observed - values, weights, unit, base.shape[1]) <= level


def noise(base: Outcomes, new: Outcomes) -> tuple[Pmf, Pmf]:
    """Distribution of the difference of the two means if nothing changed: values in 1/(K M) questions, and weights.

    The wider of two views. K >= 2 stored runs show how they scatter: a question right in g of them is right with
    p = g/K in any run, and as many such questions are counted as make the variance unbiased, K/(K-1) of them. The new
    runs show what stored ones cannot, which may be copies of one another or round in another way: what is gained is
    noise, and as much is lost the same way; for K = 1 that is all there is.
    """
    runs, drawn = len(base), len(new)
    steps = 2 * round(float((np.minimum(differences(base, new), 0.0) ** 2).sum()))
    counts = np.bincount(base.sum(axis=0), minlength=runs + 1)[1:runs]
    shares = np.arange(1, runs) / runs
    times = np.ceil(counts * runs / max(1, runs - 1)).astype(int)
    if steps > float((times * shares * (1 - shares)).sum()) * (1 / runs + 1 / drawn):
        return runs * drawn * (2.0 * np.arange(steps + 1) - steps), binom.pmf(np.arange(steps + 1), steps, 0.5)
    pmf: Pmf = np.ones(1)
    for repeated, share in zip(times, shares, strict=True):
        if repeated:
            above = np.zeros(runs * repeated * drawn + 1)
            above[::drawn] = binom.pmf(np.arange(runs * repeated + 1), runs * repeated, share)
            below = np.zeros(drawn * repeated * runs + 1)
            below[::runs] = binom.pmf(np.arange(drawn * repeated + 1), drawn * repeated, share)
            pmf = np.convolve(pmf, np.convolve(above, below[::-1]))
    return np.arange(len(pmf)) - float(times.sum() * drawn * runs), pmf


def _observed(base: Outcomes, new: Outcomes) -> tuple[int, int]:
    """The drop in whole units of 1/(K M) questions, and how many units a question has."""
    return int(base.sum()) * len(new) - int(new.sum()) * len(base), len(base) * len(new)


def _at_most(delta: float, room: Pmf, weights: Pmf, unit: int, questions: int) -> float:
    """P(losses + noise <= observed) where `room` is observed - noise, and a share delta is lost (gained below 0)."""
    whole = np.floor(room / unit + EDGE)
    chances = binom.cdf(whole, questions, delta) if delta >= 0 else binom.sf(-whole - 1, questions, -delta)
    return float(weights @ chances)


def smallest_drop(n: int, base_runs: int, new_runs: int, d: float, alpha: float, power: float) -> float:
    """Drop, as a share, that one look fails with probability `power`.

    delta = (z(1 - alpha) + z(power)) sqrt((v0 + delta / M) / n) with v0 = (d / 2) (1 / K + 1 / M): the difference of
    the means has variance v0 per question where nothing changed, and a lost question adds its own (Connor 1987 for
    K = M = 1). The exact test asks for less, except where d is so small that one flip decides: no drop is smaller than
    ceil(log(alpha) / log(K-to-1 odds)) losses.
    """
    v0 = d / 2 * (1 / base_runs + 1 / new_runs)
    z = float(norm.ppf(1 - alpha) + norm.ppf(power))
    delta = 1.0
    for _ in range(200):
        delta = z * math.sqrt((v0 + delta / new_runs) / n)
    odds = math.comb(base_runs + new_runs, new_runs)
    return max(delta, math.ceil(-math.log(alpha) / math.log(odds)) / n)
