# SPDX-License-Identifier: Apache-2.0
"""`hilgate pipeline` and `hilgate rerun` as they are typed, and what is asked for on and shown to GitHub."""

import base64
import json
import types

import pytest
import yaml
from support import plans
from support.rest import TOKEN, build, serving

from hilgate.buildkite import api, github
from hilgate.buildkite.publish import ANSWER, MARK
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


def test_rerun_starts_a_build_of_the_last_commit_and_says_what_it_means(root, buildkite):
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


@pytest.mark.parametrize("state", ["passed", "failed"])
def test_watch_is_red_when_there_is_something_to_say(root, buildkite, state):
    env = ({}, {"HILGATE_PROFILE": "nightly"}, {"HILGATE_FLOW": "release"})
    buildkite.answer(200, [build(1, state="running")])
    buildkite.answer(200, [])
    buildkite.answer(200, [build(2 + n, state=state if n == 0 else "passed", env=one) for n, one in enumerate(env)])
    buildkite.answer(200, "heard")
    heartbeat = f"{api.API}/heartbeat"
    done = plans.hilgate(
        root, "watch", *WHERE, BUILDKITE_API_TOKEN=TOKEN, HILGATE_HEARTBEAT_URL=heartbeat, HILGATE_TEXTFILE=str(root)
    )
    assert done.returncode == (Exit.FAIL if state == "failed" else Exit.PASS), done.stderr
    assert done.stdout.startswith("main is failed: https" if state == "failed" else "nodes, main, the night and queues")
    asked = [
        (path.rpartition("/")[2], query.get("state") or query.get("state[]"))
        for _, path, query, _, _ in buildkite.asked
    ]
    assert asked == [
        ("builds", ["scheduled", "running", "failing"]),
        ("agents", None),
        ("builds", ["finished"]),
        ("heartbeat", None),
    ]
    alarms = int(state == "failed")
    assert f"\nhilgate_watch_alarms {alarms}\n" in (root / "hilgate-watch.prom").read_text()


def test_names_of_the_pipeline_come_from_the_environment(root, buildkite):
    buildkite.answer(200, [build(41)]).answer(201, build(42))
    done = rerun(root, "all", "--pr", "7", HILGATE_ORGANIZATION="acme", HILGATE_PIPELINE="rocm")
    assert done.returncode == 0
    assert "hilgate/required: if it covers the whole plan" in done.stderr


def test_dry_run_shows_the_requests_sends_none_and_needs_no_token(root, buildkite):
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


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((401, {"message": "no"}), Exit.MISUSE, "does not accept the token (401)"),
        ((200, []), Exit.MISUSE, "pull request 7 has no build"),
        ((503, ""), Exit.CANNOT_RUN_HERE, "5 times in a row"),
    ],
    ids=["token", "no-build", "outage"],
)
def test_buildkite_that_says_no_is_one_clear_error(root, buildkite, answer, status, words):
    buildkite.answer(*answer)
    done = rerun(root, "jamba", "--pr", "7", *WHERE)
    assert done.returncode == status
    assert words in done.stderr
    assert "to do: " in done.stderr
    assert "Traceback" not in done.stderr
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


@pytest.fixture
def forge(buildkite, monkeypatch):
    """GitHub answers from the same server, in turn with Buildkite."""
    monkeypatch.setattr(github, "API", buildkite.address)
    return buildkite


def comment(body, login="alice"):
    address = "https://api.github.com/repos/acme/rocm/issues/7"
    return {"id": 77, "body": body, "user": {"login": login}, "issue_url": address, "html_url": "https://c.invalid/1"}


def listed(*users):
    text = json.dumps({"users": users, "cooldown_minutes": 10})
    return {"encoding": "base64", "content": base64.b64encode(text.encode()).decode()}


def answer(root, *arguments):
    names = ("--repository", "acme/rocm", "--author", "gate[bot]", *WHERE)
    return plans.hilgate(root, "answer", "77", *names, *arguments, **{api.TOKEN_VARIABLE: TOKEN})


def test_a_comment_starts_a_rerun_and_is_answered_in_one_comment(root, forge):
    forge.answer(200, comment("/hilgate run jamba lint")).answer(200, {"default_branch": "main"})
    forge.answer(200, listed("alice")).answer(200, [build(41)]).answer(200, [build(41)]).answer(201, build(42))
    forge.answer(200, [comment(f"{ANSWER}\nold", "gate[bot]")]).answer(200, comment("x"))
    done = answer(root)
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stdout.startswith("build 42 was started: ")
    assert json.loads(forge.asked[5][3])["env"]["HILGATE_MODELS"] == "jamba step:lint"
    method, path, _, body, _ = forge.asked[-1]
    assert (method, path) == ("PATCH", "/repos/acme/rocm/issues/comments/77")
    assert json.loads(body)["body"].startswith(f"{ANSWER}\nbuild 42 was started: https")


def test_a_wrong_name_is_answered_and_nothing_is_started(root, forge):
    forge.answer(200, comment("/hilgate run jmba")).answer(200, {"default_branch": "main"}).answer(200, listed("alice"))
    forge.answer(200, [build(41)]).answer(200, [build(41)]).answer(200, []).answer(201, comment("x"))
    done = answer(root)
    assert done.returncode == Exit.MISUSE
    assert "did you mean 'jamba'?" in json.loads(forge.asked[-1][3])["body"]
    assert [one[0] for one in forge.asked] == ["GET"] * 6 + ["POST"]


@pytest.mark.parametrize(("body", "login", "status"), [("hello", "eve", 0), ("/hilgate retry", "eve", Exit.MISUSE)])
def test_a_talk_and_a_stranger_get_no_answer(root, forge, body, login, status):
    forge.answer(200, comment(body, login)).answer(200, {"default_branch": "main"}).answer(200, listed("alice"))
    assert answer(root).returncode == status
    assert {one[0] for one in forge.asked} == {"GET"}


def test_a_judged_build_is_published(root, forge):
    assert plans.hilgate(root, "gate", "--all").returncode in {Exit.PASS, Exit.FAIL, Exit.NOTHING_RAN}
    names = ("--repository", "acme/rocm", "--author", "gate[bot]", "--pr", "7")
    shown = plans.hilgate(root, "publish", *names, "--dry-run")
    assert shown.returncode == Exit.PASS, shown.stderr
    assert '"name": "hilgate"' in shown.stdout
    assert forge.asked == []
    forge.answer(200, []).answer(201, comment("x")).answer(201, comment("x"))
    done = plans.hilgate(root, "publish", *names)
    assert done.stdout.split() == ["https://c.invalid/1"] * 2
    assert json.loads(forge.asked[2][3])["head_sha"] == plans.git(root, "rev-parse", "HEAD")
    assert json.loads(forge.asked[1][3])["body"].startswith(MARK)


def poll(root):
    """`hilgate answer` as the schedule calls it."""
    names = ("--repository", "acme/rocm", *WHERE)
    return plans.hilgate(root, "answer", *names, **{api.TOKEN_VARIABLE: TOKEN, "HILGATE_GITHUB_LOGIN": "gate[bot]"})


def test_a_schedule_answers_each_that_may_ask_and_a_stranger_stops_nobody(root, forge):
    theirs = {**comment("/hilgate explain"), "id": 78}
    forge.answer(200, [theirs, comment("/hilgate cancel", "eve")]).answer(200, {"default_branch": "main"})
    forge.answer(200, listed("alice")).answer(200, [build(41)]).answer(200, [build(41)])
    forge.answer(200, []).answer(201, comment("x"))
    done = poll(root)
    assert done.returncode == Exit.PASS, done.stderr
    assert "comment 77: eve may not ask" in done.stderr
    body = json.loads(forge.asked[-1][3])["body"]
    assert body.startswith(f"{ANSWER}\nbuild 41 of cccccccccccc is failed")
    assert body.endswith("\n<!-- of comment 78 -->\n")


def test_a_schedule_that_finds_nothing_asks_nothing_more(root, forge):
    forge.answer(200, [comment("hello")])
    assert (poll(root).stdout, len(forge.asked)) == ("no command\n", 1)


def test_an_outage_is_a_failure_of_the_schedule(root, forge):
    forge.answer(200, [comment("/hilgate explain")]).answer(200, {"default_branch": "main"}).answer(
        200, listed("alice")
    )
    for _ in range(api.ATTEMPTS):
        forge.answer(503)
    forge.answer(200, []).answer(201, comment("x"))
    assert poll(root).returncode == Exit.CANNOT_RUN_HERE
    assert "5 times in a row" in json.loads(forge.asked[-1][3])["body"], "who asked reads it too"


@pytest.mark.parametrize("refused", [False, True], ids=["ended", "refused"])
def test_watch_ends_a_job_that_no_agent_takes_and_goes_on_where_it_may_not(root, buildkite, monkeypatch, refused):
    monkeypatch.setattr(api, "GRAPHQL", f"{api.API}/graphql")
    queue = next(iter(load(root).agents.queues))
    waiting = {"graphql_id": "Sm9i", "state": "scheduled", "agent_query_rules": [f"queue={queue}"]}
    waiting["runnable_at"] = "2026-01-01T00:00:00Z"
    env = ({}, {"HILGATE_PROFILE": "nightly"}, {"HILGATE_FLOW": "release"})
    buildkite.answer(200, [build(1, state="running", jobs=[waiting])]).answer(200, [])
    buildkite.answer(200, [build(2 + n, state="passed", env=one) for n, one in enumerate(env)])
    buildkite.answer(200, {"errors": [{"message": "no"}]} if refused else {"data": {}}).answer(200, "heard")
    heartbeat = f"{api.API}/heartbeat"
    late = plans.hilgate(
        root, "watch", "--end-late", *WHERE, BUILDKITE_API_TOKEN=TOKEN, HILGATE_HEARTBEAT_URL=heartbeat
    )
    assert late.returncode == Exit.FAIL
    assert ("was not ended: Buildkite refuses to end a job: no" if refused else "so it was ended after") in late.stdout
    assert [path for _, path, *_ in buildkite.asked][-2:] == ["/graphql", "/heartbeat"]
    assert json.loads(buildkite.asked[-2][3])["variables"] == {"id": "Sm9i"}
