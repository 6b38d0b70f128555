# SPDX-License-Identifier: Apache-2.0
"""What is said of the merge base, where it comes from, and what is said when nothing is known."""

from __future__ import annotations

import pytest
from support.builds import built, remember
from support.jobs import failed, passed, skipped
from support.plans import COMMIT, plan, step

from hilgate.report import merge_base
from hilgate.report.merge_base import MergeBase, on_merge_base
from hilgate.run.results import RESULTS_FILE, step_folder, write

BASE = "b" * 40
PLAN = plan(step("a", "x"), merge_base=BASE)


def test_a_check_is_known_by_itself_and_a_step_by_its_checks(tmp_path):
    remember(tmp_path, [failed("f", "max_abs_err 0.5\nmore"), passed("p")], commit=BASE)
    facts = merge_base.find(PLAN, history=tmp_path)
    assert on_merge_base(facts, "a-cpu", "f") == (
        "failed too (max_abs_err 0.5) at bbbbbbbbbbbb; failed in 1 of the last 1 build"
    )
    assert on_merge_base(facts, "a-cpu", "p") == "passed at bbbbbbbbbbbb; failed in none of the last 1 build"
    assert on_merge_base(facts, "a-cpu") == "fail too at bbbbbbbbbbbb"


def test_flaky_builds_count_as_failures_and_other_commits_are_not_the_merge_base(tmp_path):
    for minute, flaky in enumerate([("f",), (), ("f",)]):
        remember(tmp_path, [passed("f")], commit=f"{minute}" * 40, flaky=flaky, minute=minute)
    facts = merge_base.find(PLAN, history=tmp_path)
    assert on_merge_base(facts, "a-cpu", "f") == (
        "not known: no build of bbbbbbbbbbbb is in the history; failed in 2 of the last 3 builds"
    )


def test_the_newest_build_of_the_merge_base_counts(tmp_path):
    remember(tmp_path, [failed("f")], commit=BASE)
    remember(tmp_path, [passed("f")], commit=BASE, minute=1)
    assert on_merge_base(merge_base.find(PLAN, history=tmp_path), "a-cpu", "f").startswith("passed at ")


def test_of_a_long_history_only_recent_builds_and_the_merge_base_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(merge_base, "RECENT_BUILDS", 2)
    old = [remember(tmp_path, [failed("f")], minute=minute) for minute in range(3)]
    for build in old:
        (build / RESULTS_FILE).write_text("never read")
    remember(tmp_path, [passed("f")], commit=BASE, minute=3)
    remember(tmp_path, [failed("f")], minute=4)
    facts = merge_base.find(PLAN, history=tmp_path)
    assert on_merge_base(facts, "a-cpu", "f") == "passed at bbbbbbbbbbbb; failed in 1 of the last 2 builds"


def ran(*checks):
    return built((step("a", "x"), list(checks)))[1]


@pytest.mark.parametrize(
    ("facts", "check", "words"),
    [
        (merge_base.NOTHING, "f", "not known: no history and no results of it were given"),
        (MergeBase(commit=BASE), "f", "not known: a-cpu was not run at bbbbbbbbbbbb"),
        (MergeBase(recorded=ran(passed("p"))), "new", "not known: no such check at a folder without a commit"),
        (MergeBase(commit=BASE, recorded=ran(skipped("s", "x"))), "s", "did not run (x) at bbbbbbbbbbbb"),
        (MergeBase(commit=BASE, recorded=ran(passed("p"))), "", "passed (1 check) at bbbbbbbbbbbb"),
    ],
    ids=["nothing", "step not run", "new check", "skipped", "the step"],
)
def test_what_is_not_known_says_why(facts, check, words):
    assert on_merge_base(facts, "a-cpu", check) == words
    assert on_merge_base(facts, "a-cpu", check, local=True) == ("" if facts is merge_base.NOTHING else words)


def test_no_merge_base_and_no_build_are_said(tmp_path):
    assert merge_base.find(PLAN, history=tmp_path).unknown == "the history has no build yet"
    remember(tmp_path, [passed("p")])
    assert merge_base.find(plan(step("a", "x")), history=tmp_path).unknown == "the plan names no merge base"


def test_a_damaged_history_stops_no_report(tmp_path):
    path = remember(tmp_path, [passed("p")], commit=BASE) / RESULTS_FILE
    path.write_text('{"kind":"branch"}\n{"kind": "step"}\n')
    facts = merge_base.find(PLAN, history=tmp_path)
    assert f"{path}:2" in on_merge_base(facts, "a-cpu", "p")


def results_folder(folder, checks, *, commit=BASE):
    """A results folder as `hilgate gate` leaves it."""
    a_plan, recorded, _ = built((step("a", "x"), checks), commit=commit)
    folder.mkdir()
    a_plan.save(folder / "plan.json")
    write(step_folder(folder, "a-cpu"), recorded.builds[0], recorded.records("a-cpu"))
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
