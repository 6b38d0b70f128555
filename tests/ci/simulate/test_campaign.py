# SPDX-License-Identifier: Apache-2.0
"""The simulator: no verdict is better than what really happened, whatever goes wrong."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import environ, plan, python, step
from support.simulate import truth
from support.simulate.__main__ import main
from support.simulate.campaign import Campaign, Tally, Wrong, problems, run_build, shrink
from support.simulate.job import DAMAGING, FAILS_FAST, damage
from support.simulate.scenarios import Fault, FaultKind, draw, possible, scenarios_of
from support.simulate.truth import Event, Excuse, Ledger, Truth

from hilgate.errors import Exit
from hilgate.judge import verdict
from hilgate.model.record import Outcome

ROOT = Path(__file__).parents[3]
_judge = verdict.judge
RECOVERED = {
    FaultKind.AGENT_LOST,
    FaultKind.AGENT_STOPPED,
    FaultKind.EXECUTOR_KILLED,
    FaultKind.RESULTS_LOST,
    FaultKind.SICK_NODE,
    FaultKind.DUPLICATED,
    FaultKind.PLAN_AGENT_LOST,
    FaultKind.VERDICT_AGENT_LOST,
    FaultKind.LOOSENED_APPROVED,
    FaultKind.QUARANTINED_FAILURE,
    FaultKind.CANNOT_RUN,
    FaultKind.UNEXPECTED_PASS,
    FaultKind.RECHECK_SAME_NODE,
    FaultKind.NAMES_OF_OTHERS,
    FaultKind.HOLES,
    FaultKind.MANY_FILES,
}
"""Kinds after which a build may still deserve to pass."""


def scenarios():
    return scenarios_of(ROOT, "tests")


def campaign(builds, seed="tests", **changes):
    return Campaign(ROOT, builds, seed, **changes).run()


def test_without_faults_every_build_passes_and_nothing_is_held_back():
    tally = campaign(40, rate=0.0)
    assert tally.verdicts == {"pass": 40}
    assert tally.deserved == {"must pass": 40}
    assert not tally.problems


def test_no_build_passes_that_must_not_and_no_result_is_lost():
    tally = campaign(250)
    assert tally.as_json()["failing"] == []
    assert tally.sound
    assert tally.deserved["must not pass"] > 100
    assert tally.verdicts["pass"] > 50
    assert len(tally.faults) == len(FaultKind)


def test_a_plan_of_this_repository_is_judged_as_truly_as_a_small_one():
    scenario = scenarios().real(0)
    assert len(scenario.plan.steps) == len([step for step in scenario.generated if step.runs])
    for number in range(6):
        faults = draw(random.Random(number), scenario.plan, 0.05)
        assert not problems(built(scenario, str(number), faults))


@pytest.mark.parametrize("kind", FaultKind, ids=lambda kind: kind.name.lower())
def test_each_kind_of_fault_bites_and_deceives_nobody(kind):
    tally = campaign(6, rate=1.0, kinds=frozenset({kind}))
    assert tally.as_json()["failing"] == []
    assert sum(tally.faults.values()) > 0
    if kind in RECOVERED:
        assert tally.deserved["must not pass"] == 0
    else:
        assert tally.deserved["must not pass"] > 0
    assert tally.verdicts["pass"] <= tally.deserved["must pass"] + tally.deserved["may pass"]


def lost_to_a_fast_failing_agent():
    """Jobs of each build whose agent had begun to fail every one of them at once."""
    runs = Campaign(ROOT, 48, "tests", rate=1.0, kinds=frozenset({FaultKind.FAST_FAILING}))
    found = []
    for number in range(runs.builds):
        scenario, faults = runs.drawn(scenarios(), number)
        events = built(scenario, f"tests:{number}", faults).site.ledger.events.values()
        found.append(sum(FAILS_FAST in event.wrong for tries in events for event in tries))
    return found


def test_an_agent_that_fails_fast_takes_three_jobs_and_no_more(monkeypatch):
    assert max(lost_to_a_fast_failing_agent()) == 3
    monkeypatch.setattr("agent_host.endings.IN_A_ROW", 10**6)
    assert max(lost_to_a_fast_failing_agent()) > 3


def test_the_same_seed_is_the_same_series():
    first, second = campaign(20).as_json(), campaign(20).as_json()
    assert first | {"seconds": 0} == second | {"seconds": 0}
    assert campaign(5, seed="other").as_json()["faults"] != first["faults"]


def built(scenario, name, faults):
    folder = Path(tempfile.mkdtemp(prefix="hilgate-test-"))
    try:
        return run_build(scenario, name, faults, folder)
    finally:
        shutil.rmtree(folder)


@st.composite
def schedules(draw_from):
    """A small plan and any faults at any of its places, the same kind at several places too."""
    scenario = scenarios().small(draw_from(st.integers(0, 7)))
    faults = []
    for kind in draw_from(st.lists(st.sampled_from(list(FaultKind)), max_size=5)):
        places = possible(kind, scenario.plan)
        if places:
            faults.append(Fault(kind, draw_from(st.sampled_from(places)), draw_from(st.integers(0, 1 << 20))))
    return scenario, tuple(faults), str(draw_from(st.integers(0, 99)))


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(schedules())
def test_no_schedule_of_faults_earns_a_false_pass_or_loses_a_result(schedule):
    scenario, faults, name = schedule
    found = problems(built(scenario, name, faults))
    assert not [problem for problem in found if problem.kind in {Wrong.FALSE_PASS, Wrong.LOST_RESULT}]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(schedules())
def test_what_forbids_a_pass_still_forbids_it_when_more_goes_wrong_with_the_build(schedule):
    scenario, faults, name = schedule
    before = built(scenario, name, faults)
    after = built(scenario, name, (*faults, Fault(FaultKind.LOOSENED, "", 0)))
    assert after.truth.forbidden
    assert not after.passed
    assert set(before.truth.forbidden) <= set(after.truth.forbidden)


def test_faults_are_left_out_as_long_as_the_verdict_stays_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(verdict, "judge", passing)
    scenario = scenarios().small(1)
    key = scenario.plan.steps[0].key
    regression = Fault(FaultKind.REGRESSION, key, 1)
    many = (Fault(FaultKind.DUPLICATED, key, 1), regression, Fault(FaultKind.VERDICT_AGENT_LOST, "", 1))
    assert shrink(scenario, "shrunk", many, Wrong.FALSE_PASS, tmp_path) == (regression,)


def passing(plan, recorded, digest, **more):
    """A judge that passes everything."""
    return _judge(plan, recorded, digest, **more).model_copy(update={"outcome": Outcome.PASS})


LINES = (
    b'{"kind":"build","schema_version":1,"plan_digest":"d","commit":"c","tree":"t"}\n'
    b'{"kind":"check","step":"a","check":{"id":"x","outcome":"pass","seconds":0.5}}\n'
    b'{"kind":"check","step":"a","check":{"id":"y","outcome":"pass","seconds":0.5}}\n'
    b'{"kind":"step","key":"a","exit_status":0,"outcome":"pass","checks":2,"command":"c","environment":{"image":""},"s":1}\n'
)


@pytest.mark.parametrize("kind", sorted(DAMAGING))
def test_damage_is_the_same_for_the_same_number_and_changes_the_file(kind):
    assert [damage(kind, number, LINES) for number in range(9)] == [damage(kind, number, LINES) for number in range(9)]
    assert any(damage(kind, number, LINES) != LINES for number in range(9))


@pytest.mark.parametrize("kind", sorted(DAMAGING))
def test_a_file_that_is_damaged_already_can_be_damaged_again(kind):
    for first in sorted(DAMAGING):
        for number in range(30):
            spoilt = damage(first, number, LINES)
            assert isinstance(damage(kind, number + 1, spoilt) if spoilt else spoilt, bytes)


def simulate(*arguments):
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(ROOT),
        mock.patch.dict(os.environ, environ(), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=errors.getvalue())


def test_the_command_says_what_it_did_in_80_columns():
    done = simulate("--builds", "20", "--seed", "tests")
    assert done.returncode == Exit.PASS
    assert done.stdout.startswith("20 builds, ")
    assert "false passes" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_command_as_json_has_every_number():
    done = simulate("--builds", "5", "--seed", "tests", "--json")
    found = json.loads(done.stdout)
    assert (found["builds"], found["seed"], found["false_passes"], found["lost_results"]) == (5, "tests", 0, 0)
    assert sum(found["verdicts"].values()) == 5


def test_a_false_pass_is_printed_with_a_line_that_repeats_it(monkeypatch):
    monkeypatch.setattr(verdict, "judge", passing)
    done = simulate("--builds", "12", "--seed", "tests")
    assert done.returncode == Exit.FAIL
    line = next(line for line in done.stdout.splitlines() if "reproduce: " in line)
    arguments = line.split("make simulate ARGS='")[1].rstrip("'").split()
    assert simulate(*arguments).returncode == Exit.FAIL
    monkeypatch.undo()
    assert simulate(*arguments).returncode == Exit.PASS


def test_kept_folders_hold_each_build_and_are_never_overwritten(tmp_path):
    arguments = ("--builds", "1", "--seed", "tests:3", "--rate", "0", "--keep", str(tmp_path / "kept"))
    assert simulate(*arguments).returncode == Exit.PASS
    assert list((tmp_path / "kept" / "3" / "verdict.0" / "jobs").glob("*/results.jsonl"))
    again = simulate(*arguments)
    assert again.returncode == Exit.MISUSE
    assert "--keep" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "a b"], "is no seed"),
        (["--seed", "1:x"], "is no seed"),
        (["--seed", "1:2", "--builds", "3"], "is one build"),
        (["--builds", "0"], "builds"),
        (["--rate", "1.5"], "rate"),
        (["--rate", "nan"], "rate"),
    ],
)
def test_wrong_options_are_refused(arguments, words):
    done = simulate(*arguments)
    assert done.returncode == Exit.MISUSE
    assert words in done.stderr


def test_what_a_simulated_build_deserves_is_not_decided_by_what_it_tests():
    tree = ast.parse(Path(truth.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert "support.simulate.buildkite" in imported
    assert not [name for name in imported if name.startswith(("hilgate.judge", "hilgate.report", "hilgate.run"))]


@pytest.mark.parametrize(("excuses", "counted"), [((), 1), ((Excuse("t", "a", None, expired=False),), 0)])
def test_a_failure_that_a_retry_has_hidden_is_counted_unless_it_may_fail(excuses, counted):
    ledger = Ledger()
    ledger.excuses.extend(excuses)
    ledger.events["a-cpu"] = [Event("a-cpu", n, "h", tests={"t": end}) for n, end in enumerate(("failed", "passed"))]
    site = SimpleNamespace(ledger=ledger, plan=plan(step("a", python("1"))))
    tally = Tally("1", 0.0)
    tally.add(SimpleNamespace(passed=True, verdict=None, truth=Truth((), ()), faults=(), site=site))
    assert tally.unseen_failures == counted
