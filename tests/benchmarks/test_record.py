"""Which results files are believed, and what is said of the others. No device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is run from the root and belongs to no distribution

from benchmarks import record  # noqa: E402

SAMPLE = Path(__file__).with_name("sample.jsonl")
LINES = SAMPLE.read_text(encoding="utf-8").splitlines()


def write(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def lines(count: int = 3) -> list[dict]:
    return [json.loads(line) for line in LINES[:count]]


def message(path: Path) -> str:
    with pytest.raises(record.RecordsError) as stop:
        record.read(path)
    text = str(stop.value)
    assert "\n  to do: " in text
    return text


def test_every_committed_run_is_believed():
    runs = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    assert runs
    for run in runs:
        assert record.read(run)


def test_a_run_is_read_in_its_order():
    rows = record.read(SAMPLE)
    assert [row.record.case for row in rows] == [json.loads(line)["case"] for line in LINES]
    assert all(row.case.name == row.record.case for row in rows)
    assert rows[0].record.line() == LINES[0], "nothing is lost or added"


@pytest.mark.parametrize("key", sorted(json.loads(LINES[0])))
def test_every_key_is_needed(tmp_path, key):
    good, bad, _ = lines()
    del bad[key]
    assert f"r.jsonl:2: key '{key}'" in message(write(tmp_path / "r.jsonl", good, bad))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ours_us", "16.5"), ("ours_us", True), ("spread", [1]), ("case", 3), ("op", "decoding"), ("peer", None),
        ("yardstick", "reed"), ("yardstick_rate", None), ("versions", {"torch": 2}), ("trouble", None),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named_with_what_was_got(tmp_path, key, value):
    good, bad, _ = lines()
    bad[key] = value
    text = message(write(tmp_path / "r.jsonl", good, bad))
    assert f"r.jsonl:2: key '{key}" in text
    assert "got" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", ["ours_us", "spread", "fraction", "rel_error", "yardstick_rate"])
def test_what_is_not_finite_is_no_figure(tmp_path, key, value):
    good, bad, _ = lines()
    bad[key] = value
    assert f"r.jsonl:2: key '{key}': Input should be a finite number" in message(write(tmp_path / "r.jsonl", good, bad))


def test_an_unknown_key_is_refused(tmp_path):
    bad = lines()[0] | {"our_us": 1.0}
    assert "r.jsonl:1: key 'our_us'" in message(write(tmp_path / "r.jsonl", bad))


def test_a_case_twice_names_both_lines(tmp_path):
    first, second, _ = lines()
    text = message(write(tmp_path / "r.jsonl", first, second, second))
    assert "r.jsonl:3: case 'decode bs1 32k' is already in line 2" in text


@pytest.mark.parametrize("text", ["", "{", LINES[0][:-20], "[1]", "null"])
def test_a_line_that_is_no_object_is_refused(tmp_path, text):
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
        ({"ours_us": 0.0}, "ours_us: got 0.0; expected more than 0"),
        ({"peer_us": -1.0}, "peer_us: got -1.0"),
        ({"spread": None}, "ours: got a time without its spread or its error"),
        ({"peer_rel_error": None}, "peer: got a time without its spread or its error"),
        ({"trouble": "ours: WRONG, error 1.0e+00"}, "expected one of the two"),
        ({"peer_us": None, "peer_spread": None, "ratio": None}, "expected one of the two"),
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


@pytest.mark.parametrize(
    "changes",
    [{"hardware": "NVIDIA H100"}, {"versions": {"torch": "2.12"}}, {"commit": "000000000000"}],
)
def test_a_file_is_one_run(tmp_path, changes):
    first, second, _ = lines()
    text = message(write(tmp_path / "r.jsonl", first, second | changes))
    assert f"r.jsonl:2: {next(iter(changes))}: got" in text
    assert "a file is one run" in text


def test_a_rate_measured_twice_is_two_runs(tmp_path):
    first, second, _ = lines()
    second["yardstick_rate"] *= 2
    second["fraction"] /= 2
    assert "r.jsonl:2: yardstick_rate: got" in message(write(tmp_path / "r.jsonl", first, second))


def test_a_side_without_a_time_is_read_when_it_says_why(tmp_path):
    wrong = lines()[0] | {
        "peer_us": None, "peer_spread": None, "peer_rel_error": None, "ratio": None, "trouble": "peer: did not run: x",
    }  # fmt: skip
    assert record.read(write(tmp_path / "r.jsonl", wrong))[0].record.ratio is None
