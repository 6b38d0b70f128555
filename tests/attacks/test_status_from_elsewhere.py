# SPDX-License-Identifier: Apache-2.0
"""Who: anybody who may write to the repository. What: posts `rocm/required` themselves (a workflow of a branch, one
call of GitHub's API), pushes past the queue, or merges what no build has seen.

What must happen: GitHub holds that, by settings that are data here (`ci/agent/github.tf`): the required status counts
from Buildkite's app alone, merges go through the queue as squashes, nobody pushes to its branches or bypasses a rule.
A changed line of them is a protected change; `terraform plan` shows where the repository differs.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.nodes import ROOT

from hilgate.declare import yaml
from hilgate.declare.load import load
from hilgate.declare.protected import PROTECTED_FILE, Protected, ProtectedList, entry_for

FILE = "ci/agent/github.tf"
TEXT = (ROOT / FILE).read_text()
MAIN, QUEUE = "github_repository_ruleset main", "github_repository_ruleset queue"


def blocks(text: str) -> dict[str, Any]:
    """A Terraform file: nested blocks by their words, and values as they are written."""
    top: dict[str, Any] = {}
    inside = [top]
    for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()):
        if opened := re.fullmatch(r"(\w+)((?: \"[^\"]+\")*) \{", line):
            name = " ".join([opened[1], *re.findall(r'"([^"]+)"', opened[2])])
            name = name.removeprefix("resource ")
            assert name not in inside[-1], f"{name} twice"
            inside[-1][name] = {}
            inside.append(inside[-1][name])
        elif line == "}":
            inside.pop()
        elif value := re.fullmatch(r"(\w+)\s+= (.+)", line):
            inside[-1][value[1]] = value[2].strip('"')
        else:
            assert not line or line.startswith("variable "), line
    assert inside == [top]
    return top


def wrong(text: str) -> list[str]:
    """What in the settings would let somebody past the verdict."""
    settings = blocks(text)
    main, queue = settings.get(MAIN, {}), settings.get(QUEUE, {})
    rules, held = main.get("rules", {}), queue.get("rules", {})
    check = rules.get("required_status_checks", {}).get("required_check", {})
    review = rules.get("pull_request", {})
    bypass = queue.get("bypass_actors", {})
    facts = {
        "main is the default branch": main.get("conditions", {}).get("ref_name")
        == {"include": '["~DEFAULT_BRANCH"]', "exclude": "[]"},
        "main is active": main.get("enforcement") == "active",
        "nobody bypasses main": "bypass_actors" not in main,
        "main is not deleted": rules.get("deletion") == "true",
        "main is not forced": rules.get("non_fast_forward") == "true",
        "the verdict is required": check.get("context") == load(ROOT).project.status,
        "the verdict is Buildkite's": check.get("integration_id") == "var.buildkite_app_id",
        "one review": review.get("required_approving_review_count") == "1",
        "code owners review": review.get("require_code_owner_review") == "true",
        "the last push is reviewed": review.get("require_last_push_approval") == "true",
        "a push drops reviews": review.get("dismiss_stale_reviews_on_push") == "true",
        "squashes only": review.get("allowed_merge_methods") == '["squash"]',
        "the queue squashes": rules.get("merge_queue", {}).get("merge_method") == "SQUASH",
        "each of the queue is green": rules.get("merge_queue", {}).get("grouping_strategy") == "ALLGREEN",
        "the queue's branches are held": queue.get("conditions", {}).get("ref_name")
        == {"include": '["refs/heads/gh-readonly-queue/**/*"]', "exclude": "[]"},
        "the queue's rules are active": queue.get("enforcement") == "active",
        "the queue alone bypasses": bypass
        == {"actor_type": "Integration", "actor_id": "var.merge_queue_app_id", "bypass_mode": "always"},
        "nobody makes or moves its branches": {name for name, value in held.items() if value == "true"}
        == {"creation", "update", "deletion", "non_fast_forward"},
    }
    return [name for name, holds in facts.items() if not holds]


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
