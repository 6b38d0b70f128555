# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks count, what they refuse to report, and that their oracle can say no. No device."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from benchmarks import cases, operations, oracle, record, run, timing

RATES = {"read": 4e12, "copy": 4e12, "matmul": 8e14, "launch": 5e4}
RIGHT = record.Measured((100e-6, 110e-6, 130e-6), error=1e-3, bound=8e-3)
PEER = record.Measured((220e-6,) * 3, error=2e-3, bound=8e-3)
BY_NAME = {case.name: case for case in cases.CASES}


def build(ours=RIGHT, peer=PEER, case=BY_NAME["decode bs1 8k"], earlier=()):
    return record.build(
        case, ours, peer, rates=RATES, earlier=earlier, hardware="chip", versions={"torch": "1"}, commit="abc"
    )


def test_names_are_unique_and_goals_refer_to_earlier_cases():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    for i, case in enumerate(cases.CASES):
        assert case.goal.like is None or case.goal.like in names[:i]


def test_record_has_median_spread_and_ratio():
    got = build()
    assert got.ours_us == pytest.approx(110)
    assert got.spread == pytest.approx(30)
    assert got.ratio == pytest.approx(2)
    assert got.gbps == pytest.approx(BY_NAME["decode bs1 8k"].bytes_moved() / 110e-6 / 1e9)
    assert got.fraction == pytest.approx(got.gbps / 4000)
    assert got.trouble == ""
    assert got.goal == "x3", "2 is not 3 times faster"


def test_a_call_of_the_host_is_held_against_an_empty_launch():
    got = build(case=BY_NAME["host decode"])
    assert (got.yardstick, got.gbps, got.tflops, got.ratio) == ("launch", None, None, pytest.approx(2))
    assert got.fraction == pytest.approx(20 / 110), "the launch takes 20 us"
    assert "9,091 calls/s" in record.table([got])


def test_the_host_is_timed_a_call_without_what_runs_before_it(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.__setitem__(0, clock[0] + 100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run(seconds):
        calls.append(seconds)
        clock[0] += seconds * (9 if len(calls) <= 4 * timing.CALLS else 1)  # the first two replays warm up

    assert timing.host([lambda: run(2.0), lambda: run(3.0)], replays=3) == [[2.0] * 3, [3.0] * 3]


def test_slots_of_runs_fill_blocks_one_after_the_other():
    case = cases.smoke(BY_NAME["write 262k native runs"])
    torch.manual_seed(1)
    slots = operations.slots_of(case, "cpu")
    assert len(slots) == 2 * 37
    assert slots.unique().numel() == len(slots)
    assert (slots[:64].view(4, 16).diff() == 1).all()
    scattered = operations.slots_of(dataclasses.replace(case, runs=False), "cpu")
    assert (scattered[:64].view(4, 16).diff() != 1).any()


@pytest.mark.parametrize("error", [8.1e-3, math.inf, math.nan])
def test_a_wrong_result_has_no_speed(error):
    got = build(dataclasses.replace(RIGHT, error=error))
    assert (got.ours_us, got.spread, got.ratio, got.gbps, got.tflops, got.fraction) == (None,) * 6
    assert "ours: WRONG" in got.trouble
    assert got.goal != "met"
    assert json.loads(got.line())["ours_us"] is None
    assert "WRONG" in record.table([got])


def test_a_wrong_peer_and_a_side_that_did_not_run_have_no_speed():
    got = build(peer=dataclasses.replace(PEER, error=math.inf))
    assert (got.peer_us, got.peer_spread, got.ratio) == (None,) * 3
    assert got.ours_us is not None
    assert "peer: WRONG" in got.trouble
    assert got.goal != "met"
    got = build(record.Measured(trouble="did not run: OutOfMemoryError"))
    assert (got.ours_us, got.rel_error) == (None, None)
    assert "OutOfMemoryError" in got.trouble


def test_a_goal_relative_to_another_case():
    case = BY_NAME["decode bs64 8k block 784"]
    base = build(case=BY_NAME["decode bs64 8k"])
    assert build(case=case, earlier=[base]).goal == "met"
    slower = record.Measured(tuple(t * 1.06 for t in RIGHT.seconds), error=1e-3, bound=8e-3)
    assert build(slower, case=case, earlier=[base]).goal == "within 5%"
    assert build(case=case).goal == "within 5%", "without the base it cannot be met"


def test_the_error_of_a_row_sees_a_difference():
    golden = torch.randn(1, 4, 32).double()
    assert oracle.row_error(golden, golden) == 0
    wrong = golden.clone()
    wrong[0, 3] *= 1.25
    assert oracle.row_error(wrong, golden) == pytest.approx(0.25)
    assert oracle.row_error(torch.full_like(golden, math.nan), golden) == math.inf


def test_a_copy_has_no_tolerance():
    want = torch.randn(8, 16).to(torch.bfloat16)
    assert oracle.copy_error(want.clone(), want) == 0
    got = want.clone()
    got.view(torch.int16)[2, 3] ^= 1
    assert oracle.copy_error(got, want) == pytest.approx(1 / 128)


def test_no_case_selected_is_misuse(capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["--only", "no such case"])
    assert stop.value.code == 2
    assert "decode bs1 8k" in capsys.readouterr().err


def test_without_a_gpu_there_is_no_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "results.jsonl"
    assert run.main(["--out", str(out)]) == 5
    assert not out.exists()
    assert "times need a GPU" in capsys.readouterr().err


def test_a_vendor_has_a_column_and_a_wrong_one_no_time():
    prefill = next(case for case in cases.CASES if case.name == "prefill 4 x 4k")
    right, wrong = (
        record.build(prefill, RIGHT, PEER, vendor, rates=RATES, earlier=[], hardware="chip", versions={}, commit="abc")
        for vendor in (dataclasses.replace(PEER, seconds=(4e-6,)), dataclasses.replace(PEER, error=math.nan))
    )
    assert right.vendor_us == pytest.approx(4)
    assert f"| 4.0, {4 / right.ours_us:.2f} |" in record.table([right])
    assert (wrong.vendor_us, wrong.vendor_spread) == (None, None)
    assert "vendor: WRONG" in wrong.trouble
