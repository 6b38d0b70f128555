"""A recorded run of benchmarks as a build of the history."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest

from hilgate.errors import RecordsError
from hilgate.history import benchmarks, store
from hilgate.model import Outcome

NOW = dt.datetime(2026, 11, 21, 7, tzinfo=dt.UTC)
CASE = {
    "case": "decode bs1 2k", "op": "decode", "ours_us": 12.5, "spread": 0.1, "peer": "theirs", "peer_us": 16.0,
    "gbps": 674.0, "rel_error": 0.003, "trouble": "", "hardware": "a GPU", "commit": "22aa2dee5da4", "goal": "met",
}  # fmt: skip


def recorded_run(folder, *rows):
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(CASE | row) + "\n" for row in rows))
    return path


def test_a_recorded_benchmark_is_a_build_of_one_step(tmp_path):
    wrong = {"case": "prefill", "ours_us": None, "trouble": "ours: WRONG"}
    found = benchmarks.of_benchmarks(recorded_run(tmp_path, {}, wrong), measured=NOW, branch="main")
    assert (found.build.profile, found.build.outcome, found.build.time) == ("benchmarks", Outcome.FAIL, NOW)
    assert (found.steps[0].device, found.steps[0].passed, found.steps[0].failed) == ("a GPU", 1, 1)
    assert found.checks[0].numbers["ours_us"] == 12.5
    assert (found.checks[1].outcome, found.checks[1].message) == (Outcome.FAIL, "ours: WRONG")


def test_the_recorded_run_of_this_repository_can_be_added(tmp_path):
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "h200.jsonl"
    store.append(tmp_path, benchmarks.of_benchmarks(path, measured=NOW, branch=""))
    with store.opened(tmp_path) as history:
        assert len(history.checks) == len(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty"),
        ([{}, {"commit": "another-commit"}], "two commits"),
        ([{}, {"ours_us": "fast"}], "run.jsonl:2"),
        ([{"ours_us": float("nan")}], "run.jsonl:1"),
    ],
    ids=["empty", "two commits", "not a number", "nan"],
)
def test_benchmarks_that_are_none_are_refused(tmp_path, rows, words):
    with pytest.raises(RecordsError) as caught:
        benchmarks.of_benchmarks(recorded_run(tmp_path, *rows), measured=NOW, branch="")
    assert words in str(caught.value)


def test_a_missing_file_of_benchmarks_is_refused(tmp_path):
    with pytest.raises(RecordsError, match="no benchmarks"):
        benchmarks.of_benchmarks(tmp_path / "none", measured=NOW, branch="")
