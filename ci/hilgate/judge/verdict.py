# SPDX-License-Identifier: Apache-2.0
"""The verdict of a build: what the plan expected against what arrived. Pure; any folder of results can be judged again.

`judge.step` decides on each step; here they become one answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.declare.quarantine import Entries
from hilgate.errors import Exit
from hilgate.evidence import kind_of
from hilgate.judge.step import judge_step
from hilgate.model.declaration import Quarantine
from hilgate.model.record import Counts, Outcome
from hilgate.model.verdict import StepVerdict, Verdict
from hilgate.run.outcome import worst

if TYPE_CHECKING:
    import datetime as dt
    from pathlib import Path

    from hilgate.model.plan import Plan
    from hilgate.run.results import Recorded

NO_QUARANTINE = Quarantine()

UNCOMPARED = "compared with no merge base: its own quarantine counts, and no change of the gate itself was looked for"
"""Note of a verdict about a tree without a merge base, of which nobody knows what is new."""


def judge(
    plan: Plan,
    recorded: Recorded,
    digest: str,
    *,
    decided: dt.datetime,
    quarantine: Quarantine = NO_QUARANTINE,
    approved_by: str = "",
    doubts: tuple[str, ...] = (),
) -> Verdict:
    """Decide on every planned step, and on the whole.

    Entries of the quarantine, which is the merge base's (`quarantine.effective`), expire by the day of `decided` (UTC).
    With `doubts` about the files that were judged, nothing is a pass.
    """
    entries = Entries(quarantine.tests, decided.date())
    steps = tuple(judge_step(step, plan, recorded, entries) for step in plan.steps)
    outcome = worst(step.outcome for step in steps)
    why = _why(outcome, steps)
    if plan.promised and outcome is Outcome.PASS:
        why = words_of_part(sum((step.counts for step in steps), Counts()), plan)
    if (expired := entries.expired()) and outcome is not Outcome.FAIL:
        outcome, why = Outcome.FAIL, expired[0]
    loosened = plan.loosened
    if loosened and not approved_by and outcome is Outcome.PASS:
        outcome = Outcome.INCONCLUSIVE
        more = f" (and {len(loosened) - 1} more)" if len(loosened) > 1 else ""
        why = f"needs a named approval: {loosened[0].path}: {loosened[0].what}{more}"
    if doubts and outcome is Outcome.PASS:
        outcome, why = Outcome.INCONCLUSIVE, doubts[0]
    return Verdict(
        decided=decided,
        profile=plan.profile,
        commit=plan.commit,
        plan_digest=digest,
        outcome=outcome,
        why=why,
        images=recorded.digests(plan),
        loosened=loosened,
        approved_by=approved_by if loosened else "",
        notes=(UNCOMPARED,) if plan.local and plan.commit and plan.base is None else (),
        doubts=doubts,
        steps=steps,
        omissions=plan.omissions,
    )


def exit_status(verdict: Verdict, plan: Plan) -> Exit:
    """The status of a command that ends with this verdict.

    A verdict of did not run is 5 (this environment) only when every step that did not run said so itself; pytest's
    own 5 means that no tests were collected and does not count.
    """
    if verdict.outcome is Outcome.DID_NOT_RUN:
        kinds = {step.key: kind_of(step) for step in plan.steps}
        missing = [step for step in verdict.steps if step.outcome is Outcome.DID_NOT_RUN]
        environment = missing and all(kinds[step.key].cannot_run_here(step.exit_status) for step in missing)
        return Exit.CANNOT_RUN_HERE if environment else Exit.NOTHING_RAN
    return {Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.FAIL, Outcome.INCONCLUSIVE: Exit.INCONCLUSIVE}[verdict.outcome]


def words_of_part(counts: Counts, plan: Plan) -> str:
    """Say how much of the whole steps passed on this machine: `smoke: 412 of at least 4,210 checks`."""
    what = "smoke" if plan.profile == "smoke" else f"a subset of {', '.join(s.key for s in plan.steps if s.arguments)}"
    # Whole steps have more checks than they promise, and may make up for the subsets.
    of = f" of at least {plan.promised:,}" if counts.passed < plan.promised else ""
    return f"{what}: {counts.passed:,}{of} checks"


def totals(verdict: Verdict) -> Counts:
    """Checks of all steps, counted together."""
    return sum((step.counts for step in verdict.steps), Counts())


def read_verdict(path: Path) -> Verdict:
    """Read `verdict.json`.

    Raises:
        RecordsError: It is missing or not a verdict.
    """
    return Verdict.load(path, "run `hilgate judge` first")


def _why(outcome: Outcome, steps: tuple[StepVerdict, ...]) -> str:
    if not steps:
        return "the plan has no steps: a gate over nothing is not a pass"
    if outcome is Outcome.PASS:
        return f"all {len(steps)} steps passed"
    first = next(step for step in steps if step.outcome is outcome)
    same = sum(step.outcome is outcome for step in steps) - 1
    more = f" (and {same} more {'step' if same == 1 else 'steps'})" if same else ""
    return f"{first.key}: {first.why}{more}"
