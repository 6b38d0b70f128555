# SPDX-License-Identifier: Apache-2.0
"""The commands over a small repository, as a person or an agent types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.plans import (
    MAY_LACK,
    alive,
    environ,
    failing,
    git,
    hilgate,
    passing,
    python,
    skipped,
    wait_for,
    write_repository,
    writes_findings,
)

from hilgate.errors import Exit
from hilgate.run.results import RESULTS_FILE, step_folder

GREEN = {"a": writes_findings(passing(), skipped()), "b": writes_findings(passing("b"))}


@pytest.fixture
def green(tmp_path):
    return write_repository(tmp_path, GREEN, a=MAY_LACK)


def test_a_green_gate_says_so_and_leaves_results(green):
    before = {path for path in green.rglob("*") if ".git/" not in str(path)}
    done = hilgate(green, "gate")
    assert done.returncode == Exit.PASS, done.stderr
    assert "✓ pass: 2 passed, 0 failed, 1 not run (needs gfx950)" in done.stdout
    assert "report: results/report.html" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "a-cpu: started" in done.stderr
    names = {path.name for path in (green / "results").iterdir()}
    assert names >= {"plan.json", "verdict.json", "report.html", "annotation.md", "junit.xml", "steps"}
    new = {path for path in green.rglob("*") if ".git/" not in str(path)} - before
    assert all(path.is_relative_to(green / "results") for path in new)


def test_the_slowest_checks_are_named_where_that_is_asked_for(tmp_path):
    slow, other = passing("slow") | {"seconds": 61.5}, passing("other") | {"seconds": 2}
    root = write_repository(tmp_path, {"a": writes_findings(passing(), slow), "b": writes_findings(other)})
    assert hilgate(root, "run", "a", "b", "--slowest", "2").stdout.endswith("\n1 min 02 s slow\n2.0 s other\n")
    assert "slow" not in hilgate(root, "run", "a", "b").stdout


def test_fail_fast_starts_nothing_more_and_resume_goes_on(tmp_path):
    red = writes_findings(failing(), status=1)
    steps = {"bad": red} | dict.fromkeys(("one", "two", "zero"), GREEN["b"])
    root = write_repository(tmp_path, steps, bad={"minutes": 9})
    done = hilgate(root, "gate", "--fail-fast", "--jobs", "1")
    started = re.findall(r"(\w+)-cpu: started:", done.stderr)
    assert (done.returncode, started) == (Exit.FAIL, ["one", "bad"]), "a quick step first, then the longest"
    assert "○ did not run: not started: two-cpu and 1 other step" in done.stdout
    assert "not started: bad-cpu failed before it (--fail-fast)" in done.stdout
    assert "1 of 4 steps passed, 1 step regressed, 2 steps not started" in done.stdout
    done = hilgate(root, "gate", "--resume", "--jobs", "1")
    assert (done.returncode, done.stderr.count(": started:")) == (Exit.FAIL, 3)
    assert "3 of 4 steps passed, 1 step regressed" in done.stdout
    assert "2 steps" in hilgate(root, "run", *steps, "--fail-fast", "--jobs", "1").stdout


def test_a_red_report_only_step_stops_nothing_and_is_shown(tmp_path):
    steps = {"bad": writes_findings(failing(), status=1)} | dict.fromkeys(("one", "two"), GREEN["b"])
    root = write_repository(tmp_path, steps, bad={"minutes": 9, "report_only": True})
    done = hilgate(root, "gate", "--fail-fast", "--jobs", "1")
    assert done.returncode == Exit.PASS
    assert "✗ fail: regression (only reported): bad-cpu" in done.stdout
    assert "✓ pass: 2 passed, 0 failed" in done.stdout
    assert "1 step only reported, not counted, of these not passed: bad-cpu (fail)" in done.stdout
    assert "regression (only reported): bad-cpu" in (root / "results/annotation.md").read_text()
    assert hilgate(root, "run", "bad").returncode == Exit.FAIL, "asked for by name it answers for itself"


MARKUP = "[/x] [bold]no[/bold] :boom:"
TELLING = (
    ("gate", "--base", "HEAD"),
    ("judge",),
    ("plan", "--base", "HEAD"),
    ("plan", "a", "--base", "HEAD"),
    ("run", "a", "--", MARKUP),
    ("history", "show"),
    ("run", MARKUP),
    ("plan", "--profile", MARKUP),
    (MARKUP,),
)
SILENT = (("plan", "b", "--omitted"), ("doctor",), ())


def test_brackets_in_names_and_arguments_are_text_everywhere(tmp_path):
    broken = writes_findings(failing(MARKUP), skipped(f"{MARKUP} too"), status=1)
    root = write_repository(tmp_path, {"a": broken, "b": GREEN["b"]}, a={"label": MARKUP, "env": {"X": MARKUP}})
    (root / "[").mkdir()
    (root / "[" / "x] [bold]no[").mkdir()
    (root / "[" / "x] [bold]no[" / "bold] :boom:").write_text("a file whose path is the text above")
    hilgate(root, "gate")
    hilgate(root, "history", "add")
    for arguments in TELLING + SILENT:
        done = hilgate(root, *arguments)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != Exit.BUG, said
        assert arguments in SILENT or MARKUP in said, (arguments, said)


def test_colour_only_where_asked_for(green):
    assert "\x1b[" not in hilgate(green, "gate", "--steps", "b").stdout
    assert "\x1b[" in hilgate(green, "judge", FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[3" not in hilgate(green, "--no-color", "judge", FORCE_COLOR="1", TERM="xterm").stdout


def test_an_agents_job_runs_one_step_and_judge_decides_on_all(green):
    assert hilgate(green, "plan", "--write", "results/plan.json").returncode == 0
    one = hilgate(green, "run", "a-cpu", "--plan", "results/plan.json", "--results", "results/jobs/a-cpu")
    assert one.returncode == Exit.PASS, one.stderr
    judge = ("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
    half = hilgate(green, *judge)
    assert half.returncode == Exit.NOTHING_RAN
    assert "no record of it arrived" in half.stdout
    hilgate(green, "run", "b-cpu", "--plan", "results/plan.json", "--results", "results/jobs/b-cpu")
    whole = hilgate(green, *judge, "--json")
    assert whole.returncode == Exit.PASS
    assert json.loads(whole.stdout)["outcome"] == "pass"
    assert "steps/a-cpu/log.txt" in (green / "results" / "report.html").read_text()


def test_judge_and_report_can_be_replayed(green):
    hilgate(green, "gate")
    (green / "results" / "report.html").unlink()
    again = hilgate(green, "judge")
    assert (again.returncode, again.stdout.strip().endswith("results/report.html")) == (Exit.PASS, True)
    assert (green / "results" / "report.html").exists()


def test_resume_repeats_only_what_was_lost(green):
    hilgate(green, "gate")
    path = step_folder(green / "results", "b-cpu") / RESULTS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    done = hilgate(green, "gate", "--resume")
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stderr.count("started") == 1


ENDS = {
    "a failure": ("fail", Exit.FAIL, Exit.INCONCLUSIVE),
    "out of memory": ("os.kill(os.getpid(), 9)", Exit.NOTHING_RAN, Exit.PASS),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_resumed_pass_makes_good_only_what_the_machine_stopped(name, tmp_path, monkeypatch):
    end, first, second = ENDS[name]
    outcome = '"outcome": "fail", "message": "m"' if end == "fail" else '"outcome": "pass"'
    code = f"""
import os, pathlib
mark, out = pathlib.Path("results/ended"), pathlib.Path(os.environ["HILGATE_OUT"], "findings.jsonl")
found = '{{"id": "a", "outcome": "pass"}}'
if not mark.exists():
    mark.touch()
    found = '{{"id": "a", {outcome}}}'
    {"pass" if end == "fail" else end}
out.write_text(found)
raise SystemExit('"fail"' in found)
"""
    root = write_repository(tmp_path, {"a": python(code)})
    with monkeypatch.context() as patch:
        patch.setattr("hilgate.run.recheck.start", lambda *_, **__: None)  # a rerun would be the second attempt
        assert hilgate(root, "gate").returncode == first
    again = hilgate(root, "gate", "--resume")
    assert again.returncode == second, again.stdout


def test_resume_refuses_another_state_of_the_files(green):
    hilgate(green, "gate")
    area = green / "ci" / "areas" / "samples.yaml"
    (green / "new.py").write_text("")  # an untracked file is a change too
    done = hilgate(green, "gate", "--resume")
    assert done.returncode in {Exit.MISUSE, Exit.INVALID_DECLARATION}
    assert "start afresh" in done.stderr
    area.write_text(area.read_text().replace("a samples", "other samples"))
    assert "start afresh" in hilgate(green, "gate", "--resume").stderr


def test_an_edit_while_it_runs_is_reported_and_cannot_be_resumed(tmp_path):
    code = f"pathlib.Path({str(tmp_path / 'edited.py')!r}).write_text('')"
    root = write_repository(tmp_path, {"a": writes_findings(passing(), then=code)})
    done = hilgate(root, "gate")
    assert done.returncode == Exit.INCONCLUSIVE
    assert "changed since, or while they ran" in " ".join(done.stdout.split())
    assert "start afresh" in hilgate(root, "gate", "--resume").stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_gate_ends_its_steps_and_resumes(tmp_path, number):
    mark = tmp_path / "results" / "pid"
    slow = python(
        f"import os, pathlib, time; p = pathlib.Path({str(mark)!r}); seen = p.exists(); p.write_text(str(os.getpid()));"
        " seen or time.sleep(60); pathlib.Path(os.environ['HILGATE_OUT'], 'findings.jsonl')"
        '.write_text(\'{"id": "x", "outcome": "pass"}\')'
    )
    root = write_repository(tmp_path, {"slow": slow})
    gate = subprocess.Popen([sys.executable, "-m", "hilgate", "gate"], cwd=root, env=environ(), stderr=subprocess.PIPE)
    wait_for(lambda: mark.exists() and mark.read_text())
    gate.send_signal(number)
    errors = gate.communicate(timeout=20)[1].decode()
    assert gate.returncode == Exit.INTERRUPTED, errors
    assert "go on with `hilgate gate --resume`" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    done = hilgate(root, "gate", "--resume")
    assert done.returncode == Exit.PASS, done.stderr


def test_a_killed_gate_takes_its_steps_along_and_resumes(tmp_path):
    """A process can do nothing about SIGKILL, and what its step started must not run on beside a resumed one."""
    mark = tmp_path / "results" / "pids"
    once = f"""
import os, pathlib, subprocess, sys
with open(os.environ["HILGATE_OUT"] + "/findings.jsonl", "a") as file:
    file.write('{{"id": "x", "outcome": "pass"}}\\n')
mark = pathlib.Path({str(mark)!r})
if not mark.exists():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    mark.write_text(f"{{os.getpid()}} {{child.pid}}")
    child.wait()
"""
    root = write_repository(tmp_path, {"once": python(once)})
    gate = subprocess.Popen([sys.executable, "-m", "hilgate", "gate"], cwd=root, env=environ(), stderr=subprocess.PIPE)
    wait_for(lambda: mark.exists() and mark.read_text())
    gate.kill()
    gate.communicate(timeout=20)
    pids = [int(word) for word in mark.read_text().split()]
    wait_for(lambda: not any(alive(pid) for pid in pids), seconds=2)
    ends = []  # refused for as long as what kills them has the lock
    wait_for(lambda: ends.append(hilgate(root, "gate", "--resume")) or ends[-1].returncode != Exit.MISUSE)
    assert ends[-1].returncode == Exit.PASS, ends[-1].stderr
    verdict = json.loads((root / "results" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["steps"][0]["counts"]["passed"]) == ("pass", 1)


def test_two_gates_in_one_folder_refuse(tmp_path):
    waits = "import time; [time.sleep(0.02) for _ in iter(pathlib.Path('results/go').exists, True)]"
    root = write_repository(tmp_path, {"slow": writes_findings(passing(), then=waits)})
    first = subprocess.Popen([sys.executable, "-m", "hilgate", "gate"], cwd=root, env=environ(), stderr=subprocess.PIPE)
    wait_for((root / "results" / "steps").exists)
    second = hilgate(root, "gate")
    assert second.returncode == Exit.MISUSE
    assert "another hilgate run" in second.stderr
    (root / "results" / "go").touch()
    first.communicate(timeout=20)
    assert first.returncode == Exit.PASS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "aa"], "did you mean"),
        (["run", "a-cpuu", "--plan", "results/plan.json"], "did you mean 'a-cpu'"),
        (["run", "a-cpu", "--plan", "results/plan.json", "--", "-k", "x"], "leave out --plan"),
        (["run", "a", "--fruit", "fig"], "takes after --"),
        (["selftest", "nothing"], "no bug is planted here"),
    ],
)
def test_misuse_is_answered_with_a_remedy(green, arguments, message):
    hilgate(green, "plan", "--write", "results/plan.json")
    done = hilgate(green, *arguments)
    assert done.returncode == Exit.MISUSE
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_buildkite_groups_open_on_failure(tmp_path):
    root = write_repository(
        tmp_path, {"a": writes_findings(failing(), then="print('log line')", status=1), "b": GREEN["b"]}
    )
    errors = hilgate(root, "gate", BUILDKITE="true").stderr.splitlines()
    assert any(line.startswith("+++ a-cpu: ✗ fail") for line in errors)
    assert any(line.startswith("--- b-cpu: ✓ pass") for line in errors)
    assert "log line" in errors


TWICE = (
    "import json, os\nfrom samples import twice\n"
    """
wrong = twice(2) != 4
check = {"id": "twice", "outcome": "fail" if wrong else "pass", "message": "twice(2) is wrong" if wrong else ""}
open(os.environ["HILGATE_OUT"] + "/findings.jsonl", "w").write(json.dumps(check))
raise SystemExit(wrong)
"""
)


@pytest.fixture(scope="module")
def first_tree(tmp_path_factory):
    """A sound repository, and an environment with an editable install of its package and of this hilgate."""
    folder = tmp_path_factory.mktemp("trees")
    root = folder / "first"
    (root / "kernels" / "samples").mkdir(parents=True)
    (root / "kernels" / "samples" / "__init__.py").write_text("def twice(x):\n    return 2 * x\n")
    (root / "ci").mkdir()
    (root / "ci" / "project.yaml").write_text("python_path: [kernels]\n")
    (root / "twice.py").write_text(TWICE)
    write_repository(root, {"twice": "python twice.py"})
    venv.create(folder / "venv", symlinks=True)
    ours = Path(__file__).resolve().parents[3] / "ci"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (packages / "editable.pth").write_text(f"{root / 'kernels'}\n{ours}\n{sysconfig.get_path('purelib')}\n")
    return root


def gate_in(folder, *options, python="../venv/bin/python"):
    env = environ()
    del env["PYTHONPATH"]
    command = [python, "-m", "hilgate", *options, "gate"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_first_tree_is_sound(first_tree):
    done = gate_in(first_tree)
    assert done.returncode == Exit.PASS, done.stderr


@pytest.mark.parametrize("kind", ["worktree", "clone", "root", "linked"])
def test_another_tree_is_tested_with_its_own_packages(first_tree, kind):
    """The environment's own `samples` is the first tree's, which is sound; what is broken is the tree that is named."""
    tree = first_tree.with_name(kind)
    if kind == "worktree":
        git(first_tree, "worktree", "add", "-q", str(tree))
    else:
        git(first_tree, "clone", "-q", ".", str(tree))
    (tree / "kernels" / "samples" / "__init__.py").write_text("def twice(x):\n    return 3 * x\n")
    if kind == "linked":
        (tree / ".venv").symlink_to("../venv")
    options = ("--root", f"../{kind}") if kind == "root" else ()
    python = ".venv/bin/python" if kind == "linked" else "../venv/bin/python"
    done = gate_in(first_tree if kind == "root" else tree, *options, python=python)
    assert done.returncode == Exit.FAIL, done.stderr
    assert "twice(2) is wrong" in done.stdout
    record = (step_folder(tree / "results", "twice-cpu") / RESULTS_FILE).read_text()
    assert '"imported":{"samples":"kernels/samples"}' in record


def test_a_tree_with_its_own_hilgate_is_not_served_by_another(first_tree):
    own = first_tree.with_name("own")
    git(first_tree, "clone", "-q", ".", str(own))
    (own / "kernels" / "hilgate").mkdir()
    (own / "kernels" / "hilgate" / "__init__.py").touch()
    done = gate_in(own)
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "the hilgate that runs is another tree's" in done.stderr
    assert "has its own: kernels/hilgate" in done.stderr
    assert f"PYTHONPATH={own / 'kernels'}" in done.stderr


@pytest.fixture
def unpacked(tmp_path):
    """What `git archive | tar x` makes of a repository whose step `asks` needs git."""
    steps = {"asks": writes_findings(passing("asked")), "plain": writes_findings(passing())}
    root = write_repository(tmp_path / "cloned", steps, asks={"checkout": True})
    folder = tmp_path / "unpacked"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
    return folder


WITHOUT_GIT = (
    "this is no git checkout, so asks-cpu cannot run: clone the repository, or run `git init && git add --all` here"
)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], f"everything: {WITHOUT_GIT}"),
        (["--all"], f"everything, as asked; {WITHOUT_GIT}"),
        (["--steps", "plain"], "plain, as asked"),
    ],
    ids=["alone", "all", "another step"],
)
def test_without_git_the_first_line_names_steps_that_cannot_run(unpacked, options, line):
    done = hilgate(unpacked, "gate", *options, CI="")
    shell = "steps do not get this shell's "  # whatever runs these tests has set
    lines = [line for line in done.stderr.splitlines() if not line.startswith(shell)]
    said = " ".join(" ".join(lines).split())
    assert said.startswith(f"{line} Plan of no git"), "before anything runs"
    assert "asks-cpu: started" not in done.stderr
    if "asks" not in line:
        assert done.returncode == Exit.PASS
        return
    assert done.returncode == Exit.NOTHING_RAN
    reported = " ".join(done.stdout.split())
    assert "○ did not run: infra: asks-cpu needs a git checkout, and this is no git checkout: clone the" in reported
    assert "will not run here, this is no git checkout" in said


def test_without_git_a_run_is_not_resumed_and_files_not_blamed(unpacked):
    assert hilgate(unpacked, "gate", CI="").returncode == Exit.NOTHING_RAN
    again = hilgate(unpacked, "gate", "--resume", CI="")
    assert again.returncode == Exit.INVALID_DECLARATION
    assert "it is unknown whether files changed since then: this is no git checkout" in again.stderr


def test_a_git_repository_made_of_it_is_enough(unpacked):
    git(unpacked, "init", "-q")
    git(unpacked, "add", "--all")
    done = hilgate(unpacked, "gate", CI="")
    assert done.returncode == Exit.PASS, done.stdout
    assert done.stderr.startswith("everything: nothing is committed yet\n")
