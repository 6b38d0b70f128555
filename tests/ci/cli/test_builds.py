# SPDX-License-Identifier: Apache-2.0
"""The commands of the history and of bundles, on the results of a real run of samples."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console
from support.builds import NOW, rows_of, three_builds
from support.bundles import edited, forge
from support.plans import failing, git, hilgate, passing, write_repository, writes_findings

from hilgate.cli import builds
from hilgate.report import history

HISTORY = "results/history.sqlite"
MEASURED = {"id": "decode", "outcome": "pass", "numbers": {"ours_us": 12.5}}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository whose gate ran once and is in its history."""
    root = write_repository(tmp_path_factory.mktemp("samples"), {"a": writes_findings(passing(), MEASURED)})
    assert hilgate(root, "gate").returncode == 0
    added = hilgate(root, "history", "add", "--branch", "main")
    assert (added.returncode, added.stderr) == (0, "")
    assert ": 1 step to " in added.stdout
    return root


def test_adding_again_says_so_and_adds_nothing(repository):
    before = rows_of(repository / HISTORY)
    again = hilgate(repository, "history", "add")
    assert again.returncode == 0
    assert "is already in" in again.stdout
    assert rows_of(repository / HISTORY) == before


def test_the_history_outlives_the_next_gate(repository):
    assert hilgate(repository, "gate", "--steps", "a").returncode == 0
    assert hilgate(repository, "history", "add").stdout.startswith("added ")
    shown = json.loads(hilgate(repository, "history", "show", "--metric", "times", "--json").stdout)
    assert shown["times"][0]["builds"] >= 2


def test_the_environment_names_another_history(repository, tmp_path):
    added = hilgate(repository, "history", "add", HILGATE_HISTORY=str(tmp_path / "far"), BUILDKITE_BRANCH="feature")
    assert added.stdout.startswith("added ")
    assert [row[5] for row in rows_of(tmp_path / "far")["builds"]] == ["feature"]


STEPS = {
    "steady-cpu": (800, 0, "pass"),
    "young-cpu": (30, 0, "pass"),
    "red-cpu": (800, 0, "fail"),
    "shaky-cpu": (100, 9, "pass"),
    "fine-cpu": (100, 1, "pass"),
}


def test_promote_says_what_may_count_and_what_should_not(tmp_path, monkeypatch):
    only = {name: {"report_only": True} for name in ("steady", "young", "red")}
    root = write_repository(tmp_path, {key.removesuffix("-cpu"): "python -c pass" for key in STEPS}, **only)
    known = [history.Steadiness(key, *of) for key, of in STEPS.items()]
    monkeypatch.setattr(history, "steadiness", mock.Mock(return_value=known))
    shown = hilgate(root, "history", "promote", COLUMNS="200").stdout
    told = {line.split()[0]: " ".join(line.split("%")[-1].split()) for line in shown.splitlines()[1:-1]}
    assert told == {
        "steady-cpu": "steady: remove report_only",
        "young-cpu": "only reported: 735 builds to go",
        "red-cpu": "only reported: steady, and now fail",
        "shaky-cpu": "counts, and exceeds it: mend it",
    }
    assert shown.splitlines()[-1].startswith("1 step more, which count")
    as_json = json.loads(hilgate(root, "history", "promote", "--json").stdout)
    assert [(one["key"], one["report_only"]) for one in as_json["steps"]][-1] == ("shaky-cpu", False)


def test_promote_of_an_empty_history_says_what_to_do(tmp_path):
    root = write_repository(tmp_path, {"a": "python -c pass"})
    refused = hilgate(root, "history", "promote")
    assert (refused.returncode, "hilgate history add" in refused.stderr) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("show", "--history", "none"), 2, "add one: `hilgate history add`"),
        (("show", "--metric", "kernel"), 2, "did you mean 'kernels'"),
        (("show", "--step", "aa"), 2, "did you mean"),
        (("show", "--since", "yesterday"), 2, "yesterday"),
        (("show", "--rows", "0"), 2, "than or equal to 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_refused_with_what_to_do(repository, arguments, status, words):
    refused = hilgate(repository, "history", *arguments)
    assert (refused.returncode, refused.stdout) == (status, "")
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(("named", "place"), [("", HISTORY), ("far", "far")], ids=["default", "named"])
def test_other_commands_find_the_same_history(monkeypatch, named, place):
    monkeypatch.setenv("HILGATE_HISTORY", named)
    assert history.path_of(Path()) == Path(place)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = three_builds(tmp_path_factory.mktemp("history") / "history.sqlite")
    return {step: history.ask(path, step=step) for step in ("", "a")}


def tables(metric, rows):
    text = io.StringIO()
    builds.show_history_tables(Console(file=text, width=80), metric, rows, limit=1)
    return text.getvalue()


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([1.0], "▄"),
        ([1.0, 1.0], "▄▄"),
        ([1.0, None, 2.0], "▁·█"),
        ([float("nan"), 1.0, 2.0], "·▁█"),
        ([None], "·"),
        ([9.0, *range(12)], "▁▂▃▄▅▆▇█"),
    ],
    ids=["none", "one", "constant", "gap", "nan", "only a gap", "more than fit"],
)
def test_bars(values, drawn):
    assert builds.bars(values) == drawn


@pytest.mark.parametrize("metric", history.METRICS)
@pytest.mark.parametrize("step", ["", "a"], ids=["all", "one step"])
def test_tables_fit_80_columns(answers, metric, step):
    lines = tables(metric, answers[step][metric]).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80


def test_a_terminal_gets_no_escape_sequences():
    row = {
        "key": "a",
        "id": "x\x1b[31m\u202e",
        "flaky": 1,
        "rate": 1.0,
        "failed": 0,
        "builds": 1,
        "last": NOW,
        "low": 0.2,
        "high": 1.0,
    }
    shown = tables("flakes", [row])
    assert "x\\x1b[31m\\u202e" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("metric", history.METRICS)
def test_an_empty_table_says_why(metric):
    assert tables(metric, []).startswith(f"{metric}: no ")


def test_the_commands(repository):
    done = hilgate(repository, "bundle", "--out", "e.tar")
    assert (done.returncode, done.stdout) == (0, "e.tar\n")
    checked = hilgate(repository, "verify-bundle", "e.tar", "--profile", "gate")
    assert checked.returncode == 0
    assert checked.stdout.endswith("sound; its verdict: pass\n")
    assert max(map(len, checked.stdout.splitlines())) <= 90
    as_json = json.loads(hilgate(repository, "verify-bundle", "e.tar", "--json").stdout)
    assert (as_json["sound"], as_json["outcome"]) == (True, "pass")


def test_an_unsound_bundle_ends_with_3_whatever_it_claims(repository):
    hilgate(repository, "bundle", "--out", "e.tar")
    forge(repository / "e.tar", repository / "f.tar", edited("verdict.json", b"2 passed", b"7 passed"))
    done = hilgate(repository, "verify-bundle", "f.tar")
    assert done.returncode == 3
    assert done.stdout.endswith("invalid bundle: nothing in it counts\n")
    assert hilgate(repository, "verify-bundle", "none.tar").returncode == 3


def test_results_judged_otherwise_than_recorded_are_not_bundled(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(failing(), status=1)})
    assert hilgate(root, "gate").returncode == 1
    verdict = root / "results" / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"fail"', '"pass"'))
    done = hilgate(root, "bundle", "--out", "e.tar")
    assert done.returncode == 3
    assert "the stored verdict says pass; the records give fail" in done.stderr
    assert not (root / "e.tar").exists()


def test_a_bundle_is_of_the_commit_that_is_checked_out(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    hilgate(root, "gate")
    git(root, "commit", "-q", "--allow-empty", "-m", "x")
    done = hilgate(root, "bundle", "--out", "e.tar")
    assert done.returncode == 3
    assert "is checked out" in done.stderr
