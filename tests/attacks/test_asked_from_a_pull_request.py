# SPDX-License-Identifier: Apache-2.0
"""Who: a stranger, a fork, a member with a branch. What: comments that ask for builds or carry code, flows of their own
that would get a token, results that are shown on GitHub.

What must happen: the verdict of a branch is one comment on GitHub, and a comment of somebody of the project starts
models of the commit that it names; a fork gets no token, a stranger starts nothing, no branch runs a flow but main's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from support.flow import BRANCH, FORK, MAIN, OURS, SECRETS, Build, Machine
from support.plans import git

TOKEN = SECRETS["HILGATE_GITHUB_TOKEN"]


@dataclass
class Shown:
    """Builds of a branch: a red one, which brings a flow of its own, and a green one after it."""

    red: Build
    green: Build


@pytest.fixture(scope="module")
def shown(host: Machine, main: Build) -> Shown:
    assert main.posted == 0, main.log()
    evil = 'steps: [{key: evil, agents: {queue: amd-gate}, command: "gh pr comment; touch stolen"}]\n'
    serving = replace(host, secrets=SECRETS)
    builds = [
        serving.build(serving.clone, serving.change(floor, **files), **BRANCH)
        for floor, files in (("0.5", {".buildkite/pipeline.yml": evil}), ("1.9 / 2", {}))
    ]
    return Shown(*builds)


@pytest.mark.parametrize(("name", "status", "words"), [("red", 1, "one-cpu"), ("green", 0, "pass")])
def test_a_verdict_is_one_comment_that_later_builds_change(shown: Shown, name: str, status: int, words: str) -> None:
    build: Build = getattr(shown, name)
    assert build.posted == status, build.log()
    (call,) = build.comments
    assert call["words"] == f"pr comment 7 --repo {OURS} --edit-last --create-if-none --body-file -".split()
    assert words in call["body"]
    assert call["token"] == TOKEN
    assert call["at"] == "/", "gh asks git where it runs, and a checkout may have settings"
    assert TOKEN not in build.log()


def test_a_branch_is_shown_by_the_flow_of_main_and_not_its_own(shown: Shown) -> None:
    assert not (shown.red.folder / "checkout/stolen").exists()
    assert "evil" not in shown.red.statuses


def test_a_fork_gets_no_token_though_the_cluster_has_one(green: dict[str, Build]) -> None:
    found = green["fork"]
    assert found.posted == 0, found.log()
    assert found.secrets_asked == []
    assert found.comments == []
    assert not set(SECRETS.values()) & set(found.log().split())


def test_a_github_that_refuses_changes_no_verdict(green: dict[str, Build]) -> None:
    found = green["branch"]
    assert (found.posted, found.statuses["verdict"]) == (0, 0), found.log()
    assert "no comment" in found.logs["verdict"]
    assert len(found.comments) == 1


def test_a_cluster_without_a_token_shows_nothing(main: Build) -> None:
    assert main.comments == []


@pytest.mark.parametrize(
    "facts", [BRANCH, FORK, {**MAIN, "BRANCH": "theirs"}], ids=["pull request", "fork", "other branch"]
)
def test_a_flow_with_a_token_is_mains_alone(host: Machine, main: Build, facts: dict[str, str]) -> None:
    assert main.posted == 0
    host.change("1.9 / 2")
    scheduled = replace(host, secrets=SECRETS, settings={**host.settings, "HILGATE_FLOW": "waiting"})
    found = scheduled.build(host.clone, git(host.clone, "rev-parse", "HEAD"), **facts)
    assert found.statuses == {"upload": 2}
    assert "of the default branch alone" in found.logs["upload"]


def test_a_branch_that_calls_itself_main_is_refused(host: Machine, main: Build) -> None:
    assert main.posted == 0
    host.change("1.9 / 2", **{".buildkite/waiting.yml": json.dumps({"steps": []})})
    scheduled = replace(host, secrets=SECRETS, settings={**host.settings, "HILGATE_FLOW": "waiting"})
    found = scheduled.build(host.clone, git(host.clone, "rev-parse", "HEAD"), **MAIN)
    assert found.statuses == {"upload": 5}
