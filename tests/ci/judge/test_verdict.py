"""The verdict: every rule by example, and the two properties that make it a gate."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import ENVIRONMENT, plan, step

from hilgate.errors import Exit, RecordsError
from hilgate.judge import verdict as judge
from hilgate.model import BuildRecord, Check, Outcome, StepRecord
from hilgate.plan.make import plan_digest
from hilgate.run import outcome as rules
from hilgate.run import results
from hilgate.run.evidence import KINDS, kind_of

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
PASS = Check(id="p", outcome=Outcome.PASS)
FAIL = Check(id="f", outcome=Outcome.FAIL, message="max_abs_err 0.5 > 0.001\nmore")
SKIP = Check(id="s", outcome=Outcome.DID_NOT_RUN, message="needs gfx950")
OPEN = Check(id="o", outcome=Outcome.INCONCLUSIVE, message="n=50")


def facts(exit_status=0, checks=(PASS,), *, evidence="findings", minimum=1, **more):
    return rules.Facts(KINDS[evidence], minimum, exit_status, tuple(checks), **more)


EXAMPLES = [
    (facts(), Outcome.PASS, "1 passed"),
    (facts(checks=[PASS, SKIP]), Outcome.PASS, "1 passed, 1 not run (needs gfx950)"),
    (facts(0, [PASS, FAIL]), Outcome.FAIL, "f: max_abs_err 0.5 > 0.001"),
    (facts(1, [PASS, FAIL]), Outcome.FAIL, "f: max_abs_err 0.5 > 0.001"),
    (facts(None, [FAIL], stopped="timed out after 60 s"), Outcome.FAIL, "f: max_abs_err 0.5 > 0.001"),
    (facts(1), Outcome.FAIL, "exit 1 and no failing check"),
    (facts(None, stopped="timed out after 60 s"), Outcome.DID_NOT_RUN, "timed out after 60 s"),
    (facts(2), Outcome.DID_NOT_RUN, "exit 2 (misuse of the command line)"),
    (facts(3, evidence="junit"), Outcome.DID_NOT_RUN, "exit 3 (pytest met an internal error)"),
    (facts(5, (), evidence="junit"), Outcome.DID_NOT_RUN, "exit 5 (no tests were collected)"),
    (facts(-9), Outcome.DID_NOT_RUN, "killed by SIGKILL"),
    (facts(-200), Outcome.DID_NOT_RUN, "killed by signal 200"),
    (facts(42, last_line="boom"), Outcome.DID_NOT_RUN, "exit 42; last line: boom"),
    (facts(problem="its junit.xml is empty"), Outcome.DID_NOT_RUN, "its junit.xml is empty"),
    (facts(checks=()), Outcome.DID_NOT_RUN, "it recorded no checks"),
    (facts(checks=[SKIP, SKIP]), Outcome.DID_NOT_RUN, "none of its 2 checks ran; the first: needs gfx950"),
    (facts(minimum=2), Outcome.DID_NOT_RUN, "1 checks ran where at least 2 must; 1 passed, 0 failed"),
    (facts(0, [PASS, OPEN]), Outcome.INCONCLUSIVE, "o: n=50"),
    (facts(6, [PASS]), Outcome.INCONCLUSIVE, "exit 6 (inconclusive) and no check that says why"),
    (facts(6, [OPEN], minimum=2), Outcome.DID_NOT_RUN, "1 checks ran where at least 2 must"),
]


@pytest.mark.parametrize(("given_facts", "outcome", "why"), EXAMPLES)
def test_rules_by_example(given_facts, outcome, why):
    decision = rules.decide(given_facts)
    assert decision.outcome is outcome
    assert decision.why.startswith(why)


def test_every_rule_decides_an_example():
    deciding = {next(rule.name for rule in rules.RULES if rule.when(example)) for example, _, _ in EXAMPLES}
    assert deciding == {rule.name for rule in rules.RULES}


def record(a_step, checks=(PASS,), *, claims=None, **changes):
    """An attempt at a step; `claims` is the outcome it records for itself."""
    status = changes.pop("exit_status", 0)
    own = rules.decide(rules.Facts(kind_of(a_step), a_step.step.minimum, status, tuple(checks), "stopped"))
    values = {
        "key": a_step.key,
        "started": NOW,
        "seconds": 1.0,
        "exit_status": status,
        "outcome": claims or own.outcome,
        "message": own.why,
        "checks": len(checks),
        "command": a_step.step.command,
        "environment": ENVIRONMENT,
    }
    return results.Attempt(StepRecord.model_validate(values | changes), tuple(checks))


def verdict_of(a_plan, *attempts):
    digest = plan_digest(a_plan)
    build = BuildRecord(started=NOW, plan_digest=digest, commit=a_plan.commit, environment=ENVIRONMENT)
    found = {}
    for attempt in attempts:
        found[attempt.record.key] = (*found.get(attempt.record.key, ()), attempt)
    recorded = results.Recorded((build,), found)
    return judge.judge(a_plan, recorded, digest, decided=NOW)


A, B = step("a", "python -c pass", minimum=1), step("b", "python -c pass", evidence="junit")


def test_all_pass():
    verdict = verdict_of(plan(A, B), record(A), record(B))
    assert verdict.outcome is Outcome.PASS
    assert verdict.why == "all 2 steps passed"
    assert judge.exit_status(verdict, plan(A, B)) == Exit.PASS


def test_no_steps_is_not_a_pass():
    assert verdict_of(plan()).outcome is Outcome.DID_NOT_RUN
    assert judge.exit_status(verdict_of(plan()), plan()) == Exit.NOTHING_RAN


def test_a_missing_step_did_not_run():
    verdict = verdict_of(plan(A, B), record(A))
    assert [s.why for s in verdict.steps] == ["1 passed", "no record of it arrived"]
    assert judge.exit_status(verdict, plan(A, B)) == Exit.NOTHING_RAN


def test_another_command_did_not_run():
    verdict = verdict_of(plan(A), record(A, command="python -c 'easier'"))
    assert verdict.outcome is Outcome.DID_NOT_RUN
    assert "another command" in verdict.why


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        (record(A, [FAIL], claims=Outcome.PASS), Outcome.FAIL),
        (record(A, [SKIP], claims=Outcome.PASS), Outcome.DID_NOT_RUN),
        (record(A, exit_status=1, claims=Outcome.PASS), Outcome.FAIL),
        (record(A, [PASS], claims=Outcome.DID_NOT_RUN), Outcome.DID_NOT_RUN),
    ],
)
def test_a_record_is_never_believed_beyond_its_evidence(attempt, outcome):
    assert verdict_of(plan(A), attempt).outcome is outcome


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
    assert judge.exit_status(verdict_of(plan(A, B), *attempts), plan(A, B)) == status


@pytest.mark.parametrize(
    ("node_id", "line"),
    [
        ("tests/t.py::test_gather[bs16-HND]", "hilgate run b-cpu -- -k 'test_gather[bs16-HND]'"),
        ("tests/t.py::TestA::test_gather", "hilgate run b-cpu -- -k test_gather"),
        ("tests/t.py::test_gather[a b]", "hilgate run b-cpu -- -k test_gather"),
        ("tests/t.py::test_gather[a::b]", "hilgate run b-cpu -- -k 'test_gather[a::b]'"),
        ("no node id", "hilgate run b-cpu"),
    ],
)
def test_reproduce_line(node_id, line):
    failed = Check(id=node_id, outcome=Outcome.FAIL, message="wrong")
    assert verdict_of(plan(B), record(B, [failed], exit_status=1)).steps[0].reproduce == line


def test_the_verdict_is_written_and_read_back(tmp_path):
    verdict = verdict_of(plan(A), record(A))
    verdict.save(tmp_path / "verdict.json")
    assert judge.read_verdict(tmp_path / "verdict.json") == verdict
    (tmp_path / "verdict.json").write_text("{")
    for path in (tmp_path / "verdict.json", tmp_path / "none.json"):
        with pytest.raises(RecordsError):
            judge.read_verdict(path)


outcomes = st.sampled_from([PASS, FAIL, SKIP, OPEN])
statuses = st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6, 70, 137, -11, None])
claims = st.sampled_from([None, *Outcome])
attempts_at = st.tuples(statuses, st.lists(outcomes, max_size=4), claims)


@st.composite
def builds(draw):
    """A plan and an attempt (or none) at each of its steps."""
    steps = tuple(
        step(name, "python -c pass", minimum=draw(st.integers(1, 3))) for name in "abc"[: draw(st.integers(0, 3))]
    )
    drawn = [draw(st.none() | attempts_at) for _ in steps]
    attempts = [
        record(one, checks, claims=claim, exit_status=status)
        for one, attempt in zip(steps, drawn, strict=True)
        if attempt
        for status, checks, claim in [attempt]
    ]
    return plan(*steps), attempts


@settings(max_examples=150, deadline=None)
@given(builds())
def test_a_pass_needs_every_step_to_have_passed_on_its_evidence(build):
    a_plan, attempts = build
    verdict = verdict_of(a_plan, *attempts)
    if verdict.outcome is Outcome.PASS:
        assert len(attempts) == len(a_plan.steps) > 0
        for one, attempt in zip(a_plan.steps, attempts, strict=True):
            assert attempt.record.exit_status == 0
            assert attempt.record.outcome is Outcome.PASS
            assert {check.outcome for check in attempt.checks} <= {Outcome.PASS, Outcome.DID_NOT_RUN}
            assert sum(check.outcome is Outcome.PASS for check in attempt.checks) >= one.step.minimum
    assert (judge.exit_status(verdict, a_plan) == Exit.PASS) == (verdict.outcome is Outcome.PASS)


@settings(max_examples=150, deadline=None)
@given(builds(), st.integers(0, 2))
def test_a_failing_check_never_improves_the_verdict(build, where):
    a_plan, attempts = build
    if not attempts:
        return
    before = verdict_of(a_plan, *attempts)
    spoilt = attempts[where % len(attempts)]
    worse = results.Attempt(spoilt.record, (*spoilt.checks, FAIL))
    after = verdict_of(a_plan, *[worse if attempt is spoilt else attempt for attempt in attempts])
    assert after.outcome is Outcome.FAIL
    assert rules.SEVERITY[after.outcome] >= rules.SEVERITY[before.outcome]


@settings(max_examples=100, deadline=None)
@given(builds(), st.integers(0, 2))
def test_losing_a_step_is_never_a_pass(build, where):
    a_plan, attempts = build
    if attempts:
        del attempts[where % len(attempts)]
    assert verdict_of(a_plan, *attempts).outcome is not Outcome.PASS
