# SPDX-License-Identifier: Apache-2.0
"""What a person sees while steps run."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.plans import step

from hilgate.run import progress


@pytest.mark.parametrize(
    ("size", "passed", "words"),
    [
        (SimpleNamespace(minutes=5.0), 60, "1 min 00 s, about 4 min 00 s left by the forecast"),
        (SimpleNamespace(minutes=5.0), 400, "6 min 40 s"),
        (None, 60, "1 min 00 s"),
    ],
    ids=["within the forecast", "beyond it", "without one"],
)
def test_a_heartbeat_says_what_is_left_by_the_forecast(monkeypatch, size, passed, words):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    printed = io.StringIO()
    lines = progress.Lines(Console(file=printed, width=80), buildkite=False, size=size)
    lines.started(step("a", "x"), SimpleNamespace(seconds=passed, last_line=lambda: ""))
    now[0] = passed
    lines.tick()
    assert printed.getvalue().splitlines()[1] == words


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
