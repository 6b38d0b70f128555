# SPDX-License-Identifier: Apache-2.0
"""The verdict of a build: what makes it a gate, approvals, and the static steps that post it."""

from __future__ import annotations

import datetime as dt

import pytest
import yaml
from support.jobs import GATHER, TEST, Jobs, agents_plan, entry, failed, finished, passed, undecided
from support.plans import ENVIRONMENT, plan, step
from support.static_steps import ANNOTATES, FILES, JUDGE, STEPS, run

from hilgate.errors import Exit, RecordsError
from hilgate.evidence import KINDS
from hilgate.judge.verdict import BACK, UNCOMPARED, exit_status, judge, read_verdict, totals
from hilgate.model.declaration import Quarantine
from hilgate.model.plan import Omission, ProtectedChange, plan_digest
from hilgate.model.record import BuildRecord, Check, Outcome
from hilgate.run import results

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
PASS, FAIL, OPEN = passed("p"), failed("f"), undecided("o")
SKIP = Check(id="s", outcome=Outcome.DID_NOT_RUN, message="needs gfx950")


def record(a_step, checks=(PASS,), exit_status=0):
    """An attempt at a step."""
    *_, last = finished(a_step, *checks, status=exit_status, environment=ENVIRONMENT)
    return results.Attempt(last, tuple(checks))


def verdict_of(a_plan, *attempts, **more):
    digest = plan_digest(a_plan)
    build = BuildRecord(started=NOW, plan_digest=digest, commit=a_plan.commit, environment=ENVIRONMENT)
    found = {}
    for attempt in attempts:
        found[attempt.record.key] = (*found.get(attempt.record.key, ()), attempt)
    recorded = results.Recorded((build,), found)
    return judge(a_plan, recorded, digest, decided=NOW, **more)


A, B = step("a", "python -c pass", minimum=1), step("b", "python -c pass", evidence="junit")


def test_neither_no_steps_nor_a_missing_one_is_a_pass():
    for a_plan, attempts in ((plan(), []), (plan(A, B), [record(A)])):
        verdict = verdict_of(a_plan, *attempts)
        assert verdict.outcome is Outcome.DID_NOT_RUN
        assert exit_status(verdict, a_plan) == Exit.NOTHING_RAN


FOUR = KINDS["findings"].exit_meaning(4)


def test_the_first_of_several_is_named_and_the_others_counted():
    c = step("c", "python -c pass")
    for attempts, why in [
        ([record(A, [FAIL], exit_status=1), record(B), record(c)], "a-cpu: f: max_abs_err 0.5 > 0.001"),
        ([record(one, [FAIL], exit_status=1) for one in (A, B)], "a-cpu: f: max_abs_err 0.5 > 0.001 (and 1 more step)"),
        ([record(one, (), exit_status=4) for one in (A, B, c)], f"a-cpu: {FOUR} (and 2 more steps)"),
    ]:
        assert verdict_of(plan(A, B, c) if len(attempts) == 3 else plan(A, B), *attempts).why == why


def test_a_quick_run_says_how_much_of_the_gate_passed():
    omitted = [
        Omission(key=f"omitted-{number}", area="samples", label="l", cause=cause, reason="r")
        for cause, times in (("not quick", 3), ("not here", 2), ("other profiles", 1))
        for number in range(times)
    ]
    two = plan(A, B, profile="quick", omissions=tuple(omitted))
    verdict = verdict_of(two, record(A, [PASS, PASS.model_copy(update={"id": "q"})]), record(B))
    assert verdict.why == "quick run: 3 checks of 2 of 5 steps; it decides no merge"
    assert totals(verdict).passed == 3
    assert "quick run" not in verdict_of(two, record(A)).why


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({}, ()),
        ({"base": None}, (UNCOMPARED,)),
        ({"base": None, "commit": ""}, ()),
        ({"base": None, "profile": "nightly"}, ()),
    ],
    ids=["compared", "no-base", "no-checkout", "agents"],
)
def test_a_local_verdict_says_that_nothing_was_compared(changes, notes):
    assert verdict_of(plan(A, **changes), record(A)).notes == notes


REPORTED = A.model_copy(update={"report_only": True})


@pytest.mark.parametrize("attempt", [record(A, [FAIL], exit_status=1), record(A, (), exit_status=4), None])
def test_a_report_only_step_is_named_and_decides_nothing(attempt):
    a_plan = plan(REPORTED, B)
    verdict = verdict_of(a_plan, record(B), *([attempt] if attempt else []))
    assert (verdict.outcome, verdict.why) == (Outcome.PASS, "all 1 steps passed")
    red = verdict.steps[0].outcome
    assert red is not Outcome.PASS
    assert verdict.notes == (f"1 step only reported, not counted, of these not passed: a-cpu ({red.value})",)
    assert totals(verdict) == verdict.steps[1].counts
    assert exit_status(verdict, a_plan) == Exit.PASS
    green = verdict_of(a_plan, record(A), record(B))
    assert green.notes == ("1 step only reported, not counted",)


def test_a_plan_of_which_nothing_counts_is_no_pass():
    verdict = verdict_of(plan(REPORTED), record(A))
    assert (verdict.outcome, verdict.why) == (
        Outcome.DID_NOT_RUN,
        "no step of the plan counts: each is only reported",
    )


OUT = Omission(key="c-gfx942", area="samples", label="c", cause="queue out", reason="queue x is out")


def test_a_queue_that_is_out_leaves_no_pass_and_hides_no_failure():
    later = OUT.model_copy(update={"key": "d-gfx942", "reason": "queue y is out"})
    held = {"profile": "pr", "omissions": (OUT, later)}
    for steps, attempts, outcome in [
        ((A,), [record(A)], Outcome.INCONCLUSIVE),
        ((), [], Outcome.INCONCLUSIVE),
        ((REPORTED,), [record(A)], Outcome.INCONCLUSIVE),
        ((A,), [record(A, [FAIL], exit_status=1)], Outcome.FAIL),
        ((A,), [], Outcome.DID_NOT_RUN),
    ]:
        verdict = verdict_of(plan(*steps, **held), *attempts)
        assert verdict.outcome is outcome
        why = f"queue x is out; 2 steps not started, {OUT.key} first"
        assert (outcome is Outcome.INCONCLUSIVE) is (verdict.why == why)
        assert BACK in verdict.notes
    own_job = verdict_of(plan(A, **held), record(A), approvals=False)
    assert own_job.outcome is Outcome.PASS, "the job of a step answers for that step alone"
    only_reported = OUT.model_copy(update={"cause": "only reported"})
    assert verdict_of(plan(A, omissions=(only_reported,)), record(A)).outcome is Outcome.PASS


def test_doubts_about_files_leave_no_pass_and_hide_no_failure():
    for attempt, outcome, why in [
        (record(A), Outcome.INCONCLUSIVE, "they moved"),
        (record(A, [FAIL], exit_status=1), Outcome.FAIL, "a-cpu: f: max_abs_err 0.5 > 0.001"),
    ]:
        verdict = verdict_of(plan(A), attempt, doubts=("they moved", "twice"))
        assert (verdict.outcome, verdict.why, verdict.doubts) == (outcome, why, ("they moved", "twice"))


@pytest.mark.parametrize(
    ("attempts", "status"),
    [
        ([record(A, (), exit_status=5), record(B)], Exit.CANNOT_RUN_HERE),
        ([record(A, (), exit_status=5), record(B, (), exit_status=5)], Exit.NOTHING_RAN),  # pytest's 5 is another
        ([record(A, (), exit_status=5)], Exit.NOTHING_RAN),  # b is missing
        ([record(A, [FAIL], exit_status=1), record(B, (), exit_status=5)], Exit.FAIL),
        ([record(A, [OPEN], exit_status=6), record(B)], Exit.INCONCLUSIVE),
        ([record(A, [OPEN], exit_status=6), record(B, (), exit_status=4)], Exit.NOTHING_RAN),
    ],
)
def test_exit_status(attempts, status):
    assert exit_status(verdict_of(plan(A, B), *attempts), plan(A, B)) == status


@pytest.mark.parametrize(
    ("node_id", "line"),
    [
        ("tests/t.py::test_gather[bs16-HND]", "hilgate run b-cpu -- -k 'test_gather[bs16-HND]'"),
        ("no node id", "hilgate run b-cpu"),
    ],
)
def test_reproduce_line(node_id, line):
    failed = Check(id=node_id, outcome=Outcome.FAIL, message="wrong")
    assert verdict_of(plan(B), record(B, [failed], exit_status=1)).steps[0].reproduce == line


@pytest.mark.parametrize(("longer", "narrowed"), [(0, True), (1, False)])
def test_a_line_that_repeats_a_step_has_no_endless_name(longer, narrowed):
    word = "a" * (1000 - len("-k test_") + longer)
    failed = Check(id=f"tests/t.py::test_{word}", outcome=Outcome.FAIL, message="wrong")
    line = verdict_of(plan(B), record(B, [failed], exit_status=1)).steps[0].reproduce
    assert line == (f"hilgate run b-cpu -- -k test_{word}" if narrowed else "hilgate run b-cpu")


def test_the_verdict_is_written_and_read_back(tmp_path):
    verdict = verdict_of(plan(A), record(A))
    verdict.save(tmp_path / "verdict.json")
    assert read_verdict(tmp_path / "verdict.json") == verdict
    (tmp_path / "verdict.json").write_text("{")
    for path in (tmp_path / "verdict.json", tmp_path / "none.json"):
        with pytest.raises(RecordsError):
            read_verdict(path)


def test_an_expired_entry_is_red_without_its_step(tmp_path):
    jobs = Jobs(tmp_path)
    expired = entry(step="elsewhere", days=0)
    verdict = jobs.verdict(quarantine=Quarantine(tests=(expired, entry("t::other", step="elsewhere", days=0))))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.why == f"quarantine of {TEST} expired on 2026-11-21: mend it or take it out"
    assert exit_status(verdict, jobs.plan) == Exit.FAIL
    jobs.path().unlink()
    assert jobs.verdict(quarantine=Quarantine(tests=(expired,))).why == verdict.why  # whatever did not run beside it
    jobs.job(GATHER.key, *finished(GATHER, failed(), status=1))
    assert jobs.verdict(quarantine=Quarantine(tests=(expired,))).why.startswith(f"{GATHER.key}: {TEST}: ")


@pytest.mark.parametrize(("trees", "tree"), [(["t"], "t"), (["t", "t"], "t"), (["t", "u"], ""), ([], "")])
def test_a_verdict_is_of_the_one_tree_that_all_jobs_saw(trees, tree):
    digest = plan_digest(plan(A))
    one = BuildRecord(started=NOW, plan_digest=digest, commit=plan(A).commit, environment=ENVIRONMENT)
    builds = tuple(one.model_copy(update={"tree": seen}) for seen in trees)
    assert judge(plan(A), results.Recorded(builds, {}), digest, decided=NOW).tree == tree


LOOSER = ProtectedChange(path="tests/support/tolerances.py", what="fp16: 0.001 -> 0.1")
MORE = ProtectedChange(path="evals/gates.yaml", what="deleted")


@pytest.mark.parametrize(
    ("protected_changes", "approved_by", "outcome", "named"),
    [
        ((LOOSER, MORE), "", Outcome.INCONCLUSIVE, ""),
        ((LOOSER,), "", Outcome.INCONCLUSIVE, ""),
        ((LOOSER,), "A. Owner", Outcome.PASS, "A. Owner"),
        ((), "nobody asked", Outcome.PASS, ""),
    ],
    ids=["not-approved", "one-not-approved", "approved", "nothing-to-approve"],
)
def test_what_is_loosened_needs_a_name(tmp_path, protected_changes, approved_by, outcome, named):
    jobs = Jobs(tmp_path, agents_plan(protected_changes=protected_changes))
    verdict = jobs.verdict(approved_by=approved_by)
    assert (verdict.outcome, verdict.approved_by, verdict.protected_changes) == (outcome, named, protected_changes)
    if outcome is Outcome.INCONCLUSIVE:
        more = " (and 1 more)" if MORE in protected_changes else ""
        assert verdict.why == f"needs a named approval: tests/support/tolerances.py: fp16: 0.001 -> 0.1{more}"
        assert exit_status(verdict, jobs.plan) == Exit.INCONCLUSIVE


def test_an_approval_excuses_no_failure(tmp_path):
    jobs = Jobs(tmp_path, agents_plan(protected_changes=(LOOSER,)))
    jobs.job(GATHER.key, *finished(GATHER, failed(), status=1))
    assert jobs.verdict(approved_by="A. Owner").outcome is Outcome.FAIL
    assert jobs.verdict().outcome is Outcome.FAIL


def decides(folder, name="pipeline.yml", key="verdict", *, status=0, protected_changes="[]", annotates=0, **more):
    """Run a step of the static pipelines that decides, with a judge that ends with `status`."""
    values = {
        "hilgate": JUDGE.format(protected_changes=protected_changes, status=status),
        "buildkite_agent": ANNOTATES.format(status=annotates),
    }
    return run(folder, STEPS[name, key], **(values | more))


FLOWS = ["pipeline.yml", "rerun.yml", "release.yml"]


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("status", [0, 1, 3, 4, 5, 6, 70])
def test_verdict_ends_as_the_judge_and_posts_its_annotation(tmp_path, name, status):
    ended = decides(tmp_path, name, status=status)
    assert ended.status == status
    assert any("the verdict" in call for call in ended.calls if call.startswith("annotate"))


@pytest.mark.parametrize("name", FLOWS)
def test_verdict_without_plan_or_results_still_judges(tmp_path, name):
    """Planning failed: nothing can be downloaded, the judge says so with 3, and the annotation is the judge's."""
    agent = '[ "$1" = artifact ] && exit 1; ' + ANNOTATES.format(status=0)
    hilgate = '[ "$1" = fetch ] && exit 4\n' + JUDGE.format(protected_changes="[]", status=3)
    ended = decides(tmp_path, name, status=3, buildkite_agent=agent, hilgate=hilgate)
    assert ended.status == 3
    assert "there is no plan" in ended.output
    assert "no job left results" in ended.output
    assert any(call.startswith("hilgate judge") for call in ended.calls)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("how", ["exit 1", "kill -9 $$", "exit 127", "exit 0"])
def test_judge_that_leaves_nothing_is_reported(tmp_path, name, how):
    ended = decides(tmp_path, name, hilgate=how)
    assert ended.status != 0
    assert any("There is no verdict" in call for call in ended.calls)


@pytest.mark.parametrize(("status", "style"), [(0, "success"), (1, "error"), (4, "error"), (6, "warning")])
def test_an_annotation_has_the_colour_of_the_verdict(tmp_path, status, style):
    ended = decides(tmp_path, status=status, annotates=1)
    assert any(f"--style {style}" in call for call in ended.calls)
    assert ended.status == status
    assert "no annotation" in ended.output


@pytest.mark.parametrize(
    ("judged", "protected_changes", "asks"), [(0, "[]", False), (6, "[]", False), (6, "[1]", True), (1, "[1]", False)]
)
@pytest.mark.parametrize("form", ["echo 'steps: []'", "exit 5"])
def test_a_change_to_its_gate_asks_for_a_name_by_the_bases_form(tmp_path, judged, protected_changes, asks, form):
    hilgate = f'[ "$1 $2" = "flow approve" ] && {{ {form}; exit; }}\n' + JUDGE.format(
        protected_changes=protected_changes, status=judged
    )
    ended = decides(tmp_path, status=judged, hilgate=hilgate)
    broken = asks and form == "exit 5"
    assert ended.status == (5 if broken else judged)
    assert ended.uploads == (["results/approve.yml"] if asks and not broken else [])


def test_a_retried_verdict_finds_its_form_and_keeps_its_status(tmp_path):
    refusing = '[ "$1" = pipeline ] && exit 1; ' + ANNOTATES.format(status=0)
    ended = decides(tmp_path, status=6, protected_changes="[1]", buildkite_agent=refusing)
    assert ended.status == 6
    assert "no new form" in ended.output


def test_images_are_left_for_reruns(tmp_path):
    ended = decides(tmp_path, buildkite_agent="")
    assert 'buildkite-agent meta-data set hilgate-images {"rocm": "sha256:00"}' in ended.calls


def test_failing_checks_are_left_for_later_builds(tmp_path):
    steps = '[{"key": "a-cpu", "failed": ["t::a"]}, {"key": "b-cpu", "failed": []}]'
    agent = '[ "$*" = "meta-data set hilgate-failed" ] && echo "left $(cat)" >> "$CALLS"; exit 0'
    hilgate = JUDGE.format(protected_changes="[]", status=1).replace('"steps": []', f'"steps": {steps}')
    ended = decides(tmp_path, hilgate=hilgate, buildkite_agent=agent)
    assert 'left {"tree": "t", "failed": {"a-cpu": ["t::a"]}}' in ended.calls


@pytest.mark.parametrize(("fork", "asks"), [("false", True), ("true", False), ("null", False)])
@pytest.mark.parametrize("name", [*FLOWS, "approve.yml"])
def test_earlier_builds_are_asked_with_a_token_never_for_forks(tmp_path, fork, asks, name):
    agent = f"""[ "$1" = artifact ] && {{ echo '{{"fork": {fork}}}' > results/plan.json; exit; }}
[ "$1 $2" = "secret get" ] && {{ [ "$3" = HILGATE_READ_TOKEN ] && echo secret || exit 1; }}; exit 0"""
    hilgate = 'echo "token for $1: ${BUILDKITE_API_TOKEN:-none}" >> "$CALLS"\n' + APPROVED.format(name="A", status=0)
    key = "required" if name == "approve.yml" else "verdict"
    judged = JUDGE.format(protected_changes="[]", status=0)
    ended = decides(tmp_path, name, key, hilgate=hilgate + judged, buildkite_agent=agent)
    assert ended.status == 0
    assert ("token for earlier: secret" in ended.calls) is asks
    assert "token for judge: none" in ended.calls


APPROVED = '[ "$1" = approver ] && {{ echo "{name}"; exit {status}; }}\n'


def test_approval_judges_again_with_the_name(tmp_path):
    hilgate = APPROVED.format(name="Ada <ada@example.invalid>", status=0) + JUDGE.format(
        protected_changes="[1]", status=1
    )
    ended = decides(tmp_path, "approve.yml", "required", hilgate=hilgate, buildkite_agent="")
    assert ended.status == 1
    assert any(call.endswith("--approved-by Ada <ada@example.invalid>") for call in ended.calls)
    assert any(call.startswith("buildkite-agent annotate --context verdict") for call in ended.calls)


@pytest.mark.parametrize("key", ["approved", "required"])
def test_approval_without_another_name_is_none(tmp_path, key):
    hilgate = APPROVED.format(name="", status=2) + JUDGE.format(protected_changes="[1]", status=1)
    ended = decides(tmp_path, "approve.yml", key, hilgate=hilgate, buildkite_agent="")
    assert ended.status == 2
    assert [call for call in ended.calls if call.startswith("hilgate")] == ["hilgate approver"]


@pytest.mark.parametrize("again", [True, False])
def test_approval_judges_what_ran_as_approved(tmp_path, again):
    """Either because all steps ran once more, or because nothing had been put back while they ran."""
    printed = '[ "$1" = pipeline ] && {{ printf "{text}"; exit; }}\n'.format(text="steps" if again else "")
    hilgate = APPROVED.format(name="Ada <ada@example.invalid>", status=0) + printed
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    ran = decides(tmp_path / "a", "approve.yml", "approved", hilgate=hilgate, buildkite_agent="")
    assert ran.status == 0
    assert ran.uploads == (["results/approved.yml"] if again else [])
    judged = JUDGE.format(protected_changes="[1]", status=0)
    ended = decides(tmp_path / "b", "approve.yml", "required", hilgate=hilgate + judged, buildkite_agent="")
    assert ended.status == 0
    fetched = [call for call in ended.calls if call.startswith("hilgate fetch")]
    assert fetched == ["hilgate fetch --plan results/plan.json" + (" --approved" if again else "")]


def test_an_approval_belongs_to_a_team_and_is_waited_for():
    ask, runs, wait, again = yaml.safe_load(FILES["approve.yml"])["steps"]
    assert (ask["allowed_teams"], ask["blocked_state"]) == (["rocm-gate-owners"], "failed")
    assert (runs["depends_on"], wait["continue_on_failure"]) == ("approve", True)
    assert "depends_on" not in again  # which would take it out of what waits
    *_, bundle, sign = yaml.safe_load(FILES["release.yml"])["steps"]
    assert (bundle["depends_on"], sign["depends_on"]) == ("verdict", "bundle")
    assert "allow_dependency_failure" not in bundle
