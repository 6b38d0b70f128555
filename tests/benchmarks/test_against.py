# SPDX-License-Identifier: Apache-2.0
"""What the perf gate times, what it says of each case, and what is no pass. The GPU is a clock that is made up."""

import importlib.util
import json
import random

import pytest

from benchmarks import against
from benchmarks.against import Timed, judged, status_of, time_case
from benchmarks.paired import load_rules
from pagedkv.audit.changed import BaseUnreadableError
from pagedkv.errors import CannotRunHereError

RULES = load_rules()


class FakeGpu:
    """A side whose kernels take `microseconds`, with 1 % of noise, and whose answers may be replaced."""

    def __init__(self, code, microseconds=100.0, **answers):
        self.code, self.microseconds, self.answers = code, microseconds, answers
        self.asked = []
        self.random = random.Random(code)

    def ask(self, request):
        [name] = request
        self.asked.append(name)
        if name in self.answers:
            if isinstance(self.answers[name], Exception):
                raise self.answers[name]
            return self.answers[name]
        if name == "time":
            return [1e-6 * self.microseconds * self.random.gauss(1, 0.01) for _ in range(request["time"])]
        return {"prepare": {"case": "shape", "code": [self.code]}, "error": {"error": 1e-3, "bound": 8e-3}}.get(
            name, {}
        )


def outcome(base, change):
    findings = judged([time_case("decode", base, change, RULES)], RULES, {})
    return status_of(findings).name, findings[-1].message


def test_the_same_machine_code_is_not_timed():
    base, change = FakeGpu("a"), FakeGpu("a", 900.0)
    assert outcome(base, change) == (
        "PASS",
        "0 of 1 cases launch other machine code than the merge base; nothing was timed",
    )
    assert base.asked == change.asked == ["prepare"]


def test_they_take_turns_and_the_times_of_both_are_said():
    turns = []

    class Turning(FakeGpu):
        def ask(self, request):
            turns.extend([self.code] * ("time" in request))
            return super().ask(request)

    timed = time_case("decode", Turning("base"), Turning("change", 95.0), RULES)
    assert turns == ["base", "change", "change", "base"] * RULES.quads * RULES.sessions
    summary, finding = judged([timed], RULES, {"hardware": "chip"})
    assert summary.message == "1 of 1 cases launch other machine code than the merge base; 1 timed"
    assert finding.numbers["base_us"] == pytest.approx(100, rel=0.02)
    assert finding.numbers["ci_low"] < 0.95 < finding.numbers["ci_high"] < 1


@pytest.mark.parametrize(
    ("slower", "expected"), [(0.9, "PASS"), (1.0, "PASS"), (1.1, "FAIL")], ids=["faster", "equal", "planted"]
)
def test_a_planted_slow_kernel_is_red(slower, expected):
    assert outcome(FakeGpu("a"), FakeGpu("b", 100 * slower))[0] == expected


DEAD = BaseUnreadableError("killed")
TROUBLE = {"trouble": "OutOfMemoryError: no"}


@pytest.mark.parametrize(
    ("answers", "of_base", "of_change"),
    [
        pytest.param({"prepare": TROUBLE}, "the merge base's did not run: OutOfMemory", "did not run: OutOf", id="OOM"),
        pytest.param({"prepare": DEAD}, "the merge base's did not finish: killed", "did not finish", id="dead"),
        pytest.param({"time": DEAD}, "the merge base's did not finish: killed", "did not finish", id="dead later"),
        pytest.param({"time": TROUBLE}, "the merge base's did not run", "did not run", id="no replay"),
        pytest.param({"time": [0.0]}, "the merge base's did not run: it took 0.0", "it took 0.0 s", id="no time"),
        pytest.param({"time": [float("nan")]}, "it took nan s", "it took nan s", id="no number"),
        pytest.param({"error": {"error": 1.0, "bound": 0.1}}, "the merge base's wrong", "wrong: off by", id="wrong"),
        pytest.param({"error": {"error": float("nan"), "bound": 0.1}}, "off by nan", "off by nan", id="NaN"),
    ],
)
def test_what_cannot_be_timed_is_no_pass(answers, of_base, of_change):
    status, message = outcome(FakeGpu("a", **answers), FakeGpu("b"))
    assert (status, of_base in message) == ("INCONCLUSIVE", True)
    status, message = outcome(FakeGpu("a"), FakeGpu("b", **answers))
    assert (status, of_change in message) == ("FAIL", True)


def test_a_case_that_did_not_run_has_no_other_code():
    summary, _ = judged([time_case("decode", FakeGpu("a"), FakeGpu("b", prepare=TROUBLE), RULES)], RULES, {})
    assert summary.message == (
        "0 of 1 cases launch other machine code than the merge base, 1 did not run; nothing was timed"
    )


def test_a_missing_package_blames_the_machine(monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "elftools" else there(name))
    assert against.main(["--base", "main"]) == 5
    assert "pyelftools is not installed\n  to do: python -m pip install" in capsys.readouterr().err


@pytest.mark.parametrize("case", [None, "another shape"])
def test_a_new_case_says_that_there_is_nothing_to_compare_with(case):
    base = FakeGpu("a", prepare={"case": case, "code": []})
    summary, finding = judged([time_case("decode", base, FakeGpu("b"), RULES)], RULES, {})
    assert summary.message.endswith("than the merge base, 1 cannot be compared; nothing was timed")
    assert (finding.outcome, "nothing to compare with" in finding.labels["passed_but"]) == ("pass", True)


def test_one_slow_case_is_red_and_an_unknown_one_no_pass():
    fast = [time_case(f"case {n}", FakeGpu(f"a{n}"), FakeGpu(f"b{n}"), RULES) for n in range(9)]
    assert status_of(judged(fast, RULES, {})) == 0
    assert status_of(judged([*fast, Timed("x", open="why")], RULES, {})) == 6
    slow = time_case("slow", FakeGpu("a"), FakeGpu("b", 110.0), RULES)
    assert status_of(judged([*fast, slow, Timed("x", open="why")], RULES, {})) == 1


def test_refusals_each_have_their_status(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(against, "merge_base", lambda *_: "abcdef" * 6)
    assert against.main(["--only", "no such case"]) == 4
    assert "no such case" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert against.main([]) == 5
    assert "need a GPU" in capsys.readouterr().err
    monkeypatch.setattr(against, "_gpu", lambda: "chip")
    assert against.main(["--out", str(tmp_path)]) == 6
    [finding] = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert "has no kernels/pagedkv and benchmarks" in finding["message"]

    def unknown(*_):
        raise CannotRunHereError("git knows no commit")

    monkeypatch.setattr(against, "merge_base", unknown)
    assert against.main([]) == 5


def test_a_checkout_s_process_says_what_stops_a_case():
    """Without a GPU each case is in trouble, in words."""
    with against.pair(against.ROOT / "kernels") as (base, change):
        for side in (base, change):
            reply = side.ask({"prepare": "decode bs1 8k"})
            assert set(reply) == {"trouble"}
        assert change.ask({"prepare": "no such case"}) == {"case": None}


def test_a_base_without_the_package_is_said_to_be_that(tmp_path):
    (tmp_path / "kernels").mkdir()
    # Where another checkout's package can be imported, that is what is said.
    with pytest.raises(BaseUnreadableError, match=r"its kernels cannot be asked|imports pagedkv from .*, not from"):
        against.Checkout(tmp_path / "kernels", [], "benchmarks.against")
