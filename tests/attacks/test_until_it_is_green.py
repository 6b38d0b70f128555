# SPDX-License-Identifier: Apache-2.0
"""Who: an author, or nobody. What: the same files are built again, or a job is killed by its own test and tried again,
until it is green; or a person tries the job again that had found it. What was found before is lost.

What must happen: a command that was killed is not tried again by itself. Where a project lets people try jobs again
whose machine failed, a try after an answer, or that nobody knows of, leaves no pass. Lost tries and earlier builds of
the same files are named beside the verdict, with each check that failed in one and passes now; where nobody knows, that
is said. A machine that vanished is ordinary: it is named, and blocks nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from support.declarations import EVERYTHING, LAPTOP, declare, step
from support.jobs import GATHER, TEST, Jobs, agents_plan
from support.rest import TOKEN, build, serving

from hilgate.buildkite import api
from hilgate.buildkite.lint import lint
from hilgate.buildkite.steps import RECHECK_RETRY, RETRY, pipeline_yaml
from hilgate.judge.build import judge_folder
from hilgate.judge.earlier import before
from hilgate.model import EARLIER_FILE
from hilgate.model.declaration import Project
from hilgate.model.earlier import Earlier, EarlierBuild, LostTry, Waited
from hilgate.model.plan import plan_digest
from hilgate.model.record import Outcome
from hilgate.plan.make import ChangeFacts, assemble
from hilgate.report.annotation import render
from hilgate.report.view import ReportView

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.judge.build import Judged

TREE = "t" * 64
FAILED = EarlierBuild(number=11, commit="0" * 40, state="failed", tree=TREE, failed={GATHER.key: (TEST, "t::gone")})


def verdict_of(folder: Path, earlier: Earlier | str | None, **changes: Any) -> Judged:
    """The verdict of a green build, with this before it; `changes` are of its plan."""
    jobs = Jobs(folder, agents_plan(**changes))
    if earlier is not None:
        text = earlier if isinstance(earlier, str) else earlier.model_dump_json()
        (folder / EARLIER_FILE).write_text(text)
    return judge_folder(folder, jobs.plan, plan_digest(jobs.plan), jobs=jobs.folder)


def judged(folder: Path, earlier: Earlier | str | None) -> tuple[str, ...]:
    """What a green build says of what came before it."""
    found = verdict_of(folder, earlier)
    assert found.verdict.outcome is Outcome.PASS, found.verdict.why
    assert found.verdict.before == before(folder, found.plan, found.recorded).said
    assert json.loads((folder / "verdict.json").read_text())["before"] == list(found.verdict.before)
    return found.verdict.before


@pytest.mark.parametrize("status", [137, 139, 134, 143])
@pytest.mark.parametrize("retry", [RETRY, RECHECK_RETRY])
def test_a_command_that_was_killed_is_not_tried_again(retry: Any, status: int) -> None:
    assert status not in {rule.exit_status for rule in retry.automatic}
    own = {"automatic": [{"exit_status": status}], "manual": {"allowed": False}}
    step = {"key": "a", "command": "a", "agents": {"queue": "q"}, "timeout_in_minutes": 5, "retry": own}
    (problem,) = lint(json.dumps({"steps": [step]}))
    assert "which is not infrastructure" in problem


@pytest.mark.parametrize("status", [-1, 5, 75, 255])
def test_a_machine_that_vanished_is_named_and_blocks_nothing(tmp_path: Path, status: int) -> None:
    assert status in {rule.exit_status for rule in RETRY.automatic or ()}
    tries = [LostTry(step=GATHER.key, job=f"0190-{number}", exit_status=status) for number in (1, 2)]
    (line,) = judged(tmp_path, Earlier(tries=tuple(tries)))
    assert line.startswith(f"{GATHER.key}: 2 lost tries before the one that counts: job 0190-1 ended with {status}")
    assert ("(the agent was lost)" in line) is (status == -1)


TRY = LostTry(step=GATHER.key, job="0190-1", exit_status=1)


@pytest.mark.parametrize("status", [1, 6, 4, 137, 143, None])
@pytest.mark.parametrize("step", [GATHER.key, f"{GATHER.key}-approved"])
def test_an_answer_is_not_replaced_by_a_try_by_hand(tmp_path: Path, step: str, status: int | None) -> None:
    earlier = Earlier(tries=(TRY.model_copy(update={"step": step, "exit_status": status}),))
    verdict = verdict_of(tmp_path, earlier, manual_retry=True).verdict
    assert verdict.outcome is Outcome.INCONCLUSIVE
    ended = "no exit status" if status is None else status
    assert verdict.why.startswith(f"{step} was tried again by hand after an answer (job 0190-1 ended with {ended})")


@pytest.mark.parametrize(
    "lost",
    [
        {"exit_status": -1},
        {"exit_status": 5},
        {"exit_status": 75},
        {"exit_status": 255},
        {"exit_status": 143, "by_hand": False},
        {"exit_status": None, "started": False},
        {"step": "verdict"},
    ],
    ids=str,
)
def test_a_job_that_answered_nothing_may_be_tried_again_by_hand(tmp_path: Path, lost: dict[str, Any]) -> None:
    earlier = Earlier(tries=(TRY.model_copy(update=lost),))
    assert verdict_of(tmp_path, earlier, manual_retry=True).verdict.outcome is Outcome.PASS


@pytest.mark.parametrize("earlier", [None, "{"])
def test_manual_tries_that_nobody_knows_of_leave_no_pass(tmp_path: Path, earlier: str | None) -> None:
    verdict = verdict_of(tmp_path, earlier, manual_retry=True).verdict
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.why.startswith("not known: whether jobs were tried more than once")


def test_jobs_can_be_tried_by_hand_only_where_the_plan_says_so() -> None:
    manual = []
    for allowed in (True, False):
        plan = agents_plan(manual_retry=allowed)
        groups = yaml.safe_load(pipeline_yaml(plan, declare()))["steps"]
        manual.append({str(step["retry"]["manual"]) for group in groups for step in group["steps"]})
    assert manual[0] == {"{'allowed': True, 'permit_on_passed': False}"}
    assert all("'allowed': False" in one for one in manual[1])
    step = {"key": "a", "command": "a", "agents": {"queue": "q"}, "timeout_in_minutes": 5}
    for by_hand in ({"allowed": True}, {"allowed": True, "permit_on_passed": True}):
        (problem,) = lint(json.dumps({"steps": [step | {"retry": {"manual": by_hand}}]}), manual=True)
        assert "can be retried by hand" in problem


@pytest.mark.parametrize(("profile", "fork"), [("release", False), ("pr", True), ("gate", False)])
def test_no_release_and_no_fork_has_tries_by_hand(profile: Any, fork: bool) -> None:
    declared = replace(declare(a=[step("s")]), project=Project(manual_retry=True))
    machine = LAPTOP if profile == "gate" else None
    assert not assemble(declared, EVERYTHING, machine, profile=profile, facts=ChangeFacts(fork=fork)).manual_retry
    assert assemble(declared, EVERYTHING, None, profile="pr").manual_retry


@pytest.mark.parametrize("same", ["commit", "files"])
def test_a_check_that_failed_in_an_earlier_build_is_named(tmp_path: Path, same: str) -> None:
    jobs = Jobs(tmp_path / "other")
    other = {"commit": jobs.plan.commit, "tree": "u" * 64} if same == "commit" else {}
    found = judged(tmp_path, Earlier(builds=(FAILED.model_copy(update=other),)))
    assert found == (
        "build 11 of the same files: failed",
        f"{GATHER.key}: {TEST} failed in build 11 and passed in this one",
    )


def test_a_cancelled_build_is_named_and_others_files_are_not(tmp_path: Path) -> None:
    commit = Jobs(tmp_path / "other").plan.commit
    cancelled = EarlierBuild(number=10, commit=commit, state="canceled")
    passed = EarlierBuild(number=9, commit=commit, state="passed", tree=TREE)
    other = FAILED.model_copy(update={"tree": "u" * 64})
    nothing = FAILED.model_copy(update={"tree": "", "failed": {}})
    later = other.model_copy(update={"commit": "f" * 40})
    assert judged(tmp_path, Earlier(builds=(cancelled, passed, other, later, nothing))) == (
        "build 10 of the same files: canceled",
    )


@pytest.mark.parametrize("earlier", [None, "", "{", '{"tries": 1}'])
def test_what_nobody_knows_is_not_none(tmp_path: Path, earlier: str | None) -> None:
    (line,) = judged(tmp_path, earlier)
    assert line.startswith("not known: whether jobs were tried more than once")
    assert ("(Buildkite was not asked" if earlier is None else "(earlier.json is ") in line


def test_a_build_with_nothing_before_it_says_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path, Earlier()) == ()


def test_many_lines_are_cut_and_the_reader_is_told(tmp_path: Path) -> None:
    builds = tuple(FAILED.model_copy(update={"number": number}) for number in range(1, 30))
    found = judged(tmp_path, Earlier(builds=builds))
    assert (len(found), found[-1]) == (21, "and 38 more, in earlier.json")
    assert judged(tmp_path / "ten", Earlier(builds=builds[:10])) == found[:20]  # two lines of each


def test_the_annotation_shows_it_and_no_id_leaves_its_line(tmp_path: Path) -> None:
    odd = LostTry(step=GATHER.key, job="`</pre>\n# pass\x1b[31m", exit_status=None)
    jobs = Jobs(tmp_path)
    (tmp_path / EARLIER_FILE).write_text(Earlier(tries=(odd,)).model_dump_json())
    found = judge_folder(tmp_path, jobs.plan, plan_digest(jobs.plan), jobs=jobs.folder)
    text = render(ReportView(jobs.plan, found.recorded, found.verdict))
    assert "1 lost try before the one that counts" in text
    assert "\n# pass" not in text
    assert "\x1b" not in text


def test_buildkite_is_asked_for_lost_tries_and_branch_builds() -> None:
    job = {
        "id": "0190-a",
        "type": "script",
        "step_key": "one-cpu",
        "exit_status": -1,
        "retried": True,
        "state": "failed",
    }
    left = json.dumps({"tree": TREE, "failed": {"one-cpu": ["t::a"]}})
    again = {"id": "0190-b", "retried": False, "exit_status": 0}
    by_itself = [
        job | {"id": "0190-c", "retried_in_job_id": "0190-d"},
        job | again | {"id": "0190-d", "retry_type": "automatic"},
    ]
    late = {"step_key": "two-cpu", "runnable_at": "2026-11-21T00:00:00Z", "finished_at": "2026-11-21T01:01:30Z"}
    now = build(12, jobs=[job, job | again, *by_itself, late, {"type": "waiter"}])
    builds = [now, build(11, meta_data={api.FAILED_KEY: left}), build(10, meta_data={api.FAILED_KEY: "["})]
    with serving() as server:
        server.answer(200, now).answer(200, builds)
        url = api.builds_url("acme", "rocm", api=server.address)
        found = api.earlier(api.Client(url, TOKEN), 12, "feature")
    assert found.tries == (
        LostTry(step="one-cpu", job="0190-a", exit_status=-1),
        LostTry(step="one-cpu", job="0190-c", exit_status=-1, by_hand=False),
    )
    assert found.waited == (Waited(step="two-cpu", minutes=61),)
    assert [(one.number, one.tree, one.failed) for one in found.builds] == [
        (11, TREE, {"one-cpu": ("t::a",)}),
        (10, "", {}),
    ]
    (_, path, query, *_), (_, _, builds_of, *_) = server.asked
    assert path.endswith("/builds/12")
    assert query == {"include_retried_jobs": ["true"]}
    assert builds_of["branch"] == ["feature"]
