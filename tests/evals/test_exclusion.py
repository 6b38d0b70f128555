import numpy as np
import pytest
from scipy.stats import beta

from hileval.gates.statistics import drop_interval, excludes


def toss(rng, runs, chance):
    return rng.random((runs, len(chance))) < chance


@pytest.mark.parametrize("lost", [0, 1, 3, 10])
def test_upper_bound_of_a_deterministic_engine_is_clopper_and_pearsons(lost):
    new = np.ones((1, 200), dtype=bool)
    new[0, :lost] = False
    upper = drop_interval(np.ones((5, 200), dtype=bool), new, 0.01)[1]
    assert upper == pytest.approx(beta.ppf(0.99, lost + 1, 200 - lost), abs=1e-6)


def test_improvement_and_drop_mirror_each_other():
    base, new = np.zeros((3, 100), dtype=bool), np.zeros((1, 100), dtype=bool)
    new[0, :8] = True
    low, high = drop_interval(base, new, 0.01)
    mirrored = drop_interval(~base, ~new, 0.01)
    assert (low, high) == pytest.approx((-mirrored[1], -mirrored[0]), abs=1e-6)
    assert high < 0


@pytest.mark.parametrize(("base_runs", "new_runs", "d"), [(5, 1, 0.02), (5, 1, 0.13), (1, 1, 0.04), (5, 3, 0.04)])
def test_upper_bound_holds_its_level(base_runs, new_runs, d):
    rng = np.random.default_rng([base_runs, new_runs, int(d * 100)])
    n, drop = 150, 0.05
    tossed = round(2 * d * n)
    chance = np.concatenate([np.full(tossed, 0.5), np.ones(n - tossed - 5), np.zeros(5)])
    lost = drop / chance.mean()
    below = 0
    for _ in range(600):
        new = toss(rng, new_runs, chance * (rng.random(n) >= lost))
        below += drop_interval(toss(rng, base_runs, chance), new, 0.05)[1] < drop
    assert below / 600 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 600)


def test_excludes_agrees_with_the_bound():
    rng = np.random.default_rng(4)
    chance = np.concatenate([np.full(10, 0.5), np.ones(190)])
    for drop in (0.0, 0.02, 0.05):
        base, new = toss(rng, 5, chance), toss(rng, 1, chance * (rng.random(200) >= drop))
        assert excludes(base, new, 0.05, 0.01) == (drop_interval(base, new, 0.01)[1] <= 0.05)


def test_more_noise_in_the_baseline_excludes_less():
    rng = np.random.default_rng(9)
    new = np.ones((1, 250), dtype=bool)
    quiet = np.ones((5, 250), dtype=bool)
    noisy = toss(rng, 5, np.concatenate([np.full(30, 0.5), np.ones(220)]))
    noisy[:, :30][0] = True  # the means stay close, the spread does not
    assert drop_interval(noisy, new, 0.01)[1] - noisy.mean() + 1 > drop_interval(quiet, new, 0.01)[1]
