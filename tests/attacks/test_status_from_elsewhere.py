# SPDX-License-Identifier: Apache-2.0
"""Who: anybody who may write to the repository. What: posts `rocm/required` themselves (a workflow of a branch, one
call of GitHub's API), pushes past the queue, or turns off what stands against it.

What must happen: that is held by settings of GitHub, which are data here: the required status counts from Buildkite's
app alone, merges go through the queue, nobody pushes to its branches; and `hilgate watch` is red while the repository's
settings are others.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support import plans, rest
from support.github import BUILDKITE, GitHub, declared, serving
from support.nodes import ROOT

from hilgate.buildkite import api, github
from hilgate.buildkite.api import RemoteError
from hilgate.declare.load import load
from hilgate.errors import DeclarationError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FILES = {
    f"{github.FOLDER}/{name}.json": github.DeclaredSettings.model_validate(declared(name)) for name in ("main", "queue")
}


@pytest.fixture
def forge() -> Iterator[GitHub]:
    with serving() as server:
        yield server


def compare(forge: GitHub, token: str = "") -> github.Findings:
    forge.token = token
    return github.compare(FILES, github.Forge(f"{forge.address}/repos/acme/rocm", token), "main")


def rule(ruleset: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [one for one in ruleset["rules"] if one["type"] == kind]
    return found


def test_what_is_declared_stands_against_the_attack() -> None:
    found = github.load(ROOT)
    assert set(found) == set(FILES)
    main, queue = (json.loads((ROOT / name).read_text()) for name in sorted(found))
    (check,) = rule(main, "required_status_checks")["parameters"]["required_status_checks"]
    assert check["context"] == load(ROOT).project.status
    assert "integration_id" in check
    assert rule(main, "pull_request")["parameters"]["require_code_owner_review"] is True
    assert {one["type"] for one in main["rules"]} >= {"merge_queue", "non_fast_forward", "deletion"}
    assert main["bypass_actors"] == []
    assert (main["enforcement"], queue["enforcement"]) == ("active", "active")
    assert {one["type"] for one in queue["rules"]} >= {"creation", "update"}


@pytest.mark.parametrize("token", ["", "reader", "admin"])
def test_settings_as_declared_say_nothing(forge: GitHub, token: str) -> None:
    found = compare(forge, token)
    assert found.differs == []
    assert bool(found.unseen) is (token != "admin")


def unpin(main: dict[str, Any], _: dict[str, Any]) -> None:
    del rule(main, "required_status_checks")["parameters"]["required_status_checks"][0]["integration_id"]


def pin_to_actions(main: dict[str, Any], _: dict[str, Any]) -> None:
    rule(main, "required_status_checks")["parameters"]["required_status_checks"][0]["integration_id"] = BUILDKITE + 9


def other_status(main: dict[str, Any], _: dict[str, Any]) -> None:
    rule(main, "required_status_checks")["parameters"]["required_status_checks"][0]["context"] = "rocm/optional"


def drop(kind: str, number: int = 0) -> Callable[..., None]:
    def change(*rulesets: dict[str, Any]) -> None:
        rulesets[number]["rules"] = [one for one in rulesets[number]["rules"] if one["type"] != kind]

    return change


def fewer_reviews(main: dict[str, Any], _: dict[str, Any]) -> None:
    rule(main, "pull_request")["parameters"]["require_last_push_approval"] = False


def not_active(main: dict[str, Any], _: dict[str, Any]) -> None:
    main["enforcement"] = "evaluate"


def bypassed(main: dict[str, Any], _: dict[str, Any]) -> None:
    main["bypass_actors"] = [{"actor_type": "RepositoryRole", "actor_id": 5, "bypass_mode": "always"}]


def pushed(_: dict[str, Any], queue: dict[str, Any]) -> None:
    queue["bypass_actors"].append({"actor_type": "Team", "actor_id": 1, "bypass_mode": "always"})


def rebased(main: dict[str, Any], _: dict[str, Any]) -> None:
    rule(main, "pull_request")["parameters"]["allowed_merge_methods"].append("rebase")


def rebased_in_the_queue(main: dict[str, Any], _: dict[str, Any]) -> None:
    rule(main, "merge_queue")["parameters"]["merge_method"] = "REBASE"


CHANGES: dict[str, tuple[Callable[..., None], str]] = {
    "any writer may post": (unpin, "integration_id"),
    "another app may post": (pin_to_actions, "integration_id"),
    "another status": (other_status, "rocm/required"),
    "no required status": (drop("required_status_checks"), "required_status_checks: there is no such rule"),
    "no queue": (drop("merge_queue"), "merge_queue: there is no such rule"),
    "direct pushes": (drop("pull_request"), "pull_request: there is no such rule"),
    "force pushes": (drop("non_fast_forward"), "non_fast_forward: there is no such rule"),
    "fewer reviews": (fewer_reviews, "require_last_push_approval is false and not true"),
    "rebase merges": (rebased, 'allowed_merge_methods has "rebase"'),
    "a queue that rebases": (rebased_in_the_queue, 'merge_method is "REBASE" and not "SQUASH"'),
    "only evaluated": (not_active, "there is no such rule"),
    "admins pass": (bypassed, "it may be bypassed by RepositoryRole 5"),
    "anybody makes branches of the queue": (drop("creation", 1), "gh-readonly-queue/main/pr-1 to creation"),
    "a team pushes to the queue": (pushed, "it may be bypassed by Team 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_is_a_sentence(forge: GitHub, name: str) -> None:
    change, words = CHANGES[name]
    change(forge.rulesets[1], forge.rulesets[2])
    differs = compare(forge, "admin").differs
    assert any(words in sentence for sentence in differs), differs


def test_rules_of_an_organization_and_of_a_second_page_count(forge: GitHub) -> None:
    forge.rulesets[1]["rules"] = [{"type": "tag_name_pattern"}] * 150 + forge.rulesets[1]["rules"]
    assert compare(forge, "admin").differs == []


def test_ids_that_nobody_has_filled_in_are_said(forge: GitHub) -> None:
    forge.token = "admin"
    client = github.Forge(f"{forge.address}/repos/acme/rocm", "admin")
    differs = github.compare(github.load(ROOT), client, "main").differs
    assert any("may be posted by anybody" in sentence for sentence in differs)
    assert any("actor_id" in sentence for sentence in differs)


@pytest.mark.parametrize("change", [rebased, rebased_in_the_queue])
def test_a_declared_ruleset_that_lets_github_rebase_is_named(forge: GitHub, change: Callable[..., None]) -> None:
    wide = declared("main")
    change(wide, {})
    files = {f"{github.FOLDER}/main.json": github.DeclaredSettings.model_validate(wide)}
    change(forge.rulesets[1], forge.rulesets[2])
    differs = github.compare(files, github.Forge(f"{forge.address}/repos/acme/rocm"), "main").differs
    assert any("commits on the branch that no build has seen" in sentence for sentence in differs), differs


def test_what_github_does_not_say_is_no_agreement(forge: GitHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="refuses"):
        github.compare(FILES, github.Forge(f"{forge.address}/repos/acme/other"), "main")
    monkeypatch.setattr(forge, "rules", lambda _: [{"kind": "x"}] * 3)
    with pytest.raises(RemoteError, match="not what it documents"):
        compare(forge)
    with pytest.raises(RemoteError, match="no answer"):
        github.compare(FILES, github.Forge("http://127.0.0.1:9/repos/acme/rocm"), "main")


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "x"}', '{"rules": 1}'])
def test_a_file_that_is_no_ruleset_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / github.FOLDER).mkdir(parents=True)
    (tmp_path / github.FOLDER / "main.json").write_text(text)
    with pytest.raises(DeclarationError, match="not a ruleset"):
        github.load(tmp_path)


def test_the_repository_is_found_by_its_address() -> None:
    assert github.repository_url("acme/rocm") == "https://api.github.com/repos/acme/rocm"
    assert github.repository_url("git@github.com:Acme/rocm.git") == "https://api.github.com/repos/acme/rocm"
    assert github.repository_url("https://ghe.example.org/a/b") == "https://ghe.example.org/api/v3/repos/a/b"
    for wrong in ("", "acme", "https://forge.example.org/a/b/c", "/srv/git/rocm"):
        with pytest.raises(MisuseError):
            github.repository_url(wrong)


@pytest.mark.parametrize("pinned", [True, False])
def test_watch_is_red_while_the_settings_differ(
    tmp_path: Path, forge: GitHub, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    root = plans.write_repository(tmp_path, {"lint": "true"})
    shutil.copytree(ROOT / github.FOLDER, root / github.FOLDER)
    for name in ("main", "queue"):
        (root / github.FOLDER / f"{name}.json").write_text(json.dumps(declared(name)))
    if not pinned:
        unpin(forge.rulesets[1], forge.rulesets[2])
    forge.token = "reader"
    kinds = ({}, {"HILGATE_PROFILE": "nightly"}, {"HILGATE_FLOW": "release"})
    with rest.serving() as buildkite:
        monkeypatch.setattr(api, "API", buildkite.address)
        monkeypatch.setattr(github, "API", forge.address)
        buildkite.answer(200, [rest.build(1, state="running")])
        buildkite.answer(200, [])
        buildkite.answer(200, [rest.build(2 + n, state="passed", env=env) for n, env in enumerate(kinds)])
        done = plans.hilgate(
            root,
            "watch",
            "--organization",
            "acme",
            "--pipeline",
            "rocm",
            "--repository",
            "acme/rocm",
            BUILDKITE_API_TOKEN=rest.TOKEN,
            HILGATE_GITHUB_TOKEN="reader",
        )
    assert done.returncode == (0 if pinned else 1), done.stderr
    assert ("integration_id" in done.stdout) is not pinned
    assert "reader" not in done.stdout
