# SPDX-License-Identifier: Apache-2.0
"""What an exit status and its evidence mean together: one table, read from the top, first match decides.

The runner uses it to know whether dependants may start, the judge to decide. Both see the same table.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hilgate.errors import Exit
from hilgate.model import Check, Counts, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hilgate.model import Plan, StepRecord
    from hilgate.run.evidence import EvidenceKind

SEVERITY: dict[Outcome, int] = {
    Outcome.PASS: 0,
    Outcome.INCONCLUSIVE: 1,
    Outcome.DID_NOT_RUN: 2,
    Outcome.FAIL: 3,
}
"""The order in which outcomes win: fail over did not run over inconclusive over pass."""


OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
"""Signals that a process brings upon itself; the others come from outside (SIGKILL: out of memory)."""


TIMED_OUT = "timed out"
"""How the reason begins when a step was ended at its timeout."""
NOT_STARTED = "not started"
"""How it begins when another step stood in its way."""


@dataclass(frozen=True)
class Facts:
    """Everything that is known of one step.

    Attributes:
        exit_status: None when the step was not started or was ended by us; then `stopped` says why.
        problem: What is wrong with the evidence as a whole (missing, corrupt); empty when it could be read.
        last_line: The last thing the step printed, to explain an exit without evidence.
    """

    evidence: EvidenceKind
    minimum: int
    exit_status: int | None
    checks: tuple[Check, ...]
    stopped: str = ""
    problem: str = ""
    last_line: str = ""

    @cached_property
    def counts(self) -> Counts:
        """How many checks ended how."""
        return Counts.of(check.outcome for check in self.checks)

    @property
    def done(self) -> int:
        """Checks that reached a result: an inconclusive one did its work, a skipped one did not."""
        return self.counts.passed + self.counts.inconclusive

    def reason(self, outcome: Outcome) -> str:
        """What the first check with this outcome says; empty where there is none."""
        check = first(self.checks, outcome)
        return first_line(check.message) if check else ""

    def finding(self, outcome: Outcome) -> str:
        """The same, behind the id of the check."""
        check = first(self.checks, outcome)
        return f"{check.id}: {first_line(check.message)}" if check else ""

    def exit_in_words(self, text: str = "") -> str:
        """An exit status that is no finding (or `text`), with what is wrong with the evidence and the last line."""
        text = text or self.evidence.exit_meaning(self.exit_status or 0)
        text += f"; {self.problem}" if self.problem else ""
        return text + (f"; last line: {self.last_line}" if self.last_line else "")


@dataclass(frozen=True)
class Decision:
    """An outcome and the first thing that explains it."""

    outcome: Outcome
    why: str


@dataclass(frozen=True)
class Rule:
    """If `when` holds, the outcome is `outcome`, explained by `why`."""

    name: str
    when: Callable[[Facts], bool]
    outcome: Outcome
    why: Callable[[Facts], str]


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome that wins; of nothing at all: did not run."""
    return max(outcomes, key=SEVERITY.__getitem__, default=Outcome.DID_NOT_RUN)


def first(checks: Iterable[Check], outcome: Outcome) -> Check | None:
    """The first check with this outcome."""
    return next((check for check in checks if check.outcome is outcome), None)


def first_line(text: str) -> str:
    """The first line with text, which is where pytest and our own messages say what is wrong."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def other_packages(plan: Plan, imported: Mapping[str, str]) -> str:
    """Which package of the tree under test a step imports from elsewhere; empty when none."""
    for name, place in plan.packages.items():
        if (found := imported.get(name, "(nobody knows where)")) != place:
            return f"it imports {name} from {found}, not from {place}: what it says is not about this tree"
    return ""


def crashed(record: StepRecord) -> bool:
    """Whether a step ended by its own signal or at its timeout: a finding, as a failing test is."""
    own = record.exit_status is not None and -record.exit_status in OWN_SIGNALS
    return own or record.message.startswith(TIMED_OUT)


def _why_pass(facts: Facts) -> str:
    skipped = facts.counts.did_not_run
    more = f", {skipped} not run ({facts.reason(Outcome.DID_NOT_RUN)})" if skipped else ""
    return f"{facts.counts.passed} passed{more}"


RULES: tuple[Rule, ...] = (
    # A failure that was seen stays a failure, whatever the exit status says and whatever happened afterwards.
    Rule("a check failed", lambda f: f.counts.failed > 0, Outcome.FAIL, lambda f: f.finding(Outcome.FAIL)),
    Rule(
        "exit 1 without a failing check",
        lambda f: f.exit_status == Exit.FAIL,
        Outcome.FAIL,
        lambda f: f.exit_in_words("exit 1 and no failing check"),
    ),
    Rule(
        "ended by hilgate, or never started",
        lambda f: f.exit_status is None,
        Outcome.DID_NOT_RUN,
        lambda f: f.stopped or "it has no exit status",
    ),
    Rule(
        "any status that is not a finding: misuse, no tests, this environment, signals",
        lambda f: f.exit_status not in {Exit.PASS, Exit.INCONCLUSIVE},
        Outcome.DID_NOT_RUN,
        lambda f: f.exit_in_words(),
    ),
    Rule("evidence missing or unreadable", lambda f: bool(f.problem), Outcome.DID_NOT_RUN, lambda f: f.problem),
    Rule("evidence without a check", lambda f: not f.checks, Outcome.DID_NOT_RUN, lambda _: "it recorded no checks"),
    Rule(
        "nothing but skips",
        lambda f: f.done == 0,
        Outcome.DID_NOT_RUN,
        lambda f: f"none of its {len(f.checks)} checks ran; the first: {f.reason(Outcome.DID_NOT_RUN)}",
    ),
    Rule(
        "fewer checks than the step promises",
        lambda f: f.done < f.minimum,
        Outcome.DID_NOT_RUN,
        lambda f: f"{f.done} checks ran where at least {f.minimum} must; {f.counts}",
    ),
    Rule(
        "an inconclusive check, or exit 6",
        lambda f: f.exit_status == Exit.INCONCLUSIVE or f.counts.inconclusive > 0,
        Outcome.INCONCLUSIVE,
        lambda f: f.finding(Outcome.INCONCLUSIVE) or "exit 6 (inconclusive) and no check that says why",
    ),
    Rule("exit 0 and good evidence", lambda f: f.exit_status == Exit.PASS, Outcome.PASS, _why_pass),
)


def decide(facts: Facts) -> Decision:
    """Apply the first rule that matches; the last two rules cover what the others leave."""
    for rule in RULES:
        if rule.when(facts):
            return Decision(rule.outcome, rule.why(facts))
    raise AssertionError(f"no rule for {facts}")
