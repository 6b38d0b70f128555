"""The commands of the history, on the results of a real run of samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.builds import bytes_of
from support.plans import hilgate, passing, write_repository, writes_findings

from hilgate.history.store import folder_of

MEASURED = {"id": "decode", "outcome": "pass", "numbers": {"ours_us": 12.5}}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository whose gate ran once and is in its history."""
    root = write_repository(tmp_path_factory.mktemp("samples"), {"a": writes_findings(passing(), MEASURED)})
    assert hilgate(root, "gate").returncode == 0
    added = hilgate(root, "history", "add", "--branch", "main")
    assert (added.returncode, added.stderr) == (0, "")
    assert ": 1 steps to " in added.stdout
    return root


def test_adding_again_says_so_and_adds_nothing(repository):
    before = bytes_of(repository / "results" / "history")
    again = hilgate(repository, "history", "add")
    assert again.returncode == 0
    assert "is already in" in again.stdout
    assert bytes_of(repository / "results" / "history") == before


def test_the_history_outlives_the_next_gate(repository):
    assert hilgate(repository, "gate", "--steps", "a").returncode == 0
    assert hilgate(repository, "history", "add").stdout.startswith("added build ")
    shown = json.loads(hilgate(repository, "history", "show", "--metric", "minutes", "--json").stdout)
    assert len(shown["minutes"]) >= 2


def test_all_tables_fit_80_columns(repository):
    shown = hilgate(repository, "history", "show")
    assert shown.returncode == 0
    assert "decode" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_the_page_is_written_beside_the_history_or_where_it_is_asked_for(repository, tmp_path):
    assert (repository / "results" / "history" / "history.html").exists() is False
    written = hilgate(repository, "history", "report").stdout.strip()
    assert written.endswith("results/history/history.html")
    asked = hilgate(repository, "history", "report", "--out", str(tmp_path / "x.html"), "--step", "a")
    assert asked.stdout.strip() == str(tmp_path / "x.html")
    assert "History of a" in (tmp_path / "x.html").read_text()


def test_the_environment_names_another_history(repository, tmp_path):
    added = hilgate(repository, "history", "add", HILGATE_HISTORY=str(tmp_path / "far"), BUILDKITE_BRANCH="feature")
    assert added.stdout.startswith("added ")
    assert b"feature" in b"".join(bytes_of(tmp_path / "far").values())


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("show", "--history", "none"), 4, "add one: `hilgate history add`"),
        (("report", "--history", "none"), 4, "no build"),
        (("show", "--metric", "kernel"), 2, "did you mean 'kernels'"),
        (("show", "--step", "aa"), 2, "did you mean"),
        (("show", "--since", "yesterday"), 2, "yesterday"),
        (("show", "--rows", "0"), 2, "than or equal to 1"),
        (("add", "--results", "none"), 3, "none"),
        (("report", "--out", "none/x.html"), 2, "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_refused_with_what_to_do(repository, arguments, status, words):
    refused = hilgate(repository, "history", *arguments)
    assert (refused.returncode, refused.stdout) == (status, "")
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_verdict_of_another_plan_is_refused(repository, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(repository / "results", folder)
    verdict = json.loads((folder / "verdict.json").read_text())
    (folder / "verdict.json").write_text(json.dumps(verdict | {"plan_digest": "0" * 64}))
    refused = hilgate(repository, "history", "add", "--results", str(folder))
    assert refused.returncode == 3
    assert "another plan" in refused.stderr


@pytest.mark.parametrize(("named", "place"), [("", "results/history"), ("far", "far")], ids=["default", "named"])
def test_other_commands_find_the_same_history(monkeypatch, named, place):
    monkeypatch.setenv("HILGATE_HISTORY", named)
    assert folder_of(Path()) == Path(place)
