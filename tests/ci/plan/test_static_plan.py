# SPDX-License-Identifier: Apache-2.0
"""The steps that upload others, run with stand-ins: settings, plan, recheck, and the models of a rerun."""

import re

import pytest
import yaml
from support.static_steps import ANNOTATES, FOLDER, JUDGE, PLANS, PULL_REQUEST, STEPS, run

from hilgate.buildkite.lint import schema_problems


@pytest.mark.parametrize(
    ("env", "arguments"),
    [
        (PULL_REQUEST, "--profile pr"),
        ({**PULL_REQUEST, "HILGATE_PROFILE": "nightly"}, "--profile pr"),
        ({"HILGATE_PROFILE": "gate"}, "--profile pr"),
        ({}, "--profile pr"),
        ({"BUILDKITE_PULL_REQUEST": "false", "HILGATE_PROFILE": "nightly"}, "--profile nightly"),
    ],
    ids=["pull-request", "pull-request-keeps-its-profile", "no-profile-of-agents", "main", "night"],
)
def test_plan_is_made_written_and_uploaded(tmp_path, env, arguments):
    ended = run(
        tmp_path, STEPS["pipeline.yml", "plan"], env=env, hilgate=PLANS, buildkite_agent=ANNOTATES.format(status=0)
    )
    assert ended.status == 0
    assert f"hilgate plan {arguments} --write results/plan.json" in ended.calls
    assert ended.uploads == ["results/pipeline.yml"]
    assert (
        ended.calls.index("buildkite-agent artifact upload results/plan.json;results/pipeline.yml")
        < len(ended.calls) - 2
    )


def test_plan_shown_cannot_leave_its_code_block(tmp_path):
    ended = run(tmp_path, STEPS["pipeline.yml", "plan"], hilgate=PLANS, buildkite_agent=ANNOTATES.format(status=0))
    shown = "\n".join(ended.calls)
    assert "a file [31mred" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("name", ["HILGATE_MODELS", "HILGATE_IMAGE_FROM_BUILD"])
def test_part_of_a_plan_cannot_use_the_flow_that_posts(tmp_path, name):
    ended = run(tmp_path, STEPS["pipeline.yml", "plan"], env={name: "pocket"}, hilgate=PLANS)
    assert ended.status == 2
    assert "must not post rocm/required" in ended.output
    assert ended.calls == []


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize("broken", ["plan", "pipeline"])
def test_planning_that_fails_fails_the_step(tmp_path, name, broken):
    ended = run(
        tmp_path, STEPS[name, "plan"], env={"HILGATE_MODELS": ""}, hilgate=f'[ "$1" = {broken} ] && exit 3; {PLANS}'
    )
    assert ended.status == 3
    assert ended.uploads == []


@pytest.mark.parametrize("name", ["pipeline.yml", "rerun.yml", "release.yml"])
@pytest.mark.parametrize(("failing", "expected"), [("echo steps", ["results/recheck.yml"]), ("", [])])
def test_recheck_uploads_only_what_there_is(tmp_path, name, failing, expected):
    ended = run(tmp_path, STEPS[name, "recheck"], hilgate=failing)
    assert ended.status == 0
    assert ended.uploads == expected
    assert ("nothing to run again" in ended.output) is not bool(expected)


def test_recheck_that_fails_says_so(tmp_path):
    ended = run(tmp_path, STEPS["pipeline.yml", "recheck"], hilgate="exit 3")
    assert (ended.status, ended.uploads) == (3, [])


@pytest.mark.parametrize(
    ("env", "chosen", "arguments"),
    [
        ({"HILGATE_MODELS": "jamba pocket"}, "", "--profile pr --models jamba --models pocket"),
        ({}, "jamba\\npocket", "--profile pr --models jamba --models pocket"),
        ({"HILGATE_MODELS": "all"}, "", "--profile pr"),
        ({"HILGATE_MODELS": "jamba step:kernels-cache"}, "", "--profile pr --models jamba kernels-cache"),
        ({"HILGATE_MODELS": "*", "HILGATE_PROFILE": "nightly"}, "", "--profile nightly --models *"),
        ({**PULL_REQUEST, "HILGATE_MODELS": "a"}, "", "--profile pr --models a"),
    ],
    ids=["by-api", "by-form", "all", "a-step", "no-glob", "pull-request"],
)
def test_rerun_plans_the_models_and_the_whole(tmp_path, env, chosen, arguments):
    agent = f'[ "$1" = meta-data ] && printf "{chosen}"; exit 0'
    ended = run(tmp_path, STEPS["rerun.yml", "plan"], env=env, hilgate=PLANS, buildkite_agent=agent)
    assert ended.status == 0
    assert f"hilgate plan {arguments} --write results/plan.json" in ended.calls
    whole = arguments.split(" --models")[0]
    assert f"hilgate plan {whole} --write results/required.json" in ended.calls


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("status", [0, 1])
def test_rerun_posts_only_when_it_is_complete(tmp_path, complete, status):
    hilgate = f'[ "$1" = pipeline ] && {{ {"echo steps" if complete else "true"}; exit; }}\n' + JUDGE.format(
        protected_changes="[]", status=status
    )
    agent = '[ "$1 $2" = "artifact download" ] && echo {} > results/required.json; exit 0'
    ended = run(tmp_path, STEPS["rerun.yml", "verdict"], hilgate=hilgate, buildkite_agent=agent)
    assert ended.status == status
    assert ended.uploads == (["results/required.yml"] if complete else [])
    assert ("rocm/required stays as it is" in ended.output) is not complete


def bootstrap():
    """The step of Buildkite's settings, as the page shows it."""
    (shown,) = re.findall(
        r"```yaml\n(.*?)```", (FOLDER.parent / "docs/how-to/set-up-buildkite.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert schema_problems(shown) == []
    (step,) = yaml.safe_load(shown)["steps"]
    return step


def test_settings_upload_the_flow_that_the_merge_base_has(tmp_path):
    ended = run(tmp_path, bootstrap(), hilgate='echo "steps: []"')
    assert (ended.status, ended.uploads) == (0, ["upload.yml"])
    assert ended.calls[0] == "hilgate flow"


def test_a_flow_that_is_refused_uploads_nothing(tmp_path):
    ended = run(tmp_path, bootstrap(), hilgate="exit 5")
    assert (ended.status, ended.uploads) == (5, [])
