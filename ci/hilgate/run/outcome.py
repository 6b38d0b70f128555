# SPDX-License-Identifier: Apache-2.0
"""Words about how a step ended: of its checks, of its record, and of what it printed. `run.rules` decides on it."""

from __future__ import annotations

import re
import signal
from collections import Counter
from typing import TYPE_CHECKING

from hilgate.conditions import NEEDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hilgate.model.plan import Plan
    from hilgate.model.record import Check, Outcome, StepRecord

OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
"""Signals that a process brings upon itself; the others come from outside (SIGKILL: out of memory)."""


TIMED_OUT = "timed out"
"""How the reason begins when a step was ended at its timeout."""
NOT_STARTED = "not started"
"""How it begins when another step stood in its way."""


def first(checks: Iterable[Check], outcome: Outcome) -> Check | None:
    """The first check with this outcome."""
    return next((check for check in checks if check.outcome is outcome), None)


_PLACE = re.compile(r"(\S+\.py:\d+): \S+( \(\S+\))?")


def place(check: Check) -> str:
    """`file:line` where a test failed, and the helper's: the last line of its message (`hilgate.evidence`)."""
    last = check.message.splitlines()[-1:]
    found = _PLACE.fullmatch(last[0].strip()) if last else None
    return found[1] + (found[2] or "") if found else ""


def leading(checks: Iterable[Check], outcome: Outcome) -> Check | None:
    """The first check with this outcome at the place where most of them have it: what a reader sees first."""
    worst_checks = [check for check in checks if check.outcome is outcome]
    places = [place(check) for check in worst_checks]
    return worst_checks[places.index(Counter(places).most_common(1)[0][0])] if worst_checks else None


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
"""Words of an error that only says that another program failed; the error of that program stands before it."""


def said(lines: Sequence[str]) -> str:
    """The line of a program's output that says what is wrong: its last error, else its last line with words.

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
        if (found := imported.get(name, "(unknown place)")) != place:
            return f"it imports {name} from {found}, not from {place}: what it says is not about this tree"
    return ""


def needs_of(check: Check) -> list[str]:
    """The conditions that a check says it needs."""
    return check.labels.get(NEEDS, "").split()


def crashed(record: StepRecord) -> bool:
    """Whether a step ended by its own signal or at its timeout: a finding, as a failing test is."""
    own = record.exit_status is not None and -record.exit_status in OWN_SIGNALS
    return own or record.message.startswith(TIMED_OUT)
