"""From a judged results folder to the lines of one build. Pure."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import TYPE_CHECKING

from hilgate.errors import RecordsError
from hilgate.history.lines import BuildLine, CheckLine, StepLine
from hilgate.history.store import Entry
from hilgate.model import Outcome
from hilgate.run import outcome

if TYPE_CHECKING:
    from hilgate.model import Check, Plan, PlannedStep, StepVerdict, Verdict
    from hilgate.run.results import Recorded

MESSAGE_CHARACTERS = 300
"""Of the first line of what is not green; the whole message stays with the build's own artifacts."""


def of_build(plan: Plan, recorded: Recorded, verdict: Verdict, *, branch: str) -> Entry:
    """The lines of a judged build.

    Args:
        plan: What was expected.
        recorded: What arrived.
        verdict: What was decided on it.
        branch: Where the change is going from; empty where nobody says.

    Raises:
        RecordsError: Nothing of the build was recorded, or the verdict is of another plan or lacks a step.
    """
    if not recorded.builds:
        raise RecordsError("no job of this build left a record, so there is nothing to remember")
    verdicts = {step.key: step for step in verdict.steps}
    missing = [step.key for step in plan.steps if step.key not in verdicts]
    if verdict.commit != plan.commit or missing:
        what = f"has no answer for {missing[0]}" if missing else f"is of commit {verdict.commit[:12]}"
        raise RecordsError(f"the verdict {what}", remedy="run `hilgate judge` on these results first")
    began = min(build.started for build in recorded.builds).astimezone(dt.UTC)
    shared = {
        "build": build_id(plan.commit, verdict.plan_digest, recorded.builds[0].tree, began.isoformat()),
        "commit": plan.commit,
        "branch": branch,
        "time": began,
    }
    steps = tuple(_step_line(step, plan, recorded, verdicts[step.key], shared) for step in plan.steps)
    checks = tuple(
        _check_line(check, step, shared)
        for step in plan.steps
        if (attempt := recorded.last(step.key))
        for check in attempt.checks
        if check.numbers or check.outcome is not Outcome.PASS
    )
    records = [attempt.record for attempts in recorded.attempts.values() for attempt in attempts]
    ends = [record.started + dt.timedelta(seconds=record.seconds) for record in records]
    first = min((record.started for record in records), default=began)
    build = BuildLine.model_validate(
        shared
        | {
            "profile": plan.profile,
            "outcome": verdict.outcome,
            "why": short(verdict.why),
            "steps": len(plan.steps),
            "seconds": max(0.0, (max(ends) - first).total_seconds()) if ends else 0.0,
            "step_minutes": sum(record.seconds for record in records) / 60,
            "gpu_minutes": sum(step.gpu_minutes for step in steps),
            "queue_minutes": sum(step.queue_seconds for step in steps) / 60,
        }
    )
    return Entry(build, steps, checks)


def _step_line(
    step: PlannedStep, plan: Plan, recorded: Recorded, verdict: StepVerdict, shared: dict[str, object]
) -> StepLine:
    attempts = recorded.attempts.get(step.key, ())
    started = [attempt.record for attempt in attempts if attempt.record.seconds > 0]
    return StepLine.model_validate(
        shared
        | {
            "key": step.key,
            "step": step.step.key,
            "area": step.area,
            "device": step.device,
            "queue": step.queue or "",
            "node": verdict.node or (attempts[-1].record.environment.host if attempts else ""),
            "outcome": verdict.outcome,
            "ruling": verdict.ruling,
            "passed": verdict.counts.passed,
            "failed": verdict.counts.failed,
            "seconds": attempts[-1].record.seconds if attempts else 0.0,
            "gpu_minutes": sum(record.seconds for record in started) * step.gpus / 60,
            "queue_seconds": _waited(step, plan, recorded) if started else 0.0,
            "attempts": len(attempts),
            "flaky": verdict.flaky,
        }
    )


def _waited(step: PlannedStep, plan: Plan, recorded: Recorded) -> float:
    """Seconds from when the step could have started until it did; clocks of two hosts may differ, so never below 0."""
    needs = [attempts[0].record for key in step.depends_on if (attempts := recorded.attempts.get(key))]
    ready = max([plan.created, *(need.started + dt.timedelta(seconds=need.seconds) for need in needs)])
    return max(0.0, (recorded.attempts[step.key][0].record.started - ready).total_seconds())


def _check_line(check: Check, step: PlannedStep, shared: dict[str, object]) -> CheckLine:
    green = check.outcome is Outcome.PASS
    return CheckLine.model_validate(
        shared
        | {
            "key": step.key,
            "step": step.step.key,
            "device": step.device,
            "id": check.id,
            "outcome": check.outcome,
            "message": "" if green else short(outcome.first_line(check.message)),
            "labels": check.labels,
            "numbers": check.numbers,
        }
    )


def short(text: str) -> str:
    """At most `MESSAGE_CHARACTERS`."""
    return text if len(text) <= MESSAGE_CHARACTERS else text[:MESSAGE_CHARACTERS] + "…"


def build_id(*parts: str) -> str:
    """The same for the same parts, whoever asks."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
