# SPDX-License-Identifier: Apache-2.0
"""Lint Buildkite pipelines, generated and in `.buildkite`, for what Buildkite's schema cannot see. Pure.

Texts in, sentences out; no sentence means sound. The rules hold for every step that a required verdict rests on: each
of them names a way in which a build could otherwise turn green, or never end, without having done its work.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from importlib import resources
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml

from hilgate.declare.check import find_cycle
from hilgate.errors import Exit
from hilgate.model.declaration import BUILDKITE_KEY, POSTED_BY, RESERVED_KEYS
from hilgate.names import APPROVED_KEY_SUFFIX, RECHECK_KEY_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hilgate.declare.load import Declarations

MAX_STEPS = 500
"""Steps per upload (buildkite-agent, clicommand/pipeline_upload.go)."""

STATIC_KEYS = RESERVED_KEYS | {"choose", "approve", "approved", "required", "bundle", "sign", "waiting"}
"""Step keys of the files in `.buildkite`, which share a build with generated steps."""

SUFFIXES = (RECHECK_KEY_SUFFIX, APPROVED_KEY_SUFFIX)
"""How the keys of steps end that run once more in the same build."""

KILLED, LOST = 137, 255
"""What a job ends with that was killed (128 + SIGKILL: by itself, or for memory), and one whose executor was."""

INFRASTRUCTURE_EXITS = frozenset({-1, int(Exit.CANNOT_RUN_HERE), int(Exit.SICK_NODE), KILLED, LOST})
INFRASTRUCTURE_REASONS = frozenset(
    {"agent_stop", "agent_refused", "agent_incompatible", "stack_error", "process_run_error"}
)
GREENING = ("soft_fail", "block", "input", "skip", "if", "if_changed", "branches", "matrix", "trigger")
"""Words that turn a failure or a skip green, or a step into several under one key."""

FLOWS = {
    "pipeline.yml": ("plan", "wait", "recheck", "wait", "verdict"),
    "rerun.yml": ("choose", "plan", "wait", "recheck", "wait", "verdict"),
    "release.yml": ("plan", "wait", "recheck", "wait", "verdict", "bundle", "sign"),
    "approve.yml": ("approve", "approved", "wait", "required"),
    "waiting.yml": ("waiting",),
}
"""The files of `.buildkite` and the steps of each, in order."""

SIGNING = "sign"
"""The step that signs a release: it alone runs where the key is."""

POSTING = {"pipeline.yml": "verdict", "approve.yml": "required"}
"""The only steps that post the required status, in the files that every repository has."""

Step = dict[str, Any]
_load = functools.partial(yaml.load, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C if it can be
_LONE_DOLLAR = re.compile(r"(?<!\$)(?:\$\$)*\$(?!\$)")


def lint(
    text: str,
    *,
    secrets: bool = True,
    suffix: str = "",
    posts: str = "",
    manual: bool = False,
    known: frozenset[str] = frozenset(),
) -> list[str]:
    """Problems of a generated pipeline.

    `text` is uploaded without interpolation. A build of a fork has no `secrets`; with `manual` a person may try a job
    again that has not passed; the keys of steps that run once more
    end in `suffix`, one of `SUFFIXES`; `posts` is the key of the one step that may post a status, which may then be one
    of `STATIC_KEYS`. Steps may wait for `known` keys, which the build has already.
    """
    pipeline: Step = _load(text)
    problems = [f"it sets {word!r} for the whole build" for word in pipeline if word not in ("env", "steps")]
    if "$" in text:
        problems.append("it contains '$', which an uploader may interpolate")
    steps = [step for top in pipeline["steps"] for step in (top, *top.get("steps", []))]
    keys = [str(step["key"]) for step in steps if step.get("key")]
    problems += _key_problems(keys)
    problems += [f"key {key!r} belongs to .buildkite" for key in keys if key in STATIC_KEYS and key != posts]
    problems += [
        f"key {key!r} {'ends' if key.endswith(one) else 'does not end'} in {one!r}"
        for key in keys
        for one in SUFFIXES
        if key.endswith(one) is not (one == suffix) and key != posts
    ]
    for step in steps:
        found = _step_problems(step, manual=manual) if "group" not in step else _greening(step)
        if "notify" in step and step.get("key") != posts:
            found.append("notifies, which is the verdict's alone")
        if step.get("secrets") and not secrets:
            found.append("gives secrets to a fork's build")
        problems += [f"step {step.get('key', '?')!r} {problem}" for problem in found]
    return problems + _graph_problems(steps, known)


def lint_files(texts: Mapping[str, str], declarations: Declarations) -> list[str]:
    """Problems of the files in `.buildkite` (name -> text): a flow of fixed shape each, and one step that posts.

    They stand beside what is declared: the status, who approves, the queues.
    """
    problems = [f"{name} is missing" for name in POSTING if name not in texts]
    for name, text in texts.items():
        problems += [f"{name}: {problem}" for problem in _file_problems(name, text, declarations)]
    return problems


def _file_problems(name: str, text: str, declarations: Declarations) -> Iterator[str]:
    """What is wrong with one static pipeline."""
    try:
        problems = schema_problems(text)
    except yaml.YAMLError as error:
        problems = [f"is no YAML: {' '.join(str(error).split())}"]
    if problems:  # what follows takes the shape that the schema says for granted
        yield from problems
        return
    pipeline: Step = _load(text)
    project = declarations.project
    steps: list[Step] = [step if isinstance(step, dict) else {str(step): None} for step in pipeline["steps"]]
    shape = tuple("wait" if "wait" in step else str(step.get("key", "?")) for step in steps)
    if shape != FLOWS.get(name):
        yield f"its steps are {', '.join(shape)}, not {', '.join(FLOWS.get(name, ('none',)))}"
    yield from _build_problems(pipeline, text)
    yield from _key_problems([step["key"] for step in steps if step.get("key")])
    yield from _graph_problems(steps, STATIC_KEYS if name == "approve.yml" else frozenset())
    for step in steps:
        if "wait" in step:
            if step.get("continue_on_failure") is not True:
                yield "a wait stops at a failure, and no verdict is posted"
            continue
        if "input" in step or "block" in step:
            found = _input_problems(step, project.approvers)
        else:
            found = _step_problems(step, answers=False) + _queue_problems(step, declarations)
        if any(notice.get("if") != POSTED_BY for notice in step.get("notify", [])):
            found.append("posts in builds that nobody asked to merge: its notify needs the condition POSTED_BY")
        contexts = [notice.get("github_commit_status", {}).get("context") for notice in step.get("notify", [])]
        if contexts != ([project.status] if POSTING.get(name) == step.get("key") else []):
            found.append(
                f"posts {contexts or 'nothing'}; {project.status} is posted by {POSTING.get(name, 'no step here')}"
            )
        yield from (f"step {step.get('key', '?')!r} {problem}" for problem in found)


def _build_problems(pipeline: Step, text: str) -> Iterator[str]:
    """Problems of what stands above the steps, and of the text."""
    if python := [variable for variable in pipeline.get("env") or {} if variable.startswith("PYTHON")]:
        yield f"it sets {python[0]}: what decides is Python"
    if "notify" in pipeline:
        yield "notifies for the whole build, which a step cannot take back"
    if _LONE_DOLLAR.search(text):
        yield "a single '$' is replaced when the file is uploaded; the job's own is '$$'"


def _key_problems(keys: list[str]) -> list[str]:
    problems = [f"key {key!r} is used twice" for key, count in sorted(Counter(keys).items()) if count > 1]
    if len(keys) > MAX_STEPS:
        problems.append(f"{len(keys)} steps, but one upload may hold {MAX_STEPS}")
    return problems


def _needs(step: Step) -> list[str]:
    """Keys in `depends_on`, whichever of its four forms it has."""
    needs = step.get("depends_on") or []
    needs = [needs] if isinstance(needs, str) else needs
    return [need["step"] if isinstance(need, dict) else need for need in needs]


def _graph_problems(steps: list[Step], known: frozenset[str] = frozenset()) -> list[str]:
    """Dependencies that do not exist, here or in `known`, and cycles; a group is met when all its steps are."""
    graph = {str(step["key"]): _needs(step) for step in steps if step.get("key")}
    problems = [
        f"step {key!r} depends on {need!r}, which does not exist"
        for key, needs in graph.items()
        for need in needs
        if need not in graph and need not in known
    ]
    for step in steps:
        for inner in step.get("steps", []):
            if step.get("key") and inner.get("key"):
                graph[inner["key"]] = [*graph[inner["key"]], *_needs(step)]
                graph[step["key"]] = [*graph[step["key"]], inner["key"]]
    if cycle := find_cycle(graph):
        problems.append("steps wait for each other: " + " -> ".join(cycle))
    return problems


def _greening(step: Step) -> list[str]:
    return [f"has {word!r}, which can turn a failure or a skip green" for word in GREENING if word in step]


def _step_problems(step: Step, *, answers: bool = True, manual: bool = False) -> list[str]:
    """Problems of a command step; `answers` where its exit status says something about the change."""
    rules = {
        "has no key that Buildkite takes": not BUILDKITE_KEY.fullmatch(step.get("key") or ""),
        "has no command": not "".join(step.get("command") or []).strip(),
        "has no queue": not (step.get("agents") or {}).get("queue"),
        "has no timeout": not step.get("timeout_in_minutes"),
        "has one of concurrency and concurrency_group, and Buildkite needs both": (
            ("concurrency" in step) is not ("concurrency_group" in step)
        ),
    }
    problems = [problem for problem, wrong in rules.items() if wrong]
    return _greening(step) + problems + _retry_problems(step.get("retry") or {}, answers=answers, manual=manual)


def _retry_problems(retry: Step, *, answers: bool, manual: bool) -> list[str]:
    problems = []
    automatic = retry.get("automatic") or []
    for rule in [automatic] if isinstance(automatic, dict) else automatic if isinstance(automatic, list) else [{}]:
        statuses = rule.get("exit_status", [])
        statuses = statuses if isinstance(statuses, list) else [statuses]
        by_status = statuses and (INFRASTRUCTURE_EXITS - ({KILLED} if answers else set())).issuperset(statuses)
        by_reason = rule.get("signal_reason") in INFRASTRUCTURE_REASONS and "exit_status" not in rule
        if not (by_status or by_reason):
            problems.append(f"retries {rule or 'everything'}, which is not infrastructure")
    by_hand = retry.get("manual") or {}
    permitted = manual and by_hand == {"allowed": True, "permit_on_passed": False}
    if answers and not permitted and by_hand.get("allowed") is not False:
        problems.append("can be retried by hand, which leaves out the results of the first try")
    return problems


def _queue_problems(step: Step, declarations: Declarations) -> list[str]:
    queue = (step.get("agents") or {}).get("queue")
    signs = step.get("key") == SIGNING
    right = declarations.signing_queue() if signs else declarations.gate_queue()
    of = "that of what signs" if signs else "that of what decides"
    return [f"runs on the queue {queue!r} and not on {right}, {of}"] if queue not in {None, right} else []


def _input_problems(step: Step, approvers: str) -> list[str]:
    approval = step.get("key") == "approve"
    rules = {
        "has no key that Buildkite takes": not BUILDKITE_KEY.fullmatch(step.get("key") or ""),
        f"lets {step.get('allowed_teams') or 'anybody'} approve, and not {approvers}": (
            approval and step.get("allowed_teams") != [approvers]
        ),
        "can be left out by a condition": approval and "if" in step,
        "is no block step, after which alone Buildkite names who approved": approval and "block" not in step,
    }
    return [problem for problem, wrong in rules.items() if wrong]


@functools.cache
def _schema() -> jsonschema.Draft7Validator:
    text = resources.files("buildkite_sdk").joinpath("schema.json").read_text("utf-8")
    return jsonschema.Draft7Validator(json.loads(text))


def schema_problems(text: str) -> list[str]:
    """Violations of Buildkite's pipeline schema as its SDK ships it, as `path: message`."""
    validator = _schema()
    errors = sorted(validator.iter_errors(_load(text)), key=lambda error: list(map(str, error.path)))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]
