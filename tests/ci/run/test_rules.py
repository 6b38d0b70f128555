# SPDX-License-Identifier: Apache-2.0
"""The rules that decide on a step: each by example, alone and in its surroundings."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest

from hilgate.errors import Exit
from hilgate.evidence import KINDS
from hilgate.model.declaration import Excuse
from hilgate.model.record import SEVERITY, Check, Outcome
from hilgate.model.verdict import Ruling
from hilgate.run.rules import RULES, OwnFacts, StepFacts, decide

R = Ruling
P, I, D, F = Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.DID_NOT_RUN, Outcome.FAIL  # noqa: E741

PASS = Check(id="p", outcome=Outcome.PASS)
FAIL = Check(id="f", outcome=Outcome.FAIL, message="max_abs_err 0.5 > 0.001\nmore")
SKIP = Check(id="s", outcome=Outcome.DID_NOT_RUN, message="needs gfx950")
OPEN = Check(id="o", outcome=Outcome.INCONCLUSIVE, message="n=50")
MLA = SKIP.model_copy(update={"labels": {"needs": "cpu:amx_tile"}})
RAN = PASS.model_copy(update={"labels": {"needs": "cpu:amx_tile"}})
TWO_GPUS = SKIP.model_copy(update={"id": "t", "labels": {"needs": "package:vllm gpus:2"}})
BOTH = SKIP.model_copy(update={"id": "b", "labels": {"needs": "cpu:amx_tile gpus:2"}})
RAN_TOO = RAN.model_copy(update={"id": "q"})
AMX = {
    "cpu:amx_tile": Excuse(why="the prefix cache of MLA needs AMX", most=2),
    "gpus:2": Excuse(why="two ranks need two GPUs", most=2),
}
NO_AMX = {"may_lack": AMX, "lacked": frozenset({"cpu:amx_tile"})}
NEITHER = {"may_lack": AMX, "lacked": frozenset(AMX)}


def facts(exit_status=0, checks=(PASS,), *, evidence="findings", minimum=1, **more):
    return StepFacts(KINDS[evidence], minimum, exit_status, tuple(checks), **more)


EXAMPLES = [
    (facts(), P, "1 passed"),
    # A check that was skipped: its step did not run, unless what it needs is declared and not here.
    (facts(checks=[PASS, MLA], **NO_AMX), P, "1 check passed, 1 cannot run here: the prefix cache of MLA n"),
    (
        facts(checks=[PASS, MLA, MLA, TWO_GPUS], **NEITHER),
        P,
        "1 check passed, 3 cannot run here: 2: the prefix cache of MLA needs AMX; 1: two ranks need two GPUs",
    ),
    (facts(checks=[PASS, SKIP], **NO_AMX), D, "s did not run without a declared reason (may_lack): needs gfx950"),
    (
        facts(checks=[PASS, MLA], may_lack=AMX),
        D,
        "s did not run, and it needs cpu:amx_tile, which is here: needs gfx950",
    ),
    (
        facts(checks=[PASS, MLA], lacked=frozenset({"cpu:amx_tile"})),
        D,
        "s did not run, and it needs cpu:amx_tile, which the step does not declare (may_lack)",
    ),
    (facts(checks=[PASS, MLA, SKIP, SKIP], **NO_AMX), D, "2 checks that must run did not; the first: s did not run"),
    (facts(checks=[PASS, RAN], **NO_AMX), F, "p ran without cpu:amx_tile, so drop that condition"),
    (facts(checks=[RAN, PASS, RAN_TOO], **NO_AMX), F, "p ran without cpu:amx_tile"),
    (
        facts(checks=[PASS, TWO_GPUS, SKIP]),
        D,
        "2 checks that must run did not; the first: t did not run, and it needs package:vllm, which the step does not",
    ),
    (facts(checks=[PASS, BOTH], may_lack=AMX), D, "b did not run, and it needs cpu:amx_tile, which is here"),
    (
        facts(checks=[PASS, MLA, MLA, BOTH], **NEITHER),
        D,
        "3 checks did not run for lack of cpu:amx_tile, and at most 2 may; the last: b",
    ),
    (facts(2, stopped="not started: x"), D, "exit 2 (misuse"),
    (facts(2, stopped="timed out after 60 s"), D, "exit 2 (misuse"),
    (facts(0, problem="cut", said="boom"), D, "cut"),
    (facts(42, problem="cut", said="boom"), D, "exit 42; cut; it said: boom"),
    (facts(checks=[RAN], may_lack=AMX), P, "1 passed"),
    (
        facts(checks=[PASS, TWO_GPUS, MLA, MLA, MLA], **NEITHER),
        D,
        "3 checks did not run for lack of cpu:amx_tile, and at most 2 may; the last: s",
    ),
    (
        facts(checks=[PASS, TWO_GPUS, TWO_GPUS, TWO_GPUS, MLA], **NEITHER),
        D,
        "3 checks did not run for lack of gpus:2, and at most 2 may; the last: t",
    ),
    (
        facts(checks=[PASS, MLA], minimum=2, **NO_AMX),
        D,
        "1 check ran, 1 cannot run here: the prefix cache of MLA needs AMX; at least 2 must",
    ),
    (facts(0, [PASS, FAIL]), F, "f: max_abs_err 0.5 > 0.001"),
    (facts(1, [PASS, FAIL]), F, "f: max_abs_err 0.5 > 0.001"),
    (facts(None, [FAIL], stopped="timed out after 60 s"), F, "f: max_abs_err 0.5 > 0.001"),
    (facts(1), F, "exit 1 and no failing check"),
    (facts(None, stopped="timed out after 60 s"), D, "timed out after 60 s"),
    (facts(2), D, "exit 2 (misuse of the command line)"),
    (facts(3, evidence="junit"), D, "exit 3 (pytest met an internal error)"),
    (facts(5, (), evidence="junit"), D, "exit 5 (no tests were collected)"),
    (facts(-9), D, "killed by SIGKILL"),
    (facts(-200), D, "killed by signal 200"),
    (facts(42, said="boom"), D, "exit 42; it said: boom"),
    (facts(problem="its junit.xml is empty"), D, "its junit.xml is empty"),
    (facts(checks=()), D, "it recorded no checks"),
    (facts(checks=[SKIP, SKIP]), D, "none of its 2 checks ran; the first: needs gfx950"),
    (facts(minimum=2), D, "1 check ran; at least 2 must"),
    (facts(reads="it read a.md"), D, "it read a.md"),
    (facts(checks=[FAIL], reads="it read a.md"), F, "f: max_abs_err 0.5 > 0.001"),
    (facts(remark="it read a.md"), P, "1 passed; it read a.md"),
    (facts(0, [PASS, OPEN]), I, "o: n=50"),
    (facts(0, [PASS, PASS, PASS, OPEN], minimum=4), I, "o: n=50"),
    (facts(0, [PASS, PASS, PASS, OPEN], minimum=5), D, "4 checks ran; at least 5 must"),
    (facts(6, [PASS]), I, "exit 6 (inconclusive) and no check that says why"),
    (facts(6, [OPEN], minimum=2), D, "1 check ran; at least 2 must"),
    (facts(None, stopped="not started: image-rocm-cpu did not pass"), D, "not started: image"),
    (facts(None), D, "it has no exit status"),
    (facts(5), D, "exit 5 (this environment"),
    # A step is never better than its own record, nor than its evidence.
    (facts(0, recorded=Outcome.FAIL), F, "it says that it failed"),
    (facts(0, recorded=Outcome.DID_NOT_RUN, stopped="no image"), D, "no image"),
    (facts(0, recorded=Outcome.INCONCLUSIVE), I, "it says that it is inconclusive"),
    (facts(0, [PASS, FAIL], recorded=Outcome.PASS), F, "f: max_abs_err 0.5 > 0.001 (recorded as pass)"),
    (facts(0, [OPEN], recorded=Outcome.FAIL, stopped="f: off"), F, "f: off"),
    (facts(0, [FAIL], recorded=Outcome.DID_NOT_RUN), F, "f: max_abs_err 0.5 > 0.001 (recorded as did not run)"),
    (facts(0, (), recorded=Outcome.INCONCLUSIVE), D, "it recorded no checks (recorded as inconc"),
    (facts(0, [OPEN], recorded=Outcome.INCONCLUSIVE), I, "o: n=50"),
]


def among(exit_status=0, checks=(PASS,), **around):
    return facts(exit_status, checks, stopped="" if exit_status is not None else LATE, **around)


LATE = "timed out after 1860 s"
DOUBT = {"node_in_doubt": "its node is in doubt (kernel log: reset)"}
IN_ITS_SURROUNDINGS = [
    (among(damaged="cut off", **DOUBT), D, R.INFRA, "its results cannot be believed: cut off; its node is in doubt"),
    (among(arrived=False, of_a_fork="a maintainer starts it"), D, R.INFRA, "no record of it arrived; a maintainer"),
    (among(arrived=False, not_taken="no agent of q noted"), D, R.INFRA, "no record of it arrived; no agent of q noted"),
    (among(other_command="true"), D, R.UNFINISHED, "another command was run: true"),
    (among(checks=[FAIL], other_image="it ran in another"), D, R.INFRA, "it ran in another; f failed there"),
    (among(other_packages="it imports x from y"), D, R.INFRA, "it imports x from y"),
    (among(checks=[FAIL], **DOUBT), D, R.INFRA, "f: max_abs_err 0.5 > 0.001; but its node is in doubt"),
    (among(checks=[FAIL], confirmed=True, **DOUBT), F, R.REGRESSION, "f: max_abs_err"),
    (among(without_health="nothing is known"), D, R.INFRA, "nothing is known; the step itself: 1 passed"),
    (among(checks=[PASS, OPEN], flaky=(FAIL,)), I, R.FLAKY, "f failed and passed when run again: max_abs_err"),
    (among(checks=[PASS, OPEN], flaky=(FAIL, OPEN)), I, R.FLAKY, "f failed and passed when run again: max_abs_err"),
    (among(had_failed=True), I, R.FLAKY, "1 passed"),
    (among(was_open=True), I, R.INCONCLUSIVE, "1 passed"),
    (among(unbuilt="no image"), D, R.UNFINISHED, "no image"),
    (among(stray="it holds t"), D, R.UNFINISHED, "it holds t"),
    (among(unlisted="no list"), D, R.UNFINISHED, "no list"),
    (among(wrongly_sharded="t ran in 0 shards"), D, R.UNFINISHED, "t ran in 0 shards"),
    (among(expired="the entry of f has expired", excused=("f",)), F, R.QUARANTINED, "the entry of f has expired"),
    (among(excused=("f",)), P, R.QUARANTINED, "1 passed; 1 failed in quarantine"),
    (among(None), D, R.UNFINISHED, LATE),
    (among(-11, watched=True), D, R.UNFINISHED, "killed by SIGSEGV"),
    (among(-11), D, R.INFRA, "killed by SIGSEGV"),
    (among(-1), D, R.INFRA, "killed by SIGHUP"),
    (among(1, flaky=(FAIL,)), F, R.REGRESSION, "exit 1 and no failing check"),
    (among(137), D, R.UNFINISHED, "exit 137"),
    (among(-6, watched=True), D, R.UNFINISHED, "killed by SIGABRT"),
    (among(-9, watched=True), D, R.INFRA, "killed by SIGKILL"),
    (among(0, (), watched=True), D, R.UNFINISHED, "it recorded no checks"),
    (among(Exit.SICK_NODE), D, R.INFRA, "exit"),
    (among(Exit.CANNOT_RUN_HERE), D, R.INFRA, "exit 5"),
    # What stands against a pass says nothing of what is no pass.
    (
        among(1, had_failed=True, unbuilt="no image", stray="t", expired="x", unlisted="u"),
        F,
        R.REGRESSION,
        "exit 1 and no",
    ),
    (among(2, was_open=True, excused=("f",)), D, R.UNFINISHED, "exit 2"),
]


@pytest.mark.parametrize(("given_facts", "outcome", "why"), EXAMPLES)
def test_rules_by_example(given_facts, outcome, why):
    decision = decide(given_facts)
    assert decision.outcome is outcome
    assert decision.why.startswith(why)


@pytest.mark.parametrize(("given_facts", "outcome", "ruling", "why"), IN_ITS_SURROUNDINGS)
def test_rules_of_surroundings_by_example(given_facts, outcome, ruling, why):
    decision = decide(given_facts)
    assert (decision.outcome, decision.ruling) == (outcome, ruling)
    assert decision.why.startswith(why)


def test_every_rule_decides_an_example():
    deciding = {decide(example).rule for example, *_ in EXAMPLES + IN_ITS_SURROUNDINGS}
    assert deciding == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_rule_but_the_last_is_a_pass(rule):
    """Whatever is added to the table: a pass needs exit 0 and good evidence, or a quarantine over such."""
    assert (rule.outcome in {P, None}) == (rule.name in {"passed", "failed in quarantine"})


def test_no_surroundings_make_a_step_better():
    """A failure may turn out to be the node's doing; it is never a pass then."""
    for (alone, *_), (other, *_) in itertools.product(EXAMPLES, IN_ITS_SURROUNDINGS):
        without = decide(alone).outcome
        own = {field.name: getattr(alone, field.name) for field in fields(OwnFacts)}
        among_them = decide(replace(other, **own)).outcome
        doubted = (without, among_them) == (F, D)
        assert SEVERITY[among_them] >= SEVERITY[without] or doubted, (alone, other)


def test_a_record_that_says_otherwise_is_named_with_evidence():
    for one, *_ in EXAMPLES + IN_ITS_SURROUNDINGS:
        step = replace(one, recorded=P)
        shown = decide(step)
        own = shown.rule in {step.alone.rule, "crashed"}  # whether it crashed or was killed depends on its node
        assert shown.why.endswith("(recorded as pass)") == (own and shown.outcome is not P), shown


@pytest.mark.parametrize("outcome", Outcome)
def test_a_record_of_the_same_outcome_explains_it(outcome):
    assert decide(facts(0, recorded=outcome, stopped="as recorded")).why == "as recorded"
