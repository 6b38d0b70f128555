"""Calls to Buildkite's REST API against a server on this machine that answers as documented, and as servers do."""

import json

import pytest
from support.rest import TOKEN, build, serving

from hilgate.buildkite.api import ATTEMPTS, PAGES, PER_PAGE, RERUN_KEY, Client, RemoteError, builds_url
from hilgate.errors import Exit, MisuseError

PATH = "/v2/organizations/acme/pipelines/rocm/builds"


@pytest.fixture
def server():
    with serving() as played:
        yield played


@pytest.fixture
def client(server):
    waits = []
    url = builds_url("acme", "rocm", api=f"http://127.0.0.1:{server.server_address[1]}")
    made = Client(url, TOKEN, sleep=waits.append, timeout_seconds=10.0)
    made.waits = waits
    return made


BODY = {"commit": "c" * 40, "branch": "feature", "meta_data": {RERUN_KEY: "n1"}}


def methods(server):
    return [asked[0] for asked in server.asked]


def test_build_is_created(server, client):
    server.answer(201, build(12, state="scheduled"))
    assert client.create(BODY).number == 12
    ((method, path, _, body, headers),) = server.asked
    assert (method, path, json.loads(body)) == ("POST", PATH, BODY)
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert client.waits == []


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (401, {"message": "Authentication required. Please supply a valid API Access Token"}, MisuseError, "the token"),
        (403, {"message": "Forbidden"}, MisuseError, "does not accept the token (403)"),
        (404, {"message": "No organization found"}, MisuseError, "knows no such pipeline"),
        (422, {"message": "Validation Failed", "errors": []}, RemoteError, "refuses (422): Validation Failed"),
        (422, {"message": "bad \x1b[31m\nbranch\u202e"}, RemoteError, "bad  [31m branch "),
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
    assert methods(server) == ["POST", "POST"]


@pytest.mark.parametrize("value", ["", "soon", "Wed, 21 Oct 2026 07:28:00 GMT", "-3", "1e9"])
def test_rate_limit_without_seconds_backs_off(server, client, value):
    server.answer(429, "", Retry_After=value).answer(429, "", Retry_After=value).answer(200, [])
    assert client.builds() == []
    assert client.waits == [1, 2]


def test_rate_limit_of_an_hour_is_not_waited_for(server, client):
    server.answer(429, "", Retry_After="3600")
    with pytest.raises(RemoteError, match="another 3600 seconds"):
        client.builds()
    assert client.waits == []


@pytest.mark.parametrize("lost", [500, 503, "silence", "hang up"])
def test_a_request_without_an_answer_is_repeated(server, client, lost):
    client.timeout_seconds = 0.5 if lost == "silence" else 10.0
    server.answer(lost, "").answer(201, build(12))
    assert client.create(BODY).number == 12
    assert methods(server) == ["POST", "POST"]
    assert client.waits == [1]


def test_cut_off_answer_is_a_lost_one(server, client):
    server.answer(200, json.dumps([build(12)])[:60]).answer(200, "[]", Content_Length="999").answer(200, [build(13)])
    assert client.builds()[0].number == 13
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
        client.builds()
    assert words in raised.value.what
    assert raised.value.exit_status is Exit.CANNOT_RUN_HERE
    assert len(server.asked) == ATTEMPTS
    assert client.waits == [1, 2, 4, 8]


def test_answer_of_another_shape_is_refused(server, client):
    server.answer(200, [build("twelve")])
    with pytest.raises(RemoteError, match=r"not what it documents: 0\.number"):
        client.builds()
    server.answers[:] = []
    server.answer(200, {"message": "hello"})
    with pytest.raises(RemoteError, match="not what it documents"):
        client.builds()


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


def test_token_is_not_shown_with_the_client(client):
    assert TOKEN not in repr(client)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "A b", "a?b", "-a"])
def test_names_are_slugs(name):
    with pytest.raises(MisuseError, match="is not a slug"):
        builds_url(name, "rocm")
    with pytest.raises(MisuseError, match="--pipeline"):
        builds_url("acme", name)
