# SPDX-License-Identifier: Apache-2.0
"""A results folder is judged: over which files, with whose quarantine, and what is left to the verdict of the build."""

from __future__ import annotations

import datetime as dt
import json
import shutil

import pytest
from support.jobs import GATHER, TEST, Jobs, agents_plan, entry, failed, finished, gpu_step, opening, passed
from support.plans import git, plan, step, write_repository

from hilgate import git as hilgate_git
from hilgate.declare.quarantine import QUARANTINE_FILE, USED_FILE, read_used
from hilgate.errors import Exit
from hilgate.judge.build import OTHER_FILES, judge_folder
from hilgate.judge.verdict import read_verdict
from hilgate.model import EARLIER_FILE, VERDICT_FILE
from hilgate.model.earlier import Earlier, Waited
from hilgate.model.plan import ProtectedChange, plan_digest
from hilgate.model.record import Outcome
from hilgate.run import results

A, B = step("a", "true"), step("b", "true")
FAILING = (failed(), passed())
TODAY = dt.datetime.now(dt.UTC).date()
ENTRY = entry(step="a", added=TODAY, expires=TODAY + dt.timedelta(days=7)).model_dump(mode="json")
"""Excuses the failing check of step a."""


@pytest.fixture
def root(tmp_path):
    return write_repository(tmp_path / "root", {"a": "true", "b": "true"})


def quarantined(root, text):
    """Commit this quarantine; returns the commit."""
    (root / QUARANTINE_FILE).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "quarantine")
    return git(root, "rev-parse", "HEAD")


def recorded(folder, a_plan, *lines, **changes):
    results.write(folder / "steps" / A.key, opening(a_plan, **changes), lines)


def judged(folder, a_plan, **more):
    return judge_folder(folder, a_plan, plan_digest(a_plan), **more)


def test_the_verdict_and_the_quarantine_that_counted_are_written(tmp_path):
    folder, a_plan = tmp_path / "new" / "results", plan(A)
    found = judged(folder, a_plan)
    assert (found.verdict.outcome, found.exit_status, found.refused) == (Outcome.DID_NOT_RUN, Exit.NOTHING_RAN, None)
    assert read_verdict(folder / VERDICT_FILE) == found.verdict
    assert read_used(folder).tests == ()
    assert (folder / USED_FILE).is_file()
    recorded(folder, a_plan, *finished(A, passed()))
    assert judged(folder, a_plan).exit_status == Exit.PASS


def test_the_merge_bases_quarantine_counts_until_approved(tmp_path, root):
    base = git(root, "rev-parse", "HEAD")
    quarantined(root, json.dumps({"tests": [ENTRY]}))
    folder, a_plan = tmp_path / "results", plan(A, merge_base=base)
    recorded(folder, a_plan, *finished(A, *FAILING, status=1), tree=hilgate_git.fingerprint(root))
    assert judged(folder, a_plan, root=root).verdict.outcome is Outcome.FAIL
    assert read_used(folder).tests == ()
    approved = judged(folder, a_plan, root=root, approved_by="Ada").verdict
    assert (approved.outcome, approved.steps[0].quarantined) == (Outcome.PASS, (TEST,))
    assert [one.test for one in read_used(folder).tests] == [TEST]
    assert judged(folder, a_plan).verdict.outcome is Outcome.FAIL  # no repository, no quarantine
    assert judged(folder, plan(A), root=root).verdict.outcome is Outcome.DID_NOT_RUN  # results of another plan


def test_a_local_pass_over_files_that_changed_meanwhile_is_none(tmp_path, root):
    folder, a_plan = tmp_path / "results", plan(A)
    recorded(folder, a_plan, *finished(A, passed()), tree=hilgate_git.fingerprint(root))
    assert judged(folder, a_plan, root=root).verdict.outcome is Outcome.PASS
    (root / "new").write_text("")
    moved = judged(folder, a_plan, root=root).verdict
    assert (moved.outcome, moved.why, moved.doubts) == (Outcome.INCONCLUSIVE, OTHER_FILES, (OTHER_FILES,))
    assert judged(folder, a_plan).verdict.outcome is Outcome.PASS  # no repository to compare with
    recorded(folder, a_plan, *finished(A, passed()), tree="")
    assert judged(folder, a_plan, root=root).verdict.outcome is Outcome.PASS  # it ran over no checkout


@pytest.mark.parametrize("local", [True, False])
def test_jobs_of_agents_ran_over_their_own_checkouts(tmp_path, root, local):
    """The judge's checkout is another one: its files say nothing about what they ran over."""
    jobs = Jobs(tmp_path / "results", agents_plan(profile="gate" if local else "pr", merge_base=""))
    found = judged(tmp_path / "results", jobs.plan, jobs=jobs.folder, root=root)
    assert (found.verdict.outcome, found.verdict.doubts) == (Outcome.PASS, ())
    if not local:
        one = judged(jobs.path().parent, jobs.plan, root=root, only=frozenset({GATHER.key}), job=GATHER.key)
        assert (one.verdict.outcome, one.verdict.doubts) == (Outcome.PASS, ())


def test_a_job_decides_on_its_step_and_leaves_node_and_image(tmp_path):
    protected_changes = (ProtectedChange(path="evals/gates.yaml", what="deleted"),)
    only_reported = GATHER.model_copy(update={"report_only": True})
    a_plan = agents_plan(only_reported, gpu_step("scan"), protected_changes=protected_changes)
    folder = tmp_path / "results"
    results.write(folder, opening(a_plan), finished(GATHER, passed()))
    found = judged(folder, a_plan, only=frozenset({GATHER.key}), job=GATHER.key)
    assert [one.key for one in found.plan.steps] == [GATHER.key]
    assert (found.verdict.outcome, found.verdict.protected_changes, found.exit_status) == (Outcome.PASS, (), Exit.PASS)


def test_a_part_at_a_desk_still_asks_for_the_approval(tmp_path):
    a_plan = plan(A, B, protected_changes=(ProtectedChange(path="evals/gates.yaml", what="deleted"),), profile="quick")
    folder = tmp_path / "results"
    recorded(folder, a_plan, *finished(A, passed()))
    found = judged(folder, a_plan, only=frozenset({A.key}))
    assert (found.verdict.outcome, found.verdict.protected_changes) == (Outcome.INCONCLUSIVE, a_plan.protected_changes)
    assert (found.verdict.profile, len(found.verdict.steps)) == ("quick", 1)


def test_a_job_that_no_agent_took_says_how_long_it_waited(tmp_path):
    jobs = Jobs(tmp_path)
    shutil.rmtree(jobs.path().parent)
    (tmp_path / EARLIER_FILE).write_text(Earlier(waited=(Waited(step=GATHER.key, minutes=61),)).model_dump_json())
    verdict = judge_folder(tmp_path, jobs.plan, plan_digest(jobs.plan), jobs=jobs.folder).verdict
    assert verdict.outcome is Outcome.DID_NOT_RUN
    assert "it waited 61 minutes for queue amd_mi300_1 and was ended: look at the queue" in verdict.why
    assert verdict.waited == {GATHER.key: 61}
