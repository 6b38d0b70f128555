# SPDX-License-Identifier: Apache-2.0
"""Who: anybody who may write to the repository. What: posts `rocm/required` themselves (a workflow of a branch, one
call of GitHub's API), pushes past the queue, or merges what no build has seen.

What must happen: GitHub holds that, by settings that are data here (`ci/agent/github.tf`): the required status counts
from Buildkite's app alone, merges go through the queue as squashes, nobody pushes to its branches or bypasses a rule.
A changed line of them is a protected change; `terraform plan` shows where the repository differs.
"""

from __future__ import annotations

from typing import Any

import hcl2
import pytest
from support.nodes import ROOT

from hilgate.declare import yaml
from hilgate.declare.load import load
from hilgate.declare.protected import PROTECTED_FILE, Protected, ProtectedList, entry_for

FILE = "ci/agent/github.tf"
TEXT = (ROOT / FILE).read_text()


def plain(value: Any) -> Any:
    """A value as python-hcl2 reads it, without quotes; a block that stands once is itself and not a list of one."""
    if isinstance(value, dict):
        return {plain(key): plain(inner) for key, inner in value.items() if not key.startswith("__")}
    if isinstance(value, list):
        one_block = len(value) == 1 and isinstance(value[0], dict)
        return plain(value[0]) if one_block else [plain(inner) for inner in value]
    return value.strip('"') if isinstance(value, str) else value


def wrong(text: str) -> list[str]:
    """What in the settings would let somebody past the verdict."""
    rulesets = [plain(resource)["github_repository_ruleset"] for resource in hcl2.loads(text)["resource"]]
    settings = {name: body for ruleset in rulesets for name, body in ruleset.items()}
    main, queue = settings.get("main", {}), settings.get("queue", {})
    rules, held = main.get("rules", {}), queue.get("rules", {})
    check = rules.get("required_status_checks", {}).get("required_check", {})
    review = rules.get("pull_request", {})
    merges = rules.get("merge_queue", {})
    app = {"actor_type": "Integration", "actor_id": "${var.merge_queue_app_id}", "bypass_mode": "always"}
    facts = {
        "main is the default branch": branches(main) == (["~DEFAULT_BRANCH"], []),
        "main is active": main.get("enforcement") == "active",
        "nobody bypasses main": "bypass_actors" not in main,
        "main is not deleted": rules.get("deletion") is True,
        "main is not forced": rules.get("non_fast_forward") is True,
        "the verdict is required": check.get("context") == load(ROOT).project.status,
        "the verdict is Buildkite's": check.get("integration_id") == "${var.buildkite_app_id}",
        "one review": review.get("required_approving_review_count") == 1,
        "code owners review": review.get("require_code_owner_review") is True,
        "the last push is reviewed": review.get("require_last_push_approval") is True,
        "a push drops reviews": review.get("dismiss_stale_reviews_on_push") is True,
        "squashes only": review.get("allowed_merge_methods") == ["squash"],
        "the queue squashes": merges.get("merge_method") == "SQUASH",
        "each of the queue is green": merges.get("grouping_strategy") == "ALLGREEN",
        "the queue's branches are held": branches(queue) == (["refs/heads/gh-readonly-queue/**/*"], []),
        "the queue's rules are active": queue.get("enforcement") == "active",
        "the queue alone bypasses": queue.get("bypass_actors") == app,
        "nobody makes or moves its branches": {name for name, value in held.items() if value is True}
        == {"creation", "update", "deletion", "non_fast_forward"},
    }
    return [name for name, holds in facts.items() if not holds]


def branches(ruleset: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The branches that a ruleset is about, and those that it leaves out."""
    names = ruleset.get("conditions", {}).get("ref_name", {})
    return names.get("include", []), names.get("exclude", [])


def test_what_is_declared_stands_against_the_attack() -> None:
    assert wrong(TEXT) == []


CHANGES = {
    "any writer may post": ("        integration_id = var.buildkite_app_id\n", "", "the verdict is Buildkite's"),
    "another app may post": ("= var.buildkite_app_id", "= 15368", "the verdict is Buildkite's"),
    "another status": ("rocm/required", "rocm/optional", "the verdict is required"),
    "force pushes": ("non_fast_forward = true", "non_fast_forward = false", "main is not forced"),
    "fewer reviews": ("require_last_push_approval        = true", "", "the last push is reviewed"),
    "no code owners": ("require_code_owner_review         = true", "", "code owners review"),
    "rebase merges": ('["squash"]', '["squash", "rebase"]', "squashes only"),
    "a queue that rebases": ('"SQUASH"', '"REBASE"', "the queue squashes"),
    "only evaluated": ('"active"', '"evaluate"', "main is active"),
    "admins pass": (
        "  conditions {",
        '  bypass_actors {\n    actor_type = "RepositoryRole"\n    actor_id = 5\n  }\n\n  conditions {',
        "nobody bypasses main",
    ),
    "anybody makes branches of the queue": ("    creation         = true\n", "", "nobody makes or moves its branches"),
    "another branch": ("~DEFAULT_BRANCH", "refs/heads/other", "main is the default branch"),
    "a branch is left out": ("exclude = []", 'exclude = ["refs/heads/main"]', "main is the default branch"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_weaker_setting_is_found(name: str) -> None:
    old, new, words = CHANGES[name]
    assert old in TEXT
    assert words in wrong(TEXT.replace(old, new, 1))


@pytest.mark.parametrize("path", [FILE, ".github/workflows/rerun.yml", ".github/rerun.py"])
def test_a_change_to_what_github_runs_and_holds_needs_a_name(path: str) -> None:
    declared = yaml.read(ROOT / PROTECTED_FILE, ROOT, ProtectedList).value
    assert declared is not None
    assert entry_for((Protected(paths=("**",)), *declared.rules), path) is not None
