# SPDX-License-Identifier: Apache-2.0
"""What a gate chooses to run, in clones of a small repository; and that a quick run stands for no other."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from support.plans import git, hilgate, python, write_repository

from hilgate.errors import Exit
from hilgate.model.verdict import Verdict

COUNTING = (
    "import json, os; open(os.environ['HILGATE_OUT'] + '/findings.jsonl', 'w').writelines("
    'json.dumps({"id": str(i), "outcome": "pass"}) + "\\n" for i in range(3))'
)
FAILING = (
    "import json, os; open(os.environ['HILGATE_OUT'] + '/findings.jsonl', 'w').write("
    'json.dumps({"id": "one", "outcome": "fail", "message": "it is wrong"})); raise SystemExit(1)'
)
SWIFT = {"needs": ["base"]}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A repository with a quick step, a step that it needs, and one that is neither."""
    root = tmp_path_factory.mktemp("origin")
    (root / "ci").mkdir()
    (root / "ci" / "project.yaml").write_text("quick: [swift]\n")
    steps = dict.fromkeys(("base", "swift", "whole"), python(COUNTING))
    return write_repository(root, steps, swift=SWIFT)


@pytest.fixture
def clone(origin, tmp_path):
    git(tmp_path, "clone", "-q", str(origin), "clone")
    return tmp_path / "clone"


def gate(root, *options, command="gate", **env):
    return hilgate(root, command, *options, **{"CI": "", **env})


def planned(root):
    plan = json.loads((root / "results" / "plan.json").read_text())
    return plan["profile"], [step["step"]["key"] for step in plan["steps"]]


QUICK, ALL = ("quick", ["base", "swift"]), ("gate", ["base", "whole", "swift"])
WHY = "quick run: 6 checks of 2 of 3 steps; it decides no merge"


def test_a_clean_clone_gets_a_quick_run_that_says_so(clone):
    done = gate(clone, HILGATE_GATE="make gate ARGS=")
    assert done.returncode == Exit.PASS, done.stderr
    assert planned(clone) == QUICK
    branch = git(clone, "branch", "--show-current")
    said = " ".join(done.stderr.split())
    assert said.startswith(
        f"no change against origin/{branch}: the quick steps, which decide no merge (`make gate ARGS=--all` runs"
    )
    assert f"✓ pass: {WHY}; `make gate ARGS=--all` runs everything" in " ".join(done.stdout.split())
    assert re.search(r"took [\d.]+ s, forecast [\d mins]+", said)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    verdict = Verdict.load(clone / "results" / "verdict.json", "")
    assert (verdict.profile, verdict.why) == ("quick", WHY)
    assert {(one.key, one.cause) for one in verdict.omissions} == {("whole", "not quick")}
    for name in ("report.html", "annotation.md"):
        assert WHY in (clone / "results" / name).read_text().replace("\\", "")


def test_a_red_quick_run_is_red(tmp_path):
    (tmp_path / "origin" / "ci").mkdir(parents=True)
    (tmp_path / "origin" / "ci" / "project.yaml").write_text("quick: [swift]\n")
    write_repository(tmp_path / "origin", {"swift": python(FAILING), "whole": python(COUNTING)})
    git(tmp_path, "clone", "-q", "origin", "clone")
    done = gate(tmp_path / "clone")
    assert (done.returncode, planned(tmp_path / "clone")) == (Exit.FAIL, ("quick", ["swift"]))
    assert "✗ fail: quick run: 0 passed, 1 failed" in done.stdout


@pytest.mark.parametrize("committed", [False, True], ids=["untracked", "committed on no branch"])
def test_a_change_gets_the_steps_that_it_selects(clone, committed):
    (clone / "new.py").write_text("")
    if committed:
        git(clone, "checkout", "-q", "--detach")
        git(clone, "add", "-A")
        git(clone, "commit", "-qm", "a change")
    done = gate(clone)
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stderr.startswith("1 file changed against origin/")
    assert planned(clone) == ALL
    assert gate(clone, "--base", "HEAD").returncode == Exit.PASS
    assert planned(clone) == (QUICK if committed else ALL), "--base overrules"


@pytest.mark.parametrize(
    ("options", "env", "expected", "words"),
    [
        (["--all"], {}, ALL, "everything, as asked"),
        (["--all"], {"HILGATE_BASE": "HEAD"}, ALL, "everything, as asked"),
        (["--steps", "swift"], {}, ("gate", ["base", "swift"]), "swift, as asked"),
        ([], {"CI": "true"}, ALL, "everything: no change against"),
    ],
)
def test_options_overrule_and_ci_machines_get_no_quick_run(clone, options, env, expected, words):
    done = gate(clone, *options, **env)
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stderr.startswith(words)
    assert planned(clone) == expected


def test_options_that_contradict_each_other_are_refused(clone):
    done = gate(clone, "--all", "--base", "HEAD")
    assert (done.returncode, "exclude each other" in done.stderr) == (Exit.MISUSE, True)
    assert not (clone / "results" / "plan.json").exists()


@pytest.mark.parametrize("options", [["gate", "--smoke"], ["plan", "--profile", "quick"]], ids=" ".join)
def test_nobody_asks_for_a_quick_run(clone, options):
    assert hilgate(clone, *options).returncode == Exit.MISUSE


def test_without_quick_steps_a_clean_clone_gets_everything(tmp_path):
    write_repository(tmp_path / "origin", {"a": python(COUNTING)})
    git(tmp_path, "clone", "-q", "origin", "clone")
    done = gate(tmp_path / "clone")
    assert "and ci/project.yaml names no quick step" in " ".join(done.stderr.split())
    assert (done.returncode, planned(tmp_path / "clone")) == (Exit.PASS, ("gate", ["a"]))


def test_what_is_planned_is_what_a_gate_would_run(clone):
    for options in ([], ["--all"], ["--base", "HEAD"]):
        shown = gate(clone, *options, "--write", "results/plan.json", command="plan")
        assert shown.returncode == Exit.PASS, shown.stderr
        assert planned(clone) == (ALL if "--all" in options else QUICK)
    reasons = " ".join(gate(clone, command="plan").stdout.split())
    assert "quick step of ci/project.yaml" in reasons
    assert "needed by swift" in reasons


def test_no_merge_no_release_and_no_history_is_made_of_it(clone):
    """Each way on which a verdict goes to others refuses it, also where its plan was renamed to a gate's."""
    assert gate(clone).returncode == Exit.PASS
    shutil.copytree(clone / "results" / "steps", clone / "results" / "jobs")
    refusing = [
        (["judge", "--jobs", "results/jobs"], "a quick run decides about no merge and no release"),
        (["bundle", "--out", "e.tar"], "a quick run decides about no merge and no release"),
        (["history", "add"], "a quick run decides about no merge and no release"),
        (["pipeline", "--plan", "results/plan.json"], "the plan is for one machine"),
    ]
    for arguments, words in refusing:
        done = hilgate(clone, *arguments)
        assert done.returncode not in {Exit.PASS, Exit.BUG}, arguments
        assert words in done.stderr, arguments
    assert not (clone / "e.tar").exists()
    verdict = Verdict.load(clone / "results" / "verdict.json", "")
    assert verdict.outcome.value == "did not run", "the old verdict does not outlive the refusal"
    plan = (clone / "results" / "plan.json").read_text()
    (clone / "results" / "plan.json").write_text(plan.replace('"profile": "quick"', '"profile": "gate"'))
    assert hilgate(clone, "judge", "--jobs", "results/jobs").returncode == Exit.NOTHING_RAN, "results of another plan"
    (clone / "results" / "plan.json").write_text(plan)
    gate(clone, "--profile", "pr", "--write", "pr.json", command="plan")
    done = hilgate(clone, "pipeline", "--plan", "results/plan.json", "--required", "pr.json")
    assert (done.stdout, "not complete: the profile is another" in done.stderr) == ("", True)
    done = hilgate(clone, "pipeline", "--plan", "results/plan.json", "--required", "results/plan.json")
    assert (done.stdout, "profile quick is not what a merge needs" in done.stderr) == ("", True)


def test_no_other_run_is_resumed_from_it_nor_it_from_another(clone):
    assert gate(clone).returncode == Exit.PASS
    done = gate(clone, "--all", "--resume")
    assert (done.returncode, "of profile quick; now it would be gate" in done.stderr) == (Exit.MISUSE, True)
    again = gate(clone, "--resume")
    assert (again.returncode, again.stderr.count(": started:")) == (Exit.PASS, 0)
    plan = json.loads((clone / "results" / "plan.json").read_text()) | {"profile": "gate"}
    (clone / "results" / "plan.json").write_text(json.dumps(plan))
    assert gate(clone, "--all", "--resume").returncode == Exit.MISUSE
    assert gate(clone, "--all").returncode == Exit.PASS
    assert "of profile gate; now it would be quick" in gate(clone, "--resume").stderr


def test_what_a_gate_measured_is_the_next_forecast(clone):
    gate(clone, "--all")
    kept = json.loads((clone / "results" / "minutes.json").read_text())
    assert kept["minutes"].keys() == {"base-cpu", "swift-cpu", "whole-cpu"}
    kept["minutes"] = dict.fromkeys(kept["minutes"], 2.5)
    (clone / "results" / "minutes.json").write_text(json.dumps(kept))
    shown = " ".join(gate(clone, "--jobs", "1").stderr.split())
    assert "2 steps, about 5 min 00 s on 1 core (measured for 2 of 2)" in shown
    assert "forecast 5 min 00 s" in shown
    (clone / "results" / "minutes.json").write_text("{")
    assert "(as declared)" in gate(clone, "--all", command="plan").stdout
