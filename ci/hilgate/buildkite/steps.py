# SPDX-License-Identifier: Apache-2.0
"""Generate Buildkite steps from a plan: those of a change, reruns of failing checks, the verdict of a complete rerun.

buildkite-sdk 0.12.0 ignores keys that it does not know, so a misspelt `command` becomes a step that does nothing and
passes. Four guards stand against that: model constructors only (never dicts), mypy strict on this file, unknown keys
forbidden on the SDK's models, and `hilgate.buildkite.lint` over the emitted text. The text is then validated against
Buildkite's schema. Nothing emitted contains a `$`, so it means the same whether or not the uploader interpolates.

What is generated is uploaded by the steps of `.buildkite/*.yml`, which hold the plan, the recheck and the verdict.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from buildkite_sdk import schema
from buildkite_sdk.pipeline import Pipeline
from buildkite_sdk.schema import (
    AutomaticRetry,
    CommandStep,
    CommandStepManualRetryObject,
    CommandStepRetry,
    GroupStep,
    NotifyGithubCommitStatus,
    NotifyGithubCommitStatusGithubCommitStatus,
)
from pydantic import BaseModel

from hilgate.buildkite import pods
from hilgate.buildkite.lint import LOST, lint, schema_problems
from hilgate.errors import DeclarationError, Exit, NothingSelectedError
from hilgate.model import JOBS_FOLDER, PLAN_FILE
from hilgate.model.declaration import POSTED_BY
from hilgate.names import APPROVED_KEY_SUFFIX, RECHECK_KEY_SUFFIX, RECHECK_SUFFIX, approved_key, recheck_key
from hilgate.text import shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hilgate.declare.load import Declarations
    from hilgate.model import ImageDigest, Key
    from hilgate.model.plan import Plan, PlannedStep, PlanProfile

MARGIN_MINUTES = 4
"""What Buildkite's timeout adds to the step's own: checkout, preflight and plan before it, and after it the minute that
`hilgate.run.process` keeps for the results."""

BETWEEN_MINUTES = 2
"""More of it for each further step of a shared job: its copy of the checkout, its container and the end of that."""

IMAGE_MINUTES = 15
"""More of it for a step in an image: a ROCm image is tens of GB, and a fresh node pulls it first."""

LONGEST_NAMES = 150
"""Characters of a shared job's label that name its steps."""

MERGE_QUEUE_BRANCH = "gh-readonly-queue/"
"""What GitHub's merge queue calls its branches."""

MERGE_QUEUE_PRIORITY = 200
PRIORITIES: dict[PlanProfile, int] = {"pr": 100, "nightly": -10, "release": 0}
"""Higher runs first (Buildkite's default is 0): what people wait for goes before what the night does."""

MANUAL = CommandStepManualRetryObject(
    allowed=False,
    reason="A second try would hide what the first one found. For a fresh build of some models: hilgate rerun",
)


BY_HAND = CommandStepManualRetryObject(allowed=True, permit_on_passed=False)
"""Where the project allows it: the judge refuses a pass after a try that had answered (`judge.earlier`)."""


def infrastructure_retry(*, sick_limit: int, manual: CommandStepManualRetryObject = MANUAL) -> CommandStepRetry:
    """Infrastructure only. A failed check (1) or an inconclusive one (6) is an answer, and is never asked for again.

    Nor is a command that was killed (137) while its agent lived: a test can do that to its own step, and a step that
    needs too much memory needs it everywhere. Where the machine is taken away, the agent is lost or stopped.
    """
    return CommandStepRetry(
        automatic=[
            AutomaticRetry(exit_status=-1, limit=2),  # the agent was lost
            AutomaticRetry(exit_status=int(Exit.CANNOT_RUN_HERE), limit=1),
            AutomaticRetry(exit_status=int(Exit.SICK_NODE), limit=sick_limit),  # the agent has paused itself
            AutomaticRetry(exit_status=LOST, limit=2),
            AutomaticRetry(signal_reason="agent_stop", limit=2),
            AutomaticRetry(signal_reason="agent_refused", limit=2),
            AutomaticRetry(signal_reason="stack_error", limit=1),
        ],
        manual=manual,
    )


RETRY = infrastructure_retry(sick_limit=2)
RETRY_BY_HAND = infrastructure_retry(sick_limit=2, manual=BY_HAND)
RECHECK_RETRY = infrastructure_retry(sick_limit=3)
"""A recheck also ends as from a sick node where it lands on the node that it should avoid."""


class InvalidPipelineError(DeclarationError):
    """The declarations lead to a pipeline that Buildkite would refuse, or run differently than planned."""


def pipeline_yaml(plan: Plan, declarations: Declarations, *, branch: str = "") -> str:
    """The steps of a plan for the agents as YAML text, linted and valid by Buildkite's schema; empty if none may start.

    Of `branch`, the one that is built, those of the merge queue go first.

    Raises:
        InvalidPipelineError: It breaks an invariant; says which and where.
        NothingSelectedError: The plan has no steps.
    """
    if plan.local:
        raise InvalidPipelineError(
            "the plan is for one machine", where=f"profile {plan.profile}", remedy="make the plan with --profile pr"
        )
    if not plan.steps and plan.held_up:
        return ""
    if not plan.steps:
        raise NothingSelectedError(
            "the plan has no steps", remedy="plan a change that selects a step: a pipeline over nothing would be green"
        )
    groups: list[GroupStep | CommandStep] = []
    waiting = _waiting(plan, declarations)
    if waiting:
        groups.append(_pods_step(plan, declarations))
    groups += _groups(plan, declarations, branch, [key for key in plan.jobs() if key not in waiting])
    return emit(groups, secrets=not plan.fork, manual=plan.manual_retry)


def pods_yaml(plan: Plan, digests: Mapping[Key, ImageDigest], declarations: Declarations, *, branch: str = "") -> str:
    """The steps of a plan that `pipeline_yaml` left out, now that jobs of this build have built their images.

    Raises:
        InvalidPipelineError: An image was not built, or a step breaks an invariant.
    """
    waiting, known = _waiting(plan, declarations), plan.jobs().keys()
    plan = plan.model_copy(update={"digests": dict(digests)})
    groups = _groups(plan, declarations, branch, [key for key in plan.jobs() if key in waiting])
    return emit(groups, secrets=not plan.fork, manual=plan.manual_retry, known=frozenset(known - waiting))


def _waiting(plan: Plan, declarations: Declarations) -> set[Key]:
    """Jobs in pods of an image without a digest, which must be in the pod's own text, and all that wait for them."""
    waiting: set[Key] = set()
    job_of = {step.key: step.job_key for step in plan.steps}
    for key, steps in plan.jobs().items():
        needs = {job_of.get(need, need) for need in steps[0].depends_on}
        if _lacks_digest(steps[0], plan, declarations) or not waiting.isdisjoint(needs):
            waiting.add(key)
    return waiting


def _lacks_digest(step: PlannedStep, plan: Plan, declarations: Declarations) -> bool:
    queue = declarations.agents.queues.get(step.queue or "")
    return bool(queue and queue.pods and step.image and step.image not in plan.digests)


def _pods_step(plan: Plan, declarations: Declarations) -> CommandStep:
    """The step that uploads those that wait for an image, as soon as it is built. It runs where plans are made.

    Raises:
        InvalidPipelineError: No step of the plan builds an image that a pod needs.
    """
    nameless = [step for step in plan.steps if _lacks_digest(step, plan, declarations)]
    images = {step.image for step in nameless if step.image}
    providers = {step.step.provides: step.job_key for step in plan.steps if step.step.provides}
    if missing := [step for step in nameless if step.image not in providers]:
        raise InvalidPipelineError(
            f"step {missing[0].key!r} runs in a pod of the image {missing[0].image!r}, which nobody has built",
            where=f"queues.{missing[0].queue} of ci/agents.yaml",
            remedy="build it on the default branch, or plan the step that provides it: a pod names its image by digest",
        )
    return CommandStep(
        key=PODS_KEY,
        label="pods of images that this build has made",
        command=[
            "rm -rf results",
            f"buildkite-agent artifact download results/{PLAN_FILE} . --step plan",
            f"hilgate fetch --plan results/{PLAN_FILE}",
            f"hilgate pipeline --plan results/{PLAN_FILE} --built results/{JOBS_FOLDER} > results/pods.yml",
            "buildkite-agent pipeline upload --reject-parse-warnings --no-interpolation results/pods.yml",
        ],
        agents={"queue": declarations.gate_queue()},
        depends_on=sorted({providers[image] for image in images}),
        timeout_in_minutes=10,
        retry=RETRY,
    )


def _groups(
    plan: Plan, declarations: Declarations, branch: str, keys: Collection[Key]
) -> list[GroupStep | CommandStep]:
    """The jobs of these keys, by area."""
    titles = {area.area: area.title for area in declarations.areas}
    groups: list[GroupStep | CommandStep] = []
    jobs = [steps for key, steps in plan.jobs().items() if key in keys]
    for area in dict.fromkeys(step.area for step in plan.steps):
        own = [_job(steps, plan, declarations, branch) for steps in jobs if len(steps) == 1 and steps[0].area == area]
        groups += [GroupStep(group=titles.get(area, area), key=area, steps=own)] if own else []
    if small := [_job(steps, plan, declarations, branch) for steps in jobs if len(steps) > 1]:
        groups.append(GroupStep(group="small steps, several in a job", steps=small))
    return groups


def _job(
    steps: Sequence[PlannedStep],
    plan: Plan,
    declarations: Declarations,
    branch: str,
    *,
    failed: int = 0,
    failed_on: str = "",
    approved: bool = False,
) -> CommandStep:
    """The job of planned steps, or the one that runs the `failed` failing checks of one once more on another node.

    With `approved` it runs the steps once more, over the files that were approved.

    Raises:
        InvalidPipelineError: No queue offers the steps' device, or a pod cannot be named.
    """
    step = steps[0]
    if step.queue is None:
        raise InvalidPipelineError(
            f"step {step.key!r} has no queue",
            where="ci/agents.yaml",
            remedy=f"make the plan with --profile pr, or give {step.device} a queue",
        )
    key, label = step.key, _label(steps)
    folders = [f"results/{JOBS_FOLDER}/{member.key}" for member in steps]
    command = [f"buildkite-agent artifact download results/{PLAN_FILE} . --step plan"]
    job_of = {member.key: member.job_key for member in plan.steps}
    lock, flag, needs = None, "", list(dict.fromkeys(job_of.get(need, need) for need in step.depends_on))
    if failed:
        key, folders, flag = recheck_key(key), [folders[0] + RECHECK_SUFFIX], " --recheck"
        label += f": {failed} failing {'check' if failed == 1 else 'checks'} on another node"
    elif approved:
        key, flag, needs = approved_key(key), " --approved", [approved_key(need) for need in needs]
        label += ", as approved"
    elif step.step.provides in plan.images:
        # Of two builds of the same contents the second waits, and then finds what the first has built.
        lock = f"hilgate/image/{step.step.provides}/{plan.images[step.step.provides][:16]}"
    options = f"{flag} --plan results/{PLAN_FILE} --results {folders[0]}"
    minutes = sum(member.step.timeout_minutes for member in steps) + BETWEEN_MINUTES * (len(steps) - 1)
    return CommandStep(
        key=key,
        label=label,
        command=[*command, f"hilgate job {' '.join(member.key for member in steps)}{options}"],
        agents={"queue": step.queue},
        depends_on=None if failed else needs or None,
        priority=MERGE_QUEUE_PRIORITY if branch.startswith(MERGE_QUEUE_BRANCH) else PRIORITIES[plan.profile],
        concurrency=1 if lock else None,
        concurrency_group=lock,
        concurrency_method="eager" if lock else None,
        timeout_in_minutes=minutes + MARGIN_MINUTES + (IMAGE_MINUTES if step.image else 0),
        artifact_paths=[f"{folder}/**/*" for folder in folders],  # the hooks' notes go to the first
        plugins=_plugins(step, step.queue, plan, declarations, failed_on),
        secrets=None if plan.fork else list(step.step.secrets) or None,
        retry=RECHECK_RETRY if failed else RETRY_BY_HAND if plan.manual_retry else RETRY,
    )


def _label(steps: Sequence[PlannedStep]) -> str:
    """What a person reads of a job; of a shared one its declared steps, as far as there is room."""
    if len(steps) == 1:
        return steps[0].label
    named = ", ".join(member.step.key for member in steps)
    return f"{len(steps)} steps ({steps[0].device}): {shorten(named, LONGEST_NAMES)}"


def _plugins(
    step: PlannedStep, queue: str, plan: Plan, declarations: Declarations, avoid: str = ""
) -> list[str | dict[str, Any]] | None:
    """The pod of a job whose queue has pods; None on hosts.

    Raises:
        InvalidPipelineError: The image of the step has no digest yet.
    """
    declared = declarations.agents.queues.get(queue)
    if declared is None or declared.pods is None:
        return None
    digest = plan.digests.get(step.image or "")
    if digest is None:
        what = f"its image {step.image!r} was not built" if step.image else "it has no image"
        raise InvalidPipelineError(
            f"step {step.key!r} runs in a pod, and {what}",
            where=f"queues.{queue} of ci/agents.yaml",
            remedy="see the step that builds the image; what builds images itself needs a queue of hosts",
        )
    return [pods.plugin(step, queue, declared.pods, digest, fork=plan.fork, avoid=avoid)]


def emit(
    steps: Sequence[GroupStep | CommandStep],
    *,
    secrets: bool = True,
    suffix: str = "",
    posts: str = "",
    manual: bool = False,
    known: frozenset[Key] = frozenset(),
) -> str:
    """Emit, lint and validate. `hilgate` on hosts is that of the merge base; `known` steps are uploaded already.

    Raises:
        InvalidPipelineError: With every problem found.
    """
    text = Pipeline(steps=list(steps)).to_yaml(sort_keys=False, width=80, allow_unicode=True)
    problems = lint(text, secrets=secrets, suffix=suffix, posts=posts, manual=manual, known=known)
    problems = problems or schema_problems(text)
    if problems:
        raise InvalidPipelineError(
            "the generated pipeline is not sound: " + "; ".join(problems),
            where="ci/areas",
            remedy="correct the step that is named",
        )
    return text


def _forbid_unknown_keys() -> None:
    """Make the SDK's models refuse what they would drop."""
    models: list[type[BaseModel]] = [Pipeline]
    models += [model for _, model in inspect.getmembers(schema, inspect.isclass) if issubclass(model, BaseModel)]
    models.remove(BaseModel)
    for model in models:
        model.model_config["extra"] = "forbid"
    for model in models:
        model.model_rebuild(force=True)


_forbid_unknown_keys()

REQUIRED_KEY = "required"
PODS_KEY = "pods"


def recheck_yaml(
    plan: Plan,
    pending: Mapping[str, Sequence[str]],
    declarations: Declarations,
    *,
    nodes: Mapping[str, str] | None = None,
    branch: str = "",
) -> str:
    """The steps that run failing checks once more, each on another node of the same queue; empty when nothing failed.

    `pending` has the ids of its checks that need it by planned key, `nodes` where they failed.

    Raises:
        InvalidPipelineError: A key is not in the plan, or what it leads to breaks an invariant.
    """
    steps = {step.key: step for step in plan.steps}
    if unknown := sorted(set(pending) - set(steps)):
        raise InvalidPipelineError(
            f"step {unknown[0]!r} is not in the plan", where="what failed", remedy="give the plan that was run"
        )
    rechecks = [
        _job([steps[key]], plan, declarations, branch, failed=len(ids), failed_on=(nodes or {}).get(key, ""))
        for key, ids in sorted(pending.items())
        if ids
    ]
    return emit(rechecks, secrets=not plan.fork, suffix=RECHECK_KEY_SUFFIX) if rechecks else ""


def approved_yaml(plan: Plan, declarations: Declarations, *, branch: str = "") -> str:
    """All steps of a plan once more, over the files that were approved."""
    steps = [_job(steps, plan, declarations, branch, approved=True) for steps in plan.jobs().values()]
    return emit(steps, secrets=not plan.fork, suffix=APPROVED_KEY_SUFFIX, manual=plan.manual_retry)


def required_yaml(declarations: Declarations) -> str:
    """The one step that posts the required context of a complete rerun: it judges once more what is there."""
    queue = declarations.gate_queue()
    if queue is None:
        raise InvalidPipelineError("no queue offers the cpu", where="ci/agents.yaml", remedy="declare one")
    context = NotifyGithubCommitStatusGithubCommitStatus(context=declarations.project.status)
    step = CommandStep(
        key=REQUIRED_KEY,
        label="verdict of a complete rerun",
        command=[
            "rm -rf results",
            f"buildkite-agent artifact download results/{PLAN_FILE} . --step plan",
            f"hilgate fetch --plan results/{PLAN_FILE}",
            f"hilgate judge --plan results/{PLAN_FILE} --jobs results/{JOBS_FOLDER} --results results",
            "test -s results/verdict.json",
        ],
        agents={"queue": queue},
        timeout_in_minutes=15,
        artifact_paths=["results/verdict.json"],
        notify=[NotifyGithubCommitStatus(github_commit_status=context, step_if=POSTED_BY)],
        retry=RETRY,
    )
    return emit([step], posts=REQUIRED_KEY)
