# SPDX-License-Identifier: Apache-2.0
"""What a build deserves, from what really happened in it. Shares no code with the judge, and reads no record.

The jobs of the simulator note here what they do, before anything is damaged, lost or misreported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from support.simulate.buildkite import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hilgate.model.plan import Plan, PlannedStep

PASSED, FAILED, SKIPPED, CANNOT_RUN = "passed", "failed", "skipped", "cannot run there"
"""What became of a test on the node where it ran."""


@dataclass
class Event:
    """One attempt of a job at a planned step, as it really was.

    Attributes:
        ended: Exit status of the step's own process; None when it was killed or never started.
        tests: Id -> what became of it.
        wrong: What makes the attempt worthless, each in words: another commit, a sick node, damaged evidence ...
        doubtful: What a judge may take or leave: damage that changes nothing that decides.
        innocent: Whether nothing that went wrong is the change's doing.
        seen_sick: Whether the hooks after the step saw that its node was sick.
        recorded: Whether it left records at all.
        other_tree: Whether the files under test were others than the commit's.
        arrives: Simulated minute from which its records can be downloaded.
    """

    step: str
    attempt: int
    host: str
    ended: int | None = None
    tests: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
    innocent: bool = True
    seen_sick: bool = False
    recorded: bool = False
    other_tree: bool = False
    arrives: float = NEVER

    def failures(self) -> set[str]:
        """Ids that failed."""
        return {name for name, end in self.tests.items() if end == FAILED}


@dataclass(frozen=True)
class Excuse:
    """A quarantine entry of the merge base: this test may fail here."""

    test: str
    step: str
    device: str | None
    expired: bool

    def covers(self, step: PlannedStep, test: str) -> bool:
        """Whether it excuses this test of this step."""
        here = self.device is None or self.device == step.device
        return not self.expired and self.test == test and self.step == step.step.key and here


@dataclass
class Ledger:
    """Everything that happened in a build.

    Attributes:
        planned: Whether there was a plan at all.
        wrong: What is wrong with the build as a whole.
        verdict_at: Simulated minute at which the results were gathered for the verdict that was posted.
    """

    events: dict[str, list[Event]] = field(default_factory=dict)
    excuses: list[Excuse] = field(default_factory=list)
    planned: bool = True
    wrong: list[str] = field(default_factory=list)
    verdict_at: float = NEVER

    def note(self, event: Event) -> Event:
        """Remember an attempt."""
        self.events.setdefault(event.step, []).append(event)
        return event

    def last(self, key: str) -> Event | None:
        """The attempt that no other followed."""
        return self.events[key][-1] if key in self.events else None

    def excused(self, step: PlannedStep, tests: Iterable[str]) -> set[str]:
        """Those of these tests of a step that may fail."""
        return {test for test in tests if any(excuse.covers(step, test) for excuse in self.excuses)}

    def trees_differ(self) -> bool:
        """Whether jobs whose records arrived in time ran over different files."""
        last = [tries[-1] for tries in self.events.values()]
        return len({event.other_tree for event in last if event.recorded and event.arrives <= self.verdict_at}) > 1


@dataclass(frozen=True)
class Truth:
    """What the build deserves.

    Attributes:
        forbidden: Why it must not pass; empty when nothing stands against it.
        doubtful: Why it may be held back all the same.
    """

    forbidden: tuple[str, ...]
    doubtful: tuple[str, ...]


def deserved(plan: Plan, ledger: Ledger) -> Truth:
    """Judge the build by what really happened."""
    forbidden, doubtful = list(ledger.wrong), []
    if not ledger.planned:
        forbidden.append("nothing was planned")
    forbidden += [f"quarantine of {excuse.test} has expired" for excuse in ledger.excuses if excuse.expired]
    for step in plan.steps:
        against, unsure = of_step(step, ledger)
        forbidden += [f"{step.key}: {reason}" for reason in against]
        doubtful += [f"{step.key}: {reason}" for reason in unsure]
    return Truth(tuple(forbidden), tuple(doubtful))


def of_step(step: PlannedStep, ledger: Ledger) -> tuple[list[str], list[str]]:
    """What stands against a step, and what is doubtful about it."""
    event = ledger.last(step.key)
    if event is None:
        return ["it never ran"], []
    excused = ledger.excused(step, event.failures())
    against = list(event.wrong)
    unsure = list(event.doubtful)
    if event.other_tree:
        # Trees are compared between jobs, so one alone is seen only where another arrived that differs.
        (against if ledger.trees_differ() else unsure).append("of another tree")
    if event.failures() - excused:
        against.append(f"{min(event.failures() - excused)} failed")
    ends = list(event.tests.values())
    if PASSED not in ends or SKIPPED in ends or sum(end in {PASSED, CANNOT_RUN} for end in ends) < step.step.minimum:
        against.append("it did not do its work")
    if event.ended != 0 and not (event.ended == 1 and excused):
        against.append(f"its process ended with {event.ended}")
    if event.arrives > ledger.verdict_at:
        against.append("its results had not arrived")
    # A retried attempt's artifacts are out of reach of everybody who judges the build.
    unsure += ["an attempt that was retried had failed" for d in ledger.events[step.key][:-1] if d.failures()]
    return against, unsure
