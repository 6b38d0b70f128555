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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from hileval.gates import statistics
from hilgate.model import Noun

if TYPE_CHECKING:
    from collections.abc import Sequence


class Rule(Noun):
    """`gates.yaml: rules`: how many questions, how sure, and what an undecided gate means."""

    questions: int | None = Field(default=None, ge=1)
    """How many of the task's questions, drawn at random with `seed`; None asks all of them."""
    seed: int = 0
    """Of the draw and of the order in which questions are asked (the first ones of GSM8K are easier)."""
    look_every: int | None = Field(default=None, ge=1)
    """Questions between two looks; None looks once, at the end."""
    first_look: int = Field(default=1, ge=1)
    alpha: float = Field(gt=0, lt=0.5)
    """How often an unchanged model may fail, all looks and further runs together."""
    margin: float = Field(gt=0, lt=1)
    """A drop of exact match that a pass excludes, as a share."""
    beta: float = Field(gt=0, lt=0.5)
    """How often, at a look, a model that dropped by the margin may pass."""
    baseline_runs: int = Field(default=1, ge=1)
    """Stored runs without which there is no pass: the luck of one run would be shared by every merge."""
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
    def _looks_fit(self) -> Rule:
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


def order(rule: Rule, available: int) -> tuple[int, ...]:
    """Ids of the questions to ask, in order: a seeded random draw, so that any first part of it is one too."""
    drawn = np.random.default_rng(rule.seed).permutation(available)
    return tuple(int(i) for i in drawn[: rule.questions or available])


def shared(rule: Rule, gates: int) -> Rule:
    """The rule of one of several gates that decide on the same change together.

    Each takes its part of alpha (Bonferroni), because each decides on its own agent, before the others are done;
    without that, ten gates at 1 % cry wolf at 10 % of all changes.
    """
    return rule.model_copy(update={"alpha": rule.alpha / gates})


class State(enum.StrEnum):
    """What the answers so far mean."""

    FAIL = "fail"
    PASS = "pass"  # noqa: S105 - a state, not a password
    ASK_MORE = "more questions"
    RUN_AGAIN = "another run"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a gate, with everything that is said of it.

    Attributes:
        n: Questions that count so far.
        new_runs: Runs of them.
        p_value: Of no drop, at this look.
        level: What p had to be at or below (of a sequence of looks: what may be spent until here).
        drop: Mean exact match of the baseline less that of the new runs, as a share.
        low: Lower bound of the drop at level 1 - beta.
        high: Upper bound.
    """

    state: State
    n: int
    new_runs: int
    p_value: float
    level: float
    drop: float
    low: float
    high: float


def first_runs(rule: Rule, base: statistics.Outcomes) -> int:
    """How many runs to start with: more than one where the baseline disagrees with itself too often."""
    noisy = rule.noisy_d is not None and len(base) > 1 and statistics.discordance(base) > rule.noisy_d
    return rule.noisy_runs if noisy else 1


def stand(rule: Rule, base: statistics.Outcomes, runs: Sequence[statistics.Outcomes]) -> Standing:
    """Where the gate stands.

    Args:
        rule: The rule.
        base: K stored runs of all questions the plan may ask, [K, n], in the order of asking.
        runs: The new runs, each the outcomes of its first questions, [m]; all but the last are complete.
    """
    everything = base.shape[1]
    start = first_runs(rule, base)
    if len(runs) == 1 and start == 1:
        return _by_looks(rule, base, np.atleast_2d(runs[0]))
    complete = [run for run in runs if len(run) == everything]
    if len(complete) < len(runs):
        return _standing(State.ASK_MORE, rule, base, np.array(complete) if complete else np.atleast_2d(runs[0]), 0.0)
    new = np.array(runs)
    level = rule.alpha * (first_share(rule, start) if len(runs) == start else rule.extension_share)
    if statistics.drop_p(base, new) <= level:
        state = State.FAIL
    elif len(runs) < start:
        state = State.ASK_MORE
    elif statistics.excludes(base, new, rule.margin, rule.beta):
        state = State.PASS
    else:
        state = State.RUN_AGAIN if len(runs) < start + rule.extensions else State.UNRESOLVED
    return _standing(state, rule, base, new, level)


def _by_looks(rule: Rule, base: statistics.Outcomes, new: statistics.Outcomes) -> Standing:
    plan = statistics.Plan(rule.plan(base.shape[1]), rule.alpha * first_share(rule, 1), rule.margin, rule.beta)
    decided, look = statistics.first_decision(base, new, plan)
    n, level = (look.n, look.allowed) if look else (new.shape[1], 0.0)
    if decided:
        state = State(decided)
    elif n < plan.looks[-1]:
        state = State.ASK_MORE
    else:
        state = State.RUN_AGAIN if rule.extensions else State.UNRESOLVED
    return _standing(state, rule, base[:, :n], new[:, :n], level)


def first_share(rule: Rule, start: int) -> float:
    """Share of alpha for the looks at the run (or runs) that the rule starts with."""
    return 1.0 - (start - 1 + rule.extensions) * rule.extension_share


def _standing(state: State, rule: Rule, base: statistics.Outcomes, new: statistics.Outcomes, level: float) -> Standing:
    base = base[:, : new.shape[1]]
    low, high = statistics.drop_interval(base, new, rule.beta)
    return Standing(
        state=state,
        n=new.shape[1],
        new_runs=len(new),
        p_value=statistics.drop_p(base, new),
        level=level,
        drop=statistics.drop(base, new),
        low=low,
        high=high,
    )
