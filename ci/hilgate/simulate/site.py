"""The site of one simulated build: what its jobs share, and what its tests would say on a healthy node.

What a step's process did on a node: its tests as they really went, and what it said about them.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.model import Check, Environment, Outcome, Quarantine, Quarantined
from hilgate.run.evidence import kind_of
from hilgate.simulate.buildkite import Upload
from hilgate.simulate.faults import FIRST_ATTEMPT_ONLY, Fault, Kind
from hilgate.simulate.truth import FAILED, PASSED, SKIPPED, Excuse, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hilgate.model import Plan, PlannedStep
    from hilgate.simulate.buildkite import Build, Command, Host
    from hilgate.simulate.truth import Deed


EPOCH = dt.datetime(2026, 11, 21, 8, tzinfo=dt.UTC)
"""When every simulated build begins."""

TREE = hashlib.sha256(b"the files under test").hexdigest()
LATE_MINUTES = 10_000.0
"""How much later than its job a late upload arrives: after every verdict."""

_LASTING = frozenset({Kind.REGRESSION, Kind.QUARANTINED_FAILURE, Kind.QUARANTINED_ELSEWHERE, Kind.SOFT_FAILED})
_QUARANTINING = {
    Kind.QUARANTINED_FAILURE: False,
    Kind.QUARANTINED_ELSEWHERE: False,
    Kind.UNEXPECTED_PASS: False,
    Kind.QUARANTINE_EXPIRED: True,
}
"""Kinds that put a test into quarantine, and whether its entry has expired."""

_VALID_DAYS = 10
"""From `added` to `expires`; a quarantine file allows 14."""


@dataclass
class Site:
    """What the jobs of one build share.

    Attributes:
        name: Seed of everything that is drawn while it runs.
        folder: Where attempts leave their folders.
        images: Image -> digest, as last built.
        spoilt_images: Images that were built from other contents than planned.
        sick: Hosts whose sickness preflight does not see.
        failing: Planned step -> tests to run once more on another node.
        cleared: Planned steps with a test that passed on another node.
    """

    name: str
    plan: Plan
    digest: str
    folder: Path
    faults: tuple[Fault, ...]
    ledger: Ledger = field(default_factory=Ledger)
    images: dict[str, str] = field(default_factory=dict)
    spoilt_images: set[str] = field(default_factory=set)
    sick: set[str] = field(default_factory=set)
    failing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)

    @functools.cached_property
    def steps(self) -> dict[str, PlannedStep]:
        """Planned steps by key."""
        return {step.key: step for step in self.plan.steps}

    def striking(self, key: str, attempt: int) -> dict[Kind, int]:
        """Faults that strike an attempt, with their numbers."""
        return {
            fault.kind: fault.number
            for fault in self.faults
            if fault.step == key and (attempt == 0 or fault.kind not in FIRST_ATTEMPT_ONLY)
        }

    def rng(self, *what: object) -> random.Random:
        """Numbers for one purpose, the same whatever else is drawn."""
        return random.Random(":".join(map(str, (self.name, *what))))

    def at(self, minute: float) -> dt.datetime:
        """A simulated minute as a time."""
        return EPOCH + dt.timedelta(minutes=minute)

    def tests(self, step: PlannedStep) -> tuple[str, ...]:
        """Ids of the tests of a step: a few more than it promises."""
        place = f"tests/{step.step.key}.py::test"
        count = step.step.minimum + self.rng("tests", step.key).randint(1, 3)
        return tuple(f"{place}_{number}" for number in range(count))

    def chosen(self, step: PlannedStep, kinds: Iterable[Kind]) -> set[str]:
        """The tests that faults of these kinds picked."""
        tests = self.tests(step)
        return {tests[f.number % len(tests)] for f in self.faults if f.step == step.key and f.kind in kinds}

    def failing_by_nature(self, key: str) -> set[str]:
        """The tests of a step that fail whatever the node."""
        return self.chosen(self.steps[key], _LASTING | {Kind.FLAKY})

    def outcomes(self, step: PlannedStep, host: Host, attempt: int) -> dict[str, str]:
        """What becomes of each test when a step runs on a host; half of the flaky ones fail only the first time."""
        ends = dict.fromkeys(self.tests(step), PASSED)
        failing = self.failing_by_nature(step.key)
        if attempt > 0:
            moody = {
                f.number % len(ends)
                for f in self.faults
                if f.kind is Kind.FLAKY and f.step == step.key and f.number & 2
            }
            failing -= {test for place, test in enumerate(ends) if place in moody} - self.chosen(step, _LASTING)
        if host.name in self.sick:
            failing |= set(list(ends)[:: self.rng("sick", host.name).randint(1, 3)])
        return ends | dict.fromkeys(failing, FAILED)

    def again(self, step: PlannedStep, test: str, host: Host, *, elsewhere: bool) -> str:
        """What becomes of one failing test when it runs once more."""
        if host.name in self.sick or test in self.chosen(step, _LASTING):
            return FAILED
        fault = next((f for f in self.faults if f.kind is Kind.FLAKY and f.step == step.key), None)
        stubborn = fault is not None and fault.number % 2 == 1 and test in self.chosen(step, {Kind.FLAKY})
        return FAILED if stubborn and not elsewhere else PASSED

    def excused(self, step: PlannedStep, test: str) -> bool:
        """Whether the quarantine of the merge base excuses a failure."""
        return any(excuse.covers(step, test) for excuse in self.ledger.excuses)

    def environment(self, step: PlannedStep, host: Host, image: str) -> Environment:
        """Where the records of a job are made."""
        return Environment(
            host=host.name,
            device=step.device,
            cores=16,
            memory_gib=128.0,
            python="3.12.3",
            versions={"torch": "2.10.0", "triton": "3.6.0"},
            image=image,
        )

    def upload(self, build: Build, command: Command, deed: Deed, folder: Path, minute: float) -> None:
        """Put a job's folder into the artifact store, as far as the pipeline says so and the network lets it."""
        struck = self.striking(deed.step, deed.attempt)
        if not command.uploads:
            deed.wrong.append("the pipeline uploads no results")
            return
        if Kind.NETWORK_LOSS in struck:
            number = struck[Kind.NETWORK_LOSS]
            deed.wrong.append("the network was lost at upload")
            if number % 2:
                return
            (folder / "results.jsonl").unlink(missing_ok=True)
        if Kind.LATE in struck:
            minute += LATE_MINUTES
        deed.arrives = minute
        build.uploads.append(Upload(command.key, deed.attempt, command.folder, folder, minute))


def quarantine_of(site: Site) -> Quarantine:
    """The quarantine of the merge base, noted in the ledger as excuses."""
    entries: list[Quarantined] = []
    for fault in site.faults:
        if fault.kind not in _QUARANTINING or fault.step not in site.steps:
            continue
        expired = _QUARANTINING[fault.kind]
        step = site.steps[fault.step]
        test = next(iter(site.tests(step)[fault.number % len(site.tests(step)) :]))
        if any((entry.test, entry.step) == (test, step.step.key) for entry in entries):
            continue  # a quarantine with two entries of a test is refused
        device = "another-device" if fault.kind is Kind.QUARANTINED_ELSEWHERE else None
        added = EPOCH.date() - dt.timedelta(days=_VALID_DAYS * 2 if expired else 1)
        entries.append(
            Quarantined(
                test=test,
                step=step.step.key,
                devices=(device,) if device else (),
                reason="under repair",
                owner="the kernel team",
                added=added,
                expires=added + dt.timedelta(days=_VALID_DAYS),
            )
        )
        site.ledger.excuses.append(Excuse(test, step.step.key, device, expired))
    return Quarantine(tests=tuple(entries))


OUTCOMES = {PASSED: Outcome.PASS, FAILED: Outcome.FAIL, SKIPPED: Outcome.DID_NOT_RUN}
MESSAGES = {PASSED: "", FAILED: "max_abs_err 0.5 > 0.001", SKIPPED: "needs another device"}

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
        return Said(stopped=f"timed out after {step.step.timeout_minutes * 60} s")
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
        deed.ended = int(kind_of(step).no_checks)
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
        return tests | dict.fromkeys(list(tests)[step.step.minimum - 1 :], SKIPPED)
    return tests
