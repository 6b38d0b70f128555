# SPDX-License-Identifier: Apache-2.0
"""Power of one look and of a plan, beside published figures and the closed form."""

import pytest

from hileval.gates.power import simulate, smallest_drop
from hileval.gates.statistics import Plan
from hilgate.errors import MisuseError

PRE_MERGE = Plan(looks=tuple(range(50, 251, 25)), alpha=0.01, margin=0.05, beta=0.03)


@pytest.mark.parametrize(
    ("n", "base_runs", "new_runs", "d", "points"),
    [(250, 1, 1, 0.01, 3.1), (250, 5, 1, 0.04, 4.4), (1319, 5, 1, 0.02, 1.3), (1319, 5, 3, 0.08, 1.5)],
)
def test_smallest_drop_agrees_with_published_figures(n, base_runs, new_runs, d, points):
    assert 100 * smallest_drop(n, base_runs, new_runs, d, 0.01, 0.9) == pytest.approx(points, abs=0.06)


def test_a_drop_of_two_points_is_within_reach_of_the_whole_set_up_to_5_percent_noise():
    assert smallest_drop(1319, 5, 1, 0.05, 0.01, 0.9) <= 0.02 < smallest_drop(1319, 5, 1, 0.08, 0.01, 0.9)
    assert smallest_drop(1319, 5, 3, 0.13, 0.01, 0.9) <= 0.02


def test_simulated_power_agrees_with_the_closed_form():
    plan = Plan(looks=(500,), alpha=0.01, margin=0.02, beta=0.01)
    drop = smallest_drop(500, 5, 1, 0.04, 0.01, 0.9)
    seen = simulate(plan, accuracy=0.85, d=0.04, drop=drop, base_runs=5, new_runs=1, replays=400, seed=1)
    assert seen.failed == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize("d", [0.01, 0.04])
def test_the_plan_before_a_merge(d):
    still = simulate(PRE_MERGE, accuracy=0.9, d=d, drop=0.0, base_runs=5, new_runs=1, replays=400, seed=2)
    wrecked = simulate(PRE_MERGE, accuracy=0.9, d=d, drop=0.5, base_runs=5, new_runs=1, replays=50, seed=3)
    lost = simulate(PRE_MERGE, accuracy=0.9, d=d, drop=0.05, base_runs=5, new_runs=1, replays=400, seed=4)
    assert still.failed <= 0.01
    assert still.questions < 130
    assert (wrecked.failed, wrecked.questions) == (1.0, 50.0)
    assert lost.failed > 0.85
    assert lost.passed < 0.10


def test_an_impossible_model_is_refused():
    with pytest.raises(MisuseError, match="do not go together"):
        simulate(PRE_MERGE, accuracy=0.9, d=0.2, drop=0.0, base_runs=5, new_runs=1, replays=1, seed=0)
