"""The verdict: what the plan expected against what arrived. Pure; it can be replayed on any folder of results.

The outcome of a step is never better than what its own records say, nor than what `rules.RULES` says of them: a record
that claims more than its evidence shows is overruled, and a step without a record did not run.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hilgate import rules
from hilgate.errors import Exit, RecordsError
from hilgate.escape import pytest_word
from hilgate.model import Counts, Evidence, Outcome, Plan, PlannedStep, Ruling, StepVerdict, Verdict

if TYPE_CHECKING:
    import datetime as dt
    from pathlib import Path

    from hilgate.results import Attempt, Recorded

VERDICT_FILE = "verdict.json"
_RULINGS = {
    Outcome.PASS: Ruling.PASS,
    Outcome.FAIL: Ruling.REGRESSION,
    Outcome.INCONCLUSIVE: Ruling.INCONCLUSIVE,
    Outcome.DID_NOT_RUN: Ruling.INFRA,
}


def judge(plan: Plan, recorded: Recorded, digest: str, *, decided: dt.datetime) -> Verdict:
    """Decide on every planned step, and on the whole.

    Args:
        plan: What was expected.
        recorded: What arrived; already known to answer this plan (`results.read`).
        digest: `plan_digest(plan)`.
        decided: The time to write into the verdict.
    """
    steps = tuple(_judge_step(step, recorded) for step in plan.steps)
    outcome = rules.worst(step.outcome for step in steps)
    return Verdict(
        decided=decided,
        commit=plan.commit,
        plan_digest=digest,
        outcome=outcome,
        why=_why(outcome, steps),
        steps=steps,
        omissions=plan.omissions,
    )


def exit_status(verdict: Verdict, plan: Plan) -> Exit:
    """The status of a command that ends with this verdict.

    A verdict of did not run is 5 (this environment) only when every step that did not run said so itself; pytest's
    own 5 means that no tests were collected and does not count.
    """
    if verdict.outcome is Outcome.DID_NOT_RUN:
        evidence = {step.key: step.evidence for step in plan.steps}
        missing = [step for step in verdict.steps if step.outcome is Outcome.DID_NOT_RUN]
        environment = missing and all(
            step.exit_status == Exit.CANNOT_RUN_HERE and evidence[step.key] is Evidence.FINDINGS for step in missing
        )
        return Exit.CANNOT_RUN_HERE if environment else Exit.NOTHING_RAN
    return {Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.FAIL, Outcome.INCONCLUSIVE: Exit.INCONCLUSIVE}[verdict.outcome]


def totals(verdict: Verdict) -> Counts:
    """Checks of all steps, counted together."""
    return Counts(
        passed=sum(step.counts.passed for step in verdict.steps),
        failed=sum(step.counts.failed for step in verdict.steps),
        inconclusive=sum(step.counts.inconclusive for step in verdict.steps),
        did_not_run=sum(step.counts.did_not_run for step in verdict.steps),
    )


def write_verdict(verdict: Verdict, path: Path) -> None:
    """Write `verdict.json` in one go: a reader sees the old file or the new one."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(verdict.model_dump_json(indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def read_verdict(path: Path) -> Verdict:
    """Read `verdict.json`.

    Raises:
        RecordsError: It is missing or not a verdict.
    """
    try:
        return Verdict.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise RecordsError("no verdict", where=str(path), remedy="run `hilgate judge` first") from None
    except ValueError as error:
        raise RecordsError(
            f"not a verdict: {rules.first_line(str(error))}", where=str(path), remedy="run `hilgate judge` again"
        ) from None


def _judge_step(step: PlannedStep, recorded: Recorded) -> StepVerdict:
    attempt = recorded.last(step.key)
    if attempt is None:
        unfinished = step.key in recorded.unfinished
        why = "it began and its end was not recorded" if unfinished else "no record of it arrived"
        return _verdict(step, None, rules.Decision(Outcome.DID_NOT_RUN, why), 0)
    attempts = recorded.attempts[step.key]
    decision = _decide(step, attempt)
    if len(attempts) > 1:
        earlier = ", ".join(a.record.outcome.value for a in attempts[:-1])
        decision = rules.Decision(decision.outcome, f"{decision.why} (attempt {len(attempts)}; before: {earlier})")
    return _verdict(step, attempt, decision, len(attempts))


def _decide(step: PlannedStep, attempt: Attempt) -> rules.Decision:
    record = attempt.record
    if record.command != step.command:
        return rules.Decision(Outcome.DID_NOT_RUN, f"another command was run: {record.command}")
    facts = rules.Facts(step.evidence, step.minimum, record.exit_status, attempt.checks, stopped=record.message)
    derived = rules.decide(facts)
    if rules.SEVERITY[derived.outcome] > rules.SEVERITY[record.outcome]:
        return rules.Decision(derived.outcome, f"{derived.why} (recorded as {record.outcome.value})")
    return rules.Decision(record.outcome, record.message or derived.why)


def _verdict(step: PlannedStep, attempt: Attempt | None, decision: rules.Decision, attempts: int) -> StepVerdict:
    return StepVerdict(
        key=step.key,
        area=step.area,
        label=step.label,
        outcome=decision.outcome,
        ruling=_RULINGS[decision.outcome],
        why=decision.why,
        counts=rules.count(attempt.checks) if attempt else Counts(),
        seconds=attempt.record.seconds or None if attempt else None,
        reproduce=reproduce_line(step, attempt),
        exit_status=attempt.record.exit_status if attempt else None,
        attempts=attempts,
    )


def reproduce_line(step: PlannedStep, attempt: Attempt | None) -> str:
    """The command that repeats a step, narrowed to its first failing test where pytest's -k can name it."""
    line = f"hilgate run {step.key}"
    failed = rules.first(attempt.checks, Outcome.FAIL) if attempt else None
    if failed is None or step.evidence is not Evidence.JUNIT or "::" not in failed.id:
        return line
    word = pytest_word(failed.id)
    return f"{line} -- -k {shlex.quote(word)}" if word else line


def _why(outcome: Outcome, steps: tuple[StepVerdict, ...]) -> str:
    if not steps:
        return "the plan has no steps: a gate over nothing is not a pass"
    if outcome is Outcome.PASS:
        return f"all {len(steps)} steps passed"
    first = next(step for step in steps if step.outcome is outcome)
    same = sum(step.outcome is outcome for step in steps) - 1
    more = f" (and {same} more {'step' if same == 1 else 'steps'})" if same else ""
    return f"{first.key}: {first.why}{more}"
