"""How much, where and for which case: only what was recorded, in the order in which it is asked for."""

from __future__ import annotations

import pytest

from hilgate.model import Check, Outcome
from hilgate.report import problems

ROWS = (
    "AssertionError: 12 of 640 (token, head) rows are off by more than 9.8e-04 of their norm\n"
    "assert not True\n +  where True = any()\ntests/kernels/attention/test_paged.py:67: AssertionError"
)


def check(name="t", message="it is off", **more):
    return Check(id=name, outcome=Outcome.FAIL, message=message, **more)


def test_a_failed_kernel_test():
    found = problems.magnitude(
        check(
            "tests/kernels/attention/test_paged.py::test_paged_attention[attention-decode-float16-d256]",
            ROWS,
            labels={"layout": "interleaved", "dtype": "float16", "shape": "5x16x256"},
            numbers={
                "max_row_relative_err": 0.0312345,
                "max_row_relative_err_allowed": 0.0009765625,
                "max_abs_err": 0.5,
                "rows_off": 12,
                "rows": 640,
                "seconds_median": 3.0,
            },
        ),
        "gfx942",
    )
    assert found.assertion == "AssertionError: 12 of 640 (token, head) rows are off by more than 9.8e-04 of their norm"
    assert found.place == "tests/kernels/attention/test_paged.py:67"
    assert found.error == "max_abs_err 0.5, max_row_relative_err 0.03123 (0.0009766 allowed), 12 of 640 rows off"
    assert found.case == "shape 5x16x256, dtype float16, layout interleaved, arch gfx942"


def test_nan_comes_first_because_it_is_no_number():
    found = problems.error(check(labels={"max_abs_err": "nan", "note": "nan"}, numbers={"max_rel_err": 2.0}))
    assert found == "max_abs_err nan, max_rel_err 2"


@pytest.mark.parametrize(
    ("name", "labels", "words"),
    [
        ("t[decode-bfloat16-d64-gfx950]", {}, "dtype bfloat16, arch gfx950"),
        ("t[fp8_e4m3-bs16]", {}, "dtype fp8_e4m3, arch cpu"),
        ("t[bf16]", {"dtype": ""}, "dtype bf16, arch cpu"),
        ("t[int32-block]", {}, "arch cpu"),
        ("float16 in a name, not in parameters", {}, "arch cpu"),
        ("gfx942/x", {"arch": "gfx90a", "kernel": "reduce"}, "kernel reduce, arch gfx90a"),
    ],
    ids=["both", "fp8", "short", "no dtype", "no parameters", "labels win"],
)
def test_the_case_comes_from_labels_then_the_id_then_the_device(name, labels, words):
    assert problems.case(check(name, labels=labels), "cpu") == words


def test_a_score_stands_beside_its_baseline():
    numbers = {"exact_match": 0.71, "ci_low": 0.64, "ci_high": 0.77, "n": 200, "baseline_exact_match": 0.78}
    assert problems.error(check(numbers=numbers)) == "exact_match 71.0% [64.0%, 77.0%], n=200, baseline 78.0%"


@pytest.mark.parametrize(
    "message", ["it is off", "see a.py:3", "a\nb.py:x: Error", "tests/t.py:3: E rest of it\nmore"], ids=repr
)
def test_no_place_is_invented(message):
    assert problems.place(check(message=message)) == ""


def test_nothing_recorded_is_nothing_shown():
    assert problems.error(check(numbers={"seconds": 1.0}, labels={"error": "TimeoutError"})) == ""
