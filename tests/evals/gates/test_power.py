# SPDX-License-Identifier: Apache-2.0
"""Power of one look and of a rule, beside published figures and the closed form; false alarms whatever the noise."""

import numpy as np
import pytest
from support.gates import declared
from support.merges import STRESS, Noise, simulate

from hileval import statistics
from hileval.gates.rule import GateRule
from hileval.statistics import smallest_drop

N = 1319
RULES = declared().rules
STILL = {"drop": 0.0, "base_runs": 5}
ALONE = [noise for noise in STRESS if noise.rho == 0]
"""One run on each side: noise and churn alone, for there is nothing to copy."""


def test_a_drop_of_two_points_is_found_up_to_3_percent_noise():
    assert smallest_drop(N, 5, 1, 0.03, 0.01, 0.9) <= 0.02 < smallest_drop(N, 5, 1, 0.08, 0.01, 0.9)
    assert smallest_drop(N, 5, 3, 0.08, 0.01, 0.9) <= 0.02


@pytest.mark.parametrize(
    ("rule", "n", "d", "base_runs"),
    [
        (GateRule(alpha=0.01, margin=0.02, beta=0.01, unresolved="block"), 500, 0.04, 5),
        (GateRule(alpha=0.01, margin=0.02, beta=0.01, unresolved="block"), N, 0.02, 5),
        (RULES["paired"], N, 0.02, 1),
        (RULES["paired"], N, 0.08, 1),
    ],
)
def test_simulated_power_agrees_with_the_closed_form(rule, n, d, base_runs):
    drop = smallest_drop(n, base_runs, 1, d, 0.01, 0.9)
    seen = simulate(rule, n, Noise(accuracy=0.85, d=d), drop=drop, base_runs=base_runs, replays=300, seed=1)
    assert seen.failed == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize(
    ("rule", "base_runs", "stress"),
    [("pre-merge", 5, STRESS), ("release", 5, STRESS), ("pre-merge", 1, ALONE), ("paired", 1, ALONE)],
    ids=["pre-merge", "release", "pre-merge beside a pair", "paired"],
)
def test_an_unchanged_model_fails_once_in_a_hundred_at_most(rule, base_runs, stress):
    """Independent runs, copies of one run, and answers that churn: each cell within its sampling error, and all."""
    replays = 1000
    still = {"drop": 0.0, "base_runs": base_runs, "replays": replays, "only_failures": True}
    failed = [simulate(RULES[rule], N, noise, **still, seed=seed).failed for seed, noise in enumerate(stress)]
    assert max(failed) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / replays)
    assert np.mean(failed) <= 0.01


@pytest.mark.parametrize(("rule", "often"), [("pre-merge", 0.05), ("release", 0.1), ("paired", 0.04)])
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


@pytest.mark.parametrize("d", [0.02, 0.08])
def test_a_paired_merge_of_an_unchanged_model_passes(d):
    noise = Noise(accuracy=0.85, d=d)
    assert simulate(RULES["paired"], N, noise, drop=0, base_runs=1, replays=100, seed=6).passed > 0.9


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
