# SPDX-License-Identifier: Apache-2.0
"""Simulated merges: how often a rule of a gate fails, passes or leaves undecided a model of known noise and drop."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from hileval import statistics
from hileval.gates.rule import RuleState
from hilgate.model import StrictModel

if TYPE_CHECKING:
    from hileval.gates.rule import GateRule

CHUNK = 100
"""Replays drawn at once."""


class Noise(StrictModel):
    """How the answers of an unchanged model scatter."""

    accuracy: float = Field(gt=0, lt=1)
    d: float = Field(ge=0, lt=1)
    """Discordance of two independent runs: a share 2 d of the questions is a coin toss, the worst case of a given d,
    because it puts the noise on the fewest questions. The others are always right or always wrong."""
    rho: float = Field(default=0.0, ge=0, le=1)
    """Share of questions whose outcome all stored runs have in common, and all new ones: 1 is one run, copied."""
    churn: float = Field(default=0.0, ge=0, lt=1)
    """Share of the questions that the new engine loses for good, and as many that it gains."""


STRESS = (
    *(Noise(accuracy=0.9, d=d, rho=rho) for rho in (0.0, 0.5, 1.0) for d in (0.01, 0.02, 0.04, 0.08)),
    *(Noise(accuracy=0.9, d=d, rho=rho, churn=0.03) for rho in (0.0, 0.5, 1.0) for d in (0.0, 0.02, 0.04)),
)
"""What a rule must not cry wolf at: independent runs, copies of one run, all between, and answers that churn."""


class Power(StrictModel):
    """Shares of simulated merges that end so, and what they cost."""

    failed: float
    passed: float
    undecided: float
    questions: float
    """Mean number of answers asked for."""


def simulate(
    rule: GateRule,
    n: int,
    noise: Noise,
    *,
    drop: float,
    base_runs: int,
    replays: int,
    seed: int,
    only_failures: bool = False,
) -> Power:
    """Replay merges through `decide`: each has its own baseline, its own new runs and its own lost questions.

    Args:
        rule: The rule, its alpha already shared among the gates that decide together.
        n: Questions of the task.
        noise: How answers scatter.
        drop: Share of all questions that become wrong for good, drawn at random.
        base_runs: K.
        replays: How many merges.
        seed: Of the simulation.
        only_failures: Count failures alone, many times faster: what the t test calls at no look cannot fail.
    """
    rng, looks = np.random.default_rng(seed), rule.plan(n)
    most = rule.noisy_runs + rule.extensions
    endings: Counter[RuleState] = Counter()
    questions = 0
    for first in range(0, replays, CHUNK):
        base, new = _draw(rng, noise, drop, (min(CHUNK, replays - first), looks[-1]), base_runs, most)
        for i in np.flatnonzero(_suspects(rule, looks, base, new)) if only_failures else range(len(base)):
            runs = [new[i, 0]]
            while (found := rule.decide(base[i], runs)).state in {RuleState.RUN_AGAIN, RuleState.ASK_MORE}:
                runs.append(new[i, len(runs)])
            endings[found.state] += 1
            questions += found.n * found.new_runs
    return Power(
        failed=endings[RuleState.FAIL] / replays,
        passed=endings[RuleState.PASS] / replays,
        undecided=endings[RuleState.UNRESOLVED] / replays,
        questions=questions / replays,
    )


def _draw(
    rng: np.random.Generator, noise: Noise, drop: float, shape: tuple[int, int], base_runs: int, new_runs: int
) -> tuple[statistics.Outcomes, statistics.Outcomes]:
    """Outcomes [replays, runs, questions] of stored and of new runs."""
    replays, n = shape
    tossed, right = round(2 * noise.d * n), round((noise.accuracy - noise.d) * n)
    wrong = n - tossed - right
    kept = noise.churn * n
    assert kept <= min(wrong, right), "d and churn leave no room for this accuracy"
    assert 0 <= drop <= noise.accuracy
    chances = np.concatenate([np.full(tossed, 0.5), np.ones(right), np.zeros(wrong)])
    p = rng.permuted(np.tile(chances, (replays, 1)), axis=1)[:, None]
    common = rng.random((replays, 1, n)) < noise.rho
    base, new = (rng.random((replays, runs, n)) < p for runs in (base_runs, new_runs))
    base, new = (np.where(common, side[:, :1], side) for side in (base, new))
    flips = rng.random((replays, 1, n)) < np.where(p == 1, kept / max(1, right), kept / max(1, wrong)) * (p != 0.5)
    lost = rng.random((replays, 1, n)) < drop / noise.accuracy
    return base, (new ^ flips) & ~lost


def _suspects(
    rule: GateRule, looks: tuple[int, ...], base: statistics.Outcomes, new: statistics.Outcomes
) -> statistics.Outcomes:
    """Which replays the t test calls a drop in at any look or number of runs, at the whole of alpha."""
    x = statistics.differences(base, new[:, :1])
    found = np.any([statistics.difference_p(x[:, :look]) <= rule.alpha for look in looks], axis=0)
    for runs in range(2, new.shape[1] + 1):
        found |= statistics.difference_p(statistics.differences(base, new[:, :runs])) <= rule.alpha
    return np.asarray(found)
