# SPDX-License-Identifier: Apache-2.0
"""Power of one look and of a rule, beside published figures and the closed form; false alarms whatever the noise."""

import numpy as np
import pytest
from support.gates import declared
from support.merges import STRESS, Noise, simulate

from hileval import statistics
from hileval.gates.rule import GateRule
from hileval.statistics import smallest_drop
from hilgate.errors import MisuseError

N = 1319
RULES = declared().rules
STILL = {"drop": 0.0, "base_runs": 5}


def test_a_drop_of_two_points_is_found_up_to_3_percent_noise():
    assert smallest_drop(N, 5, 1, 0.03, 0.01, 0.9) <= 0.02 < smallest_drop(N, 5, 1, 0.08, 0.01, 0.9)
    assert smallest_drop(N, 5, 3, 0.08, 0.01, 0.9) <= 0.02


@pytest.mark.parametrize(("n", "d"), [(500, 0.04), (N, 0.02)])
def test_simulated_power_agrees_with_the_closed_form(n, d):
    rule = GateRule(alpha=0.01, margin=0.02, beta=0.01, unresolved="block")
    drop = smallest_drop(n, 5, 1, d, 0.01, 0.9)
    seen = simulate(rule, n, Noise(accuracy=0.85, d=d), drop=drop, base_runs=5, replays=300, seed=1)
    assert seen.failed == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize("rule", ["pre-merge", "release"])
def test_an_unchanged_model_fails_once_in_a_hundred_at_most(rule):
    """Independent runs, copies of one run, and answers that churn: each cell within its sampling error, and all."""
    replays = 1000
    failed = [
        simulate(RULES[rule], N, noise, **STILL, replays=replays, seed=seed, only_failures=True).failed
        for seed, noise in enumerate(STRESS)
    ]
    assert max(failed) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / replays)
    assert np.mean(failed) <= 0.01


@pytest.mark.parametrize(("rule", "often"), [("pre-merge", 0.05), ("release", 0.1)])
def test_the_exact_test_alone_cries_wolf_at_copies_of_one_run(monkeypatch, rule, often):
    monkeypatch.setattr(statistics, "difference_p", lambda x: np.zeros(x.shape[:-1]))
    copies = Noise(accuracy=0.9, d=0.04, rho=1)
    assert simulate(RULES[rule], N, copies, **STILL, replays=200, seed=1).failed > often


def test_counting_failures_alone_counts_the_same_failures():
    dropped = {"drop": 0.03, "base_runs": 5, "replays": 100, "seed": 4}
    noise = Noise(accuracy=0.9, d=0.02, rho=0.5)
    every, failures = (simulate(RULES["pre-merge"], N, noise, **dropped, only_failures=only) for only in (False, True))
    assert 0.2 < every.failed == failures.failed
    assert every.failed + every.passed + every.undecided == pytest.approx(1)


@pytest.mark.parametrize("d", [0.01, 0.04])
def test_the_plan_before_a_merge(d):
    noise = Noise(accuracy=0.9, d=d)
    still = simulate(RULES["pre-merge"], N, noise, **STILL, replays=300, seed=2)
    wrecked = simulate(RULES["pre-merge"], N, noise, drop=0.5, base_runs=5, replays=50, seed=3)
    lost = simulate(RULES["pre-merge"], N, noise, drop=0.10, base_runs=5, replays=100, seed=4)
    assert still.passed > 0.95
    assert still.questions < 150
    assert wrecked.failed == 1.0
    assert wrecked.questions < 60
    assert lost.failed > 0.98


def test_an_impossible_model_is_refused():
    with pytest.raises(MisuseError, match="do not go together"):
        simulate(RULES["pre-merge"], N, Noise(accuracy=0.9, d=0.2), **STILL, replays=1, seed=0)
