# SPDX-License-Identifier: Apache-2.0
"""The verdict of a build: what the plan expected against what arrived. Pure; any folder of results can be judged again.

What arrived about each planned step becomes the facts that `run.rules` decides on, and the steps become one answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hilgate.conditions import Where, holds, of_the_device
from hilgate.declare.quarantine import Entries
from hilgate.errors import Exit
from hilgate.evidence import kind_of
from hilgate.judge.health import is_demanded, lines, missing, trouble
from hilgate.model.declaration import Quarantine
from hilgate.model.record import EXIT_STATUS, Counts, Outcome, worst
from hilgate.model.verdict import StepVerdict, Verdict
from hilgate.names import RECHECK_SUFFIX
from hilgate.run.listing import paths_to_list, vanished, wrongly_sharded
from hilgate.run.outcome import crashed, first_line, leading, other_packages
from hilgate.run.rules import PASSED_LATE, StepFacts, decide
from hilgate.text import count

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hilgate.model.plan import Plan, PlannedStep, ProtectedChange
    from hilgate.model.record import Check, Health, RerunRecord
    from hilgate.run.results import Attempt, Recorded

MOST_FAILED = 20
"""Ids of failing checks that the verdict of a step has; `results.jsonl` has all."""

NO_QUARANTINE = Quarantine()

UNCOMPARED = "compared with no merge base: its own quarantine counts, and no change of the gate itself was looked for"
"""Note of a verdict about a tree without a merge base, of which it is unknown what is new."""


def judge(
    plan: Plan,
    recorded: Recorded,
    digest: str,
    *,
    decided: dt.datetime,
    quarantine: Quarantine = NO_QUARANTINE,
    approved_by: str = "",
    doubts: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    approvals: bool = True,
) -> Verdict:
    """Decide on every planned step, and on the whole.

    Entries of the quarantine, which is the merge base's (`quarantine.effective`), expire by the day of `decided` (UTC).
    With `doubts` about the files that were judged, nothing is a pass, nor where a queue took no steps. Without
    `approvals` both protected changes and such queues are left to the verdict of the whole build. Steps that are only
    reported decide nothing, nor does `before`.
    """
    entries, images = Entries(quarantine.tests, decided.date()), image_digests(plan, recorded)
    steps = tuple(judge_step(step, plan, recorded, entries) for step in plan.steps)
    held_up = _words_of_held_up(plan) if approvals and plan.held_up else ""
    quick = _words_of_quick_run(steps, plan) if plan.profile == "quick" else ""
    believed = [step for step in plan.steps if StepResult(step, plan, recorded, entries).believed]
    protected_changes = (*plan.protected_changes, *vanished(believed, plan, recorded.listings)) if approvals else ()
    approval = _needs_approval(protected_changes) if protected_changes and not approved_by else ""
    against = tuple(filter(None, (approval, *doubts)))
    outcome, why = _decide(steps, expired=entries.expired(), held_up=held_up, against=against, quick=quick)
    trees = {build.tree for build in recorded.builds}
    uncompared = (UNCOMPARED,) if plan.local and plan.commit and plan.base is None else ()
    return Verdict(
        decided=decided,
        profile=plan.profile,
        commit=plan.commit,
        plan_digest=digest,
        outcome=outcome,
        why=why,
        images=images,
        protected_changes=protected_changes,
        approved_by=approved_by if protected_changes else "",
        notes=(*uncompared, *((BACK,) if held_up else ()), *_only_reported(steps)),
        before=before,
        tree=trees.pop() if len(trees) == 1 else "",
        doubts=doubts,
        waited=recorded.waited,
        steps=steps,
        omissions=plan.omissions,
    )


def _decide(
    steps: Sequence[StepVerdict], *, expired: Sequence[str], held_up: str, against: Sequence[str], quick: str
) -> tuple[Outcome, str]:
    """What a build is, and the first reason for it.

    Args:
        steps: What was decided about each step.
        expired: Entries of the quarantine whose day has come, each as a sentence.
        held_up: Which steps were not started, because their queue takes none; empty for none.
        against: What stands against a pass of the whole, though its steps passed.
        quick: What is said of a pass of a quick run; empty for any other.
    """
    counted = [step for step in steps if not step.report_only]
    outcome = worst(step.outcome for step in counted)
    if expired and outcome is not Outcome.FAIL:
        return Outcome.FAIL, expired[0]
    if held_up and (outcome is Outcome.PASS or not counted):
        return Outcome.INCONCLUSIVE, held_up
    if against and outcome is Outcome.PASS:
        return Outcome.INCONCLUSIVE, against[0]
    if quick and outcome is Outcome.PASS:
        return outcome, quick
    return outcome, _words_of_steps(outcome, counted, len(steps))


def _words_of_steps(outcome: Outcome, counted: Sequence[StepVerdict], planned: int) -> str:
    """`all 9 steps passed`, or `units-cpu: timed out after 600 s (and 2 more steps)`: the first with the outcome."""
    if not counted:
        nothing = "the plan has no steps: a gate over nothing is not a pass"
        return "no step of the plan counts: each is only reported" if planned else nothing
    if outcome is Outcome.PASS:
        return f"all {len(counted)} steps passed"
    first, *others = [step for step in counted if step.outcome is outcome]
    more = f" (and {count(len(others), 'more step')})" if others else ""
    return f"{first.key}: {first.why}{more}"


def _needs_approval(changes: Sequence[ProtectedChange]) -> str:
    """`needs a named approval: ci/areas/a.yaml: changed (and 2 more)`."""
    first, *others = changes
    return f"needs a named approval: {first.path}: {first.what}{f' (and {len(others)} more)' if others else ''}"


def image_digests(plan: Plan, recorded: Recorded) -> dict[str, str]:
    """Image -> digest: of those that were built already the plan's, of the others what this build has built."""
    return {name: image.digest for name, image in recorded.images.items()} | plan.digests


def exit_status(verdict: Verdict, plan: Plan) -> Exit:
    """The status of a command that ends with this verdict.

    A verdict of did not run is 5 (this environment) only when every step that did not run said so itself; pytest's
    own 5 means that no tests were collected and does not count.
    """
    if verdict.outcome is Outcome.DID_NOT_RUN:
        kinds = {step.key: kind_of(step) for step in plan.steps}
        missing = [step for step in verdict.steps if step.outcome is Outcome.DID_NOT_RUN and not step.report_only]
        environment = missing and all(kinds[step.key].cannot_run_here(step.exit_status) for step in missing)
        return Exit.CANNOT_RUN_HERE if environment else Exit.NOTHING_RAN
    return EXIT_STATUS[verdict.outcome]


def _words_of_quick_run(steps: Iterable[StepVerdict], plan: Plan) -> str:
    """`quick run: 412 checks of 9 of 38 steps; it decides no merge`: how much of the gate passed on this machine."""
    others = sum(omission.cause == "not quick" for omission in plan.omissions)
    of = f"{len(plan.steps)} of {count(len(plan.steps) + others, 'step')}"
    passed = sum(step.counts.passed for step in steps)
    return f"quick run: {count(passed, 'check')} of {of}; it decides no merge"


def totals(verdict: Verdict) -> Counts:
    """Checks of all steps that count, together."""
    return sum((step.counts for step in verdict.steps if not step.report_only), Counts())


def read_verdict(path: Path) -> Verdict:
    """Read `verdict.json`.

    Raises:
        RecordsError: It is missing or not a verdict.
    """
    return Verdict.load(path, "run `hilgate judge` first")


def _words_of_held_up(plan: Plan) -> str:
    """`queue x is out: ...; 3 steps not started, s-cpu first`."""
    first = plan.held_up[0]
    return f"{first.reason}; {count(len(plan.held_up), 'step')} not started, {first.key} first"


BACK = "a queue that is out comes back when a job of the default branch works there; then start this build again"
"""Note of a verdict that lacks steps for that."""


def _only_reported(steps: Iterable[StepVerdict]) -> list[str]:
    """A sentence for what was not counted, with each step of it that is not green."""
    reported = [step for step in steps if step.report_only]
    red = [f"{step.key} ({step.outcome.value})" for step in reported if step.outcome is not PASS]
    words = f"{count(len(reported), 'step')} only reported, not counted"
    return [f"{words}{', of these not passed: ' if red else ''}{', '.join(red)}"] if reported else []


FAIL, INCONCLUSIVE, PASS = Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS


@dataclass(frozen=True)
class StepResult:
    """A planned step and all that arrived about it."""

    step: PlannedStep
    plan: Plan
    recorded: Recorded
    entries: Entries

    @cached_property
    def attempt(self) -> Attempt | None:
        """The attempt that counts; None when the step did not finish."""
        return self.recorded.last(self.step.key)

    @cached_property
    def damaged(self) -> str:
        """Why its results cannot be believed."""
        return self.recorded.damaged.get(self.step.key, "")

    @cached_property
    def other_command(self) -> str:
        """The command that was run in place of the planned one."""
        command = self.attempt.record.command if self.attempt else ""
        return command if command != self.step.step.command else ""

    @cached_property
    def other_image(self) -> str:
        """Why the image it ran in is not the planned one; empty when it is, and locally."""
        name = self.step.image
        if name is None or self.plan.local or self.attempt is None:
            return ""
        if name not in self.plan.digests and (problem := self.image_problem(name)):
            return problem
        ran, built = self.attempt.record.environment.image, image_digests(self.plan, self.recorded)[name]
        return "" if ran == built else f"it ran in image {ran or '(none)'}, built was {built}"

    @cached_property
    def other_packages(self) -> str:
        """Which package of the tree under test it imported from elsewhere."""
        return other_packages(self.plan, self.attempt.record.imported) if self.attempt else ""

    @cached_property
    def stray(self) -> str:
        """A check that belongs to another step; empty where there is none."""
        reaches = kind_of(self.step).reaches
        for check in self.attempt.checks if self.attempt else ():
            if not reaches(self.step.step.command, check.id):
                for other in self.plan.steps:
                    if other.step.evidence == self.step.step.evidence and reaches(other.step.command, check.id):
                        return f"it holds {check.id}, a test of {other.key} that its own command does not run"
        return ""

    @cached_property
    def unlisted(self) -> str:
        """Why it is unknown whether the change removed tests of it; empty where that is known, or cannot happen."""
        if not paths_to_list(self.step, self.plan) or self.step.key in self.recorded.listings:
            return ""
        return "its job left no list of its tests and the merge base's, and the change may have taken some away"

    @cached_property
    def wrongly_sharded(self) -> str:
        """What is wrong with all shards of its step together; empty for a whole step."""
        if not self.step.shard:
            return ""
        shards = [step for step in self.plan.steps if step.whole == self.step.whole]
        if problem := wrongly_sharded(shards, self.recorded.listings):
            return problem
        excused: Counter[str] = Counter()
        for one in shards:
            facts = facts_of(one, self.recorded.last(one.key), self.excusable)
            excused.update(facts.lacking(check) for check in facts.cannot_run)
        allowed = {condition: excuse.most for condition, excuse in self.step.step.may_lack.items()}
        over = next((one for one in excused if excused[one] > allowed[one]), "")
        many = f"{count(excused[over], 'check')} of its shards did not run for lack of {over}"
        return f"{many}, and at most {allowed[over]} may" if over else ""

    @cached_property
    def unbuilt(self) -> str:
        """Why the image that it should build is not there."""
        return self.image_problem(self.step.step.provides) if self.step.step.provides else ""

    def image_problem(self, name: str) -> str:
        """Why an image of this build is not the planned one."""
        built = self.recorded.images.get(name)
        if built is None:
            return f"no record says which image {name!r} was built in this build"
        planned = built.content == self.plan.images.get(name)
        return "" if planned else f"the image {name!r} was built from other contents than the plan's"

    @property
    def of_a_fork(self) -> str:
        """Why agents do not start it, and who may; empty for a step in an image, and where no fork is planned."""
        return self.step.reason if self.plan.fork and not (self.plan.local or self.step.image) else ""

    @property
    def not_taken(self) -> str:
        """That no agent noted that it took the job, with what to do, or that a shared job did not come to it."""
        if self.plan.local or self.step.queue is None or self.attempt:
            return ""
        if self.health:
            return f"its job, {self.step.job}, ended before it" if self.step.job else ""
        do = "look at the queue on Buildkite, then start the build again"
        if minutes := self.recorded.waited.get(self.step.key):
            return f"it waited {count(minutes, 'minute')} for queue {self.step.queue} and was ended: {do}"
        return f"no agent of {self.step.queue} noted that it began: {do}"

    @cached_property
    def health(self) -> tuple[Health, ...]:
        """What the hooks of its job saw."""
        return self.recorded.health.get(self.step.key, ())

    @cached_property
    def trouble(self) -> tuple[str, ...]:
        """What the hooks saw of its node that makes a result worthless."""
        gpus = self.step.gpus if is_demanded(self.step, self.plan) else 0
        return trouble(self.health, self.attempt.record.environment.host if self.attempt else "", gpus)

    @cached_property
    def node_in_doubt(self) -> str:
        """The first reason to doubt its node, if any."""
        return f"its node is in doubt ({self.trouble[0]})" if self.trouble else ""

    @cached_property
    def without_health(self) -> str:
        """Which health record is demanded and not there."""
        lacking = missing(self.health) if is_demanded(self.step, self.plan) else ""
        return f"nothing is known of its node's health {lacking}" if lacking and self.attempt else ""

    @cached_property
    def believed(self) -> bool:
        """Whether the results are whole and those of the planned command, image and packages."""
        elsewhere = self.damaged or self.other_command or self.other_image or self.other_packages
        return self.attempt is not None and not elsewhere

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """The checks that count."""
        return self.attempt.checks if self.attempt and self.believed else ()

    @property
    def leading_failure(self) -> Check | None:
        """The leading failing check that arrived, believed or not."""
        return leading(self.attempt.checks, FAIL) if self.attempt else None

    @cached_property
    def failed(self) -> tuple[Check, ...]:
        """Failing checks that are not in quarantine."""
        return tuple(check for check in self.checks if check.outcome is FAIL and check.id not in self.excusable)

    @cached_property
    def excusable(self) -> frozenset[str]:
        """Ids in quarantine on this step and device."""
        return self.entries.of(self.step)

    @cached_property
    def excused(self) -> tuple[str, ...]:
        """Ids that failed in quarantine."""
        return tuple(check.id for check in self.checks if check.outcome is FAIL and check.id in self.excusable)

    @cached_property
    def reruns(self) -> tuple[RerunRecord, ...]:
        """Its failing checks that were run once more."""
        return self.recorded.reruns.get(self.step.key, ())

    @cached_property
    def flaky(self) -> tuple[Check, ...]:
        """Checks that failed and passed when run again."""
        passed = {rerun.check for rerun in self.reruns if rerun.outcome is PASS}
        return tuple(check for check in self.failed if check.id in passed)

    @cached_property
    def regressed(self) -> bool:
        """Whether a check failed and nothing excuses it."""
        return len(self.failed) > len(self.flaky)

    @cached_property
    def confirmed(self) -> bool:
        """Whether such a check failed on another node too, whose health records show no trouble."""
        here = self.attempt.record.environment.host if self.attempt else ""
        failed = {check.id for check in self.failed} - {check.id for check in self.flaky}
        health = self.recorded.health.get(self.step.key + RECHECK_SUFFIX, ())
        return any(
            rerun.outcome is FAIL
            and rerun.elsewhere
            and rerun.check in failed
            and rerun.host != here
            and not trouble(health, rerun.host, 0)  # mutant NumberReplacer: no node has fewer GPUs than none
            for rerun in self.reruns
        )

    @cached_property
    def facts(self) -> StepFacts:
        """All that the rules ask; failures that are excused are left out, and a flaky one is inconclusive."""
        flaky = frozenset() if self.regressed else frozenset(check.id for check in self.flaky)
        facts = facts_of(self.step, self.attempt, self.excusable, flaky)
        return replace(
            facts,
            arrived=self.attempt is not None,
            damaged=self.damaged,
            of_a_fork=self.of_a_fork,
            not_taken=self.not_taken,
            other_command=self.other_command,
            other_image=self.other_image,
            other_packages=self.other_packages,
            watched=bool(self.health),
            node_in_doubt=self.node_in_doubt,
            without_health=self.without_health,
            confirmed=self.confirmed,
            flaky=self.flaky,
            excused=self.excused,
            expired=self.expired[0] if self.expired else "",
            had_failed=self.had(FAIL) or any(crashed(one.record) for one in self.earlier),
            was_open=self.had(INCONCLUSIVE),
            unbuilt=self.unbuilt,
            stray=self.stray,
            unlisted=self.unlisted,
            wrongly_sharded=self.wrongly_sharded,
        )

    @cached_property
    def earlier(self) -> tuple[Attempt, ...]:
        """Its attempts before the one that counts."""
        return self.recorded.attempts.get(self.step.key, ())[:-1]

    @cached_property
    def passed_late(self) -> tuple[str, ...]:
        """Ids that failed in an earlier attempt and passed in the last."""
        now = {check.id for check in self.checks if check.outcome is PASS} - self.excusable
        failed = [check.id for one in self.earlier for check in one.checks if check.outcome is FAIL]
        return tuple(dict.fromkeys(name for name in failed if name in now))

    def had(self, outcome: Outcome) -> bool:
        """Whether an earlier attempt had this outcome; a later attempt makes up only for one that did not run."""
        return any(decide(facts_of(self.step, one, self.excusable)).outcome is outcome for one in self.earlier)

    @cached_property
    def expired(self) -> tuple[str, ...]:
        """A sentence for each entry of its quarantine that has expired."""
        return self.entries.expired(self.step)

    @property
    def status(self) -> int | None:
        """Exit status of the attempt that counts."""
        return self.attempt.record.exit_status if self.attempt else None


def judge_step(step: PlannedStep, plan: Plan, recorded: Recorded, entries: Entries) -> StepVerdict:
    """Decide on a step."""
    s = StepResult(step, plan, recorded, entries)
    decision = decide(s.facts)
    why = decision.why
    if s.earlier and s.believed:
        before = ", ".join(attempt.record.outcome.value for attempt in s.earlier)
        why += f" (attempt {len(s.earlier) + 1}; before: {before})"
    record = s.attempt.record if s.attempt else None
    image = record.environment.image if record else ""
    line = reproduce_line(step, s.leading_failure)
    return StepVerdict(
        key=step.key,
        area=step.area,
        label=step.label,
        outcome=decision.outcome,
        ruling=decision.ruling,
        why=why,
        evidence=_evidence(s),
        node=record.environment.host if record else "",
        image=image,
        failed=tuple(dict.fromkeys(check.id for check in s.checks if check.outcome is FAIL))[:MOST_FAILED],
        flaky=tuple(dict.fromkeys(check.id for check in s.flaky))
        or (s.passed_late if decision.rule == PASSED_LATE else ()),
        quarantined=tuple(dict.fromkeys(s.excused)),
        unexpected_passes=tuple(dict.fromkeys(c.id for c in s.checks if c.outcome is PASS and c.id in s.excusable)),
        counts=Counts.of(check.outcome for check in s.attempt.checks) if s.attempt else Counts(),
        seconds=record.seconds or None if record else None,
        reproduce=f"{line}  # in image {image}" if image else line,
        exit_status=s.status,
        report_only=step.report_only,
        attempts=len(recorded.attempts.get(step.key, ())),
    )


def facts_of(
    step: PlannedStep, attempt: Attempt | None, excused: frozenset[str], flaky: frozenset[str] = frozenset()
) -> StepFacts:
    """Return the facts of an attempt (None: nothing arrived), without the failures that are excused.

    An excused failure counts for no minimum either, and a flaky one is inconclusive. Exit status 1 only says that
    checks failed, so it goes with them; any other status stays.
    """
    if attempt is None:
        return StepFacts(kind_of(step), step.step.minimum, None, ())
    record = attempt.record
    facts = StepFacts(
        kind_of(step),
        step.step.minimum,
        record.exit_status,
        attempt.checks,
        stopped=record.message,
        may_lack=step.step.may_lack,
        lacked=frozenset(record.lacked) - not_lacking(step),
        recorded=record.outcome,
    )
    left = tuple(
        check.model_copy(update={"outcome": INCONCLUSIVE}) if check.outcome is FAIL and check.id in flaky else check
        for check in attempt.checks
        if check.outcome is not FAIL or check.id not in excused
    )
    if left == attempt.checks or record.outcome is not FAIL:
        return facts
    status = Exit.PASS if record.exit_status == Exit.FAIL else record.exit_status
    return replace(facts, exit_status=status, checks=left, stopped="it was ended before it was done", recorded=None)


def not_lacking(step: PlannedStep) -> frozenset[str]:
    """Return the conditions that the device of a step meets; a record that says it lacks them is not believed."""
    here = Where(step.device)
    return frozenset(one for one in step.step.may_lack if of_the_device(one) and holds(one, here))


LONGEST_SELECTOR = 1000
"""Most characters of the line: names in a change can have any length, and a report shows the whole line."""


def reproduce_line(step: PlannedStep, failed: Check | None) -> str:
    """The command that repeats a step, narrowed to its first failing check where that can be run alone."""
    options = step.step.matrix.options(failed.labels) if failed and step.step.matrix else ""
    selector = options or (kind_of(step).selector(failed.id) if failed else "") or step.arguments
    narrowed = f" -- {selector}" if selector and len(selector) <= LONGEST_SELECTOR else ""
    return f"hilgate run {step.whole}{narrowed}"


def _evidence(s: StepResult) -> tuple[str, ...]:
    """List where a step ran and over which files, what the hooks saw, what has expired, and how reruns ended."""
    if s.attempt is None:
        where = [f"node {host}" for host in sorted({one.host for one in s.health})]
    else:
        here = s.attempt.record.environment
        where = [f"node {here.host}: {here.device}"] if not s.plan.local else []  # a local run is one node
        if s.step.job:
            where.append(f"log: job {s.step.job}, group `{s.step.key}`")
        if files := s.recorded.restored.get(s.step.key, ()):
            where.append(f"with these files of the merge base: {', '.join(files)}")
    again, same = [], defaultdict(list)
    for rerun in s.reruns:
        place = f"{'elsewhere' if rerun.elsewhere else 'on the same node'}, {rerun.host}"
        same[f"again {place}", rerun.outcome.value].append(rerun)
    known = {first_line(check.message) for check in s.checks}
    for (place, ended), reruns in same.items():
        said = first_line(reruns[0].message)  # mutant NumberReplacer: shown where there is one
        message = f": {said}" if said and said not in known else ""
        one = f"{reruns[0].check}: {ended}{message}"  # mutant NumberReplacer: shown where there is one
        again.append(f"{place}: {one if len(reruns) == 1 else f'{len(reruns)} checks: {ended}'}")
    if damaged := s.recorded.damaged.get(s.step.key + RECHECK_SUFFIX, ""):
        again.append(f"its rerun elsewhere cannot be believed: {damaged}")
    unknown = [s.without_health] if s.without_health else []
    return (*where, *s.trouble, *unknown, *lines(s.health), *s.expired, *again)
