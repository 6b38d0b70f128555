# SPDX-License-Identifier: Apache-2.0
"""The verdict as commands give it: approvals, thresholds of the merge base, reruns elsewhere, and lost plans."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.plans import environ, failing, git, hilgate, passing, write_repository, writes_findings

from hilgate.declare import protected
from hilgate.errors import Exit
from hilgate.model.plan import Plan
from hilgate.plan import machine

TOLERANCES = "ALLOWED = {'fp16': 0.001}\n"
LISTED = "rules:\n  - {paths: [tests/tolerances.py], restore: true}\n"
MEASURE = """
import pathlib
from tolerances import ALLOWED
def test_error():
    pathlib.Path("results", "allowed").write_text(str(ALLOWED["fp16"]))
    assert 0.01 <= ALLOWED["fp16"], "max_abs_err 0.01"
"""
JUNIT = {
    "command": "python -m pytest tests -q -p no:cacheprovider -o pythonpath=tests",
    "evidence": "junit",
    "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
}
RUN = ("run", "measure-cpu", "--plan", "results/plan.json", "--results", "results/jobs/measure-cpu")
JUDGE = ("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")


@pytest.fixture
def changed(tmp_path):
    """A change that raises its own tolerance until its failing test passes, planned for agents."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "ci").mkdir()
    (tmp_path / "tests" / "tolerances.py").write_text(TOLERANCES)
    (tmp_path / "tests" / "test_error.py").write_text(MEASURE)
    (tmp_path / "ci" / "protected.yaml").write_text(LISTED)
    root = write_repository(tmp_path, {"measure": ""}, measure=JUNIT)
    base = git(root, "rev-parse", "HEAD")
    (root / "tests" / "tolerances.py").write_text(TOLERANCES.replace("0.001", "0.1"))
    git(root, "commit", "-qam", "make it pass")
    plan(root, base)
    return root


def plan(root, base):
    """Write the plan of a change for agents, with its protected changes."""
    assert hilgate(root, "plan", "--write", "results/plan.json").returncode == 0
    path = root / "results" / "plan.json"
    made = Plan.model_validate_json(path.read_text())
    found = protected.protected_changes(root, base, ["tests/tolerances.py"])
    changes = {"profile": "pr", "base": "main", "merge_base": base, "protected_changes": found}
    path.write_text(made.model_copy(update=changes).model_dump_json())


WAS_FINE = """
from pathlib import Path
def same(a, b): return a == b
def test_add():
    if Path(__file__).parent.parent != Path({root!r}):
        Path({seen!r}).write_text(Path({out!r}).read_text())
    assert same(1 + 1, {sum})
"""


def test_a_red_run_says_its_causes_before_it_asks_the_merge_base(tmp_path):
    """Into a file, too: the test reads it while it runs over the merge base's files."""
    out, seen, root = (tmp_path / name for name in ("out.txt", "seen.txt", "root"))
    (root / "tests").mkdir(parents=True)
    test = root / "tests/test_add.py"
    texts = [WAS_FINE.format(root=str(root), out=str(out), seen=str(seen), sum=number) for number in (2, 3)]
    test.write_text(texts[0])
    write_repository(root, {"measure": ""}, measure=JUNIT)
    test.write_text(texts[1])
    command = [sys.executable, "-m", "hilgate", "gate", "--base", "HEAD"]
    with out.open("w") as file:
        done = subprocess.run(command, cwd=root, env=environ(), stdout=file, stderr=subprocess.PIPE, check=False)
    assert done.returncode == Exit.FAIL, done.stderr
    cause, asks = "\n  assert same(1 + 1, 3)\n", "\nasking the merge base ...\n"
    before, whole = seen.read_text(), out.read_text()
    assert before.endswith(asks)
    assert cause in before
    assert whole.startswith(before)
    after = whole.removeprefix(before)
    assert after.startswith("\nThis failure is yours: it passed over the merge base's files on the same node.\n✗ fail")
    assert "measure-cpu: assert same(1 + 1, 3)\n" in after
    assert cause not in after


def test_a_looser_tolerance_is_measured_with_the_old_one(changed):
    done = hilgate(changed, *RUN)
    assert done.returncode == Exit.FAIL, done.stderr
    assert "as at the merge base, because its change is not approved: tests/tolerances.py" in done.stderr
    assert (changed / "results" / "allowed").read_text() == "0.001"
    assert "0.1" in (changed / "tests" / "tolerances.py").read_text()  # the change's own is back
    assert git(changed, "status", "--porcelain") == ""
    judged = hilgate(changed, *JUDGE)
    assert judged.returncode == Exit.FAIL
    assert "with these files of the merge base: tests/tolerances.py" in judged.stdout
    assert "changes its own gate: tests/tolerances.py: changed: 1 lines added, 1 removed" in judged.stdout
    assert "+ALLOWED = {'fp16': 0.1}" in judged.stdout


@pytest.mark.parametrize("several", [False, True], ids=["a job", "steps of a plan, run here"])
def test_approving_needs_results_of_the_new_tolerance(changed, several):
    folder, jobs = ("results", ()) if several else ("results/jobs/measure-cpu", ("--jobs", "results/jobs"))
    (changed / "tests" / "test_error.py").write_text("def test_error():\n    pass\n")  # it passes with either
    assert hilgate(changed, *RUN[:-1], folder).returncode == Exit.PASS
    if several:  # as one command for more than one step leaves it
        (changed / "results/steps/measure-cpu").mkdir(parents=True, exist_ok=True)
        (changed / "results/results.jsonl").rename(changed / "results/steps/measure-cpu/results.jsonl")
    judge = ("judge", "--plan", "results/plan.json", *jobs, "--results", "results")
    assert hilgate(changed, *judge).returncode == Exit.INCONCLUSIVE
    approved = hilgate(changed, *judge, "--approved-by", "A. Owner")
    assert approved.returncode == Exit.NOTHING_RAN, approved.stdout
    assert "it ran with files of the merge base, not with those that were approved" in approved.stdout
    assert hilgate(changed, *RUN[:-1], folder, "--approved-by", "A. Owner").returncode == Exit.PASS


def test_with_approval_the_new_tolerance_counts_and_who_is_named(changed):
    done = hilgate(changed, *RUN, HILGATE_APPROVED_BY="A. Owner")
    assert done.returncode == Exit.PASS, done.stdout
    without = hilgate(changed, *JUDGE)
    assert without.returncode == Exit.INCONCLUSIVE
    assert "changes its own gate: tests/tolerances.py" in without.stdout
    approved = hilgate(changed, *JUDGE, "--approved-by", "A. Owner <a@example.invalid>")
    assert approved.returncode == Exit.PASS
    assert json.loads((changed / "results" / "verdict.json").read_text())["approved_by"].startswith("A. Owner")


def test_a_merge_base_that_is_not_here_stops_the_job(changed):
    path = changed / "results" / "plan.json"
    path.write_text(path.read_text().replace(json.loads(path.read_text())["merge_base"], "0" * 40))
    done = hilgate(changed, *RUN)
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "is not in this checkout" in done.stderr


def test_a_failing_test_is_run_again_on_another_node(changed, monkeypatch):
    hilgate(changed, *RUN)
    elsewhere = (
        "recheck",
        "measure-cpu",
        "--plan",
        "results/plan.json",
        "--jobs",
        "results/jobs",
        "--results",
        "results/jobs/measure-cpu.recheck",
    )
    refused = hilgate(changed, *elsewhere)
    assert refused.returncode == Exit.SICK_NODE
    assert "another must run them" in refused.stderr
    real = machine.environment
    monkeypatch.setattr(machine, "environment", lambda machine: real(machine).model_copy(update={"host": "mi300-9"}))
    done = hilgate(changed, *elsewhere)
    assert done.returncode == Exit.FAIL, done.stderr
    assert done.stdout == "fail: tests/test_error.py::test_error\n"
    judged = hilgate(changed, *JUDGE)
    assert judged.returncode == Exit.FAIL
    assert "again elsewhere, mi300-9: tests/test_error.py::test_error: fail" in judged.stdout
    again = hilgate(changed, *elsewhere)
    assert again.returncode == Exit.NOTHING_RAN
    assert "has to be run again elsewhere" in again.stderr
    (changed / "results" / "jobs" / "measure-cpu.recheck" / "results.jsonl").unlink()
    (changed / "extra.py").write_text("")
    assert "the files under test changed" in hilgate(changed, *elsewhere).stderr


@pytest.mark.parametrize("text", [None, b"", b'{"schema_version": 2}'], ids=["missing", "empty", "another schema"])
def test_without_a_plan_there_is_a_red_verdict_and_an_annotation(tmp_path, text):
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    assert hilgate(root, "gate").returncode == Exit.PASS
    path = root / "results/plan.json"
    path.unlink() if text is None else path.write_bytes(text)
    done = hilgate(root, *JUDGE)
    assert done.returncode == Exit.INVALID_DECLARATION
    assert "Traceback" not in done.stderr
    verdict = json.loads((root / "results" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["steps"]) == ("did not run", [])
    assert "did not run" in (root / "results" / "annotation.md").read_text()


def test_an_unreadable_quarantine_is_red_and_all_is_judged(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    assert hilgate(root, "gate").returncode == Exit.PASS
    (root / "ci" / "quarantine.yaml").write_text("tests: [{test: t}]\n")
    done = hilgate(root, "judge")
    assert done.returncode == Exit.INVALID_DECLARATION
    verdict = json.loads((root / "results" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["steps"][0]["outcome"]) == ("fail", "pass")
    assert (root / "results" / "annotation.md").exists()
    records = root / "results" / "steps" / "a-cpu" / "results.jsonl"
    before = records.read_bytes()
    assert hilgate(root, "gate").returncode == Exit.INVALID_DECLARATION  # and nothing runs
    assert records.read_bytes() == before


EVERY_WAY = (("gate",), ("gate", "--all"), ("gate", "--steps", "a"), ("run", "a"), ("run", "a", "--", "-q"))
"""Commands that decide on a change locally."""


@pytest.mark.parametrize("command", EVERY_WAY, ids=" ".join)
def test_no_run_takes_the_changes_own_quarantine_or_tolerance(command, tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(passing(), failing("x"), status=1)})
    (root / "ci" / "protected.yaml").write_text("rules:\n  - {paths: ['tests/**']}\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "the list")
    git(root, "branch", "-M", "main")
    git(root, "checkout", "-qb", "change")
    entry = {"test": "x", "step": "a", "reason": "r", "owner": "o", "added": "2099-01-01", "expires": "2099-01-10"}
    (root / "ci" / "quarantine.yaml").write_text(json.dumps({"tests": [entry]}))
    done = hilgate(root, *command)
    assert done.returncode == Exit.FAIL, done.stdout
    area = root / "ci" / "areas" / "samples.yaml"
    area.write_text(area.read_text().replace('\\"fail\\"', '\\"pass\\"').replace("sys.exit(1)", "sys.exit(0)"))
    done = hilgate(root, *command)
    assert done.returncode == Exit.INCONCLUSIVE, done.stdout
    assert "changes its own gate: ci/areas/samples.yaml" in done.stdout
    assert "compared with no merge base" not in done.stdout


def test_a_verdict_that_was_compared_with_nothing_says_so(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    for command in EVERY_WAY:
        done = hilgate(root, *command)
        assert done.returncode == Exit.PASS, done.stdout
        assert "compared with no merge base: its own quarantine counts" in " ".join(done.stdout.split())


def test_a_mode_that_git_was_set_to_overlook_is_a_change(tmp_path):
    (tmp_path / "step.py").write_text("")
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    git(root, "branch", "-M", "main")
    git(root, "checkout", "-qb", "change")
    git(root, "config", "core.fileMode", "false")
    (root / "step.py").chmod(0o755)
    assert hilgate(root, "plan", "--write", "results/plan.json").returncode == 0
    made = Plan.load(root / "results/plan.json", "")
    assert (made.changed_files, made.dirty) == (("step.py",), True)


def test_a_private_exclusion_list_hides_no_repository_file(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text("")
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    git(root, "branch", "-M", "main")
    git(root, "checkout", "-qb", "change")
    hidden = ("conftest.py", "*.swp", "__pycache__/", "env/", "*~")
    (root / ".git/info").mkdir(exist_ok=True)
    (root / ".git/info/exclude").write_text("\n".join(hidden))
    for name in ("env/lib/a.py", "tests/.test_x.py.swp", "tests/__pycache__/a.pyc", "tests/test_x.py~"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / ".git/info/exclude").write_text("\n".join((*hidden, ".triton")))
    (root / ".triton").symlink_to("../.triton")
    assert "no change against main" in hilgate(root, "plan").stderr
    (root / "tests/conftest.py").write_text("raise SystemError")
    assert hilgate(root, "plan", "--write", "results/plan.json").returncode == 0
    made = Plan.load(root / "results/plan.json", "")
    assert (made.changed_files, made.dirty) == (("tests/conftest.py",), True)
