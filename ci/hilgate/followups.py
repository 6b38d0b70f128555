"""Steps that a build uploads once it knows more: reruns of failing checks, and the verdict of a complete rerun."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from buildkite_sdk.schema import (
    CommandStep,
    NotifyGithubCommitStatus,
    NotifyGithubCommitStatusGithubCommitStatus,
)

from hilgate.buildkite import (
    JOBS_FOLDER,
    PLAN_FILE,
    RETRY,
    InvalidPipelineError,
    infrastructure_retry,
    job,
    sound,
)
from hilgate.names import CPU
from hilgate.pipeline_lint import CONTEXT, RECHECK_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hilgate.declare import Declarations
    from hilgate.model import Plan, PlannedStep

RECHECK_FOLDER_SUFFIX = ".recheck"
RECHECK_RETRY = infrastructure_retry(sick_limit=3)
"""A recheck also ends as from a sick node where it lands on the node that it should avoid."""

KEY_CHARACTERS = 100
"""Longest key that Buildkite takes."""

REQUIRED_KEY = "required"
VERDICT_MINUTES = 15


def recheck_yaml(plan: Plan, pending: Mapping[str, Sequence[str]], *, branch: str = "") -> str:
    """The steps that run failing checks once more, each on another node of the same queue; empty when nothing failed.

    Args:
        plan: The plan they failed in.
        pending: Planned key -> ids of its checks that need it.
        branch: As for `pipeline_yaml`.

    Raises:
        InvalidPipelineError: A key is not in the plan, or what it leads to breaks an invariant.
    """
    steps = {step.key: step for step in plan.steps}
    if unknown := sorted(set(pending) - set(steps)):
        raise InvalidPipelineError(
            f"step {unknown[0]!r} is not in the plan", where="what failed", remedy="give the plan that was run"
        )
    rechecks = [_recheck(steps[key], len(ids), plan, branch) for key, ids in sorted(pending.items()) if ids]
    return sound(rechecks, secrets=not plan.fork, rechecks=True) if rechecks else ""


def recheck_key(key: str) -> str:
    """Key of the step that reruns the failing checks of a planned step; long keys are shortened and stay distinct."""
    room = KEY_CHARACTERS - len(RECHECK_SUFFIX)
    if len(key) > room:
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        key = f"{key[: room - len(digest) - 1]}-{digest}"
    return key + RECHECK_SUFFIX


def required_yaml(declarations: Declarations) -> str:
    """The one step that posts the required context of a complete rerun: it judges once more what is there."""
    cpu = ((queue.memory_gib, name) for name, queue in declarations.agents.queues.items() if queue.device == CPU)
    context = NotifyGithubCommitStatusGithubCommitStatus(context=CONTEXT)
    step = CommandStep(
        key=REQUIRED_KEY,
        label="verdict of a complete rerun",
        command=[
            "rm -rf results",
            f"buildkite-agent artifact download {PLAN_FILE} . --step plan",
            f"buildkite-agent artifact download '{JOBS_FOLDER}/**/*' .",
            f"hilgate judge --plan {PLAN_FILE} --jobs {JOBS_FOLDER} --results results",
            "test -s results/verdict.json",
        ],
        agents={"queue": min(cpu)[1]},
        timeout_in_minutes=VERDICT_MINUTES,
        artifact_paths=["results/verdict.json"],
        notify=[NotifyGithubCommitStatus(github_commit_status=context)],
        retry=RETRY,
    )
    return sound([step], posts=REQUIRED_KEY)


def _recheck(step: PlannedStep, ids: int, plan: Plan, branch: str) -> CommandStep:
    folder = f"{JOBS_FOLDER}/{step.key}{RECHECK_FOLDER_SUFFIX}"
    return job(
        step,
        plan,
        branch=branch,
        key=recheck_key(step.key),
        label=f"{step.label}: {ids} failing {'check' if ids == 1 else 'checks'} on another node",
        folder=folder,
        command=[
            f"buildkite-agent artifact download '{JOBS_FOLDER}/{step.key}/**/*' .",
            f"python3 -m hilgate.agent.job {step.key} --recheck --plan {PLAN_FILE} --results {folder}",
        ],
        retry=RECHECK_RETRY,
    )
