# SPDX-License-Identifier: Apache-2.0
"""Who: a stranger, a fork, a member with a branch. What: comments that ask for builds, flows of their own that would
get a token, results that are shown on GitHub.

What must happen: the verdict of a branch is shown on GitHub and a comment of who may ask starts a build, from the flow
that is uploaded to what the services got; a fork gets no token, a stranger no answer, no branch a flow but main's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.flow import FILES, OURS, THEIRS, Machine, machine
from support.forks import project
from support.internet import BOT, STARTER, WRITER, Internet, internet
from support.plans import git

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = {"ORGANIZATION_SLUG": "acme", "PIPELINE_SLUG": "it"}
BRANCH = {
    "BRANCH": "theirs",
    "PULL_REQUEST": "7",
    "PULL_REQUEST_BASE_BRANCH": "main",
    "PULL_REQUEST_REPO": OURS,
    **NAMES,
}
FORK = {**BRANCH, "PULL_REQUEST_REPO": THEIRS}
MAIN = {"BRANCH": "main", "PULL_REQUEST": "false", **NAMES}
SECRETS = {"HILGATE_GITHUB_WRITER": WRITER, "HILGATE_BUILDS_TOKEN": STARTER}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A host that has built main, and whose cluster has the secrets."""
    folder = tmp_path_factory.mktemp("host")
    change = project(folder, **FILES)
    made = machine(folder, change.ours, change.theirs)
    built = made.build(made.ours, git(made.ours, "rev-parse", "main"), **MAIN)
    assert built.posted == 0, "\n".join(built.logs.values())
    return replace(made, secrets=SECRETS)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Internet]:
    with internet(tmp_path) as made:
        yield made


@pytest.fixture
def host(first: Machine, services: Internet) -> Machine:
    return replace(first, settings={**services.settings, "HILGATE_GITHUB_LOGIN": BOT})


def changed(host: Machine, floor: str, **files: str) -> str:
    """A commit of the clone on top of main; the test passes with a floor of 0.95."""
    clone = host.folder / "theirs"
    git(clone, "checkout", "-q", "-B", "theirs", "origin/main")
    for name, text in {"src/limits.py": f"FLOOR = {floor}\n", **files}.items():
        (clone / name).write_text(text)
    git(clone, "commit", "-qam", "theirs")
    return git(clone, "rev-parse", "HEAD")


def test_a_verdict_is_shown_as_a_check_at_the_line_and_as_one_comment(host: Machine, services: Internet) -> None:
    commit = changed(host, "0.5")
    red = host.build(host.folder / "theirs", commit, **BRANCH)
    assert (red.posted, red.statuses["publish-verdict"]) == (1, 0), red.logs["publish-verdict"]
    (check,) = services.checks
    assert (check["name"], check["head_sha"], check["conclusion"]) == ("hilgate", commit, "failure")
    (note,) = check["output"]["annotations"]
    assert (note["path"], note["start_line"]) == ("tests/test_a.py", 5)
    (comment,) = services.of(BOT)
    assert "one-cpu" in comment
    assert WRITER not in "".join(red.logs.values())
    green = host.build(host.folder / "theirs", changed(host, "1.9 / 2"), **BRANCH)
    assert green.posted == 0
    assert [one["conclusion"] for one in services.checks] == ["failure", "success"]
    (comment,) = services.of(BOT)
    assert "pass" in comment, "it is changed, and not repeated"


def test_a_fork_gets_no_token_though_the_cluster_has_one(host: Machine, services: Internet) -> None:
    found = host.build(host.folder / "theirs", changed(host, "1.9 / 2"), **FORK)
    assert found.posted == 0, "\n".join(found.logs.values())
    assert not any(name.startswith("publish") for name in found.statuses)
    assert services.asked == []
    assert not set(SECRETS.values()) & set("".join(found.logs.values()).split())


def test_a_branch_is_shown_by_the_flow_of_main_and_not_its_own(host: Machine, services: Internet) -> None:
    evil = 'steps: [{key: publish-verdict, agents: {queue: amd-gate}, command: "touch stolen"}]\n'
    commit = changed(host, "1.9 / 2", **{".buildkite/publish.yml": evil, ".buildkite/answer.yml": evil})
    found = host.build(host.folder / "theirs", commit, **BRANCH)
    assert not (found.folder / "checkout/stolen").exists()
    assert found.statuses["publish-verdict"] == 0, found.logs["publish-verdict"]
    assert [one["head_sha"] for one in services.checks] == [commit]


def test_a_forge_that_refuses_changes_no_verdict(
    host: Machine, services: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "answer", lambda *_: (500, {}))
    found = host.build(host.folder / "theirs", changed(host, "1.9 / 2"), **BRANCH)
    assert (found.posted, found.statuses["publish-verdict"]) == (0, 5)
    assert "GitHub refuses (500)" in found.logs["publish-verdict"]


def asks(host: Machine, **facts: str) -> dict[str, int]:
    """Statuses of a build that the schedule starts on main, or that somebody starts otherwise."""
    scheduled = replace(host, settings={**host.settings, "HILGATE_FLOW": "answer"})
    source, name = (host.ours, "main") if facts == MAIN else (host.folder / "theirs", "HEAD")
    found = scheduled.build(source, git(source, "rev-parse", name), **facts)
    assert not set(SECRETS.values()) & set("".join(found.logs.values()).split())
    return found.statuses


def the_last_build(services: Internet, repository: str = OURS) -> None:
    pull = {"id": "7", "base": "main", "repository": repository}
    known = {"number": 40, "web_url": "https://builds.invalid/40", "commit": "c" * 40, "branch": "theirs"}
    services.builds.append({**known, "state": "failed", "pull_request": pull, "env": {}, "meta_data": {}})


def test_a_comment_of_who_may_ask_starts_a_build_once(host: Machine, services: Internet) -> None:
    the_last_build(services)
    services.say("eve", "/hilgate retry")
    services.say("alice", "/hilgate run one")
    assert asks(host, **MAIN) == {"upload": 0, "answer": 0}
    (_, started) = services.builds
    assert (started["commit"], started["env"]["HILGATE_MODELS"]) == ("c" * 40, "step:one")
    assert started["meta_data"] == {"hilgate-rerun": "40", "hilgate-comment": "101"}
    (said,) = services.of(BOT)
    assert "build 41 was started" in said
    assert asks(host, **MAIN) == {"upload": 0, "answer": 0}
    assert (len(services.builds), services.of(BOT)) == (2, [said]), "a comment counts once"


def test_a_rerun_of_a_fork_is_a_forks(host: Machine, services: Internet) -> None:
    the_last_build(services, THEIRS)
    services.say("alice", "/hilgate retry")
    asks(host, **MAIN)
    assert services.builds[-1]["pull_request_repository"] == THEIRS


def test_a_stranger_gets_no_answer_and_a_changed_comment_no_build(host: Machine, services: Internet) -> None:
    the_last_build(services)
    services.say("eve", "/hilgate run one")
    services.say("alice", "/hilgate retry", pull=8)
    services.comments[-1]["updated_at"] = "2026-11-21T12:30:00Z"
    assert asks(host, **MAIN)["answer"] == 0
    assert len(services.builds) == 1
    (said,) = services.of(BOT)
    assert "changed after it was written" in said


@pytest.mark.parametrize(
    ("facts", "name"),
    [(BRANCH, "answer"), (FORK, "answer"), ({**MAIN, "BRANCH": "theirs"}, "answer"), (BRANCH, "watch")],
    ids=["pull request", "fork", "branch", "watch"],
)
def test_a_flow_with_tokens_is_mains_alone(host: Machine, services: Internet, facts: dict[str, str], name: str) -> None:
    services.say("alice", "/hilgate retry")
    changed(host, "1.9 / 2")
    scheduled = replace(host, settings={**host.settings, "HILGATE_FLOW": name})
    found = scheduled.build(host.folder / "theirs", git(host.folder / "theirs", "rev-parse", "HEAD"), **facts)
    assert found.statuses == {"upload": 2}
    assert "of the default branch alone" in found.logs["upload"]
    assert services.asked == []


def test_a_branch_that_calls_itself_main_is_refused(host: Machine, services: Internet) -> None:
    services.say("alice", "/hilgate retry")
    changed(host, "1.9 / 2", **{".buildkite/answer.yml": json.dumps({"steps": []})})
    scheduled = replace(host, settings={**host.settings, "HILGATE_FLOW": "answer"})
    found = scheduled.build(host.folder / "theirs", git(host.folder / "theirs", "rev-parse", "HEAD"), **MAIN)
    assert found.statuses == {"upload": 5}
    assert services.asked == []
