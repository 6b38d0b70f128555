# SPDX-License-Identifier: Apache-2.0
"""What is said to be left of a run: the forecast, at the pace of what has ended."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.plans import plan, step

from hilgate.model.record import Outcome
from hilgate.plan.estimate import estimate
from hilgate.run import progress


@pytest.mark.parametrize(
    ("seconds", "passed", "words"),
    [
        ((), 60, "1 min 00 s, about 4 min 00 s left"),
        ((120,), 120, "2 min 00 s, about 3 min 00 s left"),  # as expected
        ((270,), 270, "4 min 30 s, about 5 min 30 s left"),  # twice as slow, so that the whole takes 10 minutes
        ((120,), 400, "6 min 40 s"),  # over: nothing is promised
    ],
)
def test_what_is_left_follows_the_pace_of_what_has_passed(monkeypatch, seconds, passed, words):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    one = step("a", "x", minutes=2)
    clock = progress.Clock(SimpleNamespace(minutes=5.0, each=estimate(plan(one)).each))
    for taken in seconds:
        clock.finished(one, SimpleNamespace(record=SimpleNamespace(outcome=Outcome.PASS, seconds=taken)))
    clock.finished(one, SimpleNamespace(record=SimpleNamespace(outcome=Outcome.FAIL, seconds=1)))  # tells no pace
    now[0] = passed
    assert str(clock) == words


def test_without_a_forecast_nothing_is_promised():
    assert str(progress.Clock(None)) == "0.0 s"


@pytest.mark.parametrize(("said", "ending"), [("", ""), ("[ 40%]", ": [ 40%]")])
def test_a_silent_steps_heartbeat_ends_without_a_colon(monkeypatch, said, ending):
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.0)
    printed = io.StringIO()
    lines = progress.Lines(Console(file=printed, width=80), buildkite=False)
    lines.started(step("a", "x"), SimpleNamespace(seconds=61.0, last_line=lambda: said))
    lines.tick()
    assert printed.getvalue().splitlines()[-1] == f"a-cpu: running for 1 min 01 s{ending}"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("printed", "forced", "buildkite", "cut"),
    [
        (Terminal(), None, False, True),
        (io.StringIO(), None, False, False),
        (io.StringIO(), True, False, False),  # FORCE_COLOR
        (Terminal(), None, True, False),  # agents give a job a terminal
    ],
)
def test_a_line_is_cut_on_a_terminal_alone(printed, forced, buildkite, cut):
    console = Console(file=printed, width=80, force_terminal=forced, color_system=None)
    command = "python -m pytest " + "tests/a " * 20
    progress.Lines(console, buildkite=buildkite).started(step("a", command), SimpleNamespace())
    line = printed.getvalue().rstrip("\n").removeprefix("--- ")
    assert line.startswith("a-cpu: started: python -m pytest tests/a tests/a")
    assert (len(line) == 80 and line.endswith("…")) if cut else command.strip() in line
