"""Several looks at one run while it is still answering, at one joint level. Pure.

Looking again and again at level alpha cries wolf more often than alpha. Dividing alpha by the number of looks holds it
and gives most of it away, because the looks share their questions. Here the whole level is spent, exactly: given which
questions the runs disagree on, the right answers that a look adds are independent of those before it, so the
probability to cross any boundary is a sum of convolutions (Armitage, McPherson and Rowe 1969), and the boundary of each
look is the widest that keeps what is spent so far below the share of alpha that the questions asked so far are of all
(Lan and DeMets 1983, with the linear spending function). What a look could not spend, because outcomes come in whole
questions, the next one may.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hileval import stats
from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.stats import Outcomes, Pmf


@dataclass(frozen=True, slots=True)
class Look:
    """What was known when `n` questions had been answered."""

    n: int
    p_value: float
    """Of this look alone (`stats.drop_p`)."""
    spent: float
    """Probability, if nothing changed, that this or an earlier look calls a drop."""
    allowed: float
    """What may be spent until here."""
    dropped: bool


def looks(base: Outcomes, new: Outcomes, plan: Sequence[int], alpha: float) -> tuple[Look, ...]:
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
        part = stats.strata(base[:, begin:end], new[:, begin:end])
        open_pmf = np.convolve(open_pmf, stats.null_pmf(part, len(new)))
        counts = stats.strata(base[:, :end], new[:, :end])
        observed = stats.statistic(counts, new[:, :end])
        allowed = alpha * end / plan[-1]
        boundary = _boundary(open_pmf, allowed - spent)
        spent += float(open_pmf[:boundary].sum())
        p_value = float(min(1.0, stats.null_pmf(counts, len(new))[: observed + 1].sum()))
        dropped = observed < boundary
        found.append(Look(end, p_value, spent, allowed, dropped))
        if dropped:
            break
        open_pmf = open_pmf.copy()
        open_pmf[:boundary] = 0.0  # a run that had crossed would not be here
        begin = end
    return tuple(found)


def _boundary(pmf: Pmf, budget: float) -> int:
    """How many of the lowest values may call a drop without spending more than `budget`."""
    return int(np.searchsorted(np.cumsum(pmf), budget, side="right"))
