# SPDX-License-Identifier: Apache-2.0
"""What is said of the merge base, where it comes from, and what is said when nothing is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.builds import NOW, built, remember
from support.jobs import failed, passed, skipped
from support.plans import plan, step

from hilgate.judge.verdict import judge
from hilgate.model.plan import plan_digest
from hilgate.model.record import Outcome, RerunRecord
from hilgate.model.verdict import Ruling
from hilgate.report import merge_base, terminal
from hilgate.report.causes import causes
from hilgate.report.history import FILE, StepThen
from hilgate.report.merge_base import MergeBase
from hilgate.report.write import Report
from hilgate.run.recheck import NO_SUCH_TEST

BASE = "b" * 40
PLAN = plan(step("a", "x"), merge_base=BASE)


def whose_is(facts, *checks, flaky=(), on_base=()):
    """What is said of each failing check of step a, and of all of them together."""
    a_plan, recorded, verdict = built((step("a", "x"), checks), merge_base=BASE)
    steps = tuple(one.model_copy(update={"flaky": flaky}) for one in verdict.steps)
    recorded = dataclasses.replace(recorded, on_base={"a-cpu": tuple(on_base)} if on_base else {})
    found = causes(a_plan, recorded, verdict.model_copy(update={"steps": steps}))
    failures = [one for cause in found for one in cause.failures]
    each = {one.id: str(merge_base.origin(facts, one, recorded.first_on_base)) for one in failures}
    return each, merge_base.whose(found, facts, recorded)


def only(facts, check, **more):
    (words,) = whose_is(facts, check, **more)[0].values()
    return words


def test_a_failure_is_new_or_red_there_too_by_its_check(tmp_path):
    remember(tmp_path / FILE, [failed("f", "max_abs_err 0.5\nmore"), passed("p"), skipped("s", "no GPU")], commit=BASE)
    facts = merge_base.find(PLAN, tmp_path / FILE)
    assert only(facts, failed("p", "x")) == "new here: it passed at bbbbbbbbbbbb"
    assert only(facts, failed("f", "max_abs_err 0.7")) == "red on the merge base too: it failed alike at bbbbbbbbbbbb"
    assert only(facts, failed("f", "KeyError")) == "not known: it failed in another way at bbbbbbbbbbbb"
    assert only(facts, failed("s", "x")) == "not known: it did not run at bbbbbbbbbbbb"
    assert only(facts, failed("n", "x")) == "not known: there is no such check at bbbbbbbbbbbb"


def test_what_was_flaky_lately_or_is_here_is_flaky(tmp_path):
    for minute, flaky in enumerate([("f",), (), ("f",)]):
        remember(tmp_path / FILE, [passed("f"), passed("g")], commit=BASE, flaky=flaky, minute=minute)
    facts = merge_base.find(PLAN, tmp_path / FILE)
    assert only(facts, failed("f")) == "flaky: so it was in 2 of the last 3 builds"
    assert only(facts, failed("g"), flaky=("g",)) == "flaky: it passed when it ran again over the same files"


def on_base(name, outcome, message=""):
    return RerunRecord(
        step="a-cpu", check=name, host="n", elsewhere=False, on_base=True, outcome=outcome, seconds=1, message=message
    )


def test_terminal_says_whose_each_cause_is_after_the_answer(capsys):
    """The causes were printed before; a cause that another outcome brings is printed then."""
    checks = [failed("ours", "KeyError: 'a'"), failed("theirs", "off by 0.5")]
    a_plan, recorded, verdict = built((step("a", "x"), checks), merge_base=BASE)
    before = Report(a_plan, recorded, verdict, Path("report.html"))
    printed = terminal.print_causes(before, "asking the merge base")
    first = capsys.readouterr().out
    assert first.endswith("\n\nasking the merge base ...\n")
    assert "merge base:" not in first
    answers = (on_base("ours", Outcome.PASS), on_base("theirs", Outcome.FAIL, "off by 0.1"))
    after = dataclasses.replace(before, recorded=dataclasses.replace(recorded, on_base={"a-cpu": answers}))
    terminal.print_verdict(after, printed=printed)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "1 of these 2 failures is yours; 1 is red on the merge base too, and red here all the same. "
    )
    assert "ours: new here: it passed over" in said
    assert "theirs: red on the merge base too: it failed alike over" in said
    assert "regression: a-cpu" not in said
    steps = (verdict.steps[0].model_copy(update={"outcome": Outcome.INCONCLUSIVE}),)
    other = dataclasses.replace(after, verdict=verdict.model_copy(update={"steps": steps}))
    terminal.print_verdict(other, printed=printed)
    assert "regression: a-cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome", "message", "words"),
    [
        (Outcome.PASS, "", "new here: it passed over the merge base's files on the same node"),
        (
            Outcome.FAIL,
            "off by 0.1",
            "red on the merge base too: it failed alike over the merge base's files on the same node",
        ),
        (Outcome.DID_NOT_RUN, NO_SUCH_TEST, "new here: the merge base has no such test"),
        (Outcome.FAIL, "KeyError", "not known: the history has no build yet"),
        (Outcome.DID_NOT_RUN, "timed out after 3 s", "not known: the history has no build yet"),
    ],
    ids=["passed", "failed", "new test", "failed otherwise", "hung"],
)
def test_the_files_of_the_merge_base_say_it_on_the_same_node(outcome, message, words):
    again = [on_base("f", outcome, message)]
    assert only(MergeBase(unknown=merge_base.NO_BUILD), failed("f", "off by 0.5"), on_base=again) == words


@pytest.mark.parametrize(
    ("new", "red", "flaky", "gone", "words"),
    [
        (1, 13, 0, 0, "1 of these 14 failures is yours; 13 are red on the merge base too, and red here all the same"),
        (
            *(2, 1, 1, 0),
            "2 of these 4 failures are yours; 1 is red on the merge base too, and red here all the same; 1 is flaky",
        ),
        (
            *(0, 1, 0, 1),
            (
                "none of these 2 failures is known to be yours; 1 is red on the merge base too, and red here all the "
                "same; of 1 it is not known (there is no such check at bbbbbbbbbbbb)"
            ),
        ),
        (1, 0, 0, 0, "this failure is yours: it passed at bbbbbbbbbbbb"),
        (0, 1, 0, 0, "this failure is not yours, and red here all the same: it failed alike at bbbbbbbbbbbb"),
        (0, 0, 0, 2, "whether these 2 failures are yours is not known: there is no such check at bbbbbbbbbbbb"),
        (0, 0, 0, 0, ""),
    ],
)
def test_the_first_sentence_counts_whose_failures_they_are(new, red, flaky, gone, words):
    numbers = {"new": new, "red": red, "flaky": flaky, "gone": gone}
    names = {kind: [f"{kind}{n}" for n in range(number)] for kind, number in numbers.items()}
    there = [*map(passed, names["new"] + names["flaky"]), *map(failed, names["red"])]
    facts = MergeBase(
        commit=BASE, steps={"a-cpu": StepThen(Outcome.FAIL, "", {one.id: (one.outcome, one.message) for one in there})}
    )
    checks = [failed(name) for found in names.values() for name in found]
    assert whose_is(facts, *checks, passed("fine"), flaky=tuple(names["flaky"]))[1] == words


def test_nothing_that_was_not_the_changes_doing_is_counted():
    a_plan, recorded, verdict = built((step("a", "x"), None), (step("b", "x"), [passed()]), merge_base=BASE)
    assert verdict.steps[0].ruling is Ruling.INFRA
    assert merge_base.whose(causes(a_plan, recorded, verdict), MergeBase(commit=BASE), recorded) == ""


def test_a_red_merge_base_makes_nothing_green():
    """The words stand beside the verdict: the same build with and without them is judged alike."""
    checks = [failed("f")]
    a_plan, recorded, verdict = built((step("a", "x"), checks), merge_base=BASE)
    known = dataclasses.replace(recorded, on_base={"a-cpu": (on_base("f", Outcome.FAIL, checks[0].message),)})
    assert judge(a_plan, known, plan_digest(a_plan), decided=NOW) == verdict
    assert verdict.outcome is Outcome.FAIL


def test_of_a_long_history_recent_builds_and_the_base_count(tmp_path, monkeypatch):
    monkeypatch.setattr(merge_base, "RECENT_BUILDS", 2)
    for minute in range(3):
        remember(tmp_path / FILE, [failed("f")], minute=minute)
    remember(tmp_path / FILE, [passed("f")], commit=BASE, minute=3)
    remember(tmp_path / FILE, [failed("f")], minute=4)
    facts = merge_base.find(PLAN, tmp_path / FILE)
    a_plan, recorded, verdict = built((step("a", "x"), [failed("f")]), merge_base=BASE)
    (cause,) = causes(a_plan, recorded, verdict)
    words = merge_base.of_cause(cause, facts, recorded)
    assert words == "new here: it passed at bbbbbbbbbbbb; failed in 1 of the last 2 builds"


def test_a_local_run_without_a_history_says_nothing():
    a_plan, recorded, verdict = built((step("a", "x"), [failed("f")]))
    found = causes(a_plan, recorded, verdict)
    for local, words in ((True, ""), (False, "whether this failure is yours is not known: there is no history")):
        assert merge_base.whose(found, merge_base.NOTHING, recorded, local=local).startswith(words)
        assert bool(merge_base.of_cause(found[0], merge_base.NOTHING, recorded, local=local)) is not local


def test_no_merge_base_and_no_build_are_said(tmp_path):
    assert merge_base.find(PLAN, tmp_path / FILE).unknown == "the history has no build yet"
    remember(tmp_path / FILE, [passed("p")])
    assert merge_base.find(plan(step("a", "x")), tmp_path / FILE).unknown == "the plan names no merge base"


def test_a_damaged_history_stops_no_report(tmp_path):
    (tmp_path / FILE).write_text("no database\n" * 99)
    facts = merge_base.find(PLAN, tmp_path / FILE)
    assert f"the history is damaged: file is not a database ({tmp_path / FILE})" in only(facts, failed("p"))
