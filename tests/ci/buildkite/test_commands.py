# SPDX-License-Identifier: Apache-2.0
"""Comments that ask for something: what is a command, who may ask, how often, and what is asked of Buildkite."""

from __future__ import annotations

import base64
import datetime as dt
import json

import pytest
from support.rest import build

from hilgate.buildkite import api
from hilgate.buildkite.api import RemoteError
from hilgate.buildkite.commands import (
    COMMENT_KEY,
    Allowed,
    AskedComment,
    Command,
    NotAllowedError,
    allowed,
    answer,
    answered_mark,
    parse,
    permit,
    read,
    unanswered,
    wanted,
)
from hilgate.buildkite.publish import ANSWER
from hilgate.errors import DeclarationError, MisuseError

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
MAY = Allowed(users=("Alice", "bob"), cooldown_minutes=10)
STEPS, MODELS = {"kernels-cache", "models-wheel"}, {"pocket-hybrid"}


@pytest.mark.parametrize(
    ("body", "command"),
    [
        ("/hilgate run kernels-cache pocket-hybrid", Command("run", ("kernels-cache", "pocket-hybrid"))),
        ("/hilgate retry\nthank you", Command("retry")),
        ("/hilgate cancel", Command("cancel")),
        ("/hilgate explain\r\n", Command("explain")),
        ("please /hilgate retry", None),
        ("> /hilgate retry", None),
        ("\n/hilgate retry", None),
        ("/hilgate-retry", None),
        ("", None),
    ],
)
def test_the_first_line_is_a_command_or_none(body, command):
    assert (parse(body) if asked(body=body).is_command else None) == command


@pytest.mark.parametrize(
    "body",
    [
        "/hilgate",
        "/hilgate ",
        "/hilgate Retry",
        "/hilgate run",
        "/hilgate run  two",
        "/hilgate retry all",
        "/hilgate run ../x",
        "/hilgate run $(id)",
        "/hilgate run --models",
        "/hilgate run a;b",
        "/hilgate run a\u202eb",
        "/hilgate\tretry\tx retry",
        f"/hilgate run {' '.join('abcdefghijk')}",
        f"/hilgate run {'a' * 101}",
    ],
)
def test_what_begins_as_a_command_and_is_none_is_refused_or_ignored(body):
    if "\t" in body:
        assert not asked(body=body).is_command
        return
    with pytest.raises(MisuseError) as raised:
        parse(body)
    assert "/hilgate run STEP|MODEL" in raised.value.remedy


def asked(login="alice", body="/hilgate retry", number=77, pull=7):
    address = f"https://api.github.com/repos/acme/rocm/issues/{pull}"
    return AskedComment.model_validate({"id": number, "body": body, "user": {"login": login}, "issue_url": address})


def started(comment, minutes):
    made = (NOW - dt.timedelta(minutes=minutes)).isoformat()
    return api.RemoteBuild.model_validate(build(11, meta_data={COMMENT_KEY: str(comment)}, created_at=made))


@pytest.mark.parametrize(
    ("who", "builds", "why"),
    [
        ("eve", [], "eve may not ask"),
        ("alice", [started(77, 60)], "answered before"),
        ("BOB", [started(1, 9)], "less than 10 minutes ago"),
        ("alice", [started(1, 11), started(2, 60)], ""),
        ("bob", [api.RemoteBuild.model_validate(build(1))], ""),
    ],
    ids=["not listed", "delivered twice", "too soon", "later", "a push"],
)
def test_who_may_ask_and_when(who, builds, why):
    if not why:
        permit(asked(who), MAY, builds, NOW)
        return
    with pytest.raises(NotAllowedError, match=why):
        permit(asked(who), MAY, builds, NOW)


def test_names_are_of_steps_or_models():
    assert wanted(Command("run", ("kernels-cache", "pocket-hybrid")), STEPS, MODELS) == [
        "step:kernels-cache",
        "pocket-hybrid",
    ]
    assert wanted(Command("retry"), STEPS, MODELS) == ["all"]
    with pytest.raises(MisuseError, match="no step and no model is called 'kernel-cache'") as raised:
        wanted(Command("run", ("kernel-cache",)), STEPS, MODELS)
    assert "kernels-cache" in raised.value.remedy


def answered(client, body, **more):
    command = parse(body)
    return answer(client, asked(body=body, **more), MAY, command, (STEPS, MODELS), NOW)


def test_a_run_is_a_rerun_that_remembers_its_comment(server, client):
    server.answer(200, [build(10)]).answer(200, [build(10)]).answer(201, build(12))
    said = answered(client, "/hilgate run kernels-cache")
    assert said.startswith("build 12 was started: https://")
    assert "a part of the plan never changes the required status" in said
    method, path, _, body, _ = server.asked[-1]
    assert (method, path) == ("POST", "/v2/organizations/acme/pipelines/rocm/builds")
    sent = json.loads(body)
    assert sent["env"]["HILGATE_MODELS"] == "step:kernels-cache"
    assert sent["meta_data"] == {api.RERUN_KEY: "10", COMMENT_KEY: "77"}
    assert sent["pull_request_repository"] == "https://example.invalid/acme/rocm.git"


def test_a_second_delivery_or_a_hurry_starts_nothing(server, client):
    made = (NOW - dt.timedelta(minutes=1)).isoformat()
    earlier = build(11, meta_data={COMMENT_KEY: "1", api.RERUN_KEY: "10"}, created_at=made)
    server.answer(200, [earlier, build(10)])
    with pytest.raises(NotAllowedError, match="less than 10 minutes"):
        answered(client, "/hilgate retry")
    assert {one[0] for one in server.asked} == {"GET"}


def test_who_may_not_ask_reaches_nobody(server, client):
    with pytest.raises(NotAllowedError, match="eve may not"):
        answered(client, "/hilgate cancel", login="eve")
    assert server.asked == []


def test_cancel_ends_what_runs_and_explain_ends_nothing(server, client):
    other = build(12, pull="8", state="running")
    server.answer(200, [other, build(11, state="running"), build(10, state="passed")])
    server.answer(200, [other, build(11, state="running"), build(10, state="passed")])
    server.answer(200, build(11, state="canceling"))
    assert answered(client, "/hilgate cancel") == "canceled: 11"
    puts = [one[1] for one in server.asked if one[0] == "PUT"]
    assert puts == ["/v2/organizations/acme/pipelines/rocm/builds/11/cancel"]
    server.answers[:] = []
    server.answer(200, [build(10)])
    assert answered(client, "/hilgate explain") == (
        "build 10 of cccccccccccc is failed: https://buildkite.example.invalid/acme/rocm/builds/10"
    )


def contents(text):
    return {"type": "file", "encoding": "base64", "content": base64.encodebytes(text.encode()).decode()}


def test_the_list_is_the_default_branchs_on_github(server, forge):
    listed = contents('{"users": ["alice"], "cooldown_minutes": 5}')
    server.answer(200, {"default_branch": "main"}).answer(200, listed)
    assert allowed(forge) == Allowed(users=("alice",), cooldown_minutes=5)
    assert server.asked[1][1:3] == ("/repos/acme/rocm/contents/ci/agent/commands.json", {"ref": ["main"]})


@pytest.mark.parametrize(
    "text", ["", "[]", '{"users": "all"}', '{"users": [], "cooldown_minutes": 0}', '{"users": []}']
)
def test_a_list_that_is_none_lets_nobody_ask(server, forge, text):
    server.answer(200, {"default_branch": "main"}).answer(200, contents(text))
    with pytest.raises(DeclarationError, match="not a list of who may ask"):
        allowed(forge)


@pytest.mark.parametrize("verb", ["retry", "cancel", "explain"])
def test_a_comment_that_was_changed_later_does_nothing(server, client, verb):
    """Whoever may write to the repository can change what somebody else wrote."""
    times = {"created_at": NOW - dt.timedelta(minutes=3), "updated_at": NOW - dt.timedelta(minutes=1)}
    changed = asked(body=f"/hilgate {verb}").model_copy(update=times)
    with pytest.raises(NotAllowedError, match="changed after it was written"):
        answer(client, changed, MAY, parse(changed.body), (STEPS, MODELS), NOW)
    assert server.asked == []


BOT = "rocm-gate[bot]"


def seen(number, body, login="alice", pull=7):
    return asked(login, body, number, pull).model_dump(mode="json")


def test_what_nobody_answered_yet_is_found_and_the_rest_is_not(server, forge):
    done = asked(number=80)
    talk = [seen(78, "/hilgate retry"), seen(79, "hello"), seen(80, "/hilgate explain"), seen(85, "/hilgate nonsense")]
    talk += [seen(70, f"{ANSWER}\nbuild 3\n\n{answered_mark(done)}", BOT), seen(82, "/hilgate cancel", "eve")]
    talk += [seen(60, "/hilgate run a", pull=8), {**seen(61, "gone"), "user": None}]
    forged = [seen(90, f"{ANSWER}\n{answered_mark(asked(number=999))}", "eve")]
    server.answer(200, talk + forged)
    assert [one.id for one in unanswered(forge, BOT, NOW)] == [60, 82, 85]
    path, query = server.asked[0][1:3]
    assert path == "/repos/acme/rocm/issues/comments"
    assert query["since"] == ["2026-11-21T06:00:00Z"]


def test_comments_are_read_to_their_last_page_or_not_at_all(server, forge):
    page = [seen(n, "hello") for n in range(100)]
    server.answer(200, page).answer(200, [seen(500, "/hilgate retry")])
    assert [one.id for one in unanswered(forge, BOT, NOW)] == [500]
    server.answers[:] = []
    server.answer(200, page)
    with pytest.raises(RemoteError, match="over 3000 comments within 6 hours"):
        unanswered(forge, BOT, NOW)


def test_the_comment_is_read_from_github(server, forge):
    when = {"created_at": "2026-11-21T12:00:00Z", "updated_at": "2026-11-21T12:00:00Z"}
    server.answer(200, {**asked().model_dump(), **when, "author_association": "NONE"})
    found = read(forge, 77)
    assert (found.login, found.body, found.pull_request) == ("alice", "/hilgate retry", 7)
    assert server.asked[0][1] == "/repos/acme/rocm/issues/comments/77"
