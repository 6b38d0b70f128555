# SPDX-License-Identifier: Apache-2.0
"""What a step is, from everything that is known of it: one table, read from the top, the first rule that holds decides.

The runner and the judge read the same table. The runner knows the step's own evidence alone. The judge adds its
surroundings: node, image, reruns, earlier attempts and the quarantine. A step is never better than its own record, nor
than its checks, with one exception that has an owner and a date: failures that the merge base has in quarantine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Surroundings:
    """What is known of a step besides its own evidence. A runner knows nothing of it, and the judge fills it in.

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
        failed_earlier: Whether an earlier attempt failed, crashed or hung.
        open_earlier: Whether an earlier attempt was inconclusive.
        unbuilt: Why the image that it should build is not there.
        stray: A test among its checks that its own command does not run and another step's does.
        unlisted: That nobody knows whether the change took tests of it away.
        wrongly_dealt: Of a shard: which test ran in none or in several, or which other shard is missing.
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
    failed_earlier: bool = False
    open_earlier: bool = False
    unbuilt: str = ""
    stray: str = ""
    unlisted: str = ""
    wrongly_dealt: str = ""


ALONE = Surroundings()
"""Nothing but the step's own evidence."""


@dataclass(frozen=True)
class Facts:
    """Everything that is known of one step.

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
        around: What is known besides.
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
    around: Surroundings = ALONE

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

    @cached_property
    def alone(self) -> Decision:
        """What the table says of the step without its surroundings."""
        return decide(replace(self, around=ALONE))

    @cached_property
    def worse(self) -> Outcome | None:
        """The recorded outcome where it is worse than the evidence; a step is never better than its own record."""
        if self.recorded is None:
            return None
        shown = decide(replace(self, around=ALONE, recorded=None)).outcome
        return self.recorded if SEVERITY[self.recorded] > SEVERITY[shown] else None

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
class Decision:
    """An outcome, what it is called, the first thing that explains it, and the rule that decided."""

    outcome: Outcome
    ruling: Ruling
    why: str
    rule: str


def _why_pass(facts: Facts) -> str:
    deselected = f", {facts.deselected} deselected" if facts.deselected else ""
    if not facts.cannot_run:
        return _joined(f"{facts.counts.passed} passed{deselected}", facts.remark)
    return _joined(f"{count(facts.counts.passed, 'check')} passed{deselected}, {_cannot_run(facts)}", facts.remark)


def _cannot_run(facts: Facts) -> str:
    """`2 cannot run here: the prefix cache of MLA needs AMX`; how many of each, where there are several sentences."""
    said = Counter(facts.may_lack[facts.lacking(check)].why for check in facts.cannot_run)
    (why, _), *others = said.most_common()
    each = "; ".join(f"{number}: {what}" for what, number in said.most_common()) if others else why
    return f"{said.total()} cannot run here: {each}"


def _why_missing(facts: Facts) -> str:
    check, *others = facts.missing
    needed = needs_of(check)
    declared = [one for one in needed if one in facts.may_lack]
    if declared:
        why = f"it needs {declared[0]}, which is here"
    elif needed:
        why = f"it needs {needed[0]}, which the step does not declare (may_lack)"
    else:
        why = "it names no condition that the step may lack (may_lack)"
    many = f"{len(facts.missing)} checks that must run did not; the first: " if others else ""
    return f"{many}{check.id} did not run, and {why}: {first_line(check.message)}"


def _why_too_many_excuses(facts: Facts) -> str:
    condition = facts.over_the_number
    excused = [check.id for check in facts.cannot_run if facts.lacking(check) == condition]
    lacking = f"{count(len(excused), 'check')} did not run for lack of {condition}"
    return f"{lacking}, and at most {facts.may_lack[condition].most} may; the last: {excused[-1]}"


def _why_contradicted(facts: Facts) -> str:
    check = facts.contradicted[0]
    lacking = facts.lacking(check)
    return f"{check.id} ran, and it is declared to need {lacking}, which is not here: remove the declaration"


def _why_too_few(facts: Facts) -> str:
    cannot = f", {_cannot_run(facts)}" if facts.cannot_run else ""
    return f"{count(facts.done, 'check')} ran{cannot}; at least {facts.minimum} must"


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _alone(facts: Facts) -> str:
    return facts.alone.why


@dataclass(frozen=True)
class Rule:
    """If `when` holds, this is what a step is, and `why` says it. Without an outcome: what the step is alone."""

    name: str
    when: Callable[[Facts], object]
    outcome: Outcome | None
    ruling: Ruling
    why: Callable[[Facts], str]


def _own(
    name: str, when: Callable[[Facts], object], outcome: Outcome, ruling: Ruling, why: Callable[[Facts], str]
) -> Rule:
    """A rule about the step's own evidence. Its record explains it, where both say the same."""

    def explained(facts: Facts) -> str:
        if facts.recorded is None:
            return why(facts)
        if facts.recorded is outcome:  # mutant ReplaceComparisonOperator_Is_Eq: members of an enum
            return facts.stopped or why(facts)
        return f"{why(facts)} (recorded as {facts.recorded.value})"

    return Rule(name, when, outcome, ruling, explained)


FAIL, DID_NOT_RUN, INCONCLUSIVE, PASS = Outcome.FAIL, Outcome.DID_NOT_RUN, Outcome.INCONCLUSIVE, Outcome.PASS

PASSED_LATE = "failed earlier"

RULES: tuple[Rule, ...] = (
    # Nothing to go by.
    Rule(
        "damaged",
        lambda f: f.around.damaged,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: _joined(f"its results cannot be believed: {f.around.damaged}", f.around.node_in_doubt),
    ),
    Rule(
        "no record",
        lambda f: not f.around.arrived,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: _joined("no record of it arrived", f.around.node_in_doubt, f.around.of_a_fork or f.around.not_taken),
    ),
    # Evidence of something else.
    Rule(
        "another command",
        lambda f: f.around.other_command,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f"another command was run: {f.around.other_command}",
    ),
    Rule(
        "another image",
        lambda f: f.around.other_image,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: _joined(f.around.other_image, f"{f.first_failure.id} failed there" if f.first_failure else ""),
    ),
    Rule(
        "another tree's packages",
        lambda f: f.around.other_packages,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: f.around.other_packages,
    ),
    # A failure that was seen stays a failure, whatever the exit status says and whatever happened afterwards.
    Rule(
        "failed, node in doubt",
        lambda f: f.counts.failed and f.around.node_in_doubt and not f.around.confirmed,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: f"{f.alone.why}; but {f.around.node_in_doubt}: it may be the node's doing",
    ),
    _own("a check failed", lambda f: f.counts.failed, FAIL, Ruling.REGRESSION, lambda f: f.finding(FAIL)),
    Rule(
        "node in doubt",
        lambda f: f.around.node_in_doubt or f.around.without_health,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: f"{f.around.node_in_doubt or f.around.without_health}; the step itself: {f.alone.why}",
    ),
    Rule(
        "flaky",
        lambda f: f.around.flaky and f.alone.outcome is INCONCLUSIVE,
        INCONCLUSIVE,
        Ruling.FLAKY,
        lambda f: f"{f.around.flaky[0].id} failed and passed when run again: {first_line(f.around.flaky[0].message)}",
    ),
    # A pass, and what is against it.
    Rule(
        PASSED_LATE,
        lambda f: f.around.failed_earlier and f.alone.outcome is PASS,
        INCONCLUSIVE,
        Ruling.FLAKY,
        _alone,
    ),
    Rule(
        "open earlier",
        lambda f: f.around.open_earlier and f.alone.outcome is PASS,
        INCONCLUSIVE,
        Ruling.INCONCLUSIVE,
        _alone,
    ),
    Rule(
        "image not built",
        lambda f: f.around.unbuilt and f.alone.outcome is PASS,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f.around.unbuilt,
    ),
    Rule(
        "another step's tests",
        lambda f: f.around.stray and f.alone.outcome is PASS,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f.around.stray,
    ),
    Rule(
        "tests not listed",
        lambda f: f.around.unlisted and f.alone.outcome is PASS,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f.around.unlisted,
    ),
    Rule(
        "shards are not the whole step",
        lambda f: f.around.wrongly_dealt and f.alone.outcome is PASS,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f.around.wrongly_dealt,
    ),
    # An entry that has expired is red by itself, so that it cannot be forgotten.
    Rule(
        "quarantine expired",
        lambda f: f.around.expired and f.alone.outcome is PASS,
        FAIL,
        Ruling.QUARANTINED,
        lambda f: f.around.expired,
    ),
    Rule(
        "failed in quarantine",
        lambda f: f.around.excused and f.exit_status == Exit.PASS,
        None,
        Ruling.QUARANTINED,
        lambda f: f"{f.alone.why}; {len(f.around.excused)} failed in quarantine",
    ),
    # The step alone: its record, its exit status, its checks.
    _own("recorded as failed", lambda f: f.worse is FAIL, FAIL, Ruling.REGRESSION, lambda _: "it says that it failed"),
    _own(
        "recorded as not run",
        lambda f: f.worse is DID_NOT_RUN,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda _: "it says that it did not run",
    ),
    _own(
        "recorded as inconclusive",
        lambda f: f.worse is INCONCLUSIVE,
        INCONCLUSIVE,
        Ruling.INCONCLUSIVE,
        lambda _: "it says that it is inconclusive",
    ),
    _own(
        "exit 1 without a failing check",
        lambda f: f.exit_status == Exit.FAIL,
        FAIL,
        Ruling.REGRESSION,
        lambda f: f.exit_in_words("exit 1 and no failing check"),
    ),
    # No exit status: ended by hilgate, or never started. Whose doing that is.
    _own("hung", lambda f: f.timed_out, DID_NOT_RUN, Ruling.UNFINISHED, lambda f: f.stopped),
    _own(
        "not started",
        lambda f: f.exit_status is None and f.stopped.startswith(NOT_STARTED),
        DID_NOT_RUN,
        Ruling.NOT_STARTED,
        lambda f: f.stopped,
    ),
    _own(
        "ended, or never started",
        lambda f: f.exit_status is None,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: f.stopped or "it has no exit status",
    ),
    # Any status that is not a finding: signals, this environment, misuse, no tests.
    # A crash on a node that was watched and is sound is the step's own, as a hang is.
    _own(
        "crashed",
        # mutant NumberReplacer: neither 0 nor 1 is the signal of a crash
        lambda f: f.around.watched and -(f.exit_status or 0) in OWN_SIGNALS,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f.exit_in_words(),
    ),
    _own("killed", lambda f: (f.exit_status or 0) < 0, DID_NOT_RUN, Ruling.INFRA, lambda f: f.exit_in_words()),
    _own(
        "cannot run there",
        lambda f: f.evidence.cannot_run_here(f.exit_status) or f.exit_status == Exit.SICK_NODE,
        DID_NOT_RUN,
        Ruling.INFRA,
        lambda f: f.exit_in_words(),
    ),
    _own(
        "any other status",
        lambda f: f.exit_status not in {Exit.PASS, Exit.INCONCLUSIVE},
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f.exit_in_words(),
    ),
    # The status says that it did its work. What its evidence says of that.
    _own(
        "evidence missing or unreadable",
        lambda f: f.problem,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f.problem,
    ),
    _own(
        "evidence without a check",
        lambda f: not f.checks,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda _: "it recorded no checks",
    ),
    _own(
        "nothing but skips",
        lambda f: f.done == 0,  # mutant ReplaceComparisonOperator_Eq_LtE: a number of checks
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        lambda f: f"none of its {len(f.checks)} checks ran; the first: {f.reason(DID_NOT_RUN)}",
    ),
    _own(
        "a check ran without what it is declared to need",
        lambda f: f.contradicted,
        FAIL,
        Ruling.REGRESSION,
        _why_contradicted,
    ),
    _own(
        "a check did not run, without a true excuse",
        lambda f: f.missing,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        _why_missing,
    ),
    _own(
        "more checks are excused than the step allows",
        lambda f: f.over_the_number,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        _why_too_many_excuses,
    ),
    _own(
        "fewer checks than the step promises",
        lambda f: f.done < f.minimum,
        DID_NOT_RUN,
        Ruling.UNFINISHED,
        _why_too_few,
    ),
    _own("it read what does not select it", lambda f: f.reads, DID_NOT_RUN, Ruling.UNFINISHED, lambda f: f.reads),
    _own(
        "an inconclusive check, or exit 6",
        # mutant ReplaceComparisonOperator_Eq_GtE: any other status but 0 has been decided
        lambda f: f.exit_status == Exit.INCONCLUSIVE or f.counts.inconclusive,
        INCONCLUSIVE,
        Ruling.INCONCLUSIVE,
        lambda f: f.finding(INCONCLUSIVE) or "exit 6 (inconclusive) and no check that says why",
    ),
    # mutant ReplaceComparisonOperator_Eq_LtE, ReplaceComparisonOperator_Eq_GtE: any other status has been decided
    _own("exit 0 and good evidence", lambda f: f.exit_status == Exit.PASS, PASS, Ruling.PASS, _why_pass),
)
"""Read from the top; the first that holds decides. The rules of an exit status cover every status."""


def decide(facts: Facts) -> Decision:
    """What a step is: the first rule that holds decides.

    The runner asks what its dependants may rest on, and the judge what the author of a change reads.
    """
    for rule in RULES:
        if rule.when(facts):
            return Decision(rule.outcome or facts.alone.outcome, rule.ruling, rule.why(facts), rule.name)
    raise AssertionError(f"no rule for {facts}")
