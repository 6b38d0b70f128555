# SPDX-License-Identifier: Apache-2.0
"""What an exit status and its evidence mean together: one table, read from the top, first match decides.

The runner uses it to know whether dependants may start, the judge to decide. Both see the same table.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hilgate.conditions import NEEDS
from hilgate.errors import Exit
from hilgate.model import SEVERITY, Check, Counts, Outcome
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hilgate.model import Plan, StepRecord
    from hilgate.run.evidence import EvidenceKind

OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
"""Signals that a process brings upon itself; the others come from outside (SIGKILL: out of memory)."""


TIMED_OUT = "timed out"
"""How the reason begins when a step was ended at its timeout."""
SLOW_MACHINE = "; this machine is slow: "
"""How the reason goes on when the machine takes more than `SLOW` times as long as the one of the declared minutes."""
SLOW = 3.0
NOT_STARTED = "not started"
"""How it begins when another step stood in its way."""


@dataclass(frozen=True)
class Facts:
    """Everything that is known of one step.

    Attributes:
        exit_status: None when the step was not started or was ended by us; then `stopped` says why.
        problem: What is wrong with the evidence as a whole (missing, corrupt); empty when it could be read.
        said: The line in which the step itself says what went wrong, to explain an exit without evidence.
        may_lack: Conditions that its declaration lets a machine lack -> what to say then.
        lacked: Those that the machine lacked, asked where the step ran.
    """

    evidence: EvidenceKind
    minimum: int
    exit_status: int | None
    checks: tuple[Check, ...]
    stopped: str = ""
    problem: str = ""
    said: str = ""
    may_lack: Mapping[str, str] = field(default_factory=dict)
    lacked: frozenset[str] = frozenset()

    @cached_property
    def counts(self) -> Counts:
        """How many checks ended how."""
        return Counts.of(check.outcome for check in self.checks)

    @property
    def done(self) -> int:
        """Checks that reached a result: an inconclusive one did its work, a skipped one did not."""
        return self.counts.passed + self.counts.inconclusive

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
    def contradicted(self) -> tuple[Check, ...]:
        """Checks that ran although what they are declared to need was lacking: they need it no more."""
        ran = {Outcome.PASS, Outcome.INCONCLUSIVE}
        return tuple(check for check in self.checks if check.outcome in ran and self.lacking(check))

    def reason(self, outcome: Outcome) -> str:
        """What the first check with this outcome says; empty where there is none."""
        check = first(self.checks, outcome)
        return summary(check.message) if check else ""

    def finding(self, outcome: Outcome) -> str:
        """The same, behind the id of the check."""
        check = first(self.checks, outcome)
        return f"{check.id}: {summary(check.message)}" if check else ""

    def exit_in_words(self, text: str = "") -> str:
        """An exit status that is no finding (or `text`), what is wrong with the evidence, and what the step said."""
        text = text or self.evidence.exit_meaning(self.exit_status or 0)
        text += f"; {self.problem}" if self.problem else ""
        return text + (f"; it said: {self.said}" if self.said else "")


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


def summary(text: str) -> str:
    """The first line with text; where `assert_close` of torch or numpy failed, also by how much.

    Their first line is the same for every failure, and the numbers follow it.
    """
    first = first_line(text)
    if not _ASSERT_CLOSE.search(first) and first != _BARE:
        return first
    lines = (line.strip() for line in text.splitlines())
    return "; ".join(dict.fromkeys([first, *(line for line in lines if _NUMBERS.match(line))]))


_BARE = "AssertionError:"
"""The first line of numpy's, which begins its message with an empty one."""
_ASSERT_CLOSE = re.compile(r"are not (?:close|equal)!")
_NUMBERS = re.compile(
    r"Not equal to tolerance|Arrays are not|Mismatched elements:|Expected .* but got |"
    r"(?:(?:Greatest |Max )?(?:absolute|relative) difference)",
    re.IGNORECASE,
)
"""Lines of torch and numpy with what was compared and by how much it is off."""


_ERROR_LINE = re.compile(
    r"(?:\([^)]*\) )?(?:ERROR [\d-]+ [\d:]+ \[[^]]*\] )?"  # how vLLM's processes begin a line of their log
    r"(?:(?:E +)?(?:[Ee]rror|ERROR|[Ff]atal|FATAL|[\w.]*(?:Error|Exception)): *\S|ERROR \S+ - )"
)
"""How a line begins in which a program says what is wrong: `error: ...`, `fatal: ...`, `ValueError: ...`."""
_POINTS_UP = re.compile(r"ended with status \d+|root cause above")
"""In an error that only says that another program failed, whose own error stands before it."""


def said(lines: Sequence[str]) -> str:
    """Of what a program printed, the line that says what is wrong: its last error, else its last line with words.

    What follows an error is where it happened and what to do, which is of no use without it. Where Python itself says
    that it crashed (`faulthandler`), its innermost calls outside of installed packages, and the test's.
    """
    if crash := _crash(lines):
        return crash
    worded = [line.strip() for line in lines if line.strip()]
    errors = [line for line in worded if _ERROR_LINE.match(line)]
    causes = [line for line in errors if not _POINTS_UP.search(line)]
    return next((found[-1] for found in (causes, errors, worded) if found), "")


_FATAL = re.compile(r"Fatal Python error: \S.*$")
_CALL = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.+)$')
_INSTALLED = re.compile(r"site-packages/|/lib/python\d|^<")
CALLS = 3
"""Innermost calls that a crash is said with."""


def _crash(lines: Sequence[str]) -> str:
    """`Fatal Python error: Segmentation fault in load (kernel.py:172) < ... test_x (test_x.py:47)`; else empty."""
    fatal = next((n for n, line in enumerate(lines) if _FATAL.search(line)), None)
    if fatal is None:
        return ""
    own: list[re.Match[str]] = []
    for line in lines[fatal + 1 :]:
        if call := _CALL.match(line):
            own += [call] if not _INSTALLED.search(call["file"]) else []
        elif own:
            break  # the thread that crashed is the first
    calls = own[:CALLS] + [one for one in own[CALLS:] if one["name"].startswith("test_")][:1]
    words = " < ".join(f"{one['name']} ({one['file'].rpartition('/')[2]}:{one['line']})" for one in calls)
    found = _FATAL.search(lines[fatal])
    assert found
    return found[0] + (f" in {words}" if words else "")


def other_packages(plan: Plan, imported: Mapping[str, str]) -> str:
    """Which package of the tree under test a step imports from elsewhere; empty when none."""
    for name, place in plan.packages.items():
        if (found := imported.get(name, "(nobody knows where)")) != place:
            return f"it imports {name} from {found}, not from {place}: what it says is not about this tree"
    return ""


def needs_of(check: Check) -> list[str]:
    """The conditions that a check says it needs."""
    return check.labels.get(NEEDS, "").split()


def crashed(record: StepRecord) -> bool:
    """Whether a step ended by its own signal or at its timeout: a finding, as a failing test is."""
    own = record.exit_status is not None and -record.exit_status in OWN_SIGNALS
    return own or record.message.startswith(TIMED_OUT)


def _why_pass(facts: Facts) -> str:
    if not facts.cannot_run:
        return f"{facts.counts.passed} passed"
    return f"{count(facts.counts.passed, 'check')} passed, {_cannot_run(facts)}"


def _cannot_run(facts: Facts) -> str:
    """`2 cannot run here: the prefix cache of MLA needs AMX`; how many of each, where there are several sentences."""
    said = Counter(facts.may_lack[facts.lacking(check)] for check in facts.cannot_run)
    if len(said) == 1:
        return f"{said.total()} cannot run here: {next(iter(said))}"
    return f"{said.total()} cannot run here: " + "; ".join(f"{number}: {what}" for what, number in said.most_common())


def _why_missing(facts: Facts) -> str:
    check, number = facts.missing[0], len(facts.missing)
    needed = needs_of(check)
    declared = [one for one in needed if one in facts.may_lack]
    if declared:
        why = f"it needs {declared[0]}, which is here"
    elif needed:
        why = f"it needs {needed[0]}, which the step does not declare (may_lack)"
    else:
        why = "it names no condition that the step may lack (may_lack)"
    many = f"{number} checks that must run did not; the first: " if number > 1 else ""
    return f"{many}{check.id} did not run, and {why}: {first_line(check.message)}"


def _why_contradicted(facts: Facts) -> str:
    check = facts.contradicted[0]
    lacking = facts.lacking(check)
    return f"{check.id} ran, and it is declared to need {lacking}, which is not here: remove the declaration"


def _reported(facts: Facts) -> int:
    return facts.done + len(facts.cannot_run)


def _why_too_few(facts: Facts) -> str:
    cannot = f", {_cannot_run(facts)}" if facts.cannot_run else ""
    return f"{count(facts.done, 'check')} ran{cannot}; at least {facts.minimum} must be reported"


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
        "a check ran without what it is declared to need",
        lambda f: bool(f.contradicted),
        Outcome.FAIL,
        _why_contradicted,
    ),
    Rule("a check did not run, without a true excuse", lambda f: bool(f.missing), Outcome.DID_NOT_RUN, _why_missing),
    Rule(
        "fewer checks than the step promises",
        lambda f: _reported(f) < f.minimum,
        Outcome.DID_NOT_RUN,
        _why_too_few,
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
