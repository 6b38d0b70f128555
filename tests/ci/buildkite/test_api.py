# SPDX-License-Identifier: Apache-2.0
"""Calls to Buildkite's REST API against a server on this machine that answers as documented, and as servers do."""

import datetime as dt
import json
from pathlib import Path

import pytest
from support import plans
from support.rest import TOKEN, build

from hilgate.buildkite import api
from hilgate.buildkite.api import (
    ATTEMPTS,
    IMAGES_KEY,
    PAGES,
    PER_PAGE,
    RERUN_KEY,
    Client,
    RemoteBuild,
    RemoteError,
    builds_url,
    images_of,
    request,
    shortfall,
)
from hilgate.declare.load import load
from hilgate.errors import Exit, MisuseError
from hilgate.model.plan import ProtectedChange

PATH = "/v2/organizations/acme/pipelines/rocm/builds"


BODY = {"commit": "c" * 40, "branch": "feature", "meta_data": {RERUN_KEY: "n1"}}


NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
QUEUES = load(Path(__file__).parents[3]).agents.queues


def job(minutes, queue="amd_mi300_1", state="scheduled"):
    since = (NOW - dt.timedelta(minutes=minutes)).isoformat()
    return {"type": "script", "state": state, "runnable_at": since, "agent_query_rules": [f"queue={queue}"]}


def running(*jobs):
    return [RemoteBuild.model_validate(build(10, state="running", jobs=[{"type": "waiter"}, *jobs]))]


def test_a_list_without_end_is_an_error_and_not_half_an_answer(server, client, monkeypatch):
    monkeypatch.setattr(api, "MOST_PAGES", 3)
    server.answer(200, [build(number) for number in range(PER_PAGE)])
    with pytest.raises(RemoteError, match="more than 3 pages"):
        list(client.builds())


def test_build_is_created(server, client):
    server.answer(201, build(12, state="scheduled"))
    assert client.create(BODY).number == 12
    ((method, path, _, body, headers),) = server.asked
    assert (method, path, json.loads(body)) == ("POST", PATH, BODY)
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in repr(client)
    assert client.waits == []


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (401, {"message": "Authentication required. Please supply a valid API Access Token"}, MisuseError, "the token"),
        (403, {"message": "Forbidden"}, MisuseError, "does not accept the token (403)"),
        (404, {"message": "No organization found"}, MisuseError, "knows no such pipeline"),
        (422, {"message": "Validation Failed", "errors": []}, RemoteError, "refuses (422): Validation Failed"),
        (422, {"message": "bad \x1b[31m\nbranch\u202e"}, RemoteError, r"bad \x1b[31m branch\u202e"),
        (400, "not json", RemoteError, "refuses (400): without a reason"),
        (400, "[]", RemoteError, "refuses (400): without a reason"),
        (302, "", RemoteError, "refuses (302)"),
    ],
    ids=["token", "scope", "pipeline", "invalid", "control-characters", "no-json", "no-object", "redirect"],
)
def test_refusal_is_one_sentence_and_is_not_repeated(server, client, status, body, error, words):
    server.answer(status, body, Location="http://127.0.0.1:9/")
    with pytest.raises(error) as raised:
        client.create(BODY)
    assert words in raised.value.what
    assert raised.value.remedy
    assert TOKEN not in str(raised.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize("header", ["Retry-After", "RateLimit-Reset"])
def test_rate_limit_is_waited_for(server, client, header):
    server.answer(429, {"message": "slow down"}, **{header: "42"}).answer(201, build(12))
    assert client.create(BODY).number == 12
    assert client.waits == [42]
    assert [asked[0] for asked in server.asked] == ["POST", "POST"]


@pytest.mark.parametrize("value", ["", "soon", "Wed, 21 Oct 2026 07:28:00 GMT", "-3", "1e9"])
def test_rate_limit_without_seconds_backs_off(server, client, value):
    server.answer(429, "", Retry_After=value).answer(429, "", Retry_After=value).answer(200, [])
    assert list(client.builds()) == []
    assert client.waits == [1, 2]


def test_rate_limit_of_an_hour_is_not_waited_for(server, client):
    server.answer(429, "", Retry_After="3600")
    with pytest.raises(RemoteError, match="another 3600 seconds"):
        next(client.builds())
    assert client.waits == []


@pytest.mark.parametrize("lost", [500, 503, "silence", "hang up"])
def test_a_request_without_an_answer_is_repeated(server, client, lost):
    client.timeout_seconds = 0.5 if lost == "silence" else 10.0
    server.answer(lost, "").answer(201, build(12))
    assert client.create(BODY).number == 12
    assert [asked[0] for asked in server.asked] == ["POST", "POST"]
    assert client.waits == [1]


def test_cut_off_answer_is_a_lost_one(server, client):
    server.answer(200, json.dumps([build(12)])[:60]).answer(200, "[]", Content_Length="999").answer(200, [build(13)])
    assert next(client.builds()).number == 13
    assert client.waits == [1, 2]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (503, "trouble of its own (503)"),
        ("silence", "no answer from Buildkite within 0.2 seconds"),
        ("hang up", "no connection"),
    ],
    ids=["503", "silence", "hang-up"],
)
def test_it_gives_up_and_says_why(server, client, answer, words):
    client.timeout_seconds = 0.2 if answer == "silence" else 10.0
    server.answer(answer, "")
    with pytest.raises(RemoteError) as raised:
        next(client.builds())
    assert words in raised.value.what
    assert raised.value.exit_status is Exit.CANNOT_RUN_HERE
    assert len(server.asked) == ATTEMPTS
    assert client.waits == [1, 2, 4, 8]


def test_answer_of_another_shape_is_refused(server, client):
    server.answer(200, [build("twelve")])
    with pytest.raises(RemoteError, match=r"not what it documents: 0\.number"):
        next(client.builds())
    server.answers[:] = []
    server.answer(200, {"message": "hello"})
    with pytest.raises(RemoteError, match="not what it documents"):
        next(client.builds())


def test_newest_build_of_the_pull_request_that_is_no_rerun(server, client):
    others = [build(99, "8"), build(98, None), build(97, pull_request=None), build(96, pull_request={})]
    server.answer(200, [*others, build(95, meta_data={RERUN_KEY: "n0"}), build(94), build(93)])
    assert client.find_pull_request(7, branch="feature", commit="c" * 40).number == 94
    query = server.asked[0][2]
    assert (query["branch"], query["commit"], query["page"]) == (["feature"], ["c" * 40], ["1"])
    assert query["exclude_jobs"] == ["true"]


def test_pages_are_turned_until_it_is_found(server, client):
    server.answer(200, [build(n, "8") for n in range(PER_PAGE)]).answer(200, [build(3)])
    assert client.find_pull_request(7).number == 3
    assert [asked[2]["page"] for asked in server.asked] == [["1"], ["2"]]


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (PER_PAGE, PAGES)], ids=["short", "for-ever"])
def test_pull_request_without_a_build(server, client, length, pages):
    server.answer(200, [build(n, "8") for n in range(length)])
    with pytest.raises(MisuseError, match="pull request 7 has no build of branch x among the newest 500"):
        client.find_pull_request(7, branch="x")
    assert len(server.asked) == pages


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "schlüssel", "tab\t"], ids=ascii)
def test_token_that_is_none_is_refused_unseen(token):
    with pytest.raises(MisuseError, match="BUILDKITE_API_TOKEN is not") as raised:
        Client("http://127.0.0.1:9", token)
    assert not token or token not in str(raised.value)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "A b", "a?b", "-a"])
def test_names_are_slugs(name):
    with pytest.raises(MisuseError, match=r"is not a slug|is missing"):
        builds_url(name, "rocm")
    with pytest.raises(MisuseError, match="--pipeline"):
        builds_url("acme", name)


def remote(**changes):
    return RemoteBuild.model_validate(build(41, **changes))


def plan(*names, **changes):
    steps = [plans.step(name, "true") for name in names]
    return plans.plan(*steps, **{"profile": "pr", "merge_base": "b" * 40, **changes})


FORK = {"id": "7", "base": "main", "repository": "https://example.invalid/somebody/rocm.git"}


def test_request_names_the_models_the_images_and_the_fork():
    assert request(remote(pull_request=FORK), ["jamba", "pocket-hybrid"], profile="pr") == {
        "commit": "c" * 40,
        "branch": "feature",
        "message": "Rerun of jamba, pocket-hybrid after build 41",
        "pull_request_id": 7,
        "pull_request_base_branch": "main",
        "pull_request_repository": FORK["repository"],
        "env": {
            "HILGATE_FLOW": "rerun",
            "HILGATE_MODELS": "jamba pocket-hybrid",
            "HILGATE_PROFILE": "pr",
            "HILGATE_IMAGE_FROM_BUILD": "41",
        },
        "meta_data": {RERUN_KEY: "41"},
    }


@pytest.mark.parametrize("known", [None, *({**FORK, gone: None} for gone in FORK)])
def test_pull_request_that_might_be_a_fork_is_refused(known):
    with pytest.raises(RemoteError, match="which repository"):
        request(remote(pull_request=known), ["jamba"], profile="pr")


def test_images_are_those_of_the_verdict():
    digest = f"sha256:{'0' * 64}"
    assert images_of(remote(meta_data={IMAGES_KEY: f'{{"rocm": "{digest}"}}'})) == {"rocm": digest}
    assert images_of(remote()) == images_of(remote(meta_data={IMAGES_KEY: None})) == {}


@pytest.mark.parametrize("text", ["", "rocm", "[]", '{"rocm": 5}', 5])
def test_images_that_cannot_be_read_are_not_guessed(text):
    with pytest.raises(RemoteError, match="cannot be read"):
        images_of(remote(meta_data={IMAGES_KEY: text}))


def test_rerun_of_everything_is_complete_whatever_the_reasons():
    assert shortfall(plan("a", "b"), plan("b", "c", "a")) == ()
    required = plan("a")
    other = required.model_copy(update={"steps": (required.steps[0].model_copy(update={"reason": "asked for"}),)})
    assert shortfall(required, other) == ()


@pytest.mark.parametrize(
    ("rerun", "expected"),
    [
        (plan("a"), ["b-cpu is missing"]),
        (plan(), ["a-cpu is missing", "b-cpu is missing"]),
        (plan("a", "b", profile="nightly"), ["the profile is another"]),
        (plan("a", "b", commit="d" * 40), ["the commit is another"]),
        (plan("a", "b", base=None), ["the base is another"]),
        (plan("a", "b", merge_base="d" * 40), ["the merge_base is another"]),
        (plan("a", "b", dirty=True), ["the dirty is another"]),
        (plan("a", "b", fork=True), ["the fork is another"]),
        (plan("a", "b", images={"rocm": "e" * 64}), ["the images is another"]),
        (plan("a", "b", changed_files=("x",)), ["the changed_files is another"]),
    ],
    ids=["part", "nothing", "profile", "commit", "base", "merge-base", "dirty", "fork", "images", "files"],
)
def test_part_of_a_plan_or_another_plan_is_not_complete(rerun, expected):
    assert list(shortfall(plan("a", "b"), rerun)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"minimum": 0},
        {"command": "true || true"},
        {"queue": "amd_mi300_1"},
        {"image": "rocm"},
        {"timeout_minutes": 2},
        {"env": {"A": "b"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_step_that_does_something_else_is_not_the_same(change):
    required = plan("a", "b")
    steps = (plans.changed(required.steps[0], **change), required.steps[1])
    assert shortfall(required, required.model_copy(update={"steps": steps})) == ("a-cpu differs",)


ITSELF = "the change edits its own gate, which needs an approval"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"changed_files": ("README.md", "ci/hilgate/judge/verdict.py")}, ITSELF),
        ({"changed_files": (".buildkite/approve.yml",)}, ITSELF),
        ({"protected_changes": (ProtectedChange(path="evals/gates.yaml", what="margin: 1 -> 2"),)}, ITSELF),
        ({"profile": "nightly"}, "a plan of profile nightly is not what a merge needs"),
    ],
    ids=["gate", "flow", "protected_changes", "profile"],
)
def test_change_that_no_rerun_answers_for(changes, expected):
    both = plan("a", **changes)
    assert shortfall(both, both) == (expected,)


def test_a_job_that_no_agent_took_in_time_is_ended(server, client):
    late = job(61) | {"graphql_id": "Sm9i"}
    unfinished = running(late, job(59) | {"graphql_id": "x"}, job(500, state="running") | {"graphql_id": "y"})
    unfinished += running(job(500, queue="another-team") | {"graphql_id": "z"}, job(500))
    ((name, words),) = api.overdue(unfinished, QUEUES, NOW)
    assert name == "Sm9i"
    assert words == f"amd_mi300_1: no agent took a job of {unfinished[0].web_url} in 61 minutes (60 allowed)"
    client.graphql = f"{server.address}/v1"
    server.answer(200, {"data": {"jobTypeCommandCancel": {"jobTypeCommand": {"state": "CANCELED"}}}})
    client.cancel_job(name)
    ((method, path, _, body, headers),) = server.asked
    assert (method, path, headers["Authorization"]) == ("POST", "/v1", f"Bearer {TOKEN}")
    assert json.loads(body)["variables"] == {"id": "Sm9i"}
    assert "jobTypeCommandCancel" in json.loads(body)["query"]


def test_a_refusal_that_comes_with_200_is_one(server, client):
    client.graphql = f"{server.address}/v1"
    server.answer(200, {"errors": [{"message": "No permission\nfor that"}]})
    with pytest.raises(RemoteError, match="refuses to end a job: No permission for that"):
        client.cancel_job("Sm9i")
