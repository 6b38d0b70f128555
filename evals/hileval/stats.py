"""Pure statistics of the gate: the exact paired test over several runs, and what else is said of a single look.

No I/O and no opinion: the rule that turns these numbers into an outcome is `gate.py`; several looks at one run are in
`looks.py`, what excludes a drop in `exclusion.py`, what a plan can see in `power.py`.

Outcomes are arrays `[runs, questions]` of bool: the same prompts in the same order, True for a right answer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import binomtest, hypergeom
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from hilgate.errors import RecordsError

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


def holm(p_values: Sequence[float], alpha: float) -> tuple[bool, ...]:
    """Which of several models dropped, at a joint level (Holm 1979): ten gates cry wolf no more often than one."""
    if not p_values:
        return ()
    return tuple(bool(rejected) for rejected in multipletests(list(p_values), alpha=alpha, method="holm")[0])


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
