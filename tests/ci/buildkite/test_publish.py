# SPDX-License-Identifier: Apache-2.0
"""A verdict on GitHub: the check at its lines and the one comment, against a server that answers as documented."""

from __future__ import annotations

import json

import pytest
from support.builds import built
from support.jobs import failed, passed, undecided
from support.plans import COMMIT, step

from hilgate.buildkite.api import RemoteError
from hilgate.buildkite.publish import MARK, publish
from hilgate.errors import MisuseError
from hilgate.model.record import Outcome
from hilgate.report.check import MOST_CHARACTERS, check_of, comment_of
from hilgate.report.merge_base import MergeBase
from hilgate.report.view import ReportView

PLACE = "tests/t.py:50: AssertionError (tests/support/attending.py:80)"
BOT = "rocm-gate[bot]"


def wrong(name, place=PLACE):
    return failed(f"tests/t.py::test_x[{name}]", f"AssertionError: 4 of 40 rows are off by @everyone\n{place}")


TWO = (wrong("decode-1"), wrong("decode-2"))


def a_build(*checks, **changes):
    values = {"profile": "pr", "commit": COMMIT} | changes
    checks = checks or (*TWO, passed("tests/t.py::test_x[prefill-1]"))
    return built((step("a", "x"), checks), **values)


def comment(number, login=BOT, body=MARK):
    return {"id": number, "body": body, "user": {"login": login, "id": 1}, "html_url": "x"}


MADE = {"id": 4, "html_url": "https://github.example.invalid/acme/rocm/runs/4"}


def test_the_check_stands_at_the_line_that_failed():
    there = built((step("a", "x"), [passed(one.id) for one in TWO]))[1]
    facts = MergeBase(commit="b" * 40, recorded=there)
    check = check_of(ReportView(*a_build(), facts))
    assert (check["name"], check["head_sha"], check["status"], check["conclusion"]) == (
        "hilgate",
        COMMIT,
        "completed",
        "failure",
    )
    assert check["output"]["title"] == "these 2 failures are yours: all pass on the merge base, or are not in it"
    (note,) = check["output"]["annotations"]
    assert {name: note[name] for name in ("path", "start_line", "end_line", "annotation_level")} == {
        "path": "tests/t.py",
        "start_line": 50,
        "end_line": 50,
        "annotation_level": "failure",
    }
    assert note["message"].startswith("2 failures look like this: 2 of 3 cases of test_x\nAssertionError: 4 of 40")
    assert note["title"] == "a-cpu: tests/t.py::test_x[decode-1]"


@pytest.mark.parametrize("checks", [[undecided()], [wrong("a")], None], ids=["inconclusive", "failed", "nothing"])
def test_what_is_no_pass_is_a_failure_on_github(checks):
    build = a_build(*checks) if checks else built((step("a", "x"), None), profile="pr", commit=COMMIT)
    assert check_of(ReportView(*build))["conclusion"] == "failure"
    assert check_of(ReportView(*a_build(passed())))["conclusion"] == "success"


@pytest.mark.parametrize("place", ["/etc/passwd.py:3: E", "../x.py:3: E", "a/../../x.py:3: E", "nowhere", "a.c:3: E"])
def test_a_place_outside_of_the_repository_gets_no_annotation(place):
    assert check_of(ReportView(*a_build(wrong("a", place))))["output"]["annotations"] == []


def test_at_most_50_annotations_and_60000_characters_are_sent():
    names = "abcdefghijklmnopqrstuvwxyz"
    pairs = enumerate(a + b for a in names for b in "abcd")
    many = [failed(f"tests/t.py::test_{ab}", f"{ab} {'x' * 3000}\ntests/t.py:{n + 1}: E") for n, ab in pairs]
    check = check_of(ReportView(*a_build(*many)))
    assert len(check["output"]["annotations"]) == 50
    for text in (check["output"]["summary"], comment_of(ReportView(*a_build(*many)))):
        assert len(text.encode()) <= MOST_CHARACTERS


def test_a_comment_mentions_nobody():
    text = comment_of(ReportView(*a_build()))
    outside = "".join(part for place, part in enumerate(text.split("```")) if place % 2 == 0)
    assert "@everyone" not in outside.replace("\\@everyone", "")


@pytest.mark.parametrize(
    ("there", "last"),
    [
        ([], ("POST", "/repos/acme/rocm/issues/7/comments")),
        ([comment(1, "eve"), comment(2, body="hello")], ("POST", "/repos/acme/rocm/issues/7/comments")),
        ([comment(1, "eve"), comment(3)], ("PATCH", "/repos/acme/rocm/issues/comments/3")),
    ],
    ids=["none", "others'", "its own"],
)
def test_one_comment_is_made_and_then_changed_and_nobody_elses(server, forge, there, last):
    server.answer(200, there).answer(200, MADE).answer(201, MADE)
    build = a_build()
    addresses = publish(forge, 7, BOT, check_of(ReportView(*build)), comment_of(ReportView(*build)))
    assert addresses == (MADE["html_url"], MADE["html_url"])
    assert [one[:2] for one in server.asked] == [
        ("GET", "/repos/acme/rocm/issues/7/comments"),
        last,
        ("POST", "/repos/acme/rocm/check-runs"),
    ]
    assert json.loads(server.asked[2][3])["head_sha"] == COMMIT
    assert json.loads(server.asked[1][3])["body"].startswith(MARK)


def test_its_own_comment_is_found_on_a_later_page(server, forge):
    server.answer(200, [comment(n, "eve") for n in range(100)]).answer(200, [comment(500)])
    server.answer(200, MADE)
    publish(forge, 7, BOT, {}, MARK)
    assert [one[2].get("page") for one in server.asked[:2]] == [["1"], ["2"]]
    assert server.asked[2][:2] == ("PATCH", "/repos/acme/rocm/issues/comments/500")


def test_a_refusal_says_which_permission_is_missing(server, forge):
    server.answer(200, []).answer(201, MADE).answer(403, {"message": "Resource not accessible by integration"})
    with pytest.raises(RemoteError) as raised:
        publish(forge, 7, BOT, {}, MARK)
    assert server.asked[1][:2] == ("POST", "/repos/acme/rocm/issues/7/comments"), "a person's token still comments"
    assert "Checks and Pull requests: write" in str(raised.value)


@pytest.mark.parametrize("changes", [{"commit": ""}, {"dirty": True}, {"profile": "quick"}], ids=repr)
def test_what_is_of_no_commit_or_of_a_part_is_not_published(changes):
    with pytest.raises(MisuseError):
        check_of(ReportView(*a_build(passed(), **changes)))


def test_the_outcomes_are_all_of_them():
    assert {one for one in Outcome if one is not Outcome.PASS} == {
        Outcome.FAIL,
        Outcome.INCONCLUSIVE,
        Outcome.DID_NOT_RUN,
    }
