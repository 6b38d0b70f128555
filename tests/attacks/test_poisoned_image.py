# SPDX-License-Identifier: Apache-2.0
"""Who: a branch that may push images, or a job that records one. What: the tag of an image is what it is built from;
another image under it would decide what every later build runs in.

What must happen: the default branch believes no tag: what others run in it has built itself (the build of images:
tests/ci/images/test_build.py). Other builds run in what it recorded, by digest, wherever a tag points to and whatever a
job records. A result from another image counts for nothing, and one from the right image does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.agent import KEY, Agent
from support.jobs import DIGEST, GATHER, Jobs, agents_plan, environment, finished, image, passed

from hilgate.images import __main__ as command
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.images.build import ImageBuild

OURS, POISONED = "sha256:" + "a" * 64, "sha256:" + "e" * 64
MAIN = {"BUILDKITE_PIPELINE_DEFAULT_BRANCH": "main", "BUILDKITE_BRANCH": "main", "BUILDKITE_PULL_REQUEST": "false"}
BUILDS = {
    "main": (MAIN, True),
    "pull request": ({**MAIN, "BUILDKITE_BRANCH": "evil", "BUILDKITE_PULL_REQUEST": "7"}, False),
    "a fork's branch main": ({**MAIN, "BUILDKITE_PULL_REQUEST": "8"}, False),
    "merge queue": ({**MAIN, "BUILDKITE_BRANCH": "gh-readonly-queue/main/pr-7"}, False),
    "local": ({}, False),
}


@pytest.mark.parametrize("build", BUILDS)
def test_the_default_branch_alone_builds_whatever_the_tag_says(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    env, fresh = BUILDS[build]
    for name in MAIN:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    asked: list[ImageBuild] = []
    monkeypatch.setattr(command, "build", lambda wanted, _: asked.append(wanted) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.main(["build", "cpu"])
    assert [one.fresh for one in asked] == [fresh]


def test_a_job_runs_in_the_image_of_the_plan_whatever_a_job_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(tmp_path)
    agent.record(digest=POISONED)
    agent.plan(digests={"rocm": OURS})
    agent.env["HILGATE_REGISTRY"] = "registry.invalid/hilgate"
    assert agent.run(monkeypatch, KEY) == 0
    assert not (agent.bin / "agent-calls").exists(), "nobody is asked"
    assert [call[-1] for call in agent.calls("pull")] == [f"registry.invalid/hilgate/rocm@{OURS}"]
    (run,) = agent.calls("run")
    assert f"registry.invalid/hilgate/rocm@{OURS}" in run
    assert POISONED not in " ".join(run)


@pytest.mark.parametrize(("ran_in", "outcome"), [(DIGEST, Outcome.PASS), (POISONED, Outcome.DID_NOT_RUN)])
def test_a_result_counts_from_the_image_of_the_plan_alone(tmp_path: Path, ran_in: str, outcome: Outcome) -> None:
    jobs = Jobs(tmp_path, agents_plan(digests={"rocm": DIGEST}))
    jobs.job("image-rocm-cpu", image(digest=POISONED))
    jobs.job(GATHER.key, *finished(GATHER, passed(), environment=environment(image=ran_in)))
    assert jobs.ruled().outcome is outcome
    assert jobs.verdict().images == {"rocm": DIGEST}
