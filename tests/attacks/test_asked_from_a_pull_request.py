# SPDX-License-Identifier: Apache-2.0
"""Who: a stranger, a fork, a member with a branch. What: comments that ask for builds, flows of their own that would
get a token, results that are shown on GitHub.

What must happen: the verdict of a branch is shown on GitHub and a comment of who may ask starts a build, from the flow
that is uploaded to what the services got; a fork gets no token, a stranger no answer, no branch a flow but main's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from support.flow import BRANCH, FORK, MAIN, OURS, THEIRS, Build, Machine
from support.internet import BOT, SECRETS, WRITER, Internet, internet
from support.plans import git

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Internet]:
    with internet(tmp_path) as made:
        yield made


def around(host: Machine, services: Internet) -> Machine:
    """The host with the services, the bot's name and a cluster that has the secrets."""
    return replace(host, secrets=SECRETS, settings={**services.settings, "HILGATE_GITHUB_LOGIN": BOT})


@pytest.fixture
def serving(host: Machine, main: Build, services: Internet) -> Machine:
    """A host that has built main and reaches the services."""
    assert main.posted == 0, main.log()
    return around(host, services)


@dataclass
class Shown:
    """Builds of a branch, a red one and a green one after it, and what the forge got."""

    commits: list[str]
    red: Build
    green: Build
    checks: list[dict[str, Any]]
    comments: list[list[str]]
    """Those that are there after each build."""


@pytest.fixture(scope="module")
def shown(host: Machine, main: Build, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """The red one brings flows of its own."""
    assert main.posted == 0, main.log()
    evil = 'steps: [{key: publish-verdict, agents: {queue: amd-gate}, command: "touch stolen"}]\n'
    flows = {".buildkite/publish.yml": evil, ".buildkite/answer.yml": evil}
    with internet(tmp_path_factory.mktemp("services")) as services:
        serving = around(host, services)
        commits, builds, comments = [], [], []
        for floor, files in (("0.5", flows), ("1.9 / 2", {})):
            commits.append(serving.change(floor, **files))
            builds.append(serving.build(serving.clone, commits[-1], **BRANCH))
            comments.append(services.of(BOT))
        return Shown(commits, *builds, services.checks, comments)


def test_a_verdict_is_shown_as_a_check_at_the_line_and_as_one_comment(shown: Shown) -> None:
    red, green = shown.red, shown.green
    assert (red.posted, red.statuses["publish-verdict"]) == (1, 0), red.logs["publish-verdict"]
    check = shown.checks[0]
    assert (check["name"], check["head_sha"], check["conclusion"]) == ("hilgate", shown.commits[0], "failure")
    (note,) = check["output"]["annotations"]
    assert (note["path"], note["start_line"]) == ("tests/test_a.py", 5)
    (comment,) = shown.comments[0]
    assert "one-cpu" in comment
    assert WRITER not in red.log()
    assert green.posted == 0
    assert [one["conclusion"] for one in shown.checks] == ["failure", "success"]
    (comment,) = shown.comments[1]
    assert "pass" in comment, "it is changed, and not repeated"


def test_a_fork_gets_no_token_though_the_cluster_has_one(green: dict[str, tuple[Build, Internet]]) -> None:
    found, services = green["fork"]
    assert found.posted == 0, found.log()
    assert not any(name.startswith("publish") for name in found.statuses)
    assert services.asked == []
    assert not set(SECRETS.values()) & set(found.log().split())


def test_a_branch_is_shown_by_the_flow_of_main_and_not_its_own(shown: Shown) -> None:
    assert not (shown.red.folder / "checkout/stolen").exists()
    assert shown.red.statuses["publish-verdict"] == 0, shown.red.logs["publish-verdict"]
    assert [one["head_sha"] for one in shown.checks] == shown.commits


def test_a_forge_that_refuses_changes_no_verdict(green: dict[str, tuple[Build, Internet]]) -> None:
    found, services = green["branch"]
    assert (found.posted, found.statuses["publish-verdict"]) == (0, 5)
    assert "GitHub refuses (500)" in found.logs["publish-verdict"]
    assert services.asked


def asks(serving: Machine, **facts: str) -> dict[str, int]:
    """Statuses of a build that the schedule starts on main, or that somebody starts otherwise."""
    scheduled = replace(serving, settings={**serving.settings, "HILGATE_FLOW": "answer"})
    source, name = (serving.ours, "main") if facts == MAIN else (serving.clone, "HEAD")
    found = scheduled.build(source, git(source, "rev-parse", name), **facts)
    assert not set(SECRETS.values()) & set(found.log().split())
    return found.statuses


def the_last_build(services: Internet, repository: str = OURS) -> None:
    pull = {"id": "7", "base": "main", "repository": repository}
    known = {"number": 40, "web_url": "https://builds.invalid/40", "commit": "c" * 40, "branch": "theirs"}
    services.builds.append({**known, "state": "failed", "pull_request": pull, "env": {}, "meta_data": {}})


def test_a_comment_of_who_may_ask_starts_a_build_once(serving: Machine, services: Internet) -> None:
    the_last_build(services)
    services.say("eve", "/hilgate retry")
    services.say("alice", "/hilgate run one")
    assert asks(serving, **MAIN) == {"upload": 0, "answer": 0}
    (_, started) = services.builds
    assert (started["commit"], started["env"]["HILGATE_MODELS"]) == ("c" * 40, "step:one")
    assert started["meta_data"] == {"hilgate-rerun": "40", "hilgate-comment": "101"}
    (said,) = services.of(BOT)
    assert "build 41 was started" in said
    assert asks(serving, **MAIN) == {"upload": 0, "answer": 0}
    assert (len(services.builds), services.of(BOT)) == (2, [said]), "a comment counts once"


def test_a_rerun_of_a_fork_is_a_forks(serving: Machine, services: Internet) -> None:
    the_last_build(services, THEIRS)
    services.say("alice", "/hilgate retry")
    asks(serving, **MAIN)
    assert services.builds[-1]["pull_request_repository"] == THEIRS


def test_a_stranger_gets_no_answer_and_a_changed_comment_no_build(serving: Machine, services: Internet) -> None:
    the_last_build(services)
    services.say("eve", "/hilgate run one")
    services.say("alice", "/hilgate retry", pull=8)
    services.comments[-1]["updated_at"] = "2026-11-21T12:30:00Z"
    assert asks(serving, **MAIN)["answer"] == 0
    assert len(services.builds) == 1
    (said,) = services.of(BOT)
    assert "changed after it was written" in said


@pytest.mark.parametrize(
    ("facts", "name"),
    [(BRANCH, "answer"), (FORK, "answer"), ({**MAIN, "BRANCH": "theirs"}, "answer"), (BRANCH, "watch")],
    ids=["pull request", "fork", "branch", "watch"],
)
def test_a_flow_with_tokens_is_mains_alone(
    serving: Machine, services: Internet, facts: dict[str, str], name: str
) -> None:
    services.say("alice", "/hilgate retry")
    serving.change("1.9 / 2")
    scheduled = replace(serving, settings={**serving.settings, "HILGATE_FLOW": name})
    found = scheduled.build(serving.clone, git(serving.clone, "rev-parse", "HEAD"), **facts)
    assert found.statuses == {"upload": 2}
    assert "of the default branch alone" in found.logs["upload"]
    assert services.asked == []


def test_a_branch_that_calls_itself_main_is_refused(serving: Machine, services: Internet) -> None:
    services.say("alice", "/hilgate retry")
    serving.change("1.9 / 2", **{".buildkite/answer.yml": json.dumps({"steps": []})})
    scheduled = replace(serving, settings={**serving.settings, "HILGATE_FLOW": "answer"})
    found = scheduled.build(serving.clone, git(serving.clone, "rev-parse", "HEAD"), **MAIN)
    assert found.statuses == {"upload": 5}
    assert services.asked == []
