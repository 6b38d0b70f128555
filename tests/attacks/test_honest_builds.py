# SPDX-License-Identifier: Apache-2.0
"""Who: somebody honest. What: main, a pull request of a fork and of a branch, a build of the merge queue, from the flow
that is uploaded to the status that is posted, by the real hooks, planner, jobs and judge.

What must happen: what refuses attackers lets them pass. A fork that changes what is tested needs nothing of a host but
the image that main has built; where there is none it is red, and the verdict says who can start what it cannot.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.builds import rows_of
from support.flow import DIGEST, FORK, TEST, Build, Machine
from support.plans import git


def test_main_builds_its_image_on_a_host_and_is_remembered(host: Machine, main: Build) -> None:
    jobs = ["upload", "plan", "image-cpu", "one-cpu", "recheck", "verdict"]
    assert main.statuses == dict.fromkeys(jobs, 0), main.log()
    assert main.posted == 0
    assert [DIGEST in line for line in main.containers] == [True]
    assert len(rows_of(host.history)["builds"]) == 1


@pytest.mark.parametrize("kind", ["fork", "branch"])
def test_a_pull_request_is_green_without_a_step_on_a_host(main: Build, green: dict[str, Build], kind: str) -> None:
    found = green[kind]
    assert found.statuses == dict.fromkeys(main.statuses.keys() - {"image-cpu"}, 0), found.log()
    assert found.posted == 0
    plan = json.loads(found.artifact("plan", "results/plan.json"))
    assert (plan["fork"], plan["digests"], plan["protected_changes"]) == (kind == "fork", {"cpu": DIGEST}, [])
    assert [DIGEST in line for line in found.containers] == [True]


def test_a_merge_queue_decides_on_its_own_change_alone(host: Machine, main: Build) -> None:
    before = host.change("0.95  # a change that is ahead in the queue")
    (host.clone / "tests/test_a.py").write_text(f"{TEST}    assert limits.FLOOR < 1\n")
    git(host.clone, "commit", "-qam", "behind it")
    branch = "gh-readonly-queue/main/pr"
    git(host.clone, "push", "-qf", "origin", f"{before}:refs/heads/{branch}-7", f"HEAD:refs/heads/{branch}-8")
    queue = {"MERGE_QUEUE_BASE_BRANCH": "main", "MERGE_QUEUE_BASE_COMMIT": before, "PULL_REQUEST": "false"}
    commit = git(host.clone, "rev-parse", "HEAD")
    found = host.build(host.clone, commit, BRANCH=f"{branch}-8", **queue)
    assert (set(found.statuses.values()), found.posted) == ({0}, 0), found.log()
    plan = json.loads(found.artifact("plan", "results/plan.json"))
    assert (plan["merge_base"], plan["changed_files"], plan["fork"]) == (before, ["tests/test_a.py"], False)
    assert set(found.statuses) == main.statuses.keys() - {"image-cpu"}
    assert len(rows_of(host.history)["builds"]) == 1, "what is not merged yet is not remembered"


def test_a_fork_without_a_built_image_reads_who_can_start_it(host: Machine) -> None:
    found = replace(host, history=host.folder / "none").build(host.clone, host.change("1.9 / 2"), **FORK)
    assert (found.statuses["image-cpu"], found.posted) == (5, 4)
    who = "gate-owners may push the commit to a branch here"
    assert who in found.artifact("verdict", "results/annotation.md")
    assert found.containers == []
