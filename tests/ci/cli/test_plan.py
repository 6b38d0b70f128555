# SPDX-License-Identifier: Apache-2.0
"""The command line as a person meets it: first screen, help, listings, mistakes, exit statuses."""

import contextlib
import datetime as dt
import functools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support import builds, jobs, plans

from hilgate.cli.app import program
from hilgate.errors import EXIT_MEANINGS, Exit
from hilgate.model.plan import Plan
from hilgate.model.verdict import Ruling
from hilgate.plan.jobs import LEAST_PASSES
from hilgate.report import history

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def hilgate():
    """The command line over this repository, on a machine that hides its GPUs."""
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "FORCE_COLOR"), "")
    return functools.partial(plans.hilgate, REPOSITORY, **hidden)


def test_the_first_screen_says_what_to_try_here(hilgate):
    shown = hilgate()
    assert shown.returncode == Exit.PASS
    assert shown.stderr == ""
    for words in ("hilgate plan", "hilgate run hygiene", "hilgate gate", "This machine:", "kernels", "accuracy"):
        assert words in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_help_lists_every_exit_status(hilgate):
    shown = hilgate("--help").stdout
    for status, meaning in EXIT_MEANINGS.items():
        assert f"{status.value}  {meaning}" in shown


def test_help_imports_nothing_heavy():
    code = (
        "import sys; import hilgate.cli.app;"
        "print(sorted({'pydantic', 'yaml', 'rich', 'jsonschema', 'torch'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert shown.stdout.strip() == "[]"


def test_plan_lists_steps_and_omissions_with_reasons(hilgate):
    shown = hilgate("plan", "--all")
    assert shown.returncode == 0
    assert "kernels-cache-cpu" in shown.stdout
    assert re.search(r"about [\d mins]+ on \d+ cores? \(", " ".join(hilgate("plan", "models").stdout.split()))
    assert "\x1b" not in shown.stdout
    assert re.search(r"\d+ steps omitted: \d+ [\w ]+, \d+ [\w ]+ \(hilgate plan --omitted\)", shown.stdout)
    assert "needs gfx942; this machine has no GPU" in hilgate("plan", "--all", "--omitted").stdout


def test_plan_as_json_is_the_plan_and_nothing_else(hilgate, tmp_path):
    shown = hilgate("plan", "hygiene", "--json", "--write", str(tmp_path / "plan.json"))
    plan = Plan.model_validate_json(shown.stdout)
    assert [step.key for step in plan.steps] == ["hygiene-cpu", "pages-cpu"]
    assert Plan.model_validate_json((tmp_path / "plan.json").read_text()) == plan


def test_a_step_is_shown_with_its_plan_by_either_kind_of_key(hilgate):
    declared, planned = hilgate("plan", "kernels-cache"), hilgate("plan", "kernels-cache-gfx942")
    shown = declared.stdout.partition("\n\nPlan of")[0]
    assert planned.stdout.startswith(shown)
    assert planned.returncode == Exit.CANNOT_RUN_HERE, "what it is was shown, and why it cannot be planned here"
    assert all(words in planned.stderr for words in ("needs gfx942", "to do:"))
    assert "Traceback" not in planned.stderr
    for words in ("ci/areas/kernels.yaml", "amd_mi300_1", "locally only", "hilgate run kernels-cache-gfx950"):
        assert words in declared.stdout


def test_an_area_is_planned_without_a_step_of_its_name(hilgate):
    assert hilgate("plan", "hygiene").stdout.startswith("Plan of ")


def test_help_and_version(hilgate):
    assert hilgate("-V").stdout == hilgate("--version").stdout
    assert (shown := hilgate("help", "rerun").stdout) == hilgate("rerun", "--help").stdout
    assert "BUILDKITE_ORGANIZATION_SLUG]" in shown


def test_help_lists_every_command_once(hilgate):
    """In a section, and whole: a summary that is too long ends in dots."""
    shown = hilgate("help").stdout.partition("Test a change:")[2].partition("Exit status:")[0]
    listed = re.findall(r"^  ([a-z][a-z-]+)  +[A-Z]", shown, re.MULTILINE)
    assert sorted(listed) == sorted(typer.main.get_command(program).commands)
    assert "..." not in shown


def test_doctor_answers_for_every_area(hilgate):
    shown = hilgate("doctor", "--json")
    answer = json.loads(shown.stdout)
    names = {path.stem for path in (REPOSITORY / "ci" / "areas").glob("*.yaml")}
    assert {area["area"] for area in answer["areas"]} == names
    assert {one["id"] for one in answer["prerequisites"]} >= {"git", "libnuma.so.1", "a TMPDIR that runs programs"}
    assert answer["packages"]["torch"]
    # Steps that need a GPU are no fault of a laptop.
    assert shown.returncode == Exit.PASS


def test_doctor_names_what_is_missing_and_ends_with_5(hilgate, tmp_path):
    (tmp_path / "git").symlink_to(shutil.which("git"))
    shown = hilgate("doctor", PATH=str(tmp_path))
    assert shown.returncode == Exit.CANNOT_RUN_HERE
    words = " ".join(shown.stdout.split())
    assert "a C++ compiler (g++) is missing" in words
    assert "sudo apt-get install g++" in words


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["plan", "hygeine"], Exit.MISUSE, ["no area or step is called 'hygeine'", "did you mean 'hygiene'"]),
        (["plan", "--base", "no-such-ref"], Exit.MISUSE, ["git knows no commit 'no-such-ref'", "git fetch"]),
        (["--root", "/", "plan"], Exit.MISUSE, ["not inside a repository"]),
    ],
)
def test_a_mistake_has_a_status_a_place_and_a_remedy(hilgate, arguments, status, words):
    shown = hilgate(*arguments)
    assert shown.returncode == status
    assert shown.stdout == ""
    assert "Traceback" not in shown.stderr
    for word in words:
        assert word in shown.stderr


def test_traceback_comes_with_debug_only(hilgate):
    assert "Traceback" in hilgate("--debug", "plan", "nothing-like-it").stderr


def test_bug_is_one_line_a_log_and_status_70(tmp_path):
    code = (
        "from hilgate.declare import load; from hilgate.cli.app import main\n"
        "def broken(start): raise RuntimeError('planted')\n"
        "load.find_root = broken\n"
        "main(['plan'])"
    )
    by_hand = {name: value for name, value in os.environ.items() if name != "HILGATE_OUT"}  # where a step's log goes
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**by_hand, "TMPDIR": str(tmp_path)},
    )
    assert shown.returncode == Exit.BUG
    assert "a bug in hilgate: RuntimeError: planted" in shown.stderr
    assert "Traceback" not in shown.stderr
    (log,) = tmp_path.glob("hilgate-*.log")
    assert str(log) in shown.stderr
    assert "planted" in log.read_text()


@pytest.fixture
def branch(tmp_path):
    """A repository with a change on a branch, and the history of the queue of its steps: so many failures in a row."""
    root = plans.write_repository(tmp_path / "ours", {"a": plans.writes_findings(plans.passing())})
    plans.git(root, "checkout", "-qb", "theirs")
    (root / "page.md").write_text("new\n")
    plans.git(root, "add", "-A")
    plans.git(root, "commit", "-qm", "theirs")
    return root


def remember_failures(path, number):
    for minute in range(number):
        a_plan, recorded, decided = builds.built((plans.step("a", "x"), [jobs.passed()]), profile="pr")
        steps = tuple(one.model_copy(update={"ruling": Ruling.INFRA}) for one in decided.steps)
        recorded = builds.began(recorded, builds.NOW + dt.timedelta(minutes=minute))
        history.add(path, a_plan, recorded, decided.model_copy(update={"steps": steps}))


def test_a_change_waits_for_no_queue_that_is_out_but_main_probes(branch, tmp_path):
    path = tmp_path / "history.sqlite"
    words = ("plan", "--profile", "pr", "--json", "--history", str(path))
    for failures, held in ((4, 0), (5, 1)):
        remember_failures(path, failures)
        made = json.loads(plans.hilgate(branch, *words, "--base", "HEAD^").stdout)
        assert (len(made["steps"]), [one["cause"] for one in made["omissions"]]) == (1 - held, ["queue out"] * held)
    assert "its last 5 jobs on the default branch" in made["omissions"][0]["reason"]
    assert len(json.loads(plans.hilgate(branch, *words).stdout)["steps"]) == 1, "of the default branch"
    (branch / "results").mkdir()
    (branch / "results/plan.json").write_text(json.dumps(made))
    assert plans.hilgate(branch, "pipeline", "--plan", "results/plan.json").stdout == ""
    judged = plans.hilgate(branch, "judge", "--plan", "results/plan.json", "--jobs", "results/jobs")
    assert (judged.returncode, "queue amd-cpu is out" in judged.stdout) == (Exit.INCONCLUSIVE, True)
    assert "1 not started" in judged.stdout
    assert "- not started: a-cpu: queue amd-cpu is out" in (branch / "results/annotation.md").read_text()
    shown = plans.hilgate(branch, *words[:3], *words[4:], "--base", "HEAD^", COLUMNS="300").stdout
    assert "not started: 1 step: queue amd-cpu is out" in shown


@pytest.mark.parametrize(("profile", "minutes"), [("pr", 10), ("nightly", 30)])
def test_timeouts_of_changes_follow_the_history(branch, tmp_path, profile, minutes):
    path = tmp_path / "history.sqlite"
    for minute in range(LEAST_PASSES):
        builds.remember(path, [jobs.passed()], minute=minute)
    words = ("plan", "--profile", profile, "--base", "HEAD^", "--json", "--history", str(path))
    (step,) = json.loads(plans.hilgate(branch, *words).stdout)["steps"]
    assert step["step"]["timeout_minutes"] == minutes
    why = "; ended after 10 min, as 95 % of 10 passes took up to 1.5"
    assert step["reason"].endswith(why) == (profile == "pr")


@pytest.mark.parametrize(
    ("damage", "words"), [("newer", "a newer hilgate wrote this history"), ("text", "not a database")]
)
def test_an_unreadable_history_is_one_line_and_stops_no_plan(branch, tmp_path, damage, words):
    path = tmp_path / "history.sqlite"
    remember_failures(path, 5)
    if damage == "text":
        path.write_text("something else\n" * 100)
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("pragma user_version = 99")
    done = plans.hilgate(branch, "plan", "--profile", "pr", "--base", "HEAD^", "--history", str(path), COLUMNS="400")
    assert done.returncode == 0
    assert words in done.stderr
    assert done.stderr.startswith("planned without the history: ")
    assert done.stderr.count("\n") == 1
