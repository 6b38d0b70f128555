# SPDX-License-Identifier: Apache-2.0
"""The rule of an accuracy gate: what the answers so far mean, and what to ask next. Pure.

    looks over one run            fail | pass | ask more questions
    undecided at the last look    one more run of the same questions, at most `extensions` times
    still undecided               unresolved: blocks a release, flags a merge

The level alpha is shared: each possible run beyond the first gets `extension_share` of it, what is looked at first gets
the rest. Where the baseline is so noisy that the rule starts with several runs, each complete run is looked at, so that
a wreck does not cost three.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from hileval import statistics
from hileval.records.answers import Flag
from hilgate.model import StrictModel
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.records.answers import Filter, Sample
    from hilgate.model import Number


def outcomes_of(samples: Sequence[Sample], which: Filter) -> statistics.Outcomes:
    """Outcomes of a run under a filter, [questions], in the order of asking."""
    return np.array([sample.correct(which) for sample in samples], dtype=bool)


class RuleState(enum.StrEnum):
    """What the answers so far mean."""

    FAIL = "fail"
    PASS = "pass"  # noqa: S105 - a state, not a password
    ASK_MORE = "more questions"
    RUN_AGAIN = "another run"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the answers so far mean, and which of them count.

    Attributes:
        n: Questions that count so far.
        new_runs: Runs of them.
        level: What both p-values had to be at or below (of a sequence of looks: what may be spent until here).
    """

    state: RuleState
    n: int
    new_runs: int
    level: float


@dataclass(frozen=True, slots=True)
class Standing(GateDecision):
    """A decision with everything that is said of it.

    Attributes:
        p_value: Of no drop, exact, if runs are independent.
        p_difference: The same by the t test of the questions' differences, which does not ask that.
        drop: Mean exact match of the baseline less that of the new runs, as a share.
        low: Lower bound of the drop at level 1 - beta.
        high: Upper bound.
        churned: Share of answers that differ between a new and a stored run.
        churn_p: Of that being what stored runs differ among themselves.
        looks: How many looks at the first run share alpha.
    """

    p_value: float
    p_difference: float
    drop: float
    low: float
    high: float
    churned: float
    churn_p: float
    looks: int


class GateRule(StrictModel):
    """`gates.yaml: rules`: how many questions, how sure, and what an undecided gate means."""

    questions: int | None = Field(default=None, ge=1)
    """Number of questions, drawn at random with `seed`; None asks all of the task."""
    seed: int = 0
    """Seed of the draw and of the order in which questions are asked (the first ones of GSM8K are easier)."""
    look_every: int | None = Field(default=None, ge=1)
    """Questions between two looks; None looks once, at the end."""
    first_look: int = Field(default=1, ge=1)
    alpha: float = Field(gt=0, lt=0.5)
    """Probability that an unchanged model fails, over all looks and further runs."""
    margin: float = Field(gt=0, lt=1)
    """A drop of exact match that a pass excludes, as a share."""
    beta: float = Field(gt=0, lt=0.5)
    """Probability that a model which dropped by the margin passes at a look."""
    baseline_runs: int = Field(default=1, ge=1)
    """Distinct stored runs without which there is no pass: the luck of one run would be shared by every merge."""
    extensions: int = Field(default=0, ge=0, le=2)
    """Further runs of the same questions while undecided."""
    extension_share: float = Field(default=0.1, gt=0, lt=0.4)
    """Share of alpha for each of them, and for each run before the last one that the rule starts with."""
    noisy_d: float | None = Field(default=None, gt=0, lt=1)
    """A baseline with more discordance than this starts with `noisy_runs` runs."""
    noisy_runs: int = Field(default=1, ge=1, le=5)
    unresolved: Literal["block", "flag"]
    """`flag` lets a merge pass with a warning; a release never does."""

    @model_validator(mode="after")
    def _looks_fit(self) -> GateRule:
        if self.look_every is not None and self.questions is None:
            raise ValueError("look_every needs a number of questions")
        if self.questions is not None and self.first_look > self.questions:
            raise ValueError(f"first_look {self.first_look} comes after the last of {self.questions} questions")
        return self

    def plan(self, available: int) -> tuple[int, ...]:
        """Numbers of questions at which it is looked, when the task holds `available`."""
        last = min(self.questions or available, available)
        if self.look_every is None:
            return (last,)
        return (*range(min(self.first_look, last), last, self.look_every), last)

    def order(self, available: int) -> tuple[int, ...]:
        """Ids of the questions to ask, in order: a seeded random draw, so that any first part of it is one too."""
        drawn = np.random.default_rng(self.seed).permutation(available)
        return tuple(int(i) for i in drawn[: self.questions or available])

    def shared(self, gates: int) -> GateRule:
        """The rule of one of several gates that decide on the same change together.

        Each takes its part of alpha (Bonferroni), because each decides on its own agent, before the others are done;
        without that, ten gates at 1 % cry wolf at 10 % of all changes.
        """
        return self.model_copy(update={"alpha": self.alpha / gates})

    def first_runs(self, base: statistics.Outcomes) -> int:
        """Number of runs to start with: more than one where the baseline disagrees with itself too often."""
        noisy = self.noisy_d is not None and len(base) > 1 and statistics.discordance(base) > self.noisy_d
        return self.noisy_runs if noisy else 1

    def first_share(self, start: int) -> float:
        """Share of alpha for the looks at the run (or runs) that the rule starts with."""
        return 1.0 - (start - 1 + self.extensions) * self.extension_share

    def decide(self, base: statistics.Outcomes, runs: Sequence[statistics.Outcomes]) -> GateDecision:
        """Decide what to do next.

        A drop is called only if the exact test and the t test of the questions' differences both call it.

        Args:
            base: K stored runs of all questions the plan may ask, [K, n], in the order of asking.
            runs: The new runs, each the outcomes of its first questions, [m]; all but the last are complete.
        """
        everything = base.shape[1]
        start = self.first_runs(base)
        if len(runs) == 1 and start == 1:
            return self._by_looks(base, np.atleast_2d(runs[0]))
        complete = [run for run in runs if len(run) == everything]
        if len(complete) < len(runs):
            new = np.array(complete) if complete else np.atleast_2d(runs[0])
            return GateDecision(RuleState.ASK_MORE, new.shape[1], len(new), 0.0)
        new = np.array(runs)
        level = self.alpha * (self.first_share(start) if len(runs) == start else self.extension_share)
        if (
            statistics.difference_p(statistics.differences(base, new)) <= level
            and statistics.drop_p(base, new) <= level
        ):
            state = RuleState.FAIL
        elif len(runs) < start:
            state = RuleState.ASK_MORE
        elif statistics.excludes(base, new, self.margin, self.beta):
            state = RuleState.PASS
        else:
            state = RuleState.RUN_AGAIN if len(runs) < start + self.extensions else RuleState.UNRESOLVED
        return GateDecision(state, everything, len(new), level)

    def _by_looks(self, base: statistics.Outcomes, new: statistics.Outcomes) -> GateDecision:
        """The first look that decides: it calls a drop, or excludes one of the margin.

        The exact test may have called it at an earlier look, at which the other did not yet.
        """
        plan, alpha = self.plan(base.shape[1]), self.alpha * self.first_share(1)
        x = statistics.differences(base[:, : new.shape[1]], new)
        for n, level in zip(plan, statistics.difference_levels(plan, alpha), strict=True):
            if n > new.shape[1]:
                return GateDecision(
                    RuleState.ASK_MORE, min(new.shape[1], max((p for p in plan if p < n), default=n)), 1, 0.0
                )
            allowed = alpha * n / plan[-1]
            if statistics.difference_p(x[:n]) <= level and statistics.dropped_at_a_look(base, new[:, :n], plan, alpha):
                return GateDecision(RuleState.FAIL, n, 1, allowed)
            if statistics.excludes(base[:, :n], new[:, :n], self.margin, self.beta):
                return GateDecision(RuleState.PASS, n, 1, allowed)
        return GateDecision(RuleState.RUN_AGAIN if self.extensions else RuleState.UNRESOLVED, plan[-1], 1, alpha)

    def next_to_ask(
        self, base: statistics.Outcomes | None, runs: Sequence[statistics.Outcomes], *, wrecked: bool
    ) -> tuple[bool, bool]:
        """Return whether to start another run, and whether to go on with this one.

        Without stored runs there is one run. Where the output is `wrecked` (`broken` failed), more answers cannot help.
        """
        if wrecked or base is None:
            return False, not wrecked
        start, state = self.first_runs(base), self.decide(base, runs).state
        if state is RuleState.ASK_MORE:
            return len(runs) < start, True
        return state is RuleState.RUN_AGAIN, False

    def stand(self, base: statistics.Outcomes, runs: Sequence[statistics.Outcomes]) -> Standing:
        """Decide (`decide`), and add the figures of the answers that count."""
        looks, decision = len(self.plan(base.shape[1])), self.decide(base, runs)
        new = np.array([run[: decision.n] for run in runs[: decision.new_runs]])
        base = base[:, : decision.n]
        low, high = statistics.drop_interval(base, new, self.beta)
        churned, _, churn_p = statistics.churn(base, new)
        return Standing(
            state=decision.state,
            n=decision.n,
            new_runs=decision.new_runs,
            level=decision.level,
            p_value=statistics.drop_p(base, new),
            p_difference=float(statistics.difference_p(statistics.differences(base, new))),
            drop=statistics.drop(base, new),
            low=low,
            high=high,
            churned=churned,
            churn_p=churn_p,
            looks=looks,
        )


HARD_RATE, ENOUGH = 0.2, 250
"""Share of broken answers that fails at any look, and answers from which on the gate's own `max_rate` does: three
of fifty are more than 5 %, and one healthy model in ten breaks so many at one of nine looks."""


class BrokenLimits(StrictModel):
    """Limits of broken output, whatever the accuracy says."""

    max_rate: float = Field(gt=0, lt=1)
    """Fail above this share of broken answers, or above twice the baseline's share if that is more."""
    alpha: float = Field(gt=0, lt=1)
    """Fail if the count is this improbable under the baseline's share plus one question."""
    min_count: int = Field(ge=1)
    """Fewest broken answers for the second rule."""

    def check(self, check_id: str, stored: tuple[float, float] | None, samples: Sequence[Sample], looks: int) -> Check:
        """Broken answers against what the stored runs broke of the same questions, at alpha shared among the looks.

        Answers that were only cut off are counted apart: a model that thinks aloud is cut off more often than it
        babbles.

        Args:
            check_id: Of the check that is returned.
            stored: Shares of stored answers that were broken, and only cut off; None without a baseline.
            samples: The answers.
            looks: How many looks share alpha.
        """
        n = len(samples)
        kinds = Counter(flag for sample in samples for flag in sample.flags)
        cut = sum(sample.flags == (Flag.TRUNCATED,) for sample in samples)
        counts = {"broken": sum(bool(sample.flags) for sample in samples) - cut, "cut off": cut}
        before = dict(zip(counts, stored or (0.0, 0.0), strict=True))
        reasons = ["a log-probability was NaN or infinite"] if kinds[Flag.NON_FINITE] else []
        p_values = {kind: statistics.excess(count, n, before[kind] + 1 / n) for kind, count in counts.items()}
        hard = {"broken": self.max_rate if n >= ENOUGH else HARD_RATE, "cut off": HARD_RATE}
        allowed = {kind: max(hard[kind], 2 * before[kind]) for kind in counts}
        for kind, count in counts.items():
            if count / n > allowed[kind]:
                reasons.append(f"more than {allowed[kind]:.1%} {kind}")
            known_rate = kind == "broken" or stored is not None
            if known_rate and count >= self.min_count and p_values[kind] <= self.alpha / looks:
                reasons.append(f"{kind}: p={p_values[kind]:.1e} against the baseline's {before[kind]:.1%}")
        flagged = {flag: kinds[flag] for flag in Flag if kinds[flag]}
        listed = ", ".join(f"{times} {flag.value}" for flag, times in flagged.items()) or "none"
        total = sum(counts.values())
        message = f"{total}/{n} answers broken ({listed})" + (f": {', '.join(reasons)}" if reasons else "")
        if first := next((sample for sample in samples if sample.flags), None):
            message += f"; first: question {first.doc_id}: {first.text[:60]!r}"
        numbers: dict[str, Number] = {
            "n": n,
            "broken": total,
            "baseline_broken_rate": sum(before.values()),
            "p_value": min(p_values.values()),
            "limit": allowed["broken"],
        }
        numbers |= {flag.value.replace(" ", "_").replace("-", "_"): times for flag, times in flagged.items()}
        return Check(id=check_id, outcome=Outcome.FAIL if reasons else Outcome.PASS, message=message, numbers=numbers)
