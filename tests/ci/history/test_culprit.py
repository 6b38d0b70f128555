# SPDX-License-Identifier: Apache-2.0
"""Bisection among flakes: 1,000 simulated ranges, tests that fail only behind another, and what the history says."""

from __future__ import annotations

import math
import random

import pytest
from support.builds import remember
from support.jobs import failed, passed

from hilgate.errors import MisuseError
from hilgate.history.culprit import NONE, SURE, Found, Search, find, observed, red_range, weigh

RATES = (0.0, 0.01, 0.05, 0.1, 0.2)


def simulated(generator, flake_rate, assumed):
    """One range with a culprit in it, searched by runs that may lie; (found, the culprit, steps of plain bisection)."""
    count = generator.randint(2, 64)

    def fails(place):
        return generator.random() < (0.99 if culprit <= place else flake_rate)

    while True:  # it is a red range: its end failed, if only by a flake
        culprit = count if generator.random() < NONE else generator.randrange(count)
        if fails(count - 1):
            break
    search = Search(count, max(assumed, 0.005), shows=0.99)
    search.saw(count - 1, failed=True)
    return find(search, fails), culprit, math.ceil(math.log2(count))


def test_1000_ranges_take_at_most_twice_the_steps_and_at_most_the_stated_rate_is_wrong():
    generator = random.Random(20261123)
    runs, steps, wrong = 0, 0, 0
    for number in range(1000):
        rate = RATES[number % len(RATES)]
        found, culprit, plain = simulated(generator, rate, rate)
        runs, steps, wrong = runs + found.runs, steps + plain, wrong + (found.place != culprit)
        assert found.sure >= SURE
    assert runs <= 2 * steps
    assert wrong <= (1 - SURE) * 1000


def test_plain_bisection_is_wrong_more_often_than_stated():
    """What the rate is for: the same ranges searched by one who believes every run."""
    generator = random.Random(5)
    wrong = 0
    for number in range(500):
        found, culprit, _ = simulated(generator, RATES[number % len(RATES)], 0.0)
        wrong += found.place != culprit
    assert wrong > (1 - SURE) * 500


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("culprit", [0, -1])
def test_without_noise_it_is_bisection(count, culprit):
    culprit %= count
    search = Search(count, 0.0, shows=1.0)
    search.saw(count - 1, failed=True)
    found = find(search, lambda place: culprit <= place)
    assert found == Found(culprit, 1.0, found.runs)
    assert found.runs <= math.ceil(math.log2(count)) + 1


def test_a_search_that_learns_nothing_ends_and_is_not_sure():
    generator = random.Random(1)
    found = find(Search(40, 0.49, shows=0.5), lambda _: generator.random() < 0.5)
    assert (found.runs, found.sure < SURE) == (60, True)


@pytest.mark.parametrize(("count", "rate"), [(0, 0.1), (4, 0.99), (4, 1.0), (4, -0.1)])
def test_what_cannot_be_searched_is_refused(count, rate):
    with pytest.raises(MisuseError):
        Search(count, rate)


def test_a_test_that_fails_behind_another_is_the_same_search():
    """The candidates are the tests before it; a run of the first of them fails if the one that spoils it is there."""
    tests = [f"test_{n}" for n in range(30)]
    generator = random.Random(2)

    def fails(place):
        return "test_19" in tests[: place + 1] or generator.random() < 0.1

    named = [find(Search(len(tests), 0.1), fails).place for _ in range(200)]
    assert named.count(19) >= SURE * 200


def test_a_range_that_a_flake_made_red_has_no_culprit():
    search = Search(16, 0.2)
    search.saw(15, failed=True)
    assert find(search, lambda _: False).place == 16


def commit(number):
    return f"{number:x}" * 40


def test_what_the_history_saw_is_weighed(tmp_path):
    good, bad = passed("f"), failed("f")
    builds = [(1, good, ()), (2, bad, ("f",)), (3, good, ()), (6, bad, ()), (8, bad, ())]
    for minute, (number, check, flaky) in enumerate(builds):
        remember(tmp_path, [check], commit=commit(number), flaky=flaky, minute=minute)
    seen = observed(tmp_path, "a-cpu", "f", "main")
    assert seen.runs[:3] == ((commit(1), False), (commit(2), True), (commit(2), False))
    assert (seen.flaky, seen.builds, seen.flake_rate) == (1, 5, pytest.approx(1 / 6))
    assert red_range(seen.runs) == (commit(3), commit(8))
    commits = [commit(number) for number in range(4, 9)]
    search = Search(len(commits), seen.flake_rate)
    weigh(search, commits, seen.runs)
    assert search.next_place in {0, 1}
    assert search.best[0] <= 2


@pytest.mark.parametrize(
    ("runs", "why"),
    [((("a", False),), "it failed in no build"), ((("a", True), ("b", False)), "it passed in no build before")],
)
def test_a_range_needs_a_pass_and_then_a_failure(runs, why):
    with pytest.raises(MisuseError, match=why):
        red_range(runs)


def test_a_check_that_no_build_ran_is_refused(tmp_path):
    remember(tmp_path, [passed("f")])
    with pytest.raises(MisuseError, match="no build of main ran 'g' in a-cpu"):
        observed(tmp_path, "a-cpu", "g", "main")
