# SPDX-License-Identifier: Apache-2.0
"""`hilgate pipeline`, `hilgate rerun` and `hilgate end-waiting` as they are typed."""

import json
import types

import pytest
import yaml
from support import plans
from support.rest import TOKEN, build, serving

from hilgate.buildkite import api
from hilgate.declare.load import load
from hilgate.errors import Exit

WHERE = ("--organization", "acme", "--pipeline", "rocm")


@pytest.fixture
def root(tmp_path):
    models = {"pocket": {"models": ["pocket-hybrid"]}, "jamba": {"models": ["jamba"]}}
    return plans.write_repository(tmp_path, {"lint": "true", "pocket": "true", "jamba": "true"}, **models)


@pytest.fixture
def buildkite(monkeypatch):
    """The command line talks to the server of this test, and does not wait."""
    with serving() as server:
        monkeypatch.setattr(api, "API", server.address)
        monkeypatch.setattr(api, "BACKOFF_SECONDS", 0.0)
        yield server


def rerun(root, *arguments, **env):
    return plans.hilgate(root, "rerun", *arguments, **{api.TOKEN_VARIABLE: TOKEN, **env})


def test_rerun_builds_the_last_commit_and_says_what_it_means(root, buildkite):
    images = {api.IMAGES_KEY: json.dumps({"rocm": "sha256:" + "0" * 64})}
    buildkite.answer(200, [build(41, meta_data=images)]).answer(201, build(42))
    done = rerun(root, "pocket-hybrid", "pocket-hybrid", "--pr", "7", *WHERE)
    assert done.returncode == 0
    assert done.stdout == "build 42: https://buildkite.example.invalid/acme/rocm/builds/42\n"
    assert "last build of pull request 7: 41 of cccccccccccc (failed)" in done.stderr
    assert f"image rocm: sha256:{'0' * 64}" in done.stderr
    assert "hilgate/required: no, it is a part of the plan" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    body = json.loads(buildkite.asked[1][3])
    assert body["env"]["HILGATE_MODELS"] == "pocket-hybrid"
    assert body["env"]["HILGATE_IMAGE_FROM_BUILD"] == "41"


def test_names_of_the_pipeline_come_from_the_environment(root, buildkite):
    buildkite.answer(200, [build(41)]).answer(201, build(42))
    done = rerun(root, "all", "--pr", "7", HILGATE_ORGANIZATION="acme", HILGATE_PIPELINE="rocm")
    assert done.returncode == 0
    assert "hilgate/required: if it covers the whole plan" in done.stderr


def test_a_dry_run_shows_requests_and_needs_no_token(root, buildkite):
    commit = "a" * 40
    mine = ("--commit", commit, "--branch", "mine")
    done = rerun(root, "jamba", "--pr", "7", *WHERE, "--dry-run", *mine, BUILDKITE_API_TOKEN="")
    assert done.returncode == 0
    address = f"{api.API}/v2/organizations/acme/pipelines/rocm/builds"
    get, _, post, *body = done.stdout.splitlines()
    assert (get, post) == (f"GET {address}", f"POST {address}")
    sent = json.loads("\n".join(body))
    assert (sent["commit"], sent["branch"], sent["env"]["HILGATE_MODELS"]) == (commit, "mine", "jamba")
    assert "nothing was sent" in done.stderr
    assert buildkite.asked == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["jmba", "--pr", "7", *WHERE], Exit.MISUSE, ["no step runs a model 'jmba'", "did you mean 'jamba'"]),
        (["jamba", "--pr", "7"], Exit.MISUSE, ["--organization is missing", "set HILGATE_ORGANIZATION"]),
        (
            ["jamba", "--pr", "7", "--organization", "acme"],
            Exit.MISUSE,
            ["--pipeline is missing", "set HILGATE_PIPELINE"],
        ),
        (["jamba", "--pr", "0", *WHERE], Exit.MISUSE, ["--pr"]),
        (["jamba", *WHERE], Exit.MISUSE, ["--pr"]),
        (["--pr", "7", *WHERE], Exit.MISUSE, ["MODEL"]),
        (["jamba", "--pr", "7", *WHERE, "--commit", "abc"], Exit.MISUSE, ["'abc' is not a full sha"]),
        (["jamba", "--pr", "7", *WHERE, "--profile", "gate"], Exit.MISUSE, ["gate"]),
    ],
    ids=["model", "organization", "pipeline", "zero", "no-pr", "no-model", "short-sha", "profile"],
)
def test_mistake_is_found_before_anything_is_sent(root, buildkite, arguments, status, words):
    done = rerun(root, *arguments)
    assert done.returncode == status
    assert done.stdout == ""
    assert buildkite.asked == []
    for word in words:
        assert word in done.stderr


def test_buildkite_that_says_no_is_one_clear_error(root, buildkite):
    buildkite.answer(401, {"message": "no"})
    done = rerun(root, "jamba", "--pr", "7", *WHERE)
    assert done.returncode == Exit.MISUSE
    assert "does not accept the token (401)" in done.stderr
    assert "to do: " in done.stderr
    assert TOKEN not in done.stderr


def test_no_token_is_said_before_anything_is_sent(root, buildkite):
    done = rerun(root, "jamba", "--pr", "7", *WHERE, BUILDKITE_API_TOKEN="")
    assert done.returncode == Exit.MISUSE
    assert "BUILDKITE_API_TOKEN is not set" in done.stderr
    assert buildkite.asked == []


@pytest.fixture
def planned(root):
    """A plan file of two steps, and one of a part of it."""
    whole = plans.plan(*[plans.step(name, "true") for name in ("lint", "jamba")], profile="pr")
    whole.save(root / "whole.json")
    whole.model_copy(update={"steps": whole.steps[:1]}).save(root / "part.json")
    return root


def pipeline(root, *arguments, **env):
    return plans.hilgate(root, "pipeline", *arguments, **env)


def test_pipeline_of_a_plan_holds_its_steps(planned):
    done = pipeline(planned, "--plan", "whole.json", BUILDKITE_BRANCH="gh-readonly-queue/main/pr-7-01")
    (group,) = yaml.safe_load(done.stdout)["steps"]
    assert [(step["key"], step["priority"]) for step in group["steps"]] == [("lint-cpu", 200), ("jamba-cpu", 200)]


def test_pipeline_of_a_change_needs_no_plan(root):
    (group,) = yaml.safe_load(pipeline(root).stdout)["steps"]
    assert {step["key"] for step in group["steps"]} == {"lint-cpu", "pocket-cpu", "jamba-cpu"}


def test_complete_rerun_gets_the_step_that_posts(planned):
    done = pipeline(planned, "--plan", "whole.json", "--required", "part.json")
    assert [step["key"] for step in yaml.safe_load(done.stdout)["steps"]] == ["required"]
    assert done.stderr == ""


def test_part_of_a_plan_gets_nothing_and_the_reason(planned):
    done = pipeline(planned, "--plan", "part.json", "--required", "whole.json")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "not complete: jamba-cpu is missing\n"


@pytest.fixture
def failing(monkeypatch):
    """What needs a rerun, as the judge's half of the program says."""
    said = types.SimpleNamespace(answer={})
    monkeypatch.setattr("hilgate.run.recheck.pending", lambda plan, recorded: said.answer)  # noqa: ARG005
    return said


def test_recheck_prints_a_step_for_each_that_failed(planned, failing):
    failing.answer = {"jamba-cpu": ("one", "two")}
    done = pipeline(planned, "--recheck", "--plan", "whole.json", "--jobs", "results/jobs")
    assert [step["key"] for step in yaml.safe_load(done.stdout)["steps"]] == ["jamba-cpu-recheck"]
    assert done.stderr == "jamba-cpu: 2 to run again on another node\n"


def test_recheck_of_nothing_prints_nothing(planned, failing):  # noqa: ARG001
    done = pipeline(planned, "--recheck", "--plan", "whole.json", "--jobs", "results/jobs")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--plan", "absent.json"], Exit.INVALID_DECLARATION, "there is no plan"),
        (["--plan", "whole.json", "--base", "main"], Exit.MISUSE, "exclude each other"),
        (["--plan", "whole.json", "--recheck"], Exit.MISUSE, "--recheck needs --jobs"),
        (["--plan", "whole.json", "--jobs", "jobs"], Exit.MISUSE, "--recheck needs --jobs"),
        (["--recheck", "--jobs", "jobs"], Exit.MISUSE, "give --plan"),
        (["--required", "whole.json"], Exit.MISUSE, "give --plan"),
        (["--plan", "whole.json", "--required", "absent.json"], Exit.INVALID_DECLARATION, "there is no plan"),
    ],
    ids=["no-plan", "base", "no-jobs", "jobs-alone", "recheck-alone", "required-alone", "no-required"],
)
def test_mistake_prints_no_pipeline(planned, arguments, status, words):
    done = pipeline(planned, *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr


def waiting(root, *jobs):
    queue = next(iter(load(root).agents.queues))
    common = {"state": "scheduled", "agent_query_rules": [f"queue={queue}"], "runnable_at": "2026-01-01T00:00:00Z"}
    return [common | {"graphql_id": name} for name in jobs]


def end_waiting(root, monkeypatch):
    monkeypatch.setattr(api, "GRAPHQL", f"{api.API}/graphql")
    return plans.hilgate(root, "end-waiting", *WHERE, BUILDKITE_API_TOKEN=TOKEN)


def test_jobs_that_no_agent_takes_are_ended(root, buildkite, monkeypatch):
    buildkite.answer(200, [build(1, state="running", jobs=waiting(root, "one", "two"))]).answer(200, {"data": {}})
    done = end_waiting(root, monkeypatch)
    assert done.returncode == Exit.FAIL, "somebody must look at the queue"
    assert done.stdout.count("ended: ") == 2
    (listed, *ended) = buildkite.asked
    assert listed[2]["state[]"] == ["scheduled", "running", "failing"]
    assert [(path, json.loads(body)["variables"]["id"]) for _, path, _, body, _ in ended] == [
        ("/graphql", "one"),
        ("/graphql", "two"),
    ]


def test_a_job_that_cannot_be_ended_leaves_the_build_red(root, buildkite, monkeypatch):
    buildkite.answer(200, [build(1, state="running", jobs=waiting(root, "one", "two"))])
    buildkite.answer(200, {"errors": [{"message": "no"}]}).answer(200, {"data": {}})
    done = end_waiting(root, monkeypatch)
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["NOT ended", "ended"]
    assert "Buildkite refuses to end a job: no" in done.stderr


def test_jobs_that_wait_no_longer_than_they_may_are_left_alone(root, buildkite, monkeypatch):
    running = [job | {"state": "running"} for job in waiting(root, "one")]
    buildkite.answer(200, [build(1, state="running", jobs=running)])
    done = end_waiting(root, monkeypatch)
    assert (done.returncode, done.stdout) == (Exit.PASS, "no job waits too long\n")
    assert len(buildkite.asked) == 1
