# SPDX-License-Identifier: Apache-2.0
"""A simulated job on an agent: preflight, the step, its results and their upload, and every way in which they go wrong.

What really happens goes to the ledger first; then the files are written as real jobs write them, and damaged. The tests
of a step, and what becomes of each on which node, are the site's: they are the same whatever else goes wrong.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import random
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from support.simulate.buildkite import LOST, Host, JobEnd, JobState, Upload
from support.simulate.scenarios import FIRST_ATTEMPT_ONLY, Fault, FaultKind, lackable
from support.simulate.truth import CANNOT_RUN, FAILED, PASSED, SKIPPED, Event, Excuse, Ledger

from agent_host.collect import collect
from agent_host.endings import Endings
from hilgate.conditions import NEEDS
from hilgate.errors import Exit
from hilgate.evidence import kind_of
from hilgate.model import declaration
from hilgate.model.declaration import CPU, Quarantine, Quarantined
from hilgate.model.record import (
    BuildRecord,
    Check,
    CheckRecord,
    Environment,
    GpuHealth,
    Health,
    ImageRecord,
    Outcome,
    RerunRecord,
    StepRecord,
)
from hilgate.run import results, rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from support.simulate.buildkite import Build, Command

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Record

Moment = Literal["before", "after"]

EPOCH = dt.datetime(2026, 11, 21, 8, tzinfo=dt.UTC)
"""When every simulated build begins."""

TREE = hashlib.sha256(b"the files under test").hexdigest()
LATE_MINUTES = 10_000.0
"""How much later than its job a late upload arrives: after every verdict."""

PREFLIGHT_MINUTES = 0.5
SHORT_MINUTES = 1.0

KILLED, EXECUTOR_KILLED = 137, 255
"""Exit status of a container whose main process got SIGKILL (128 + 9), and of a job whose executor did."""

SIGKILLED = -9
"""Exit status of a child that the kernel ended for want of memory (`subprocess`: minus SIGKILL)."""

OUTCOMES = {
    PASSED: Outcome.PASS,
    FAILED: Outcome.FAIL,
    SKIPPED: Outcome.DID_NOT_RUN,
    CANNOT_RUN: Outcome.DID_NOT_RUN,
}
MESSAGES = {
    PASSED: "",
    FAILED: "max_abs_err 0.5 > 0.001",
    SKIPPED: "needs another device",
    CANNOT_RUN: "needs another processor",
}
NOBODYS = "variable:NOBODY_DECLARES_THIS"
"""A condition that no step may lack."""

_EXITS = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 6, Outcome.DID_NOT_RUN: 4}
_LASTING = {
    FaultKind.REGRESSION,
    FaultKind.QUARANTINED_FAILURE,
    FaultKind.QUARANTINED_ELSEWHERE,
    FaultKind.SOFT_FAILED,
}
_QUARANTINING = frozenset(
    {
        FaultKind.QUARANTINED_FAILURE,
        FaultKind.QUARANTINED_ELSEWHERE,
        FaultKind.UNEXPECTED_PASS,
        FaultKind.QUARANTINE_EXPIRED,
    }
)
_UNKNOWN_HEALTH = frozenset({FaultKind.PREFLIGHT_MISSING, FaultKind.HEALTH_MISSING, FaultKind.HEALTH_CORRUPT})
_WORTHLESS = {
    FaultKind.SICK_AFTERWARDS: "its node was sick by the end",
    FaultKind.GPU_LOST: "a GPU was gone by the end",
    FaultKind.PREFLIGHT_IGNORED: "its node was unfit from the start",
    FaultKind.HEALTH_OF_OTHER_NODE: "the health is another node's",
    FaultKind.OTHER_COMMIT: "of another commit",
    FaultKind.OTHER_PLAN: "of another plan",
    FaultKind.OTHER_PACKAGES: "of the packages of another tree",
    FaultKind.OTHER_IMAGE: "in another image",
    FaultKind.IMAGE_IMPOSTOR: "in another image, which it recorded as built",
    FaultKind.OTHER_COMMAND: "another command was run",
    FaultKind.OTHER_STEP: "the records are another step's",
    FaultKind.FALSE_CLAIM: "it claims more than it shows",
    FaultKind.IMAGE_OTHER_CONTENT: "the image is of other content",
    FaultKind.IMAGE_NOT_RECORDED: "the image is not recorded",
}
_AUTHORS = frozenset(
    {
        FaultKind.REGRESSION,
        FaultKind.FLAKY,
        FaultKind.NO_EVIDENCE,
        FaultKind.ZERO_TESTS,
        FaultKind.ALL_SKIPPED,
        FaultKind.BELOW_MINIMUM,
        FaultKind.SKIPPED_TEST,
        FaultKind.RAN_WITHOUT,
        FaultKind.FALSE_CLAIM,
        FaultKind.QUARANTINED_FAILURE,
        FaultKind.QUARANTINED_ELSEWHERE,
        FaultKind.HANG,
        FaultKind.HANG_HARD,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.OUT_OF_MEMORY_HARD,
        FaultKind.OTHER_COMMAND,
        FaultKind.IMAGE_OTHER_CONTENT,
        FaultKind.IMAGE_NOT_RECORDED,
        FaultKind.SOFT_FAILED,
    }
)
"""Kinds that a change can bring about; where one struck, blaming the author is no injustice."""

_VALID_DAYS = 10
"""From `added` to `expires`; a quarantine file allows 14."""

VRAM_MIB = 196_592
"""Of an MI300X as its driver reports it: 192 GiB less what the firmware keeps."""

TERABYTE = 2**40
MOST_FILES = 100
"""Budgets of a simulated agent, smaller than a real one's (`agent.collect`), so that a build is quick."""

HOSTILE = frozenset({FaultKind.NAMES_OF_OTHERS, FaultKind.HOLES, FaultKind.MANY_FILES})
"""What a container may leave beside its results, to harm whoever takes them."""

FAST_MINUTES, FAILS_FAST = 0.05, "its agent fails fast"

IDLE_MIB = 285
RESET = "amdgpu 0000:05:00.0: amdgpu: GPU reset begin!"
GARBAGE = ("", "{", '{"healthy": true}', "null", "[]", "\x00\x01")
"""What may lie where a health file should."""


@dataclass
class BuildSite:
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

    def striking(self, key: str, attempt: int) -> dict[FaultKind, int]:
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

    def chosen(self, step: PlannedStep, kinds: Iterable[FaultKind], bits: int = 0) -> set[str]:
        """The tests that faults of these kinds picked, whose numbers have these bits set."""
        tests = self.tests(step)
        struck = [f for f in self.faults if f.step == step.key and f.kind in kinds and f.number & bits == bits]
        return {tests[fault.number % len(tests)] for fault in struck}

    def failing_by_nature(self, step: PlannedStep) -> set[str]:
        """The tests of a step that fail whatever the node."""
        return self.chosen(step, _LASTING | {FaultKind.FLAKY})

    def outcomes(self, step: PlannedStep, host: Host, attempt: int) -> dict[str, str]:
        """What becomes of each test when a step runs on a host; half of the flaky ones fail only the first time."""
        ends = dict.fromkeys(self.tests(step), PASSED)
        failing = self.failing_by_nature(step)
        if attempt > 0:
            failing -= self.chosen(step, {FaultKind.FLAKY}, bits=2) - self.chosen(step, _LASTING)
        if host.name in self.sick:
            failing |= set(list(ends)[:: self.rng("sick", host.name).randint(1, 3)])
        return ends | dict.fromkeys(failing, FAILED)

    def rerun(
        self, step: PlannedStep, test: str, host: Host, *, elsewhere: bool, claims_elsewhere: bool
    ) -> RerunRecord:
        """One failing test once more; `claims_elsewhere` is what its record says of the node."""
        fails = host.name in self.sick or test in self.chosen(step, _LASTING)
        fails |= not elsewhere and test in self.chosen(step, {FaultKind.FLAKY}, bits=1)
        end = FAILED if fails else PASSED
        return RerunRecord(
            step=step.key,
            check=test,
            host=host.name,
            elsewhere=claims_elsewhere,
            outcome=OUTCOMES[end],
            seconds=1.0,
            message=MESSAGES[end],
        )

    def opening(
        self, step: PlannedStep, host: Host, image: str, minute: float, struck: Iterable[FaultKind] = ()
    ) -> BuildRecord:
        """The line that opens a job's file."""
        return BuildRecord(
            started=self.at(minute),
            plan_digest=other(self.digest) if FaultKind.OTHER_PLAN in struck else self.digest,
            commit=other(self.plan.commit)[:40] if FaultKind.OTHER_COMMIT in struck else self.plan.commit,
            tree=other(TREE) if FaultKind.OTHER_TREE in struck else TREE,
            environment=Environment(
                host=host.name,
                device=step.device,
                cores=16,
                memory_gib=128.0,
                python="3.12.3",
                versions={"torch": "2.10.0", "triton": "3.6.0"},
                image=image,
            ),
        )


def quarantine_of(site: BuildSite) -> Quarantine:
    """The quarantine of the merge base, noted in the ledger as excuses."""
    entries: dict[tuple[str, str], Quarantined] = {}
    for fault in site.faults:
        if fault.kind not in _QUARANTINING or fault.step not in site.steps:
            continue
        step = site.steps[fault.step]
        test = site.tests(step)[fault.number % len(site.tests(step))]
        if (test, step.step.key) in entries:
            continue  # a quarantine with two entries of a test is refused
        expired = fault.kind is FaultKind.QUARANTINE_EXPIRED
        device = "another-device" if fault.kind is FaultKind.QUARANTINED_ELSEWHERE else None
        added = EPOCH.date() - dt.timedelta(days=_VALID_DAYS * 2 if expired else 1)
        entries[test, step.step.key] = Quarantined(
            test=test,
            step=step.step.key,
            devices=(device,) if device else (),
            reason="under repair",
            owner="the kernel team",
            added=added,
            expires=added + dt.timedelta(days=_VALID_DAYS),
        )
        site.ledger.excuses.append(Excuse(test, step.step.key, device, expired))
    return Quarantine(tests=tuple(entries.values()))


def run_recheck(site: BuildSite, build: Build, command: Command, attempt: int, host: Host, minute: float) -> JobEnd:
    """Run failing tests once more on another node than the one they failed on."""
    step = site.steps[command.runs]
    event = site.ledger.last(step.key)
    struck = site.striking(step.key, 0)
    same = FaultKind.RECHECK_SAME_NODE in struck and event is not None
    if same and event is not None:
        host = Host(event.host)
    elsewhere = event is None or host.name != event.host
    if not elsewhere and not struck.get(FaultKind.RECHECK_SAME_NODE, 0) % 2:
        return JobEnd(int(Exit.SICK_NODE), SHORT_MINUTES)
    folder = site.folder / f"{command.folder}.{attempt}"
    reruns = [
        site.rerun(step, test, host, elsewhere=elsewhere, claims_elsewhere=elsewhere or same)
        for test in site.failing[step.key]
    ]
    if elsewhere and any(rerun.outcome is Outcome.PASS for rerun in reruns):
        site.cleared.add(step.key)
    results.write(folder, site.opening(step, host, site.images.get(step.image or "", ""), minute), reruns)
    build.uploads.append(Upload(command.key, attempt, command.folder, folder, minute + SHORT_MINUTES))
    return JobEnd(0, SHORT_MINUTES)


def run_job(site: BuildSite, build: Build, command: Command, attempt: int, host: Host, minute: float) -> JobEnd:
    """Do one attempt of a job at a planned step; `minute` is when it begins."""
    return _Job(site, build, command, attempt, host, minute).run()


@dataclass
class _Job:
    site: BuildSite
    build: Build
    command: Command
    attempt: int
    host: Host
    minute: float
    step: PlannedStep = field(init=False)
    struck: dict[FaultKind, int] = field(init=False)
    event: Event = field(init=False)
    folder: Path = field(init=False)
    minutes: float = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.site.steps[self.command.runs]
        self.struck = self.site.striking(self.step.key, self.attempt)
        self.event = self.site.ledger.note(Event(self.step.key, self.attempt, self.host.name))
        self.event.innocent = not _AUTHORS & self.struck.keys()
        self.folder = self.site.folder / f"{self.command.folder}.{self.attempt}"
        self.folder.mkdir(parents=True)
        spread = self.site.rng("minutes", self.step.key, self.attempt).uniform(0.8, 1.5)
        self.minutes = min(self.step.step.minutes * spread, float(self.step.step.timeout_minutes))

    def run(self) -> JobEnd:
        half, struck = self.minutes / 2, self.struck
        if FaultKind.FAST_FAILING in struck and self.host.endings is None:
            self.host.endings = Endings()
        if self.host.endings is not None:
            return self._fails_fast(self.host.endings)
        if FaultKind.SICK_NODE in struck:  # preflight finds it: the agent pauses, and the step moves elsewhere
            self._health("before", self.minute, trouble="uncorrectable ECC: 3")
            self.host.paused = True
            return self._ended(int(Exit.SICK_NODE), PREFLIGHT_MINUTES, wrong="preflight refused the node")
        if FaultKind.AGENT_LOST in struck:
            self.event.wrong.append("the agent was lost")
            return JobEnd(LOST, half)
        if FaultKind.EXECUTOR_KILLED in struck:
            self.event.wrong.append("what ran it was killed")
            return JobEnd(EXECUTOR_KILLED, half)
        if struck.get(FaultKind.AGENT_STOPPED, 0) % 2:
            return self._ended(LOST, half, wrong="the agent was stopped", reason="agent_stop")
        self._health(
            "before", self.minute, trouble="uncorrectable ECC: 3" if FaultKind.PREFLIGHT_IGNORED in struck else ""
        )
        return self._cut_short() or self._work()

    def _fails_fast(self, known: Endings) -> JobEnd:
        """The agent ends each job at once and without a verdict, until its own hooks take it out."""
        status, now = int(Exit.SICK_NODE), self.minute * 60
        job = f"{self.step.key}.{self.attempt}"
        known.begin(job, now)
        facts = {"BUILDKITE_JOB_ID": job, "BUILDKITE_PULL_REQUEST": "false"}
        known.end(facts | {"BUILDKITE_COMMAND_EXIT_STATUS": str(status)}, now + FAST_MINUTES * 60)
        self.host.paused = bool(known.black_hole)
        self.event.wrong.append(FAILS_FAST)
        return JobEnd(status, FAST_MINUTES)

    def _cut_short(self) -> JobEnd | None:
        """The job ends before its step has a record; what was uploaded by then is the preflight's."""
        half, struck = self.minutes / 2, self.struck
        if FaultKind.CANCELLED in struck:
            return self._ended(LOST, half, wrong="a person cancelled it", reason="cancel", state=JobState.CANCELLED)
        if FaultKind.HANG_HARD in struck:
            return self._ended(LOST, self.command.timeout_minutes, wrong="it hung", reason="cancel")
        if FaultKind.OUT_OF_MEMORY_HARD in struck:
            return self._ended(KILLED, half, wrong="it was killed")
        return None

    def _ended(
        self, status: int, minutes: float, *, wrong: str = "", reason: str = "none", state: JobState | None = None
    ) -> JobEnd:
        """End the job; its folder is uploaded as far as the pipeline says so and the network lets it."""
        if wrong:
            self.event.wrong.append(wrong)
        lost = self.struck.get(FaultKind.NETWORK_LOSS)
        if lost is not None:
            self.event.wrong.append("the network was lost at upload")
            (self.folder / results.RESULTS_FILE).unlink(missing_ok=True)
        if not self.command.uploads:
            self.event.wrong.append("the pipeline uploads no results")
        elif lost is None or lost % 2 == 0:
            late = LATE_MINUTES if FaultKind.LATE in self.struck else 0.0
            self.event.arrives = self.minute + minutes + late
            upload = Upload(self.command.key, self.attempt, self.command.folder, self.folder, self.event.arrives)
            self.build.uploads.append(upload)
        return JobEnd(status, minutes, signal_reason=reason, state=state)

    def _health(self, moment: Moment, minute: float, *, trouble: str = "", lost: int = 0) -> None:
        if FaultKind.PREFLIGHT_MISSING not in self.struck:
            host = f"{self.host.name}-other" if FaultKind.HEALTH_OF_OTHER_NODE in self.struck else self.host.name
            write_health(self.folder, self.step, host, moment, self.site.at(minute), trouble=trouble, lost=lost)

    def _work(self) -> JobEnd:
        """Run the step, leave its records, damage them."""
        if FaultKind.HIDDEN_SICK_NODE in self.struck and not self.site.sick:
            self.site.sick.add(self.host.name)
        self.event.wrong += [why for kind, why in _WORTHLESS.items() if kind in self.struck]
        self.event.other_tree = FaultKind.OTHER_TREE in self.struck
        if self.host.name in self.site.sick:
            self.event.wrong.append("its node was sick")
        image = self._image()
        facts = self._process()
        if FaultKind.HANG in self.struck:
            self.minutes = float(self.step.step.timeout_minutes)
        status = self._write(facts, image)
        self.event.recorded = True
        self._damage(self.folder / results.RESULTS_FILE)
        if HOSTILE & self.struck.keys():
            self._collect()
        self._look_after()
        if self.struck.get(FaultKind.AGENT_STOPPED, 1) % 2 == 0:
            return self._ended(LOST, self.minutes, wrong="the agent was stopped", reason="agent_stop")
        status = int(Exit.BUG) if FaultKind.DISK_FULL in self.struck else status
        if HOSTILE & self.struck.keys() and self._endless():
            self.event.arrives = self.minute + self.minutes
            return JobEnd(int(Exit.SICK_NODE), self.minutes)
        if FaultKind.RESULTS_LOST in self.struck:  # ci/hooks/pre-exit: only a job that passed is run again for it
            self.event.wrong.append("its results were not uploaded")
            return JobEnd(status or int(Exit.SICK_NODE), self.minutes)
        return self._ended(
            status, self.minutes, state=JobState.PASSED if FaultKind.SOFT_FAILED in self.struck else None
        )

    def _image(self) -> str:
        """The digest of the image it runs in; empty on the host."""
        if self.step.image is None:
            return ""
        if self.step.image in self.site.spoilt_images:
            self.event.wrong.append("its image is not the planned one")
        digest = self.site.images.get(self.step.image, "")
        if not digest:
            self.event.wrong.append("its image was not built")
        foreign = self.struck.keys() & {FaultKind.OTHER_IMAGE, FaultKind.IMAGE_IMPOSTOR}
        return other(digest) if foreign and digest else digest

    def _process(self) -> rules.Facts:
        """Run the step's process; what really happens goes to the ledger, and what can be known of it comes back."""
        event, struck, step = self.event, self.struck, self.step.step
        facts = rules.Facts(kind_of(self.step), step.minimum, None, ())
        if FaultKind.HANG in struck:
            return replace(facts, stopped=f"timed out after {step.timeout_minutes * 60} s")
        if FaultKind.OUT_OF_MEMORY in struck or FaultKind.NO_EVIDENCE in struck:
            event.ended = SIGKILLED if FaultKind.OUT_OF_MEMORY in struck else 0
            return replace(facts, exit_status=event.ended, problem="it left no evidence")
        claim = struck[FaultKind.FALSE_CLAIM] % 4 if FaultKind.FALSE_CLAIM in struck else None
        event.tests = self._tests()
        if claim == 0:
            event.tests[next(iter(event.tests), "test")] = FAILED
        event.ended = int(claim == 1 or FAILED in event.tests.values())
        if not event.tests:
            event.ended = int(facts.evidence.no_checks)
            return replace(facts, exit_status=event.ended, problem="its evidence holds no tests")
        if claim == 3:
            event.ended = None
        needs, lacked = self._conditions()
        checks = tuple(_check(test, end, needs.get(test, "")) for test, end in event.tests.items() if claim != 2)
        # Whoever forges an excuse believes it, so that the record says what he would have it say.
        forged = declaration.Excuse(why="forged", most=1000)
        facts = replace(facts, may_lack=step.may_lack | dict.fromkeys(lacked, forged), lacked=lacked)
        return replace(facts, exit_status=event.ended, checks=checks)

    def _tests(self) -> dict[str, str]:
        tests = self.site.outcomes(self.step, self.host, self.attempt)
        if FaultKind.ZERO_TESTS in self.struck:
            return {}
        if FaultKind.ALL_SKIPPED in self.struck:
            return dict.fromkeys(tests, SKIPPED)
        for kind, end in ((FaultKind.CANNOT_RUN, CANNOT_RUN), (FaultKind.SKIPPED_TEST, SKIPPED)):
            if test := self._picked(kind, tests):
                tests[test] = end
        if FaultKind.BELOW_MINIMUM in self.struck:
            return dict(list(tests.items())[: max(1, self.step.step.minimum - 1)])
        return tests

    def _picked(self, kind: FaultKind, tests: Mapping[str, str]) -> str:
        """The test that a fault strikes; empty where it has struck none, or the test does not pass anyway."""
        test = next(iter(self.site.chosen(self.step, {kind})), "") if kind in self.struck else ""
        return test if tests.get(test) in {PASSED, CANNOT_RUN, SKIPPED} else ""

    def _conditions(self) -> tuple[dict[str, str], frozenset[str]]:
        """What tests say that they need, and what the record says that the machine lacked."""
        needs: dict[str, str] = {}
        lacked: set[str] = set()
        if test := self._picked(FaultKind.CANNOT_RUN, self.event.tests):
            needs[test] = lackable(self.step)
            lacked.add(needs[test])
        if test := self._picked(FaultKind.RAN_WITHOUT, self.event.tests):
            needs[test] = lackable(self.step)
            lacked.add(needs[test])
            if self.event.tests[test] == PASSED:
                self.event.wrong.append(f"{test} ran without what it is declared to need")
        if test := self._picked(FaultKind.SKIPPED_TEST, self.event.tests):
            # None; one that nobody declared; one that the device has; one that its machine has.
            which = self.struck[FaultKind.SKIPPED_TEST] % 4
            needs[test] = ("", NOBODYS, f"device:{self.step.device}", "program:sh")[which]
            lacked |= {needs[test]} - {"", "program:sh"}
        return needs, frozenset(lacked)

    def _write(self, facts: rules.Facts, image: str) -> int:
        """Write the records of the attempt; returns the exit status of the job's command."""
        site, step = self.site, self.step
        build = site.opening(step, self.host, image, self.minute, self.struck)
        decision = rules.decide(facts)
        claims = FaultKind.FALSE_CLAIM in self.struck and decision.outcome is not Outcome.PASS
        key, command = self._named()
        folder = "/other/" if FaultKind.OTHER_PACKAGES in self.struck else ""
        record = StepRecord(
            key=key,
            started=build.started,
            seconds=60.0,
            exit_status=facts.exit_status,
            outcome=Outcome.PASS if claims else decision.outcome,
            message="all is well" if claims else decision.why,
            checks=len(facts.checks),
            command=command,
            imported={name: folder + place for name, place in site.plan.packages.items()},
            environment=build.environment,
            lacked=tuple(sorted(facts.lacked)),
        )
        lines: list[Record] = [*(CheckRecord(step=key, check=check) for check in facts.checks), record]
        lines += [
            site.rerun(step, test, self.host, elsewhere=False, claims_elsewhere=False)
            for test in facts.evidence.failing_ids(facts.checks)
        ]
        if FaultKind.IMAGE_IMPOSTOR in self.struck and step.image is not None and image:
            content = site.plan.images.get(step.image, "")
            lines.append(ImageRecord(step=step.key, image=step.image, content=content, digest=image))
        results.write(self.folder, build, [*lines, *self._built()])
        # `hilgate run` judges its step with the quarantine, so that failures in quarantine hold up no dependant.
        failed = {check.id for check in facts.checks if check.outcome is Outcome.FAIL}
        excused = failed and failed == site.ledger.excused(step, failed)
        return 0 if excused and facts.exit_status == 1 else _EXITS[decision.outcome]

    def _named(self) -> tuple[str, str]:
        """The step and the command that the records name."""
        step = self.step
        if FaultKind.OTHER_STEP in self.struck:
            others = [one for one in self.site.plan.steps if one.key != step.key]
            if not others:
                return "nowhere-cpu", step.step.command
            step = others[self.struck[FaultKind.OTHER_STEP] % len(others)]
        elif FaultKind.OTHER_COMMAND in self.struck:
            return step.key, f"{step.step.command} -k easy"
        return step.key, step.step.command

    def _built(self) -> list[Record]:
        """The image that the step built, if it builds one."""
        image = self.step.step.provides
        if image is None or self.event.ended not in {0, 1}:
            return []
        spoilt = FaultKind.IMAGE_OTHER_CONTENT in self.struck
        planned = self.site.plan.images.get(image, "")
        content = other(planned) if spoilt else planned
        digest = "sha256:" + hashlib.sha256(f"{content}:{self.attempt}".encode()).hexdigest()
        self.site.images[image] = digest
        (self.site.spoilt_images.add if spoilt else self.site.spoilt_images.discard)(image)
        if FaultKind.IMAGE_NOT_RECORDED in self.struck:
            return []
        return [ImageRecord(step=self.step.key, image=image, content=content, digest=digest)]

    def _collect(self) -> None:
        """The container leaves more than its results, and the job takes of it what an agent takes."""
        inside = self.site.folder / f"inside.{self.command.folder}.{self.attempt}"
        inside.mkdir()
        (self.folder / results.RESULTS_FILE).rename(inside / results.RESULTS_FILE)
        if FaultKind.NAMES_OF_OTHERS in self.struck:
            for step in self.site.plan.steps:
                if step.key != self.step.key and step.step.provides is None:
                    self._forge(step, inside)
        if FaultKind.HOLES in self.struck:
            with (inside / "holes").open("wb") as file:
                file.truncate(TERABYTE)
        for number in range(2 * MOST_FILES if FaultKind.MANY_FILES in self.struck else 0):
            (inside / f"many-{number}").touch()
        collect(inside, self.folder, most_files=MOST_FILES)
        shutil.rmtree(inside)

    def _forge(self, step: PlannedStep, inside: Path) -> None:
        """A pass of another step, as one writes it who knows all about the build, under a name that leads there."""
        event = self.site.ledger.last(step.key)
        host = Host(event.host) if event else self.host
        build = self.site.opening(step, host, self.site.images.get(step.image or "", ""), self.minute)
        checks = tuple(_check(test, PASSED) for test in self.site.tests(step))
        record = StepRecord(
            key=step.key,
            started=build.started,
            seconds=60.0,
            exit_status=0,
            outcome=Outcome.PASS,
            checks=len(checks),
            command=step.step.command,
            imported=self.site.plan.packages,
            environment=build.environment,
        )
        results.write(inside / "forged", build, [*(CheckRecord(step=step.key, check=one) for one in checks), record])
        name = f"x\\..\\..\\{step.key}\\{results.RESULTS_FILE}"
        (inside / "forged" / results.RESULTS_FILE).rename(inside / name)

    def _endless(self) -> bool:
        """Whether the agent would upload what was collected until the job's time is over."""
        sizes = [path.stat().st_size for path in self.folder.iterdir()]
        return len(sizes) > 2 * MOST_FILES or sum(sizes) >= TERABYTE

    def _damage(self, path: Path) -> None:
        whole = path.read_bytes()
        if FaultKind.DUPLICATED in self.struck:
            self.event.doubtful.append("its results came twice")
            whole = damage(FaultKind.DUPLICATED, 0, whole)
        spoilt = whole
        for kind in DAMAGING:
            if kind is not FaultKind.DUPLICATED and kind in self.struck and spoilt:
                spoilt = damage(kind, self.struck[kind], spoilt)
        if spoilt != whole:
            self.event.wrong.append("its records are damaged")
        path.write_bytes(spoilt)

    def _look_after(self) -> None:
        """Health after the step, as far as the hooks ran; a GPU step without a sound one proves nothing."""
        unseen = self.site.rng("unseen", self.host.name).random() < 0.5
        sick = FaultKind.SICK_AFTERWARDS in self.struck or (self.host.name in self.site.sick and not unseen)
        end, trouble = self.minute + self.minutes, "the GPU was reset" if sick else ""
        self._health("after", end, trouble=trouble, lost=int(FaultKind.GPU_LOST in self.struck))
        self.event.seen_sick = sick and not _UNKNOWN_HEALTH & self.struck.keys()
        if FaultKind.HEALTH_MISSING in self.struck:
            self._health_file(self.struck[FaultKind.HEALTH_MISSING]).unlink(missing_ok=True)
        if FaultKind.HEALTH_CORRUPT in self.struck:
            number = self.struck[FaultKind.HEALTH_CORRUPT]
            self._health_file(number).write_text(GARBAGE[number // 2 % len(GARBAGE)], encoding="utf-8")
        if _UNKNOWN_HEALTH & self.struck.keys():
            reasons = self.event.doubtful if self.step.device == CPU else self.event.wrong
            reasons.append("the health of its node is not recorded")

    def _health_file(self, number: int) -> Path:
        return self.folder / results.health_file("before" if number % 2 else "after")


def _check(test: str, end: str, needs: str = "") -> Check:
    labels = {NEEDS: needs} if needs else {}
    return Check(id=test, outcome=OUTCOMES[end], seconds=0.5, message=MESSAGES[end], labels=labels)


def other(digest: str) -> str:
    """A digest that is not this one, of the same form."""
    prefix, _, _ = digest.rpartition(":")
    return (f"{prefix}:" if prefix else "") + hashlib.sha256(digest.encode()).hexdigest()


def write_health(
    folder: Path, step: PlannedStep, host: str, moment: Moment, taken: dt.datetime, *, trouble: str = "", lost: int = 0
) -> None:
    """Write a health file; `trouble` makes the node unfit and says why, `lost` is how many of its GPUs are gone."""
    gpus = range((step.gpus or 1) - lost) if step.device != CPU else ()
    record = Health(
        step=step.key,
        moment=moment,
        host=host,
        agent=f"{host}-1",
        taken=taken,
        seconds=4.0,
        healthy=not trouble,
        problems=(trouble,) if trouble else (),
        gpus=tuple(
            GpuHealth(
                index=index,
                bdf=f"0000:{5 + index:02x}:00.0",
                name="AMD Instinct",
                vram_total_mib=VRAM_MIB,
                vram_used_mib=IDLE_MIB,
                ecc_uncorrectable=0,
                temperature_c=41.0,
            )
            for index in gpus
        ),
        dmesg=(RESET,) if trouble and moment == "after" else (),
    )
    record.save(folder / results.health_file(moment))


DAMAGING = (
    FaultKind.FLIPPED_BIT,
    FaultKind.TRUNCATED,
    FaultKind.NOT_A_NUMBER,
    FaultKind.WRONG_TYPE,
    FaultKind.LINE_REMOVED,
    FaultKind.LINES_REORDERED,
    FaultKind.DISK_FULL,
    FaultKind.DUPLICATED,
)
"""Kinds that damage the file itself."""


def damage(kind: FaultKind, number: int, whole: bytes) -> bytes:
    """Damage a file that is not empty; `number` says where."""
    rng = random.Random(number)
    lines = whole.splitlines(keepends=True)
    match kind:
        case FaultKind.FLIPPED_BIT:
            place = rng.randrange(len(whole))
            flipped = whole[place] ^ (1 << rng.randrange(8))
            lines = [whole[:place], bytes([flipped]), whole[place + 1 :]]
        case FaultKind.TRUNCATED:
            last = whole.rstrip(b"\n").rfind(b"\n") + 1
            lines = [whole[: rng.randrange(last, len(whole))]]
        case FaultKind.NOT_A_NUMBER:
            lines = [_replace_value(rng, whole, lambda _: rng.choice(["NaN", "Infinity", "-Infinity"]))]
        case FaultKind.WRONG_TYPE:
            lines = [_replace_value(rng, whole, lambda v: json.dumps(rng.choice([[v], {"value": v}, str(v), None])))]
        case FaultKind.LINE_REMOVED:
            del lines[rng.randrange(len(lines))]
        case FaultKind.LINES_REORDERED:
            one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[one], lines[two] = lines[two], lines[one]
        case FaultKind.DISK_FULL:
            lines = [whole[: rng.randrange(len(whole))]]
        case _:
            lines *= 2
    return b"".join(lines)


def _replace_value(rng: random.Random, whole: bytes, instead: Callable[[object], str]) -> bytes:
    """Put another text where a number of a step's or a check's record stands."""
    lines = whole.split(b"\n")
    numbers = [
        (place, name)
        for place, line in enumerate(lines)
        for name, value in _fields(line).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if not numbers:
        return whole[:-1]
    place, name = rng.choice(numbers)
    record = json.loads(lines[place])
    text = instead(record[name])
    record[name] = "@here@"
    lines[place] = json.dumps(record).replace('"@here@"', text).encode()
    return b"\n".join(lines)


def _fields(line: bytes) -> dict[str, object]:
    """The fields of a line; none where an earlier damage left no JSON."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
