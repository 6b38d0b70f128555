# SPDX-License-Identifier: Apache-2.0
"""A step ends before its job does, so that its results are still uploaded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilgate.errors import CannotRunHereError
from hilgate.run.process import STARTED, TIMEOUT, UPLOAD_SECONDS, Child, inner_timeout

NOW = 1_790_000_000.0


def job(minutes, started=NOW):
    return {TIMEOUT: str(minutes), STARTED: str(started)}


LEFT = {
    "local": ({}, 1800),
    "no-timeout": ({TIMEOUT: "false"}, 1800),
    "empty": ({TIMEOUT: ""}, 1800),
    "no-timeout-ignores-start": ({STARTED: "garbage"}, 1800),
    "roomy": (job(40), 1800),
    "exactly-a-minute-more": (job(31), 1800),
    "same-as-the-step": (job(30), 1740),
    "slow-checkout": (job(31, NOW - 600), 1200),
    "only-the-upload-left": (job(10, NOW - 9 * 60), 0),
    "too-late": (job(10, NOW - 3600), 0),
    "clock-ahead": (job(20, NOW + 3600), 1140),
}


@pytest.mark.parametrize("name", LEFT)
def test_seconds_left_for_the_step(name):
    environment, expected = LEFT[name]
    assert inner_timeout(1800.0, environment, NOW) == expected


@pytest.mark.parametrize(
    "environment",
    [{TIMEOUT: "30"}, job("soon"), job("nan"), job("inf"), job("-5"), job("0"), job(30, "yesterday"), job(30, "nan")],
    ids=["no-start", "word", "nan", "infinite", "negative", "zero", "start-is-a-word", "start-is-nan"],
)
def test_a_job_that_does_not_know_its_end_is_refused(environment):
    with pytest.raises(CannotRunHereError, match="must know when it began") as raised:
        inner_timeout(1800.0, environment, NOW)
    assert "environment hook" in raised.value.remedy


@given(
    step=st.floats(1, 1e5),
    minutes=st.integers(1, 600),
    elapsed=st.floats(0, 1e5, allow_nan=False, allow_infinity=False),
)
def test_it_never_outlives_the_job_or_its_own_timeout(step, minutes, elapsed):
    left = inner_timeout(step, job(minutes, NOW - elapsed), NOW)
    assert 0 <= left <= step
    assert left == 0 or NOW + left <= NOW - elapsed + minutes * 60 - UPLOAD_SECONDS + 1e-3


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("collected 9 items\n........F..sx [ 72%]\n....", "[ 72%]"),
        ("collected 9 items\n....", "collected 9 items"),
        ("tests/test_x.py ......... [ 25%]\n\n", "tests/test_x.py [ 25%]"),
        ("E   it took 3 s\n", "E   it took 3 s"),
    ],
)
def test_the_last_line_is_one_with_words(tmp_path, log, line):
    (tmp_path / "log.txt").write_text(log)
    child = Child.__new__(Child)
    child.log = tmp_path / "log.txt"
    assert child.last_line() == line


def test_what_it_said_is_looked_for_above_the_last_line(tmp_path):
    child = Child.__new__(Child)
    child.log = tmp_path / "log.txt"
    assert (child.said(), child.last_line()) == ("", "")
    child.log.write_text("error: the engine is gone\n" + "  where: x\n" * 900 + "  to do: read what it says above\n")
    assert child.said() == "error: the engine is gone"
    assert child.last_line() == "to do: read what it says above"
