"""What a step's process did on a node: its tests as they really went, and what it said about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.model import Check, Evidence, Outcome
from hilgate.simulate.faults import Kind
from hilgate.simulate.truth import FAILED, PASSED, SKIPPED

if TYPE_CHECKING:
    from hilgate.model import PlannedStep
    from hilgate.simulate.buildkite import Host
    from hilgate.simulate.site import Site
    from hilgate.simulate.truth import Deed

OUTCOMES = {PASSED: Outcome.PASS, FAILED: Outcome.FAIL, SKIPPED: Outcome.DID_NOT_RUN}
MESSAGES = {PASSED: "", FAILED: "max_abs_err 0.5 > 0.001", SKIPPED: "needs another device"}

NO_TESTS = 5
"""pytest.ExitCode.NO_TESTS_COLLECTED."""

SIGKILLED = -9
"""Exit status of a child that the kernel ended for want of memory (`subprocess`: minus SIGKILL)."""


@dataclass(frozen=True)
class Said:
    """What the process and the runner around it say.

    Attributes:
        checks: What its evidence holds.
        stopped: Why the runner ended it; empty when it ended by itself.
        problem: What is wrong with its evidence; empty for nothing.
    """

    checks: tuple[Check, ...] = ()
    stopped: str = ""
    problem: str = ""


def do(site: Site, step: PlannedStep, host: Host, deed: Deed, struck: dict[Kind, int]) -> Said:
    """Run a step's process; what really happens goes into `deed`."""
    if Kind.HANG in struck:
        return Said(stopped=f"timed out after {step.timeout_minutes * 60} s")
    if Kind.OUT_OF_MEMORY in struck:
        deed.ended = SIGKILLED
        return Said(problem="it left no evidence")
    if Kind.NO_EVIDENCE in struck:
        deed.ended = 0
        return Said(problem="it left no evidence")
    claim = struck[Kind.FALSE_CLAIM] % 4 if Kind.FALSE_CLAIM in struck else None
    deed.tests = _tests(site, step, host, deed.attempt, struck)
    if claim == 0:
        deed.tests[next(iter(deed.tests), "test")] = FAILED
    deed.ended = int(claim == 1 or FAILED in deed.tests.values())
    if not deed.tests:
        deed.ended = NO_TESTS if step.evidence is Evidence.JUNIT else 0
        return Said(problem="its evidence holds no tests")
    if claim == 3:
        deed.ended = None
    return Said() if claim == 2 else Said(tuple(check(test, end) for test, end in deed.tests.items()))


def check(test: str, end: str) -> Check:
    """A test's end as a record says it."""
    return Check(id=test, outcome=OUTCOMES[end], seconds=0.5, message=MESSAGES[end])


def _tests(site: Site, step: PlannedStep, host: Host, attempt: int, struck: dict[Kind, int]) -> dict[str, str]:
    tests = site.outcomes(step, host, attempt)
    if Kind.ZERO_TESTS in struck:
        return {}
    if Kind.ALL_SKIPPED in struck:
        return dict.fromkeys(tests, SKIPPED)
    if Kind.BELOW_MINIMUM in struck:
        return tests | dict.fromkeys(list(tests)[step.minimum - 1 :], SKIPPED)
    return tests
