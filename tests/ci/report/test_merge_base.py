"""What is said of the merge base, where it comes from, and what is said when nothing is known."""

from __future__ import annotations

import pytest
from support.builds import built, failed, passed
from support.plans import COMMIT, plan, step

from hilgate.history import collect, store
from hilgate.model import Outcome
from hilgate.report import merge_base
from hilgate.report.merge_base import Facts, StepFacts, on_merge_base
from hilgate.run.results import RESULTS_FILE, append

BASE = "b" * 40
PLAN = plan(step("a", "x"), merge_base=BASE)


def remember(folder, checks, *, commit=BASE, flaky=(), minute=0):
    """Add a build of step a at a commit to a history."""
    a_plan, recorded, verdict = built((step("a", "x", minutes=1 + minute), checks), commit=commit)
    steps = tuple(one.model_copy(update={"flaky": flaky}) for one in verdict.steps)
    entry = collect.of_build(a_plan, recorded, verdict.model_copy(update={"steps": steps}), branch="main")
    assert store.append(folder, entry)[0]


def test_a_check_that_failed_there_too(tmp_path):
    remember(tmp_path, [failed("f", "max_abs_err 0.5\nmore")])
    facts = merge_base.find(PLAN, history=tmp_path)
    assert on_merge_base(facts, "a-cpu", "f") == (
        "failed too (max_abs_err 0.5) at bbbbbbbbbbbb; failed in 1 of the last 1 builds"
    )


def test_a_passed_check_with_numbers_is_known_by_itself_and_one_without_by_its_step(tmp_path):
    remember(tmp_path, [passed("n", numbers={"err": 1.0}), passed("p")])
    facts = merge_base.find(PLAN, history=tmp_path)
    end = " at bbbbbbbbbbbb; failed in none of the last 1 builds"
    assert on_merge_base(facts, "a-cpu", "n") == "passed" + end
    assert on_merge_base(facts, "a-cpu", "p") == "nothing failed in its step (2 passed)" + end
    assert on_merge_base(facts, "a-cpu") == "passed (2 checks) at bbbbbbbbbbbb"


def test_a_check_without_a_line_is_not_vouched_for_by_a_step_that_was_red(tmp_path):
    remember(tmp_path, [failed("f"), passed("p")])
    facts = merge_base.find(PLAN, history=tmp_path)
    assert on_merge_base(facts, "a-cpu", "p").startswith("not known: its step was not green (fail) at ")
    assert on_merge_base(facts, "a-cpu") == "fail too at bbbbbbbbbbbb"


def test_flaky_builds_count_as_failures_and_other_commits_are_not_the_merge_base(tmp_path):
    for minute, flaky in enumerate([("f",), (), ("f",)]):
        remember(tmp_path, [passed("f")], commit=f"{minute}" * 40, flaky=flaky, minute=minute)
    facts = merge_base.find(PLAN, history=tmp_path)
    assert on_merge_base(facts, "a-cpu", "f") == (
        "not known: no build of bbbbbbbbbbbb is in the history; failed in 2 of the last 3 builds"
    )


def test_the_newest_build_of_the_merge_base_counts(tmp_path):
    remember(tmp_path, [failed("f")])
    remember(tmp_path, [passed("f", numbers={"err": 0.0})], minute=1)
    assert on_merge_base(merge_base.find(PLAN, history=tmp_path), "a-cpu", "f").startswith("passed at ")


@pytest.mark.parametrize(
    ("facts", "step_key", "check", "words"),
    [
        (merge_base.NOTHING, "a-cpu", "f", "not known: no history and no results of it were given"),
        (Facts(commit=BASE), "a-cpu", "f", "not known: a-cpu was not run at bbbbbbbbbbbb"),
        (
            Facts(steps={"a-cpu": StepFacts(Outcome.PASS, 1, {"p": (Outcome.PASS, "")}, whole=True)}),
            *("a-cpu", "new", "not known: no such check at a folder without a commit"),
        ),
        (
            Facts(commit=BASE, steps={"a-cpu": StepFacts(Outcome.PASS, 1, {"s": (Outcome.DID_NOT_RUN, "x")}, True)}),
            *("a-cpu", "s", "did not run (x) at bbbbbbbbbbbb"),
        ),
    ],
    ids=["nothing", "step not run", "new check", "skipped"],
)
def test_what_is_not_known_says_why(facts, step_key, check, words):
    assert on_merge_base(facts, step_key, check) == words


def test_no_merge_base_and_no_build_are_said(tmp_path):
    assert merge_base.find(PLAN, history=tmp_path).unknown == "the history has no build yet"
    remember(tmp_path, [passed("p")])
    assert merge_base.find(plan(step("a", "x")), history=tmp_path).unknown == "the plan names no merge base"


def test_a_damaged_history_stops_no_report(tmp_path):
    remember(tmp_path, [passed("p")])
    (tmp_path / store.STEPS).write_text('{"kind": "step"}\n')
    facts = merge_base.find(PLAN, history=tmp_path)
    assert f"{store.STEPS}:1" in on_merge_base(facts, "a-cpu", "p")


def results_folder(folder, checks, *, commit=BASE):
    """A results folder as `hilgate gate` leaves it."""
    a_plan, recorded, _ = built((step("a", "x"), checks), commit=commit)
    folder.mkdir()
    a_plan.save(folder / "plan.json")
    attempt = recorded.last("a-cpu")
    from hilgate.model import CheckRecord

    lines = [CheckRecord(step="a-cpu", check=check) for check in attempt.checks]
    append(folder / RESULTS_FILE, [*recorded.builds, *lines, attempt.record])
    return folder


def test_a_results_folder_knows_every_check(tmp_path):
    folder = results_folder(tmp_path / "base", [passed("p"), failed("f", "worse")])
    facts = merge_base.find(PLAN, against=folder)
    assert on_merge_base(facts, "a-cpu", "p") == "passed at bbbbbbbbbbbb"
    assert on_merge_base(facts, "a-cpu", "f") == "failed too (worse) at bbbbbbbbbbbb"
    assert on_merge_base(facts, "a-cpu", "new") == "not known: no such check at bbbbbbbbbbbb"


def test_results_of_another_commit_are_not_called_the_merge_base(tmp_path):
    facts = merge_base.find(PLAN, against=results_folder(tmp_path / "base", [passed("p")], commit=COMMIT))
    assert on_merge_base(facts, "a-cpu", "p") == "passed at cccccccccccc, which is not the merge base"


def test_a_folder_without_results_is_said(tmp_path):
    assert str(tmp_path) in on_merge_base(merge_base.find(PLAN, against=tmp_path), "a-cpu", "p")
