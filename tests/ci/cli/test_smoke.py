# SPDX-License-Identifier: Apache-2.0
"""What a gate chooses to run, in clones of a small repository; and that a smoke run stands for no other."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from support.plans import git, hilgate, python, write_repository

from hilgate.errors import Exit
from hilgate.model.verdict import Verdict

COUNTING = (
    "import json, os, sys; n = 1 if '--part' in sys.argv else 3;"
    "open(os.environ['HILGATE_OUT'] + '/findings.jsonl', 'w').writelines("
    'json.dumps({"id": str(i), "outcome": "pass"}) + "\\n" for i in range(n))'
)
SLICE = {"smoke": {"arguments": "--part", "minimum": 1, "minutes": 0.1}, "minimum": 3}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A repository with a step that has a subset and one that has none."""
    root = tmp_path_factory.mktemp("origin")
    steps = {"sliced": python(COUNTING), "whole": python(COUNTING)}
    return write_repository(root, steps, sliced=SLICE, whole={"minimum": 2})


@pytest.fixture
def clone(origin, tmp_path):
    git(tmp_path, "clone", "-q", str(origin), "clone")
    return tmp_path / "clone"


def gate(root, *options, command="gate", **env):
    return hilgate(root, command, *options, **{"CI": "", **env})


def planned(root):
    plan = json.loads((root / "results" / "plan.json").read_text())
    return plan["profile"], [step["step"]["key"] for step in plan["steps"]]


def test_a_clean_clone_gets_a_smoke_run_which_says_how_little_it_is(clone):
    done = gate(clone, HILGATE_GATE="make gate ARGS=")
    assert done.returncode == Exit.PASS, done.stderr
    assert planned(clone) == ("smoke", ["sliced"])
    branch = git(clone, "branch", "--show-current")
    said = " ".join(done.stderr.split())
    assert said.startswith(
        f"no change against origin/{branch}: smoke, a subset of each area (`make gate ARGS=--all` runs everything)"
    )
    assert "✓ pass: smoke: 1 of at least 5 checks; `make gate ARGS=--all` runs" in done.stdout
    assert re.search(r"about [\d mins]+ on \d+ cores? \(as declared\)", said)
    assert re.search(r"took [\d.]+ s, forecast [\d mins]+; load average \d+", said)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    verdict = Verdict.load(clone / "results" / "verdict.json", "")
    assert (verdict.profile, verdict.why) == ("smoke", "smoke: 1 of at least 5 checks")
    assert {one.cause for one in verdict.omissions} == {"not in smoke"}
    for name in ("report.html", "annotation.md"):
        assert "smoke: 1 of at least 5 checks" in (clone / "results" / name).read_text().replace("\\", "")


def test_a_red_smoke_run_is_red_and_repeated_by_a_line(origin, tmp_path):
    git(tmp_path, "clone", "-q", str(origin), "clone")
    clone = tmp_path / "clone"
    area = clone / "ci" / "areas" / "samples.yaml"
    area.write_text(area.read_text().replace('"--part", "minimum": 1', '"--part", "minimum": 2'))
    done = gate(clone, "--smoke")
    assert done.returncode == Exit.NOTHING_RAN
    assert "○ did not run: smoke: 1 passed, 0 failed" in done.stdout
    assert "reproduce: hilgate run sliced-cpu -- --part" in done.stdout


@pytest.mark.parametrize("kind", ["tracked", "untracked", "committed", "detached"])
def test_a_change_gets_the_steps_that_it_selects(clone, kind):
    if kind == "detached":
        git(clone, "checkout", "-q", "--detach")
    name = "new.py" if kind != "tracked" else ".gitignore"
    (clone / name).write_text("results/\n#\n")
    if kind in {"committed", "detached"}:
        git(clone, "add", "-A")
        git(clone, "commit", "-qm", "a change")
    done = gate(clone)
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stderr.startswith("1 file changed against origin/")
    assert planned(clone) == ("gate", ["sliced", "whole"])
    assert gate(clone, "--base", "HEAD" if kind in {"committed", "detached"} else "HEAD~0").returncode == Exit.PASS
    assert planned(clone)[0] == ("smoke" if kind in {"committed", "detached"} else "gate"), "--base overrules"


def test_a_change_runs_a_slice_of_a_step_that_says_so_and_that_is_said(clone):
    area = clone / "ci" / "areas" / "samples.yaml"
    area.write_text(area.read_text().replace('"minutes": 0.1', '"minutes": 0.1, "on_change": true'))
    done = gate(clone)
    assert done.returncode == Exit.PASS, done.stderr
    assert planned(clone) == ("gate", ["sliced", "whole"])
    assert "; a subset (at least 1 check)" in " ".join(done.stderr.split())
    said = " ".join(done.stdout.split())
    assert "✓ pass: a subset of sliced-cpu: 4 of at least 5 checks; `hilgate gate --all` runs" in said
    assert "a run of a part of sliced-cpu decides about" in hilgate(clone, "bundle", "--out", "e.tar").stderr
    for options in (["--all"], ["--steps", "sliced"]):
        assert "of at least" not in gate(clone, *options).stdout
        steps = json.loads((clone / "results" / "plan.json").read_text())["steps"]
        assert {step["arguments"] for step in steps} == {""}
    assert "of at least" not in gate(clone, CI="true").stdout


@pytest.mark.parametrize(
    ("options", "env", "profile", "words"),
    [
        (["--all"], {}, "gate", "everything, as asked"),
        (["--all"], {"HILGATE_BASE": "HEAD"}, "gate", "everything, as asked"),
        (["--smoke"], {}, "smoke", "smoke, as asked"),
        (["--steps", "sliced"], {}, "gate", "sliced, as asked"),
        ([], {"CI": "true"}, "gate", "everything: no change against"),
    ],
)
def test_options_overrule_and_ci_machines_get_no_smoke_run_by_themselves(clone, options, env, profile, words):
    done = gate(clone, *options, **env)
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stderr.startswith(words)
    assert planned(clone) == (profile, ["sliced"] if "sliced" in options or profile == "smoke" else ["sliced", "whole"])


@pytest.mark.parametrize(
    "options", [["--all", "--smoke"], ["--all", "--base", "HEAD"], ["--smoke", "--steps", "sliced"]]
)
def test_options_that_contradict_each_other_are_refused(clone, options):
    done = gate(clone, *options)
    assert (done.returncode, "exclude each other" in done.stderr) == (Exit.MISUSE, True)
    assert not (clone / "results" / "plan.json").exists()


def test_without_a_slice_in_any_area_a_clean_clone_gets_everything(tmp_path):
    write_repository(tmp_path / "origin", {"a": python(COUNTING)})
    git(tmp_path, "clone", "-q", "origin", "clone")
    done = gate(tmp_path / "clone")
    assert "no step declares a smoke subset" in " ".join(done.stderr.split())
    assert (done.returncode, planned(tmp_path / "clone")) == (Exit.PASS, ("gate", ["a"]))
    done = gate(tmp_path / "clone", "--smoke")
    assert (done.returncode, "no step declares a smoke subset" in done.stderr) == (Exit.NOTHING_RAN, True)


def test_what_is_planned_is_what_a_gate_would_run(clone):
    for options in ([], ["--all"], ["--base", "HEAD"], ["--profile", "smoke"]):
        shown = gate(clone, *options, "--write", "results/plan.json", command="plan")
        assert shown.returncode == Exit.PASS, shown.stderr
        assert planned(clone)[0] == ("gate" if "--all" in options else "smoke")
    shown = " ".join(gate(clone, "sliced", command="explain").stdout.split())
    assert "smoke --part, at least 1 reported (usually 0.1 minutes)" in shown


def test_no_merge_no_release_and_no_history_is_made_of_it(clone):
    """Each way on which a verdict goes to others refuses it, also where its plan was renamed to a gate's."""
    assert gate(clone).returncode == Exit.PASS
    shutil.copytree(clone / "results" / "steps", clone / "results" / "jobs")
    refusing = [
        (["judge", "--jobs", "results/jobs"], "decides about no merge and no release"),
        (["bundle", "--out", "e.tar"], "decides about no merge and no release"),
        (["history", "add"], "decides about no merge and no release"),
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
    (clone / "results" / "plan.json").write_text(plan.replace('"profile": "smoke"', '"profile": "gate"'))
    assert "a run of a part of sliced-cpu decides about" in hilgate(clone, "judge", "--jobs", "results/jobs").stderr
    (clone / "results" / "plan.json").write_text(plan)
    gate(clone, "--profile", "pr", "--write", "pr.json", command="plan")
    done = hilgate(clone, "pipeline", "--plan", "results/plan.json", "--required", "pr.json")
    assert (done.stdout, "not complete: the profile is another" in done.stderr) == ("", True)
    done = hilgate(clone, "pipeline", "--plan", "results/plan.json", "--required", "results/plan.json")
    assert (done.stdout, "profile smoke is not what a merge needs" in done.stderr) == ("", True)


def test_no_other_run_is_resumed_from_it_nor_it_from_another(clone):
    assert gate(clone).returncode == Exit.PASS
    done = gate(clone, "--all", "--resume")
    assert (done.returncode, "of profile smoke; now it would be gate" in done.stderr) == (Exit.MISUSE, True)
    again = gate(clone, "--resume")
    assert (again.returncode, again.stderr.count(": started:")) == (Exit.PASS, 0)
    plan = json.loads((clone / "results" / "plan.json").read_text()) | {"profile": "gate", "promised": 0}
    (clone / "results" / "plan.json").write_text(json.dumps(plan))
    assert gate(clone, "--all", "--resume").returncode == Exit.MISUSE
    assert gate(clone, "--all").returncode == Exit.PASS
    assert "of profile gate; now it would be smoke" in gate(clone, "--resume").stderr


def test_what_a_gate_measured_is_the_next_forecast(clone):
    gate(clone, "--all")
    kept = json.loads((clone / "results" / "minutes.json").read_text())
    assert kept["minutes"].keys() == {"sliced-cpu", "whole-cpu"}
    kept["minutes"] = dict.fromkeys(kept["minutes"], 2.5)
    (clone / "results" / "minutes.json").write_text(json.dumps(kept))
    shown = " ".join(gate(clone, "--all", "--jobs", "1").stderr.split())
    assert "2 steps, about 5 min 00 s on 1 core (measured for 2 of 2)" in shown
    assert "forecast 5 min 00 s" in shown
    (clone / "results" / "minutes.json").write_text("{")
    assert "(as declared)" in gate(clone, "--all", command="plan").stdout
