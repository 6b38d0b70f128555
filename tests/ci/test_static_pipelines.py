"""The files of `.buildkite`: valid, agreeing with the declarations, and each step run as Buildkite runs it.

Commands run under `bash -e -c` with stand-ins for hilgate, git and buildkite-agent that write down their calls.
"""

import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import typer
import yaml

from hilgate.cli.app import build_app
from hilgate.declare import load
from hilgate.pipeline_lint import FLOWS, schema_problems, sdk_schema
from hilgate.rerun import ALL, known_models

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".buildkite"
FILES = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FLOWS}
STEPS = {
    (name, step["key"]): step
    for name, text in FILES.items()
    for step in yaml.safe_load(text)["steps"]
    if "command" in step
}
DECLARED = load(REPOSITORY)
VENDORED = json.loads(
    resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/buildkite.json").read_text("utf-8")
)


@pytest.mark.parametrize("schema", [VENDORED, sdk_schema()], ids=["check-jsonschema", "buildkite-sdk"])
@pytest.mark.parametrize("name", FILES)
def test_file_is_valid_by_both_copies_of_the_schema(name, schema):
    assert schema_problems(FILES[name], schema) == []


def script(name, key):
    """The commands of a step after the uploader has replaced `$$`."""
    return "\n".join(STEPS[name, key]["command"]).replace("$$", "$")


@pytest.mark.parametrize(("name", "key"), STEPS, ids="-".join)
def test_shell_is_clean(name, key):
    # SC2329: a function that only a trap calls.
    checked = subprocess.run(
        ["shellcheck", "--shell=bash", "--exclude=SC2329", "-"],
        input=f"set -e\n{script(name, key)}\n",
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize(("name", "key"), STEPS, ids="-".join)
def test_step_starts_with_no_results_of_another_build(name, key):
    assert script(name, key).startswith("rm -rf results")


@pytest.mark.parametrize(("name", "key"), STEPS, ids="-".join)
def test_queue_is_declared_and_has_no_gpu(name, key):
    assert DECLARED.agents.queues[STEPS[name, key]["agents"]["queue"]].gpus == 0


OTHERS = {"bundle", "verify-bundle", "recheck"}
OPTIONS = {"--approved-by", "--models"}
"""Commands and options that other parts of the program may not have yet are not looked up here."""


def test_commands_and_options_are_known_to_the_command_line():
    commands = typer.main.get_command(build_app()).commands
    seen = set()
    for name, key in STEPS:
        for line in script(name, key).splitlines():
            found = re.match(r"(?:status=0; |\s*)hilgate (\S+)(.*)", line)
            if not found or found[1] in OTHERS:
                continue
            seen.add(found[1])
            known = {option for parameter in commands[found[1]].params for option in parameter.opts}
            assert set(re.findall(r"--[a-z-]+", found[2])) - OPTIONS <= known, line
    assert seen == {"plan", "pipeline", "judge"}


def test_rerun_offers_every_model_that_a_step_runs():
    """After a change to the models: HILGATE_WRITE_GOLDEN=1 pytest tests/ci/test_static_pipelines.py."""
    options = [("the whole plan of the change", ALL), *((model, model) for model in sorted(known_models(DECLARED)))]
    written = "".join(f"          - label: {label}\n            value: {value}\n" for label, value in options)
    text = re.sub(r"(?<=        options:\n)(?:          .*\n)+", written, FILES["rerun.yml"])
    if os.environ.get("HILGATE_WRITE_GOLDEN"):
        (FOLDER / "rerun.yml").write_text(text, encoding="utf-8")
    choice = yaml.safe_load(FILES["rerun.yml"])["steps"][0]
    assert [(option["label"], option["value"]) for option in choice["fields"][0]["options"]] == options


@pytest.fixture
def run(tmp_path):
    """Run a step in an empty folder; returns its status, its output and the calls it made."""

    def step(name, key, *, env=None, **stubs):
        for command in ("hilgate", "git", "buildkite-agent"):
            path = tmp_path / command
            body = stubs.get(command.replace("-", "_"), "")
            path.write_text(f'#!/bin/bash\necho "{command} $*" >> "$CALLS"\n{body}\n')
            path.chmod(0o755)
        work = tmp_path / "work"
        work.mkdir()
        done = subprocess.run(
            ["bash", "-e", "-c", script(name, key)],
            cwd=work,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        calls = tmp_path / "calls"
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []

    step.work = tmp_path / "work"
    return step


JUDGE = """[ "$1" = judge ] || exit 0
echo '{{"loosened": {loosened}, "images": {{"rocm": "sha256:00"}}}}' > results/verdict.json
echo "the verdict" > results/annotation.md
exit {status}"""
ANNOTATES = '[ "$1" = annotate ] && {{ echo "annotate $* $(cat)" >> "$CALLS"; exit {status}; }}; exit 0'
PULL_REQUEST = {"BUILDKITE_PULL_REQUEST_BASE_BRANCH": "main"}


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize("status", [0, 1, 3, 4, 5, 6, 70])
def test_verdict_ends_as_the_judge_and_posts_its_annotation(run, name, status):
    ended, _, calls = run(
        name, "verdict", hilgate=JUDGE.format(loosened="[]", status=status), buildkite_agent=ANNOTATES.format(status=0)
    )
    assert ended == status
    assert any("the verdict" in call for call in calls if call.startswith("annotate"))


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
def test_verdict_without_plan_or_results_still_judges(run, name):
    """Planning failed: nothing can be downloaded, the judge says so with 3, and the annotation is the judge's."""
    ended, output, calls = run(
        name,
        "verdict",
        hilgate=JUDGE.format(loosened="[]", status=3),
        buildkite_agent='[ "$1" = artifact ] && exit 1; ' + ANNOTATES.format(status=0),
    )
    assert ended == 3
    assert "there is no plan" in output
    assert "no job left results" in output
    assert any(call.startswith("hilgate judge") for call in calls)


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize("how", ["exit 1", "kill -9 $$", "exit 127", "exit 0"])
def test_judge_that_leaves_nothing_is_said_to(run, name, how):
    ended, _, calls = run(name, "verdict", hilgate=how, buildkite_agent=ANNOTATES.format(status=0))
    assert ended != 0
    assert any("There is no verdict" in call for call in calls)


@pytest.mark.parametrize("status", [0, 1])
def test_annotation_that_fails_changes_no_verdict(run, status):
    hilgate = JUDGE.format(loosened="[]", status=status)
    ended, output, _ = run("pipeline.yml", "verdict", hilgate=hilgate, buildkite_agent=ANNOTATES.format(status=1))
    assert ended == status
    assert "no annotation" in output


@pytest.mark.parametrize(("status", "style"), [(0, "success"), (1, "error"), (4, "error"), (6, "warning")])
def test_annotation_has_the_colour_of_the_verdict(run, status, style):
    _, _, calls = run(
        "pipeline.yml",
        "verdict",
        hilgate=JUDGE.format(loosened="[]", status=status),
        buildkite_agent=ANNOTATES.format(status=0),
    )
    assert any(f"--style {style}" in call for call in calls)


def uploads(calls):
    return [call.split()[-1] for call in calls if call.startswith("buildkite-agent pipeline upload")]


DIFF = '[ "$1" = diff ] && exit {status}; [ "$1" = show ] && echo "steps: []"; exit 0'


@pytest.mark.parametrize(
    ("judged", "loosened", "diff", "env", "ends", "asks"),
    [
        (0, "[]", 0, PULL_REQUEST, 0, False),
        (6, "[]", 0, PULL_REQUEST, 6, False),
        (6, "[1]", 0, PULL_REQUEST, 6, True),
        (0, "[]", 1, PULL_REQUEST, 6, True),
        (0, "[]", 128, PULL_REQUEST, 6, True),
        (6, "[]", 1, PULL_REQUEST, 6, True),
        (1, "[1]", 1, PULL_REQUEST, 1, False),
        (4, "[]", 1, PULL_REQUEST, 4, False),
        (0, "[]", 1, {}, 0, False),
        (6, "[1]", 0, {}, 6, False),
    ],
    ids=[
        "clean",
        "inconclusive",
        "loosened",
        "judge-did-not-notice",
        "git-cannot-tell",
        "both",
        "failed-anyway",
        "did-not-run",
        "main",
        "main-loosened",
    ],
)
def test_change_to_its_own_gate_asks_for_a_name(run, judged, loosened, diff, env, ends, asks):
    ended, _, calls = run(
        "pipeline.yml",
        "verdict",
        env=env,
        hilgate=JUDGE.format(loosened=loosened, status=judged),
        git=DIFF.format(status=diff),
        buildkite_agent=ANNOTATES.format(status=0),
    )
    assert ended == ends
    assert uploads(calls) == (["results/approve.yml"] if asks else [])
    assert not asks or "git show origin/hilgate-base:.buildkite/approve.yml" in calls


def test_base_that_cannot_be_fetched_is_no_pass(run):
    ended, _, calls = run(
        "pipeline.yml",
        "verdict",
        env=PULL_REQUEST,
        hilgate=JUDGE.format(loosened="[]", status=0),
        git="exit 128",
        buildkite_agent=ANNOTATES.format(status=0),
    )
    assert ended == 128
    assert any("There is no verdict" in call for call in calls)


def test_images_are_left_for_reruns(run):
    _, _, calls = run("pipeline.yml", "verdict", hilgate=JUDGE.format(loosened="[]", status=0))
    assert 'buildkite-agent meta-data set hilgate-images {"rocm": "sha256:00"}' in calls


PLANS = """case "$1" in
plan) while [ "$1" != --write ]; do shift; done; echo {} > "$2"; printf 'a `file` \\033[31mred\\n' ;;
pipeline) echo "steps: []" ;;
esac"""


@pytest.mark.parametrize(
    ("env", "arguments"),
    [
        (PULL_REQUEST, "--profile pr --base origin/hilgate-base"),
        ({**PULL_REQUEST, "HILGATE_PROFILE": "gate"}, "--profile pr --base origin/hilgate-base"),
        ({}, "--profile pr"),
        ({"BUILDKITE_BRANCH": "gh-readonly-queue/main/pr-7-01"}, "--profile pr"),
        ({"HILGATE_PROFILE": "nightly"}, "--profile nightly"),
    ],
    ids=["pull-request", "pull-request-keeps-its-profile", "main", "merge-queue", "night"],
)
def test_plan_is_made_written_and_uploaded(run, env, arguments):
    ended, _, calls = run("pipeline.yml", "plan", env=env, hilgate=PLANS, buildkite_agent=ANNOTATES.format(status=0))
    assert ended == 0
    assert f"hilgate plan {arguments} --write results/plan.json" in calls
    assert uploads(calls) == ["results/pipeline.yml"]
    assert calls.index("buildkite-agent artifact upload results/plan.json;results/pipeline.yml") < len(calls) - 2


def test_plan_shown_cannot_leave_its_code_block(run):
    _, _, calls = run("pipeline.yml", "plan", hilgate=PLANS, buildkite_agent=ANNOTATES.format(status=0))
    shown = "\n".join(calls)
    assert "a file [31mred" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("name", ["HILGATE_MODELS", "HILGATE_IMAGE_FROM_BUILD"])
def test_part_of_a_plan_cannot_use_the_flow_that_posts(run, name):
    ended, output, calls = run("pipeline.yml", "plan", env={name: "pocket"}, hilgate=PLANS)
    assert ended == 2
    assert "must not post rocm/required" in output
    assert calls == []


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize("broken", ["plan", "pipeline"])
def test_planning_that_fails_fails_the_step(run, name, broken):
    ended, _, calls = run(name, "plan", env={"HILGATE_MODELS": ""}, hilgate=f'[ "$1" = {broken} ] && exit 3; {PLANS}')
    assert ended == 3
    assert uploads(calls) == []


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize(("failing", "expected"), [("echo steps", ["results/recheck.yml"]), ("", [])])
def test_recheck_uploads_only_what_there_is(run, name, failing, expected):
    ended, output, calls = run(name, "recheck", hilgate=failing)
    assert ended == 0
    assert uploads(calls) == expected
    assert ("nothing to run again" in output) is not bool(expected)


def test_recheck_that_fails_says_so(run):
    ended, _, calls = run("pipeline.yml", "recheck", hilgate="exit 3")
    assert (ended, uploads(calls)) == (3, [])


@pytest.mark.parametrize(
    ("env", "chosen", "arguments"),
    [
        ({"HILGATE_MODELS": "jamba pocket"}, "", "--profile pr --models jamba --models pocket"),
        ({}, "jamba\\npocket", "--profile pr --models jamba --models pocket"),
        ({"HILGATE_MODELS": "all"}, "", "--profile pr"),
        ({"HILGATE_MODELS": "*", "HILGATE_PROFILE": "nightly"}, "", "--profile nightly --models *"),
        ({**PULL_REQUEST, "HILGATE_MODELS": "a"}, "", "--profile pr --base origin/hilgate-base --models a"),
    ],
    ids=["by-api", "by-form", "all", "no-glob", "pull-request"],
)
def test_rerun_plans_the_models_and_the_whole(run, env, chosen, arguments):
    agent = f'[ "$1" = meta-data ] && printf "{chosen}"; exit 0'
    ended, _, calls = run("rerun.yml", "plan", env=env, hilgate=PLANS, buildkite_agent=agent)
    assert ended == 0
    assert f"hilgate plan {arguments} --write results/plan.json" in calls
    whole = arguments.split(" --models")[0]
    assert f"hilgate plan {whole} --write results/required.json" in calls


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("status", [0, 1])
def test_rerun_posts_only_when_it_is_complete(run, complete, status):
    hilgate = f'[ "$1" = pipeline ] && {{ {"echo steps" if complete else "true"}; exit; }}\n' + JUDGE.format(
        loosened="[]", status=status
    )
    agent = '[ "$1 $2" = "artifact download" ] && echo {} > results/required.json; exit 0'
    ended, output, calls = run("rerun.yml", "verdict", hilgate=hilgate, buildkite_agent=agent)
    assert ended == status
    assert uploads(calls) == (["results/required.yml"] if complete else [])
    assert ("rocm/required stays as it is" in output) is not complete


APPROVER = {"BUILDKITE_UNBLOCKER": "Ada", "BUILDKITE_UNBLOCKER_EMAIL": "ada@example.invalid"}


def test_approval_judges_again_with_the_name(run):
    env = {**APPROVER, "BUILDKITE_BUILD_CREATOR_EMAIL": "bob@example.invalid"}
    ended, _, calls = run("approve.yml", "required", env=env, hilgate=JUDGE.format(loosened="[1]", status=1))
    assert ended == 1
    assert any(call.endswith("--approved-by Ada <ada@example.invalid>") for call in calls)
    assert any(call.startswith("buildkite-agent annotate --context verdict") for call in calls)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"BUILDKITE_UNBLOCKER": "Ada"},
        {"BUILDKITE_UNBLOCKER_EMAIL": "ada@example.invalid"},
        {**APPROVER, "BUILDKITE_BUILD_CREATOR_EMAIL": "ada@example.invalid"},
    ],
    ids=["nobody", "no-address", "no-name", "herself"],
)
def test_approval_without_another_name_is_none(run, env):
    ended, _, calls = run("approve.yml", "required", env=env, hilgate=JUDGE.format(loosened="[1]", status=0))
    assert ended == 2
    assert not any(call.startswith("hilgate") for call in calls)


def test_approval_belongs_to_a_team_and_the_verdict_depends_on_it():
    ask, judge = yaml.safe_load(FILES["approve.yml"])["steps"]
    assert ask["allowed_teams"] == ["rocm-gate-owners"]
    assert ask["blocked_state"] == "failed"
    assert judge["depends_on"] == "approve"


def test_evidence_is_of_a_release_that_passed():
    bundle = yaml.safe_load(FILES["release.yml"])["steps"][-1]
    assert bundle["depends_on"] == "verdict"
    assert "allow_dependency_failure" not in bundle
