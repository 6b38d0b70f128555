# SPDX-License-Identifier: Apache-2.0
"""Statistics of accuracy gates: exact paired test, sequential looks at one level, confidence bounds of a drop. Pure.

Outcomes are arrays `[runs, questions]` of bool: the same prompts in the same order, True for a right answer. `rule.py`
turns these numbers into a decision; what a rule can see is in `power.py`.

Sequential looks. Looking again and again at level alpha cries wolf more often than alpha. Dividing alpha by the number
of looks holds it and gives most of it away, because the looks share their questions. Here the whole level is spent,
exactly: given which questions the runs disagree on, the right answers that a look adds are independent of those before
it, so the probability to cross any boundary is a sum of convolutions (Armitage, McPherson and Rowe 1969), and the
boundary of each look is the widest that keeps what is spent so far below the share of alpha that the questions asked so
far are of all (Lan and DeMets 1983, with the linear spending function). What a look could not spend, because outcomes
come in whole questions, the next one may.

Bounds of a drop. A bound by Student's t claims too much where nearly every answer is right: with one loss in a hundred
the differences are so skewed that its 99 % bound is passed by 1 drop in 20 rather than 1 in 100. So the test is
inverted: if a share `delta` of the questions were lost for good, how likely would a difference as small as the observed
one be? The answer is exact for a deterministic engine, where it becomes Clopper and Pearson's bound (1934); run-to-run
noise is added as the stored runs show it, question by question.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, binomtest, hypergeom
from statsmodels.stats.proportion import proportion_confint

from hilgate.errors import MisuseError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Outcomes = NDArray[np.bool_]
    Pmf = NDArray[np.floating]


def outcomes(runs: ArrayLike, *, what: str) -> Outcomes:
    """Outcomes as an array [runs, questions]; one run may be given as a plain list.

    Raises:
        RecordsError: There is no run, no question, or something that is neither 0 nor 1 (NaN, a score of 0.5).
    """
    array = np.atleast_2d(np.asarray(runs))
    if array.ndim != 2 or not array.size:
        raise RecordsError(f"{what}: no outcomes", remedy="record at least one run of at least one question")
    if array.dtype != np.bool_:
        numbers = array.astype(np.float64)
        if not np.isin(numbers, (0.0, 1.0)).all():
            wrong = numbers[~np.isin(numbers, (0.0, 1.0))][0]
            raise RecordsError(f"{what}: {wrong:g} is no outcome", remedy="an answer is right (1) or wrong (0)")
        array = numbers.astype(np.bool_)
    return array


def paired(base: ArrayLike, new: ArrayLike) -> tuple[Outcomes, Outcomes]:
    """Both sides as `[runs, questions]` over the same questions.

    Raises:
        RecordsError: A side is empty or not binary, or they hold different numbers of questions.
    """
    before, after = outcomes(base, what="baseline"), outcomes(new, what="new run")
    if before.shape[1] != after.shape[1]:
        raise RecordsError(
            f"{before.shape[1]} questions before and {after.shape[1]} after cannot be paired",
            remedy="compare runs of the same questions",
        )
    return before, after


def strata(base: Outcomes, new: Outcomes) -> NDArray[np.int64]:
    """How many questions were answered right by g of the K + M runs: counts [K + M + 1]."""
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
    """What `null_pmf` is the distribution of: right answers of the new runs, less those that could not be otherwise."""
    return int(new.sum()) - len(new) * int(counts[-1])


def drop_p(base: ArrayLike, new: ArrayLike) -> float:
    """Exact one-sided p-value of "the new runs are exchangeable with the baseline's" against a drop.

    Only questions on which the runs disagree carry information, so the accuracy itself need not be known. With one run
    on each side it is the exact one-sided McNemar test (McNemar 1947). No disagreement: p = 1.

    Args:
        base: K stored runs, [K, n].
        new: M new runs, [M, n].

    Raises:
        RecordsError: See `paired`.
    """
    before, after = paired(base, new)
    counts = strata(before, after)
    pmf = null_pmf(counts, len(after))
    return float(min(1.0, pmf[: statistic(counts, after) + 1].sum()))


def drop(base: ArrayLike, new: ArrayLike) -> float:
    """Mean exact match of the baseline minus that of the new runs, as a share; negative is an improvement."""
    before, after = paired(base, new)
    return float(before.mean() - after.mean())


def discordance(base: ArrayLike) -> float:
    """d: expected share of questions whose outcome differs between two runs of the same thing.

    The mean of 2 p (1 - p) over questions, unbiased over K runs (factor K / (K - 1)).

    Raises:
        RecordsError: Fewer than two runs: one run says nothing about the next.
    """
    runs = outcomes(base, what="baseline")
    if len(runs) < 2:
        raise RecordsError("d needs at least two runs of the baseline", remedy="record K >= 5 runs")
    p = runs.mean(axis=0)
    return float(np.mean(2 * p * (1 - p)) * len(runs) / (len(runs) - 1))


def interval(correct: int, n: int, alpha: float) -> tuple[float, float]:
    """Two-sided Wilson interval (level 1 - alpha) of a share (Wilson 1927; statsmodels)."""
    low, high = proportion_confint(correct, n, alpha=alpha, method="wilson")
    return float(low), float(high)


def excess(count: int, n: int, expected_rate: float) -> float:
    """Exact one-sided p-value that `count` of `n` comes from at most `expected_rate`."""
    return float(binomtest(count, n, min(1.0, expected_rate), alternative="greater").pvalue)


@functools.lru_cache(maxsize=4096)
def _power(runs: int, right: int, drawn: int, times: int) -> Pmf:
    """The hypergeometric distribution of one question, convolved `times` times (by squaring)."""
    if times == 1:
        return np.asarray(hypergeom.pmf(np.arange(drawn + 1), runs, right, drawn), dtype=np.float64)
    half = _power(runs, right, drawn, times // 2)
    whole = np.convolve(half, half)
    return np.convolve(whole, _power(runs, right, drawn, 1)) if times % 2 else whole


@dataclass(frozen=True, slots=True)
class Look:
    """What was known when `n` questions had been answered."""

    n: int
    p_value: float
    """Of this look alone (`drop_p`)."""
    spent: float
    """Probability, if nothing changed, that this or an earlier look calls a drop."""
    allowed: float
    """What may be spent until here."""
    dropped: bool


def sequential_looks(base: Outcomes, new: Outcomes, plan: Sequence[int], alpha: float) -> tuple[Look, ...]:
    """The looks that the answers so far allow, in order; the first that calls a drop is the last.

    Args:
        base: K stored runs, [K, n], in the order in which questions are asked.
        new: M new runs, [M, n], of the questions answered so far.
        plan: Numbers of questions at which it is looked, ascending; the last is all there will be.
        alpha: Joint level of all looks of the plan.

    Raises:
        MisuseError: The plan does not ascend.
    """
    if not plan or plan[0] < 1 or any(b <= a for a, b in itertools.pairwise(plan)):
        raise MisuseError(f"looks at {list(plan)} questions", remedy="name ascending numbers, e.g. 50, 100, 250")
    found: list[Look] = []
    open_pmf: Pmf = np.ones(1)
    spent, begin = 0.0, 0
    for end in plan:
        if end > new.shape[1]:
            break
        part = strata(base[:, begin:end], new[:, begin:end])
        open_pmf = np.convolve(open_pmf, null_pmf(part, len(new)))
        counts = strata(base[:, :end], new[:, :end])
        observed = statistic(counts, new[:, :end])
        allowed = alpha * end / plan[-1]
        boundary = _boundary(open_pmf, allowed - spent)
        spent += float(open_pmf[:boundary].sum())
        p_value = float(min(1.0, null_pmf(counts, len(new))[: observed + 1].sum()))
        dropped = observed < boundary
        found.append(Look(end, p_value, spent, allowed, dropped))
        if dropped:
            break
        open_pmf = open_pmf.copy()
        open_pmf[:boundary] = 0.0  # a run that had crossed would not be here
        begin = end
    return tuple(found)


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


def first_decision(base: Outcomes, new: Outcomes, plan: Plan) -> tuple[Literal["fail", "pass"] | None, Look | None]:
    """The first look that decides, and how: it calls a drop, or excludes one of the margin.

    Returns:
        Where none decides, None and the last look; no look where the answers end before the first.
    """
    look = None
    for look in sequential_looks(base, new, plan.looks, plan.alpha):
        if look.dropped:
            return "fail", look
        if excludes(base[:, : look.n], new[:, : look.n], plan.margin, plan.beta):
            return "pass", look
    return None, look


def _boundary(pmf: Pmf, budget: float) -> int:
    """How many of the lowest values may call a drop without spending more than `budget`."""
    return int(np.searchsorted(np.cumsum(pmf), budget, side="right"))


EDGE = 1e-9


def drop_interval(base: Outcomes, new: Outcomes, alpha: float) -> tuple[float, float]:
    """Confidence interval of the drop, each bound at level 1 - alpha; negative is an improvement.

    Args:
        base: K stored runs, [K, n].
        new: M new runs, [M, n].
        alpha: Chance that the drop lies above the upper bound, and again that it lies below the lower.
    """
    before, after = paired(base, new)
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


def excludes(base: Outcomes, new: Outcomes, margin: float, level: float) -> bool:
    """Whether a drop of `margin` would show so little with a chance of at most `level`: the upper bound, asked once."""
    observed, unit = _observed(base, new)
    values, weights = noise(base, new)
    return _at_most(margin, observed - values, weights, unit, base.shape[1]) <= level


def noise(base: Outcomes, new: Outcomes) -> tuple[Pmf, Pmf]:
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
    pmf: Pmf = np.ones(1)
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


def _observed(base: Outcomes, new: Outcomes) -> tuple[int, int]:
    """The drop in whole units of 1/(K M) questions, and how many units a question has."""
    return int(base.sum()) * len(new) - int(new.sum()) * len(base), len(base) * len(new)


def _at_most(delta: float, room: Pmf, weights: Pmf, unit: int, questions: int) -> float:
    """P(losses + noise <= observed) where `room` is observed - noise, and a share delta is lost (gained below 0)."""
    whole = np.floor(room / unit + EDGE)
    chances = binom.cdf(whole, questions, delta) if delta >= 0 else binom.sf(-whole - 1, questions, -delta)
    return float(weights @ chances)
