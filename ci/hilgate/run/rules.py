# SPDX-License-Identifier: Apache-2.0
"""Decides a step's outcome from everything that is known of it: one table, whose first matching rule wins.

The runner and the judge read the same table. The runner knows the step's own evidence alone. The judge adds its
surroundings: node, image, reruns, earlier attempts and the quarantine. A step is never better than its own record, nor
than its checks, with one exception that has an owner and a date: failures that the merge base has in quarantine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hilgate.errors import Exit
from hilgate.model.record import SEVERITY, Check, Counts, Outcome
from hilgate.model.verdict import Ruling
from hilgate.run.outcome import (
    NOT_STARTED,
    OWN_SIGNALS,
    TIMED_OUT,
    first,
    first_line,
    leading,
    needs_of,
    summary,
)
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hilgate.evidence import EvidenceKind
    from hilgate.model.declaration import Excuse

FAIL, DID_NOT_RUN, INCONCLUSIVE, PASS = Outcome.FAIL, Outcome.DID_NOT_RUN, Outcome.INCONCLUSIVE, Outcome.PASS


@dataclass(frozen=True)
class OwnFacts:
    """What a runner knows of a step: its own evidence.

    Attributes:
        exit_status: None when the step was not started or was ended by us; then `stopped` says why.
        problem: What is wrong with the evidence as a whole (missing, corrupt); empty when it could be read.
        said: The line in which the step itself says what went wrong, to explain an exit without evidence.
        may_lack: Conditions that its declaration lets a machine lack -> what to say then, and how many checks at most.
        lacked: Those that the machine lacked, asked where the step ran.
        deselected: How many checks an option or a hook has taken out before they could run.
        reads: What it read that does not select it; known where it ran, and later by what was recorded.
        remark: The same, of a step that is not refused for it (`run.reads`).
        recorded: The outcome that its runner recorded, with `stopped` as the reason; None while it is decided there.
    """

    evidence: EvidenceKind
    minimum: int
    exit_status: int | None
    checks: tuple[Check, ...]
    stopped: str = ""
    problem: str = ""
    said: str = ""
    may_lack: Mapping[str, Excuse] = field(default_factory=dict)
    lacked: frozenset[str] = frozenset()
    deselected: int = 0
    reads: str = ""
    remark: str = ""
    recorded: Outcome | None = None

    @cached_property
    def counts(self) -> Counts:
        """How many checks ended how."""
        return Counts.of(check.outcome for check in self.checks)

    @property
    def done(self) -> int:
        """Checks that reached a result: an inconclusive one did its work, a skipped one did not."""
        return self.counts.passed + self.counts.inconclusive

    @property
    def first_failure(self) -> Check | None:
        """The first failing check."""
        return first(self.checks, Outcome.FAIL)

    @property
    def timed_out(self) -> bool:
        """Whether it was ended at its timeout."""
        return self.exit_status is None and self.stopped.startswith(TIMED_OUT)

    def lacking(self, check: Check) -> str:
        """The first condition that a check needs, that its step may lack, and that was lacking; empty without one."""
        return next((one for one in needs_of(check) if one in self.lacked and one in self.may_lack), "")

    @cached_property
    def cannot_run(self) -> tuple[Check, ...]:
        """Checks that did not run because of a declared condition that was lacking."""
        return tuple(check for check in self.checks if check.outcome is Outcome.DID_NOT_RUN and self.lacking(check))

    @cached_property
    def missing(self) -> tuple[Check, ...]:
        """Checks that did not run and have no such excuse."""
        return tuple(check for check in self.checks if check.outcome is Outcome.DID_NOT_RUN and not self.lacking(check))

    @cached_property
    def over_the_number(self) -> str:
        """The first condition for which more checks did not run than its declaration allows; empty for none."""
        number = Counter(self.lacking(check) for check in self.cannot_run)
        return next((one for one in number if number[one] > self.may_lack[one].most), "")

    @cached_property
    def contradicted(self) -> tuple[Check, ...]:
        """Checks that ran although what they are declared to need was lacking: they need it no more."""
        ran = {Outcome.PASS, Outcome.INCONCLUSIVE}
        return tuple(check for check in self.checks if check.outcome in ran and self.lacking(check))

    def reason(self, outcome: Outcome) -> str:
        """What the first check with this outcome says; empty where there is none."""
        check = first(self.checks, outcome)
        return summary(check.message) if check else ""

    def finding(self, outcome: Outcome) -> str:
        """What the leading check with this outcome says, after its id."""
        check = leading(self.checks, outcome)
        return f"{check.id}: {summary(check.message)}" if check else ""

    def exit_in_words(self, text: str = "") -> str:
        """An exit status that is no finding (or `text`), what is wrong with the evidence, and what the step said."""
        # mutant NumberReplacer: asked where there is an exit status alone
        text = text or self.evidence.exit_meaning(self.exit_status or 0)
        text += f"; {self.problem}" if self.problem else ""
        return text + (f"; it said: {self.said}" if self.said else "")


@dataclass(frozen=True)
class StepFacts(OwnFacts):
    """Everything that is known of one step: what the judge adds to the step's own evidence.

    Texts say what stands against the step; they are empty where nothing does.

    Attributes:
        arrived: Whether an attempt of it was recorded.
        damaged: Why its results cannot be believed.
        of_a_fork: Why agents do not start it.
        not_taken: That no agent of its queue noted that it began, and what to do.
        other_command: The command that was run in place of the planned one.
        other_image: Why the image that it ran in is not the planned one.
        other_packages: Which package of the tree under test it imported from elsewhere.
        watched: Whether the hooks of its job recorded the health of its node.
        node_in_doubt: The first thing that stands against its node.
        without_health: Which health record is demanded and not there.
        confirmed: Whether a check of it failed on another node too, whose health says nothing against that.
        flaky: Checks that failed and passed when run again.
        excused: Ids of checks that failed in quarantine; they are not among the checks of the facts.
        expired: A sentence for the first entry of its quarantine that has expired.
        had_failed: Whether an earlier attempt failed, crashed or hung.
        was_open: Whether an earlier attempt was inconclusive.
        unbuilt: Why the image that it should build is not there.
        stray: A test among its checks that its own command does not run and another step's does.
        unlisted: Why it is unknown whether the change removed tests of it.
        wrongly_sharded: Of a shard: which test ran in none or in several, or which other shard is missing.
    """

    arrived: bool = True
    damaged: str = ""
    of_a_fork: str = ""
    not_taken: str = ""
    other_command: str = ""
    other_image: str = ""
    other_packages: str = ""
    watched: bool = False
    node_in_doubt: str = ""
    without_health: str = ""
    confirmed: bool = False
    flaky: tuple[Check, ...] = ()
    excused: tuple[str, ...] = ()
    expired: str = ""
    had_failed: bool = False
    was_open: bool = False
    unbuilt: str = ""
    stray: str = ""
    unlisted: str = ""
    wrongly_sharded: str = ""

    @cached_property
    def alone(self) -> Decision:
        """What the step's own evidence and record say."""
        return decide(StepFacts(**{own.name: getattr(self, own.name) for own in fields(OwnFacts)}))

    @cached_property
    def worse(self) -> Outcome | None:
        """The recorded outcome where it is worse than the evidence; a step is never better than its own record."""
        if self.recorded is None:
            return None
        shown = replace(self, recorded=None).alone.outcome
        return self.recorded if SEVERITY[self.recorded] > SEVERITY[shown] else None


@dataclass(frozen=True)
class Decision:
    """An outcome, what it is called, the first thing that explains it, and the rule that decided."""

    outcome: Outcome
    ruling: Ruling
    why: str
    rule: str


# A rule's function returns why the step is what the table says, or nothing if the rule does not hold.


def damaged(step: StepFacts) -> str:
    """The step's results cannot be believed."""
    return _joined(f"its results cannot be believed: {step.damaged}", step.node_in_doubt) if step.damaged else ""


def no_record(step: StepFacts) -> str:
    """Nothing of it arrived."""
    if step.arrived:
        return ""
    return _joined("no record of it arrived", step.node_in_doubt, step.of_a_fork or step.not_taken)


def another_command(step: StepFacts) -> str:
    """The step ran something else than the plan says."""
    return f"another command was run: {step.other_command}" if step.other_command else ""


def another_image(step: StepFacts) -> str:
    """The step ran in an image that the plan does not name."""
    if not step.other_image:
        return ""
    return _joined(step.other_image, f"{step.first_failure.id} failed there" if step.first_failure else "")


def packages_of_another_tree(step: StepFacts) -> str:
    """The step imported a package under test from elsewhere."""
    return step.other_packages


def failed_on_a_node_in_doubt(step: StepFacts) -> str:
    """The failure may be the node's doing; one that another, sound node confirmed is not."""
    if not step.counts.failed or not step.node_in_doubt or step.confirmed:
        return ""
    return f"{step.alone.why}; but {step.node_in_doubt}: it may be the node's doing"


def a_check_failed(step: StepFacts) -> str:
    """A failure stays a failure, whatever the exit status says and whatever happened afterwards."""
    return step.finding(FAIL) if step.counts.failed else ""


def node_in_doubt(step: StepFacts) -> str:
    """The step's node is not known to be sound."""
    doubt = step.node_in_doubt or step.without_health
    return f"{doubt}; the step itself: {step.alone.why}" if doubt else ""


def flaky(step: StepFacts) -> str:
    """A check failed, and passed when run again."""
    if not step.flaky or step.alone.outcome is not INCONCLUSIVE:
        return ""
    return f"{step.flaky[0].id} failed and passed when run again: {first_line(step.flaky[0].message)}"


def failed_earlier(step: StepFacts) -> str:
    """The step passes after an attempt that failed."""
    return _against_a_pass(step, step.alone.why) if step.had_failed else ""


def open_earlier(step: StepFacts) -> str:
    """The step passes after an attempt that was inconclusive."""
    return _against_a_pass(step, step.alone.why) if step.was_open else ""


def image_not_built(step: StepFacts) -> str:
    """The step passes, and the image that it should build is not there."""
    return _against_a_pass(step, step.unbuilt)


def tests_of_another_step(step: StepFacts) -> str:
    """The step passes with a check that belongs to another step."""
    return _against_a_pass(step, step.stray)


def tests_not_listed(step: StepFacts) -> str:
    """The step passes, and it is unknown which tests the change removed."""
    return _against_a_pass(step, step.unlisted)


def shards_are_not_the_whole_step(step: StepFacts) -> str:
    """The step passes, and a test ran in no shard or in several."""
    return _against_a_pass(step, step.wrongly_sharded)


def quarantine_expired(step: StepFacts) -> str:
    """The step passes. An entry that has expired is red by itself, so that it cannot be forgotten."""
    return _against_a_pass(step, step.expired)


def failed_in_quarantine(step: StepFacts) -> str:
    """Only checks in quarantine failed."""
    if not step.excused or step.exit_status != Exit.PASS:
        return ""
    return f"{step.alone.why}; {len(step.excused)} failed in quarantine"


def recorded_as_failed(step: StepFacts) -> str:
    """The step's own record is worse than its evidence."""
    return "it says that it failed" if step.worse is FAIL else ""


def recorded_as_not_run(step: StepFacts) -> str:
    """The step's own record is worse than its evidence."""
    return "it says that it did not run" if step.worse is DID_NOT_RUN else ""


def recorded_as_inconclusive(step: StepFacts) -> str:
    """The step's own record is worse than its evidence."""
    return "it says that it is inconclusive" if step.worse is INCONCLUSIVE else ""


def exit_1_without_a_failing_check(step: StepFacts) -> str:
    """The step says that checks failed, and names none."""
    return step.exit_in_words("exit 1 and no failing check") if step.exit_status == Exit.FAIL else ""


def hung(step: StepFacts) -> str:
    """The step was ended at its timeout."""
    return step.stopped if step.timed_out else ""


def not_started(step: StepFacts) -> str:
    """What it needs did not pass."""
    return step.stopped if step.exit_status is None and step.stopped.startswith(NOT_STARTED) else ""


def ended_or_never_started(step: StepFacts) -> str:
    """The step has no exit status, for any other reason."""
    return (step.stopped or "it has no exit status") if step.exit_status is None else ""


def crashed(step: StepFacts) -> str:
    """A crash on a node that was watched and is sound is the step's own, as a hang is."""
    # mutant NumberReplacer: neither 0 nor 1 is the signal of a crash
    return step.exit_in_words() if step.watched and -(step.exit_status or 0) in OWN_SIGNALS else ""


def killed(step: StepFacts) -> str:
    """A signal ended it."""
    return step.exit_in_words() if (step.exit_status or 0) < 0 else ""


def cannot_run_there(step: StepFacts) -> str:
    """The step says that this environment or node cannot run it."""
    cannot = step.evidence.cannot_run_here(step.exit_status) or step.exit_status == Exit.SICK_NODE
    return step.exit_in_words() if cannot else ""


def any_other_status(step: StepFacts) -> str:
    """The status is neither a finding nor any of those above."""
    return step.exit_in_words() if step.exit_status not in {Exit.PASS, Exit.INCONCLUSIVE} else ""


def evidence_unreadable(step: StepFacts) -> str:
    """The evidence is missing or corrupt."""
    return step.problem


def evidence_without_a_check(step: StepFacts) -> str:
    """Nothing was checked."""
    return "" if step.checks else "it recorded no checks"


def nothing_but_skips(step: StepFacts) -> str:
    """No check reached a result."""
    if step.done != 0:  # mutant ReplaceComparisonOperator_NotEq_Gt: a number of checks
        return ""
    return f"none of its {len(step.checks)} checks ran; the first: {step.reason(DID_NOT_RUN)}"


def a_check_ran_without_what_it_needs(step: StepFacts) -> str:
    """The step's declaration is wrong: the check does not need that."""
    if not step.contradicted:
        return ""
    check = step.contradicted[0]
    return f"{check.id} ran without {step.lacking(check)}, so drop that condition"


def a_check_did_not_run(step: StepFacts) -> str:
    """A check did not run, and nothing that it is declared to need was lacking."""
    if not step.missing:
        return ""
    check, *others = step.missing
    needed = needs_of(check)
    declared = [one for one in needed if one in step.may_lack]
    if declared:
        why = f", and it needs {declared[0]}, which is here"
    elif needed:
        why = f", and it needs {needed[0]}, which the step does not declare (may_lack)"
    else:
        why = " without a declared reason (may_lack)"
    many = f"{len(step.missing)} checks that must run did not; the first: " if others else ""
    return f"{many}{check.id} did not run{why}: {first_line(check.message)}"


def too_many_checks_excused(step: StepFacts) -> str:
    """More checks lacked a condition than the step allows."""
    condition = step.over_the_number
    if not condition:
        return ""
    excused = [check.id for check in step.cannot_run if step.lacking(check) == condition]
    lacking = f"{count(len(excused), 'check')} did not run for lack of {condition}"
    return f"{lacking}, and at most {step.may_lack[condition].most} may; the last: {excused[-1]}"


def fewer_checks_than_promised(step: StepFacts) -> str:
    """The step did less than its declaration demands."""
    if step.done >= step.minimum:
        return ""
    cannot = f", {_cannot_run(step)}" if step.cannot_run else ""
    return f"{count(step.done, 'check')} ran{cannot}; at least {step.minimum} must"


def read_what_does_not_select_it(step: StepFacts) -> str:
    """A change to a file that it read would not run it."""
    return step.reads


def inconclusive(step: StepFacts) -> str:
    """A check is inconclusive, or its exit status says so."""
    # mutant ReplaceComparisonOperator_Eq_GtE: any other status but 0 has been decided
    if step.exit_status == Exit.INCONCLUSIVE or step.counts.inconclusive:
        return step.finding(INCONCLUSIVE) or "exit 6 (inconclusive) and no check that says why"
    return ""


def passed(step: StepFacts) -> str:
    """The step ended with 0, with good evidence."""
    # mutant ReplaceComparisonOperator_NotEq_Gt, ReplaceComparisonOperator_NotEq_Lt: any other status has been decided
    if step.exit_status != Exit.PASS:
        return ""
    deselected = f", {step.deselected} deselected" if step.deselected else ""
    if not step.cannot_run:
        return _joined(f"{step.counts.passed} passed{deselected}", step.remark)
    return _joined(f"{count(step.counts.passed, 'check')} passed{deselected}, {_cannot_run(step)}", step.remark)


def _cannot_run(step: StepFacts) -> str:
    """`2 cannot run here: the prefix cache of MLA needs AMX`; how many of each, where there are several sentences."""
    reasons = Counter(step.may_lack[step.lacking(check)].why for check in step.cannot_run)
    (why, _), *others = reasons.most_common()
    each = "; ".join(f"{number}: {what}" for what, number in reasons.most_common()) if others else why
    return f"{reasons.total()} cannot run here: {each}"


def _against_a_pass(step: StepFacts, why: str) -> str:
    return why if why and step.alone.outcome is PASS else ""


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


@dataclass(frozen=True)
class Rule:
    """If `why` says something, a step is this.

    Attributes:
        why: Why the rule holds for a step; empty where it does not.
        outcome: None for what the step is without its surroundings.
        ruling: What the outcome is called.
        own: Whether the rule asks the step's own evidence alone; its record then explains it, where both say the same.
    """

    why: Callable[[StepFacts], str]
    outcome: Outcome | None
    ruling: Ruling
    own: bool = False

    @property
    def name(self) -> str:
        """The name of its function, in words."""
        return self.why.__name__.replace("_", " ")


PASSED_LATE = "failed earlier"

RULES: tuple[Rule, ...] = (
    # Nothing to go by.
    Rule(damaged, DID_NOT_RUN, Ruling.INFRA),
    Rule(no_record, DID_NOT_RUN, Ruling.INFRA),
    # Evidence of something else.
    Rule(another_command, DID_NOT_RUN, Ruling.UNFINISHED),
    Rule(another_image, DID_NOT_RUN, Ruling.INFRA),
    Rule(packages_of_another_tree, DID_NOT_RUN, Ruling.INFRA),
    # A failure that was seen stays a failure.
    Rule(failed_on_a_node_in_doubt, DID_NOT_RUN, Ruling.INFRA),
    Rule(a_check_failed, FAIL, Ruling.REGRESSION, own=True),
    Rule(node_in_doubt, DID_NOT_RUN, Ruling.INFRA),
    Rule(flaky, INCONCLUSIVE, Ruling.FLAKY),
    # A pass, and what is against it.
    Rule(failed_earlier, INCONCLUSIVE, Ruling.FLAKY),
    Rule(open_earlier, INCONCLUSIVE, Ruling.INCONCLUSIVE),
    Rule(image_not_built, DID_NOT_RUN, Ruling.UNFINISHED),
    Rule(tests_of_another_step, DID_NOT_RUN, Ruling.UNFINISHED),
    Rule(tests_not_listed, DID_NOT_RUN, Ruling.UNFINISHED),
    Rule(shards_are_not_the_whole_step, DID_NOT_RUN, Ruling.UNFINISHED),
    Rule(quarantine_expired, FAIL, Ruling.QUARANTINED),
    Rule(failed_in_quarantine, None, Ruling.QUARANTINED),
    # The step alone: its record, its exit status, its checks.
    Rule(recorded_as_failed, FAIL, Ruling.REGRESSION, own=True),
    Rule(recorded_as_not_run, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(recorded_as_inconclusive, INCONCLUSIVE, Ruling.INCONCLUSIVE, own=True),
    Rule(exit_1_without_a_failing_check, FAIL, Ruling.REGRESSION, own=True),
    # No exit status: ended by hilgate, or never started. Whose doing that is.
    Rule(hung, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(not_started, DID_NOT_RUN, Ruling.NOT_STARTED, own=True),
    Rule(ended_or_never_started, DID_NOT_RUN, Ruling.INFRA, own=True),
    # Any status that is not a finding: signals, this environment, misuse, no tests.
    Rule(crashed, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(killed, DID_NOT_RUN, Ruling.INFRA, own=True),
    Rule(cannot_run_there, DID_NOT_RUN, Ruling.INFRA, own=True),
    Rule(any_other_status, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    # The exit status says that it ran to its end; what follows is what its evidence says.
    Rule(evidence_unreadable, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(evidence_without_a_check, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(nothing_but_skips, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(a_check_ran_without_what_it_needs, FAIL, Ruling.REGRESSION, own=True),
    Rule(a_check_did_not_run, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(too_many_checks_excused, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(fewer_checks_than_promised, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(read_what_does_not_select_it, DID_NOT_RUN, Ruling.UNFINISHED, own=True),
    Rule(inconclusive, INCONCLUSIVE, Ruling.INCONCLUSIVE, own=True),
    Rule(passed, PASS, Ruling.PASS, own=True),
)
"""Read from the top; the first that holds decides. Every exit status has a rule."""


def decide(step: StepFacts) -> Decision:
    """What a step is: the first rule that holds decides.

    The runner asks what its dependants may rest on, and the judge what the author of a change reads.
    """
    for rule in RULES:
        why = rule.why(step)
        if why:
            explained = _as_recorded(step, rule, why) if rule.own else why
            return Decision(rule.outcome or step.alone.outcome, rule.ruling, explained, rule.name)
    raise AssertionError(f"no rule for {step}")


def _as_recorded(step: StepFacts, rule: Rule, why: str) -> str:
    """The reason that the step's record gives where it has the same outcome; else ours, and what it says instead."""
    if step.recorded is None:
        return why
    if step.recorded is rule.outcome:
        return step.stopped or why
    return f"{why} (recorded as {step.recorded.value})"
