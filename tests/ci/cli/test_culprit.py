# SPDX-License-Identifier: Apache-2.0
"""The commands that name a culprit: a commit by the history, a test by running those before another."""

from __future__ import annotations

import pytest
from support.builds import remember
from support.jobs import failed, passed
from support.plans import git, hilgate, write_repository

from hilgate.errors import Exit

TESTS = """
import os, pytest
@pytest.mark.parametrize("n", range(12))
def test_fine(n):
    if n == 7:
        os.environ["SPOILED"] = "1"
def test_last():
    assert "SPOILED" not in os.environ, "something was left behind"
def test_broken():
    assert False, "it is off"
"""


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """A repository whose last tests failed in a run of their step."""
    changes = {"evidence": "junit", "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
    root = tmp_path_factory.mktemp("order")
    (root / "tests").mkdir()
    (root / "tests" / "test_samples.py").write_text(TESTS)
    write_repository(root, {"a": "python -m pytest tests -q -p no:cacheprovider"}, a=changes)
    assert hilgate(root, "run", "a").returncode == Exit.FAIL
    return root


def test_the_test_that_spoils_a_later_one_is_named(spoiled):
    done = hilgate(spoiled, "order", "a-cpu", "tests/test_samples.py::test_last")
    assert done.stdout.startswith("it fails behind tests/test_samples.py::test_fine[7] ("), done.stderr
    assert done.returncode == Exit.PASS


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["a-cpu", "tests/test_samples.py::test_broken"], Exit.INCONCLUSIVE, "it fails alone too"),
        (["a-cpu", "tests/test_samples.py::test_fine[3]"], Exit.MISUSE, "did not fail in the last run"),
        (["b-cpu", "x"], Exit.MISUSE, "no step is called 'b-cpu'"),
    ],
)
def test_what_no_order_explains_is_said(spoiled, words, status, said):
    done = hilgate(spoiled, "order", *words)
    assert done.returncode == status
    assert said in done.stdout + done.stderr


@pytest.fixture(scope="module")
def red(tmp_path_factory):
    """A checkout of nine commits; the check passed at the first and failed at the last. And the commits."""
    root = write_repository(tmp_path_factory.mktemp("red"), {"a": "python -c pass"})
    commits = []
    for number in range(9):
        git(root, "commit", "--quiet", "--allow-empty", "-m", str(number))
        commits.append(git(root, "rev-parse", "HEAD"))
    history = root / "results" / "history"
    remember(history, [passed("f")], commit=commits[0])
    remember(history, [failed("f")], commit=commits[8], minute=1)
    return root, commits


def test_the_commit_is_named_after_a_few_runs(red):
    root, commits = red
    saw = []
    for _ in range(20):
        done = hilgate(root, "history", "culprit", "a-cpu", "f", *saw)
        if done.returncode != Exit.INCONCLUSIVE:
            break
        commit = done.stdout.split("next: run a-cpu at ")[1].split(",")[0]
        saw += ["--saw", f"{commit[:12]}={'fail' if commits.index(commit) >= 5 else 'pass'}"]
    assert done.returncode == Exit.PASS, done.stderr
    assert f"{commits[5][:12]} broke it" in done.stdout
    assert "8 commits in the range; f was flaky in 0 of 2 builds" in done.stdout
    assert len(saw) <= 2 * 2 * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--saw", "abc"], "--saw 'abc' says nothing about a commit of the range"),
        (["--good", "f" * 40], "it has no commit"),
        (["--good", "HEAD", "--bad", "HEAD"], "no commit lies between"),
    ],
)
def test_a_range_that_is_none_is_misuse(red, words, said):
    done = hilgate(red[0], "history", "culprit", "a-cpu", "f", *words)
    assert (done.returncode, said in done.stderr) == (Exit.MISUSE, True), done.stderr
