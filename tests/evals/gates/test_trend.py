# SPDX-License-Identifier: Apache-2.0
"""Trend over nights: how often it cries wolf, what it sees, and what a history may hold."""

import json

import numpy as np
import pytest

from hileval.gates.trend import ALARM, FEWEST, YEAR, alarms, judge_nights, read_nights, scan
from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.model import Outcome

N = 1319


@pytest.mark.parametrize("d", [0.002, 0.01, 0.02, 0.04, 0.08])
def test_a_year_of_an_unchanged_model_alarms_at_most_once_in_a_hundred(d):
    replays = 1000
    assert alarms(d, N, good=0, nights=YEAR, replays=replays, seed=1) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / replays)


@pytest.mark.parametrize(("d", "often"), [(0.005, 0.98), (0.01, 0.95), (0.02, 0.6)])
def test_ten_nights_of_minus_half_a_point_are_seen(d, often):
    seen = alarms(d, N, shift=0.005, good=30, nights=10, replays=300, seed=2)
    assert seen >= often
    assert alarms(d, N, ramp=0.005, good=30, nights=10, replays=100, seed=3) == 1.0


def test_what_all_nights_have_in_common_is_no_trend():
    """A baseline that was lucky, or another rounding for good."""
    steady = np.full(40, 0.03) + np.tile([0.001, -0.001], 20)
    assert scan(steady, np.full(40, float(N)), 0.02)[0] < ALARM
    z, since = scan(np.r_[steady, steady[:8] + 0.02], np.full(48, float(N)), 0.02)
    assert (bool(z >= ALARM), int(since)) == (True, 8)


def test_nights_that_scatter_more_than_the_stored_runs_say_are_believed():
    rng = np.random.default_rng(5)
    wild = rng.normal(0, 0.02, 40)
    wild[-5:] += 0.02
    assert scan(wild, np.full(40, float(N)), 0.0)[0] < ALARM


@pytest.fixture
def history(tmp_path):
    def add(night, drop, *, profile="nightly", outcome="pass", baseline="2026-01-01 ab", **numbers):
        folder = tmp_path / f"2026{night // 28 + 1:02d}{night % 28 + 1:02d}T010000Z-{night:012x}-00000000"
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps({"profile": profile}))
        numbers = {"drop": drop, "n": N, "runs": 1, "d": 0.01, **numbers}
        check = {"id": "g/accuracy", "outcome": outcome, "labels": {"baseline": baseline}, "numbers": numbers}
        lines = [{"kind": "branch"}, {"kind": "check", "step": "accuracy-g-gfx942", "check": check}]
        (folder / "results.jsonl").write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
        return folder

    return tmp_path, add


def test_ten_stored_nights_of_minus_half_a_point_turn_the_night_red(history):
    folder, add = history
    rng = np.random.default_rng(1)
    for night in range(40):
        add(night, float(rng.normal(0.005 * (night >= 30), 0.0019)))
        add(night + 100, 0.5, profile="pr")
    (found,) = judge_nights(read_nights(folder))
    assert (found.id, found.outcome) == ("accuracy-g-gfx942/trend", Outcome.FAIL)
    assert found.message.startswith("TREND: 40 nights")
    assert "since 2026020" in found.message
    assert found.numbers["since"] in range(6, 15)


def test_a_new_baseline_begins_anew_and_few_nights_say_so(history):
    folder, add = history
    assert judge_nights(read_nights(folder))[0].message == "no night of any gate is stored yet"
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
