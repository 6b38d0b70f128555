"""A plan as a Buildkite pipeline: the only module that knows Buildkite's vocabulary.

buildkite-sdk 0.12.0 ignores keys that it does not know, so a misspelt `command` becomes a step that does nothing and
passes. Four guards stand against that: model constructors only (never dicts), mypy strict on this file, unknown keys
forbidden on the SDK's models, and `lint` below over the emitted text. The text is then validated against Buildkite's
schema. Nothing emitted contains a `$`, so it means the same whether or not the uploader interpolates.
"""

from __future__ import annotations

import functools
import inspect
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml
from buildkite_sdk import schema
from buildkite_sdk.pipeline import Pipeline
from buildkite_sdk.schema import AutomaticRetry, CommandStep, CommandStepRetry, GroupStep
from pydantic import BaseModel

from hilgate.errors import DeclarationError, Exit, NothingSelectedError
from hilgate.graph import find_cycle
from hilgate.names import BUILDKITE_KEY, CPU

if TYPE_CHECKING:
    from hilgate.declare import Declarations
    from hilgate.model import Plan, PlannedStep

PLAN_FILE = "results/plan.json"
JOBS_FOLDER = "results/jobs"
VERDICT = "verdict"
MAX_STEPS = 500
"""Steps per upload (buildkite-agent, clicommand/pipeline_upload.go)."""

MARGIN_MINUTES = 2
"""What Buildkite's timeout adds to the runner's own: a minute for checkout and plan before the step, and a minute
after it in which the results of a step that timed out are still uploaded."""

VERDICT_MINUTES = 10

RETRY = CommandStepRetry(
    automatic=[
        AutomaticRetry(exit_status=-1, limit=2),  # the agent was lost
        AutomaticRetry(exit_status=int(Exit.CANNOT_RUN_HERE), limit=1),  # sick node: another may do
        AutomaticRetry(signal_reason="agent_stop", limit=2),
        AutomaticRetry(signal_reason="agent_refused", limit=2),
        AutomaticRetry(signal_reason="stack_error", limit=1),
    ]
)
"""Infrastructure only. A failed check (1) or an inconclusive one (6) is an answer, and an answer is never re-rolled."""

INFRASTRUCTURE_EXITS = frozenset({-1, int(Exit.CANNOT_RUN_HERE)})
INFRASTRUCTURE_REASONS = frozenset(
    {"agent_stop", "agent_refused", "agent_incompatible", "stack_error", "process_run_error"}
)
ENV = {"PYTHONPATH": "ci:kernels:evals"}
"""The checkout's own packages, ahead of those that the agent's image carries."""


class InvalidPipelineError(DeclarationError):
    """The declarations lead to a pipeline that Buildkite would refuse, or run differently than planned."""


def pipeline_yaml(plan: Plan, declarations: Declarations) -> str:
    """The pipeline of a `pr` plan as YAML text, linted and valid by Buildkite's schema.

    Raises:
        InvalidPipelineError: It breaks an invariant; says which and where.
        NothingSelectedError: No step of the plan has a queue.
    """
    _forbid_unknown_keys()
    titles = {area.area: area.title for area in declarations.areas}
    groups = []
    for area in dict.fromkeys(step.area for step in plan.steps):
        steps = [_step(step) for step in plan.steps if step.area == area]
        groups.append(GroupStep(group=titles.get(area, area), key=area, steps=steps))
    if not groups:
        raise NothingSelectedError("the plan has no steps", remedy="a pipeline over nothing would be green")
    cpu_queue = min(
        (queue.memory_gib, name) for name, queue in declarations.agents.queues.items() if queue.device == CPU
    )[1]
    verdict = _verdict([step.key for step in plan.steps], cpu_queue)
    text = Pipeline(env=ENV, steps=[*groups, verdict]).to_yaml(sort_keys=False, width=1000, allow_unicode=True)
    problems = lint(text) or schema_problems(text, sdk_schema())
    if problems:
        raise InvalidPipelineError(
            "the generated pipeline is not sound: " + "; ".join(problems),
            where="ci/areas",
            remedy="correct the step that is named",
        )
    return text


def _step(step: PlannedStep) -> CommandStep:
    if step.queue is None:
        raise InvalidPipelineError(
            f"step {step.key!r} has no queue",
            where="ci/agents.yaml",
            remedy=f"make the plan with --profile pr, or give {step.device} a queue",
        )
    folder = f"{JOBS_FOLDER}/{step.key}"
    return CommandStep(
        key=step.key,
        label=step.label,
        command=[
            f"buildkite-agent artifact download {PLAN_FILE} . --step plan",
            f"hilgate run {step.key} --plan {PLAN_FILE} --results {folder}",
        ],
        agents={"queue": step.queue},
        depends_on=list(step.depends_on) or None,
        timeout_in_minutes=step.timeout_minutes + MARGIN_MINUTES,
        artifact_paths=[f"{folder}/**/*"],
        retry=RETRY,
    )


def _verdict(keys: list[str], queue: str) -> CommandStep:
    """The step that always runs, and that alone decides: what left no results did not run."""
    return CommandStep(
        key=VERDICT,
        label="verdict",
        # The agent runs these lines as one `bash -e` script, so the trap posts the annotation after a failed verdict
        # too, and the exit status stays the judge's.
        command=[
            f"buildkite-agent artifact download {PLAN_FILE} . --step plan",
            f"buildkite-agent artifact download '{JOBS_FOLDER}/**/*' . || echo 'no job left results'",
            "trap 'buildkite-agent annotate --context verdict < results/annotation.md || echo no annotation' EXIT",
            f"hilgate judge --plan {PLAN_FILE} --jobs {JOBS_FOLDER} --results results",
        ],
        agents={"queue": queue},
        depends_on=keys,
        allow_dependency_failure=True,
        timeout_in_minutes=VERDICT_MINUTES,
        artifact_paths=["results/verdict.json", "results/report.html", "results/annotation.md", "results/junit.xml"],
        retry=RETRY,
    )


@functools.cache
def _forbid_unknown_keys() -> None:
    """Make the SDK's models refuse what they would drop."""
    models: list[type[BaseModel]] = [Pipeline]
    models += [model for _, model in inspect.getmembers(schema, inspect.isclass) if issubclass(model, BaseModel)]
    models.remove(BaseModel)
    for model in models:
        model.model_config["extra"] = "forbid"
    for model in models:
        model.model_rebuild(force=True)


def lint(text: str) -> list[str]:
    """What Buildkite's schema cannot see, as sentences; empty when the pipeline is sound."""
    pipeline: dict[str, Any] = yaml.safe_load(text)
    steps: list[dict[str, Any]] = []
    keys: list[str] = []
    for top in pipeline["steps"]:
        inner = top.get("steps", [])
        keys += [entry["key"] for entry in (top, *inner) if entry.get("key")]
        steps += inner if "group" in top else [top]
    problems = [f"key {key!r} is used twice" for key in sorted({key for key in keys if keys.count(key) > 1})]
    if len(keys) > MAX_STEPS:
        problems.append(f"{len(keys)} steps, but one upload may hold {MAX_STEPS}")
    if "$" in text:
        problems.append("it contains '$', which an uploader may interpolate")
    for step in steps:
        problems += [f"step {step.get('key', '?')!r} {problem}" for problem in _step_problems(step, set(keys))]
    graph = {step.get("key", "?"): step.get("depends_on") or [] for step in steps}
    if cycle := find_cycle(graph):
        problems.append("steps wait for each other: " + " -> ".join(cycle))
    everything = {step.get("key") for step in steps} - {VERDICT}
    last = next((step for step in steps if step.get("key") == VERDICT), None)
    if last is None or not last.get("allow_dependency_failure") or set(last.get("depends_on") or ()) != everything:
        problems.append(f"{VERDICT!r} does not wait for every step whatever becomes of it")
    return problems


def _step_problems(step: dict[str, Any], keys: set[str]) -> list[str]:
    problems = []
    if not BUILDKITE_KEY.fullmatch(step.get("key") or ""):
        problems.append("has no key that Buildkite takes")
    if not "".join(step.get("command") or []).strip():
        problems.append("has no command")
    if not (step.get("agents") or {}).get("queue"):
        problems.append("has no queue")
    if not step.get("timeout_in_minutes"):
        problems.append("has no timeout")
    problems += [
        f"has {word!r}, which can turn a failure or a skip green"
        for word in ("soft_fail", "block", "input", "skip", "if", "if_changed")
        if word in step
    ]
    problems += [
        f"depends on {need!r}, which does not exist" for need in step.get("depends_on") or () if need not in keys
    ]
    for rule in (step.get("retry") or {}).get("automatic") or ():
        by_status = rule.get("exit_status") in INFRASTRUCTURE_EXITS
        by_reason = rule.get("signal_reason") in INFRASTRUCTURE_REASONS and "exit_status" not in rule
        if not (by_status or by_reason):
            problems.append(f"retries {rule}, which is not infrastructure")
    return problems


def sdk_schema() -> dict[str, Any]:
    """Buildkite's pipeline schema (draft 7) as the SDK ships it."""
    loaded: dict[str, Any] = json.loads(resources.files("buildkite_sdk").joinpath("schema.json").read_text("utf-8"))
    return loaded


def schema_problems(text: str, against: dict[str, Any]) -> list[str]:
    """Violations of a Buildkite pipeline schema, as `path: message`."""
    validator = jsonschema.Draft7Validator(against)
    errors = sorted(validator.iter_errors(yaml.safe_load(text)), key=lambda error: list(map(str, error.path)))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]
