# SPDX-License-Identifier: Apache-2.0
"""Trend over nights: how often it cries wolf, what it sees, and what a history may hold."""

import json

import numpy as np
import pytest

from hileval.gates.analysis import ALARM, CONFIRMED, FEWEST, YEAR, alarms, confirm, judge_nights, read_nights, scan
from hileval.gates.judge import packed, unpacked
from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.model.record import Outcome

N = 1319


@pytest.mark.parametrize("d", [0.002, 0.01, 0.02, 0.04, 0.08])
def test_a_year_of_an_unchanged_model_alarms_at_most_once_in_a_hundred(d):
    replays = 1000
    assert alarms(d, N, good=0, nights=YEAR, replays=replays, seed=1) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / replays)


@pytest.mark.parametrize(("d", "often"), [(0.005, 0.5), (0.01, 0.35), (0.02, 0.2)])
def test_ten_nights_of_minus_half_a_point_are_often_seen_and_of_a_whole_point_nearly_always(d, often):
    assert alarms(d, N, shift=0.005, good=30, nights=10, replays=200, seed=2) >= often
    assert alarms(d, N, shift=0.01, good=30, nights=10, replays=100, seed=2) >= 0.95
    assert alarms(d, N, ramp=0.005, good=30, nights=10, replays=100, seed=3) == 1.0


def test_what_all_nights_have_in_common_is_no_trend():
    """A baseline that was lucky, or another rounding for good."""
    steady = np.full(40, 0.03) + np.tile([0.001, -0.001], 20)
    assert scan(steady, np.full(40, float(N)), 0.02).max() < ALARM
    z = scan(np.r_[steady, steady[:8] + 0.02], np.full(48, float(N)), 0.02)
    assert (bool(z.max() >= ALARM), int(z.argmax()) + 1) == (True, 8)


def test_nights_that_scatter_more_than_the_stored_runs_say_are_believed():
    rng = np.random.default_rng(5)
    wild = rng.normal(0, 0.02, 40)
    wild[-5:] += 0.02
    assert scan(wild, np.full(40, float(N)), 0.0).max() < ALARM


@pytest.mark.parametrize("d", [0.01, 0.02])
@pytest.mark.parametrize("rounding", [0.005, 0.01, 0.03])
def test_a_change_of_rounding_is_no_drop(d, rounding):
    """Some questions are lost for good and as many gained in the mean: 14 to 39 of 100 such changes were alarms."""
    replays = 200
    often = alarms(d, N, rounding=rounding, good=30, nights=30, replays=replays, seed=1)
    assert often <= 0.015 + 3 * np.sqrt(0.015 / replays)


def test_a_split_is_confirmed_by_the_questions():
    before, since = np.ones((2, 20, 400), dtype=bool)
    before[:, 50:70], since[:, 70:100] = False, False  # twenty gained, thirty lost
    assert confirm(np.vstack([before, since]), 20) > 0.05
    since[:, 50:70] = False  # thirty lost
    assert confirm(np.vstack([before, since]), 20) < CONFIRMED


@pytest.mark.parametrize("count", [1, 7, 8, 1319])
def test_which_questions_are_right_fits_a_label_and_comes_back(count):
    right = np.random.default_rng(count).random(count) < 0.9
    assert (unpacked(packed(right)) == right).all()
    for damaged in ("", "x", "9:ff", "0:", packed(right)[:-2]):
        with pytest.raises(ValueError):  # noqa: PT011 - any of Python's
            unpacked(damaged)


@pytest.fixture
def history(tmp_path):
    def add(night, drop, *, profile="nightly", outcome="pass", baseline="2026-01-01 ab", right=None, **numbers):
        folder = tmp_path / f"2026{night // 28 + 1:02d}{night % 28 + 1:02d}T010000Z-{night:012x}-00000000"
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps({"profile": profile}))
        numbers = {"drop": drop, "n": N, "runs": 1, "d": 0.01, **numbers}
        labels = {"baseline": baseline} | ({} if right is None else {"right": packed(right)})
        check = {"id": "g/accuracy", "outcome": outcome, "labels": labels, "numbers": numbers}
        lines = [{"kind": "branch"}, {"kind": "check", "step": "accuracy-g-gfx942", "check": check}]
        (folder / "results.jsonl").write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
        return folder

    return tmp_path, add


def test_ten_stored_nights_of_minus_half_a_point_turn_the_night_red(history):
    folder, add = history
    rng = np.random.default_rng(1)
    base = rng.random(N) < 0.9
    for night in range(40):
        right = base.copy()
        right[np.flatnonzero(base)[rng.choice(500, 6, replace=False)]] = False
        right[np.flatnonzero(base)[600 : 600 + 13 * (night >= 30)]] = False
        add(night, float(base.mean() - right.mean()), right=right)
        add(night + 100, 0.5, profile="pr")
    (found,) = judge_nights(read_nights(folder))
    assert (found.id, found.outcome) == ("accuracy-g-gfx942/trend", Outcome.FAIL)
    assert found.message.startswith("TREND: 40 nights")
    assert "since 2026020" in found.message
    assert "13 questions lost and 0 gained" in found.message
    assert "accept a new baseline" in found.message
    assert found.numbers["since"] in range(8, 13)


@pytest.mark.parametrize(("named", "outcome"), [(True, Outcome.PASS), (False, Outcome.INCONCLUSIVE)])
def test_nights_that_another_rounding_moved_are_no_drop_and_without_their_answers_nothing_is_said(
    history, named, outcome
):
    folder, add = history
    base = np.arange(N) % 10 > 0
    for night in range(40):
        right = base.copy()
        if night >= 30:  # forty lost, twenty gained: -1.5 points, 2.6 standard errors
            right[np.flatnonzero(base)[:40]], right[np.flatnonzero(~base)[:20]] = False, True
        add(night, float(base.mean() - right.mean()), right=right if named else None)
    (found,) = judge_nights(read_nights(folder))
    assert found.numbers["z"] >= ALARM
    assert found.outcome is outcome
    assert ("40 questions lost and 20 gained" in found.message) is named
    assert "rounding" in found.message


def test_a_new_baseline_begins_anew_and_few_nights_say_so(history):
    folder, add = history
    (nothing,) = judge_nights(read_nights(folder))
    assert nothing.outcome is Outcome.DID_NOT_RUN
    assert "no night of any gate is stored" in nothing.message
    for night in range(20):
        add(night, 0.0)
    add(30, 0.05, baseline="2026-02-02 ab")
    add(31, 0.5, outcome="did not run")
    (found,) = judge_nights(read_nights(folder))
    assert (found.outcome, found.message) == (Outcome.PASS, f"1 nights; a trend is looked for from {FEWEST} on")


def test_a_history_that_is_not_there_or_damaged_is_no_pass(history, tmp_path):
    folder, add = history
    with pytest.raises(CannotRunHereError, match="no history"):
        read_nights(tmp_path / "none")
    for spoil in (lambda build: (build / "plan.json").unlink(), lambda build: (build / "plan.json").write_text("{}")):
        build = add(1, 0.0)
        spoil(build)
        with pytest.raises(RecordsError, match="a damaged build"):
            read_nights(folder)
        (build / "plan.json").unlink(missing_ok=True)
        (build / "results.jsonl").unlink()
        build.rmdir()
