# SPDX-License-Identifier: Apache-2.0
"""Failing tests once more: which, by what command, and that nothing becomes greener by it."""

from __future__ import annotations

import json
import time

import pytest
from support.jobs import (
    ELSEWHERE,
    GATHER,
    NODE,
    TEST,
    Jobs,
    again,
    agents_plan,
    failed,
    finished,
    gpu_step,
    passed,
)
from support.plans import failing, git, passing, plan, results_of, step, writes_findings

from hilgate.judge.verdict import judge
from hilgate.model.plan import plan_digest
from hilgate.model.record import Outcome
from hilgate.model.verdict import Ruling
from hilgate.run import process, recheck, results
from hilgate.run.process import RunContext, Watchdog
from hilgate.run.runner import Reruns

# Fails until the file `mended` exists, which its first run may leave; one more passes always.
TESTS = """
import pathlib, pytest
@pytest.mark.parametrize("shape", ["bs16", "bs 48"])
def test_flaky(shape):
    mark = pathlib.Path("seen-" + shape.replace(" ", ""))
    seen, broken = mark.exists(), pathlib.Path("broken").exists()
    mark.write_text("")
    assert seen and not broken, "max_abs_err 0.5"
def test_fine(): pass
def test_slow(): pass
"""
COMMAND = "python -m pytest tests -q -p no:cacheprovider --deselect tests/test_samples.py::test_fine -k 'not slow'"


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_samples.py").write_text(TESTS)
    return tmp_path


def run_step(root):
    """One JUnit step with reruns; returns its records, its ruling and the folder of its rerun."""
    a_plan = plan(step("samples", COMMAND, evidence="junit", env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}))
    recorded = results_of(a_plan, root / "results", root=root, reruns=Reruns())
    verdict = judge(a_plan, recorded, plan_digest(a_plan), decided=recorded.builds[0].started)
    return recorded, verdict.steps[0], results.step_folder(root / "results", "samples-cpu") / recheck.FOLDER


def test_a_flake_is_found_and_is_not_a_pass(repository):
    recorded, ruled, folder = run_step(repository)
    assert [(one.check.split("::")[1], one.outcome, one.elsewhere) for one in recorded.reruns["samples-cpu"]] == [
        ("test_flaky[bs16]", Outcome.PASS, False),
        ("test_flaky[bs 48]", Outcome.PASS, False),
    ]
    assert (ruled.outcome, ruled.ruling, len(ruled.flaky)) == (Outcome.INCONCLUSIVE, Ruling.FLAKY, 2)
    assert ruled.evidence == ("again on the same node, local: 2 checks: pass",)
    assert recorded.last("samples-cpu").record.outcome is Outcome.FAIL
    assert "2 passed" in (folder / "log.txt").read_text()  # and nothing but what failed


def test_a_test_that_fails_behind_another_one_is_no_flake(repository):
    """Alone it passes: the whole file is run again."""
    text = "S = []\ndef test_a(): S.append(1)\ndef test_b(): assert not S, 'state of another test'\n"
    (repository / "tests" / "test_samples.py").write_text(text)
    _, ruled, _ = run_step(repository)
    assert (ruled.outcome, ruled.ruling, ruled.flaky) == (Outcome.FAIL, Ruling.REGRESSION, ())


def test_a_rerun_that_crashes_clears_nothing(repository):
    (repository / "tests" / "conftest.py").write_text(
        "import os, pathlib\ndef pytest_sessionfinish(session):\n"
        "    os.environ['HILGATE_OUT'].endswith('again') and os.abort()\n"
    )
    recorded, ruled, _ = run_step(repository)
    assert {one.outcome for one in recorded.reruns["samples-cpu"]} == {Outcome.DID_NOT_RUN}
    assert "SIGABRT" in recorded.reruns["samples-cpu"][0].message
    assert ruled.ruling is Ruling.REGRESSION


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_without_time_left_there_is_no_rerun(repository, seconds):
    slow = step("samples", COMMAND, evidence="junit")
    ids = ("tests/test_samples.py::test_fine",)
    with Watchdog() as watchdog:
        context = RunContext(repository, plan(slow), watchdog)
        assert recheck.start(slow, ids, repository / "again", context, seconds) is None


def test_a_rerun_that_hangs_is_ended_and_clears_nothing(repository, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.1)
    (repository / "tests" / "conftest.py").write_text("import time\ntime.sleep(60)\n")
    slow = step("samples", COMMAND, evidence="junit")
    ids = ("tests/test_samples.py::test_fine",)
    with Watchdog() as watchdog:
        rerun = recheck.start(slow, ids, repository / "again", RunContext(repository, plan(slow), watchdog), 0.2)
        while (records := rerun.poll("local", elsewhere=False)) is None:
            time.sleep(0.02)
    assert [(one.outcome, one.message) for one in records] == [(Outcome.DID_NOT_RUN, "timed out after 0.2 s")]


def test_findings_are_not_run_again(tmp_path):
    a_plan = plan(step("a", writes_findings(failing(), status=1)))
    assert results_of(a_plan, tmp_path, reruns=Reruns()).reruns == {}


def fails(jobs, *lines):
    jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1), *lines)


PENDING = {
    "failed-once": (fails, True),
    "passed-again-here": (lambda jobs: fails(jobs, again()), True),
    "ran-elsewhere": (lambda jobs: [fails(jobs), jobs.job(f"{GATHER.key}.recheck", again(host=ELSEWHERE))], False),
    "claims-to-have-run-elsewhere": (
        lambda jobs: [
            fails(jobs),
            jobs.job(f"{GATHER.key}.recheck", again(host=ELSEWHERE).model_copy(update={"host": NODE})),
        ],
        True,
    ),
    "passed": (lambda _: None, False),
    "did-not-run": (lambda jobs: jobs.path().unlink(), False),
    "damaged": (lambda jobs: [fails(jobs), jobs.path().write_bytes(jobs.path().read_bytes()[:-9])], False),
}


@pytest.mark.parametrize("name", PENDING)
def test_what_still_needs_another_node(tmp_path, name):
    spoil, wanted = PENDING[name]
    jobs = Jobs(tmp_path)
    spoil(jobs)
    assert recheck.pending(jobs.plan, jobs.recorded()) == ({GATHER.key: (TEST,)} if wanted else {})


def test_a_step_without_a_queue_has_no_other_node(tmp_path):
    lonely = gpu_step(queue=None)
    jobs = Jobs(tmp_path, agents_plan(lonely))
    jobs.job(lonely.key, *finished(lonely, failed(), status=1))
    assert recheck.pending(jobs.plan, jobs.recorded()) == {}


ON_BASE = """
import pytest
@pytest.mark.parametrize("shape", ["bs16", "bs48"])
def test_old(shape):
    assert shape != "bs48", "max_abs_err 0.5"
def test_was_fine():
    assert {fine}, "it is off"
"""


@pytest.fixture
def changed(tmp_path):
    """A checkout whose change breaks one test and adds one that fails, beside one that failed before; and its base."""
    root = tmp_path / "root"
    (root / "tests").mkdir(parents=True)
    git(root, "init", "--quiet")
    test = root / "tests" / "test_samples.py"
    test.write_text(ON_BASE.format(fine=True))
    git(root, "add", "-A")
    git(root, "commit", "--quiet", "-m", "base")
    test.write_text(ON_BASE.format(fine=False) + 'def test_new(): raise KeyError("x")\n')
    return root, git(root, "rev-parse", "HEAD")


def run_on_base(root, **more):
    command = "python -m pytest tests -q -p no:cacheprovider"
    a_plan = plan(step("samples", command, evidence="junit", env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}))
    recorded = results_of(a_plan, root / "results", root=root, **more)
    found = {one.check.split("::")[1]: (one.outcome, one.message) for one in recorded.on_base.get("samples-cpu", ())}
    return a_plan, recorded, found


def test_failing_tests_run_over_the_merge_bases_files_too(changed):
    root, base = changed
    a_plan, recorded, found = run_on_base(root, reruns=Reruns(base))
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "test_old[bs48]": Outcome.FAIL,
        "test_was_fine": Outcome.PASS,
        "test_new": Outcome.DID_NOT_RUN,
    }
    assert found["test_new"][1] == recheck.NO_SUCH_TEST
    (ruled,) = judge(a_plan, recorded, plan_digest(a_plan), decided=recorded.builds[0].started).steps
    assert (ruled.outcome, ruled.ruling, ruled.counts.failed, ruled.flaky) == (Outcome.FAIL, Ruling.REGRESSION, 3, ())
    assert "test_new" in (root / "tests" / "test_samples.py").read_text()  # the checkout itself is never touched


@pytest.mark.parametrize("known", [False, True])
def test_causes_can_be_said_before_the_merge_base_has_answered(changed, known):
    root, base = changed
    said = []

    def ended(meanwhile):
        lines = (root / "results/steps/samples-cpu/results.jsonl").read_text().splitlines()
        said.append((meanwhile, [json.loads(line)["kind"] for line in lines]))

    reruns = Reruns(base, frozenset({"samples-cpu"}) if known else frozenset())
    _, recorded, _ = run_on_base(root, reruns=reruns, ended=ended)
    ((meanwhile, kinds),) = said
    assert meanwhile == ("running the failing tests once more" if known else "asking the merge base")
    assert "step" in kinds
    assert "rerun" not in kinds
    assert recorded.reruns["samples-cpu"]


def test_a_green_run_has_nothing_to_say_early(tmp_path):
    said = []
    results_of(plan(step("a", writes_findings(passing()))), tmp_path, reruns=Reruns(), ended=said.append)
    assert said == []


@pytest.mark.parametrize(
    "more",
    [{"base": ""}, {"base": "f" * 40}, {"known": frozenset({"samples-cpu"})}, {"most": 0.0}],
    ids=["no base", "a commit that is not there", "known already", "a step that takes long"],
)
def test_the_merge_base_is_left_alone_where_it_does_not_pay(changed, more, monkeypatch):
    root, base = changed
    monkeypatch.setattr(recheck, "MOST_BASE_SECONDS", more.pop("most", recheck.MOST_BASE_SECONDS))
    assert run_on_base(root, reruns=Reruns(**{"base": base} | more))[2] == {}
