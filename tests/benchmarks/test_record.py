# SPDX-License-Identifier: Apache-2.0
"""Which results files are believed, and what is said of the others. No device."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import record

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).with_name("sample.jsonl")
LINES = SAMPLE.read_text(encoding="utf-8").splitlines()


def write(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def lines(count: int = 3) -> list[dict]:
    return [json.loads(line) for line in LINES[:count]]


def message(path: Path) -> str:
    with pytest.raises(record.BenchmarkRecordError) as stop:
        record.read(path)
    text = str(stop.value)
    assert "\n  to do: " in text
    return text


def test_every_committed_run_is_believed():
    """Bytes and operations of every recorded case are still those that its figures followed from."""
    runs = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    assert runs
    for run in runs:
        assert record.read(run)


def test_a_run_is_read_in_its_order():
    rows = record.read(SAMPLE)
    assert [row.record.case for row in rows] == [json.loads(line)["case"] for line in LINES]
    assert all(row.case.name == row.record.case for row in rows)
    assert rows[0].record.line() == LINES[0], "nothing is lost or added"


SECOND = json.loads(LINES[1])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ours_us": "16.5"}, "key 'ours_us.*got"),
        ({"ours_us": True}, "key 'ours_us.*got"),
        ({"yardstick": "reed"}, "key 'yardstick.*got"),
        *(({"fraction": value}, "key 'fraction': Input should be a finite number") for value in (math.nan, math.inf)),
        ({"our_us": 1.0}, "key 'our_us'"),
        ({"case": "decode bs1 8k"}, "case 'decode bs1 8k' is already in line 1"),
        ({"hardware": "NVIDIA H100"}, "hardware: got 'NVIDIA H100'.*a file is one run"),
        ({"versions": {"torch": "2.12"}}, "versions: got .*a file is one run"),
        ({"commit": "000000000000"}, "commit: got .*a file is one run"),
        ({"yardstick_rate": 2 * SECOND["yardstick_rate"], "fraction": SECOND["fraction"] / 2}, "yardstick_rate: got"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_got(tmp_path, changes, problem):
    good, bad, _ = lines()
    text = message(write(tmp_path / "r.jsonl", good, bad | changes))
    assert re.search(rf"r\.jsonl:2: {problem}", text, re.DOTALL), text


@pytest.mark.parametrize("text", ["", "{", "{}", LINES[0][:-20], "[1]", "null"])
def test_a_line_that_is_no_record_is_refused(tmp_path, text):
    assert "r.jsonl:2: " in message(write(tmp_path / "r.jsonl", LINES[0], text))


def test_an_empty_a_missing_and_a_binary_file_are_refused(tmp_path):
    assert "the file is empty" in message(write(tmp_path / "r.jsonl"))
    assert "cannot be read" in message(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in message(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"case": "decode bs9 8k"}, "expected the name of one in benchmarks/cases.py"),
        ({"op": "gather"}, "op: got 'gather'; expected 'decode'"),
        ({"peer": "cp_mha_gather_cache"}, "peer: got"),
        ({"yardstick": "copy"}, "yardstick: got"),
        ({"ours_us": 0.0}, "key 'ours_us': Input should be greater than 0; got 0.0"),
        ({"ratio": 2.8043}, "ratio: got 2.8043; expected 2.8032"),
        ({"ratio": None}, "ratio: got None; expected 2.80"),
        ({"gbps": 4054.0}, "gbps: got 4054.0; expected 2027"),
        ({"fraction": 0.88}, "fraction: got 0.88; expected 0.44029"),
        ({"ours_us": 8.281}, "ratio: got"),
    ],
)
def test_figures_must_follow_from_the_times_and_from_the_case(tmp_path, changes, problem):
    bad = lines()[0] | changes
    text = message(write(tmp_path / "r.jsonl", bad))
    assert "r.jsonl:1: " in text
    assert problem in text


def test_a_side_without_a_time_is_read_when_it_says_why(tmp_path):
    wrong = lines()[0] | {
        "peer_us": None,
        "peer_spread": None,
        "peer_rel_error": None,
        "ratio": None,
        "trouble": "peer: did not run: x",
    }
    assert record.read(write(tmp_path / "r.jsonl", wrong))[0].record.ratio is None


def test_a_further_session_has_rates_of_its_own(tmp_path):
    """Its rows are of the same hardware, versions and commit, and each is held against its own session's rates."""
    *first, last = lines(len(LINES))
    fraction = last["fraction"] and last["fraction"] / 1.25
    later = last | {"session": 2, "yardstick_rate": last["yardstick_rate"] * 1.25, "fraction": fraction}
    rows = record.read(write(tmp_path / "two.jsonl", *first, later))
    assert [row.record.session for row in rows] == [1] * len(first) + [2]
    said = record.environment([row.record for row in rows])
    assert f"session 1 ({len(first)} cases" in said
    assert "session 2 (1 cases" in said
    assert "as in an earlier line of its session" in message(
        write(tmp_path / "one.jsonl", *first, later | {"session": 1})
    )
