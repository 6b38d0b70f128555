"""Measured minutes: the median of the last passes, and nothing that is no pass."""

import json

import pytest

from hilgate.errors import MisuseError, RecordsError
from hilgate.plan.estimate import PASSES, measured, medians


def line(seconds, key="s-cpu", outcome="pass", kind="step", **more):
    return json.dumps({"kind": kind, "key": key, "outcome": outcome, "seconds": seconds, **more})


def test_only_passes_of_steps_count():
    lines = [line(60), line(600, outcome="fail"), line(600, kind="build"), "", line(180), line(120, node="a")]
    assert medians(lines, "h") == {"s-cpu": 2.0}


def test_the_last_passes_count():
    assert medians([line(600)] * 50 + [line(60)] * PASSES, "h") == {"s-cpu": 1.0}


def test_one_slow_node_does_not_count():
    assert medians([line(60)] * 5 + [line(6000)], "h") == {"s-cpu": 1.0}


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", "null", '{"kind": "step"}', line(-1), line("soon"), line(None), '{"kind":"step","outcome":"pass"}'],
)
def test_line_that_is_no_record_is_named(bad):
    with pytest.raises(RecordsError) as caught:
        medians([line(60), bad], "steps.jsonl")
    assert caught.value.where == "steps.jsonl:2"


def test_without_a_history_nothing_is_measured_but_a_named_one_must_exist(tmp_path):
    assert measured(tmp_path) == {}
    with pytest.raises(MisuseError, match="no such history"):
        measured(tmp_path, tmp_path / "absent.jsonl")


def test_default_history_is_found(tmp_path):
    (tmp_path / "results" / "history").mkdir(parents=True)
    (tmp_path / "results" / "history" / "steps.jsonl").write_text(line(90) + "\n")
    assert measured(tmp_path) == {"s-cpu": 1.5}
