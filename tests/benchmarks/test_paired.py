# SPDX-License-Identifier: Apache-2.0
"""The statistic of the perf gate, replayed on noise of which the truth is known: it is rarely red and sees 10 %."""

import math

import numpy as np
import pytest

from benchmarks.paired import RULES, Slowdown, load_rules, log_ratio, slowdown
from pagedkv.errors import InvalidFileError

RULE = load_rules()
RUNS = 2000
CASES = 20


def sessions(random, ratio, *, between=0.005, within=0.01, drift=0.0, spikes=0.0):
    """Times of one case: sessions that differ, noise of each time, a clock that drifts, and some times doubled."""
    shape = (RULE.sessions, RULE.quads, 4)
    place = np.arange(math.prod(shape)).reshape(shape)
    logs = np.zeros(shape)
    logs[..., 1:3] += math.log(ratio) + random.normal(0, between, (RULE.sessions, 1, 1))
    logs += random.normal(0, within, shape) + drift * place + math.log(2) * (random.random(shape) < spikes)
    return 1e-4 * np.exp(logs)


def outcomes(ratio, runs, cases, **noise):
    random = np.random.default_rng(7)
    return [
        [
            slowdown(sessions(random, ratio, **noise), cases=cases, false_alarms=RULE.false_alarms).outcome(RULE.margin)
            for _ in range(cases)
        ]
        for _ in range(runs)
    ]


@pytest.mark.parametrize(
    "noise",
    [{}, {"between": 0.02}, {"drift": 0.002}, {"spikes": 0.02}, {"between": 0.0, "within": 0.05}],
    ids=["usual", "sessions differ", "the clock drifts", "some are doubled", "a noisy host"],
)
@pytest.mark.parametrize("cases", [1, CASES])
def test_an_unchanged_run_is_red_in_one_of_a_hundred(noise, cases):
    """Also where each kernel is as slow as the margin allows, which is the worst truth that is no slow-down."""
    for ratio in (1.0, 1 + RULE.margin):
        runs = RUNS // cases
        red = sum("fail" in run for run in outcomes(ratio, runs, cases, **noise))
        # Binomial: beyond this a rate of `false_alarms` has a chance of one in a thousand.
        allowed = RULE.false_alarms * runs
        assert red <= allowed + 3.1 * math.sqrt(allowed) + 1


@pytest.mark.parametrize("cases", [1, CASES])
def test_a_kernel_that_is_a_tenth_slower_is_red(cases):
    found = [one for run in outcomes(1.1, RUNS // cases // 2, cases, between=0.01) for one in run]
    assert found.count("fail") / len(found) > 0.95
    assert "pass" not in found


@pytest.mark.parametrize("cases", [1, CASES])
def test_a_run_in_which_all_are_as_fast_passes(cases):
    runs = outcomes(1.0, RUNS // cases, cases)
    assert sum(set(run) == {"pass"} for run in runs) / len(runs) > 0.95


@pytest.mark.parametrize("noise", [{}, {"between": 0.02}], ids=["usual", "sessions differ"])
def test_a_slow_kernel_passes_in_one_of_a_hundred(noise):
    found = [one for [one] in outcomes(1.001 + RULE.margin, RUNS, 1, **noise)]
    assert found.count("pass") <= RULE.false_alarms * RUNS + 3.1 * math.sqrt(RULE.false_alarms * RUNS)


def test_noise_that_hides_the_margin_is_inconclusive():
    found = [one for [one] in outcomes(1.0, 200, 1, between=0.05)]
    assert found.count("inconclusive") / len(found) > 0.5


def test_a_straight_drift_drops_out_of_a_quad():
    assert log_ratio([1.0, 1.1 * 1.05, 1.1 * 1.05**2, 1.05**3]) == pytest.approx(math.log(1.1))
    assert log_ratio([2.0, 1.0, 1.0, 2.0]) == pytest.approx(-math.log(2))


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(0.9, 1.02, "pass"), (0.99, 1.03, "inconclusive"), (1.03, 1.04, "inconclusive"), (1.031, 1.2, "fail")],
)
def test_three_outcomes(low, high, outcome):
    assert Slowdown(1.0, low, high).outcome(0.03) == outcome


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("margin = 0.03", "margin = 3", "margin: Input should be less than 0.5; got 3"),
        ("margin = 0.03", "margin = nan", "margin: Input should be "),
        ("sessions = 6", "sessions = 2", "sessions: Input should be greater than or equal to 3; got 2"),
        ("quads = 4", "quads = true", "quads: Input should be a valid integer; got True"),
        ("replays = 5", "", "replays: Field required"),
        ("replays = 5", "replays = 5\nmore = 1", "more: Extra inputs are not permitted"),
        ("margin =", "margin", "against.toml"),
    ],
)
def test_rules_that_cannot_be_are_refused(old, new, says, tmp_path):
    path = tmp_path / "against.toml"
    text = RULES.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InvalidFileError, match=says):
        load_rules(path)
    path.unlink()
    with pytest.raises(InvalidFileError, match=r"against\.toml"):
        load_rules(path)
