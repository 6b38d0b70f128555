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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hilgate.errors import Exit
from hilgate.model import (
    CPU,
    BuildRecord,
    Check,
    CheckRecord,
    Environment,
    GpuHealth,
    Health,
    ImageRecord,
    Outcome,
    Quarantine,
    Quarantined,
    RerunRecord,
    StepRecord,
)
from hilgate.run import outcome, results
from hilgate.run.evidence import kind_of
from hilgate.simulate.buildkite import LOST, Host, JobEnd, State, Upload
from hilgate.simulate.scenarios import FIRST_ATTEMPT_ONLY, Fault, Kind
from hilgate.simulate.truth import FAILED, PASSED, SKIPPED, Deed, Excuse, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from hilgate.model import Plan, PlannedStep, Record
    from hilgate.simulate.buildkite import Build, Command


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


KILLED = 137
"""Exit status of a container whose main process got SIGKILL (128 + 9)."""

PREFLIGHT_MINUTES = 0.5
SHORT_MINUTES = 1.0
_WORTHLESS = {
    Kind.SICK_AFTERWARDS: "its node was sick by the end",
    Kind.GPU_LOST: "a GPU was gone by the end",
    Kind.PREFLIGHT_IGNORED: "its node was unfit from the start",
    Kind.HEALTH_OF_OTHER_NODE: "the health is another node's",
    Kind.OTHER_COMMIT: "of another commit",
    Kind.OTHER_PLAN: "of another plan",
    Kind.OTHER_IMAGE: "in another image",
    Kind.IMAGE_IMPOSTOR: "in another image, which it recorded as built",
    Kind.OTHER_COMMAND: "another command was run",
    Kind.OTHER_STEP: "the records are another step's",
    Kind.FALSE_CLAIM: "it claims more than it shows",
    Kind.IMAGE_OTHER_CONTENT: "the image is of other content",
    Kind.IMAGE_NOT_RECORDED: "the image is not recorded",
}
_AUTHORS = frozenset(
    {Kind.REGRESSION, Kind.FLAKY, Kind.NO_EVIDENCE, Kind.ZERO_TESTS, Kind.ALL_SKIPPED, Kind.BELOW_MINIMUM,
     Kind.FALSE_CLAIM, Kind.QUARANTINED_FAILURE, Kind.QUARANTINED_ELSEWHERE, Kind.HANG, Kind.HANG_HARD,
     Kind.OUT_OF_MEMORY, Kind.OUT_OF_MEMORY_HARD, Kind.OTHER_COMMAND, Kind.IMAGE_OTHER_CONTENT,
     Kind.IMAGE_NOT_RECORDED, Kind.SOFT_FAILED}
)  # fmt: skip
"""Kinds that a change can bring about; where one struck, blaming the author is no injustice."""


def run_job(site: Site, build: Build, command: Command, attempt: int, host: Host, minute: float) -> JobEnd:
    """Do one attempt of a job at a planned step; `minute` is when it begins."""
    return _Job(site, build, command, attempt, host, minute).run()


def run_recheck(site: Site, build: Build, command: Command, attempt: int, host: Host, minute: float) -> JobEnd:
    """Run failing tests once more on another node than the one they failed on."""
    step = site.steps[command.runs]
    deed = site.ledger.last(step.key)
    struck = site.striking(step.key, 0)
    claims = None
    if Kind.RECHECK_SAME_NODE in struck and deed is not None:
        host, claims = Host(deed.host), True
    if deed is not None and host.name == deed.host and not struck.get(Kind.RECHECK_SAME_NODE, 0) % 2:
        return JobEnd(int(Exit.SICK_NODE), SHORT_MINUTES)
    folder = site.folder / f"{command.folder}.{attempt}"
    folder.mkdir(parents=True)
    elsewhere = deed is None or host.name != deed.host
    image = site.images.get(step.image or "", "")
    lines: list[Record] = []
    for test in site.failing[step.key]:
        again = rerun(site, step, test, host, elsewhere=elsewhere, claims_elsewhere=claims)
        lines.append(again)
        if elsewhere and again.outcome.value == "pass":
            site.cleared.add(step.key)
    results.write(folder, opening(site, step, host, image, minute, {}), lines)
    build.uploads.append(Upload(command.key, attempt, command.folder, folder, minute + SHORT_MINUTES))
    return JobEnd(0, SHORT_MINUTES)


@dataclass
class _Job:
    site: Site
    build: Build
    command: Command
    attempt: int
    host: Host
    minute: float
    step: PlannedStep = field(init=False)
    struck: dict[Kind, int] = field(init=False)
    deed: Deed = field(init=False)
    folder: Path = field(init=False)
    minutes: float = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.site.steps[self.command.runs]
        self.struck = self.site.striking(self.step.key, self.attempt)
        self.deed = self.site.ledger.note(Deed(self.step.key, self.attempt, self.host.name))
        self.deed.innocent = not _AUTHORS & self.struck.keys()
        self.folder = self.site.folder / f"{self.command.folder}.{self.attempt}"
        self.folder.mkdir(parents=True)
        spread = self.site.rng("minutes", self.step.key, self.attempt).uniform(0.8, 1.5)
        self.minutes = min(self.step.step.minutes * spread, float(self.step.step.timeout_minutes))

    def run(self) -> JobEnd:
        if Kind.SICK_NODE in self.struck:
            return self._refuse()
        return self._cut_short() or self._work()

    def _refuse(self) -> JobEnd:
        """Preflight found the node unfit: the agent pauses, and the step moves elsewhere."""
        self._health("before", self.minute, trouble="uncorrectable ECC: 3")
        self.host.paused = True
        return self._ended("preflight refused the node", int(Exit.SICK_NODE), PREFLIGHT_MINUTES)

    def _cut_short(self) -> JobEnd | None:
        """The job ends before its step has a record; what was uploaded by then is the preflight's."""
        half = self.minutes / 2
        if Kind.AGENT_LOST in self.struck:
            self.deed.wrong.append("the agent was lost")
            return JobEnd(LOST, half)
        if self.struck.get(Kind.AGENT_STOPPED, 0) % 2:
            return self._ended("the agent was stopped", LOST, half, reason="agent_stop")
        self._preflight()
        if Kind.CANCELLED in self.struck:
            return self._ended("a person cancelled it", LOST, half, reason="cancel", state=State.CANCELLED)
        if Kind.HANG_HARD in self.struck:
            return self._ended("it hung", LOST, self.command.timeout_minutes, reason="cancel")
        if Kind.OUT_OF_MEMORY_HARD in self.struck:
            return self._ended("it was killed", KILLED, half)
        return None

    def _ended(
        self, wrong: str, status: int, minutes: float, *, reason: str = "none", state: State | None = None
    ) -> JobEnd:
        if wrong:
            self.deed.wrong.append(wrong)
        self.site.upload(self.build, self.command, self.deed, self.folder, self.minute + minutes)
        return JobEnd(status, minutes, signal_reason=reason, state=state)

    def _preflight(self) -> None:
        if Kind.PREFLIGHT_MISSING not in self.struck:
            trouble = "uncorrectable ECC: 3" if Kind.PREFLIGHT_IGNORED in self.struck else ""
            self._health("before", self.minute, trouble=trouble)

    def _health(self, moment: Literal["before", "after"], minute: float, *, trouble: str = "", lost: int = 0) -> None:
        host = f"{self.host.name}-other" if Kind.HEALTH_OF_OTHER_NODE in self.struck else self.host.name
        write(self.folder, self.step, host, moment, self.site.at(minute), trouble=trouble, lost=lost)

    def _work(self) -> JobEnd:
        """Run the step, leave its records, damage them."""
        if Kind.HIDDEN_SICK_NODE in self.struck and not self.site.sick:
            self.site.sick.add(self.host.name)
        self.deed.wrong += [why for kind, why in _WORTHLESS.items() if kind in self.struck]
        self.deed.other_tree = Kind.OTHER_TREE in self.struck
        if self.host.name in self.site.sick:
            self.deed.wrong.append("its node was sick")
        image = self._image()
        said = do(self.site, self.step, self.host, self.deed, self.struck)
        if Kind.HANG in self.struck:
            self.minutes = float(self.step.step.timeout_minutes)
        written = of_job(self.site, self.step, self.host, self.deed, said, self.struck, image, self.minute)
        results.write(self.folder, written.build, written.records)
        self.deed.recorded = True
        self._damage(self.folder / results.RESULTS_FILE)
        self._look_after()
        if self.struck.get(Kind.AGENT_STOPPED, 1) % 2 == 0:
            return self._ended("the agent was stopped", LOST, self.minutes, reason="agent_stop")
        status = int(Exit.BUG) if Kind.DISK_FULL in self.struck else written.exit_status
        return self._ended("", status, self.minutes, state=State.PASSED if Kind.SOFT_FAILED in self.struck else None)

    def _image(self) -> str:
        """The digest of the image it runs in; empty on the host."""
        if self.step.image is None:
            return ""
        if self.step.image in self.site.spoilt_images:
            self.deed.wrong.append("its image is not the planned one")
        digest = self.site.images.get(self.step.image, "")
        if not digest:
            self.deed.wrong.append("its image was not built")
        foreign = self.struck.keys() & {Kind.OTHER_IMAGE, Kind.IMAGE_IMPOSTOR}
        return other(digest) if foreign and digest else digest

    def _damage(self, path: Path) -> None:
        whole = path.read_bytes()
        if Kind.DUPLICATED in self.struck:
            self.deed.doubtful.append("its results came twice")
            whole *= 2
        spoilt = whole
        for kind in DAMAGING - {Kind.DUPLICATED}:
            if kind in self.struck and spoilt:
                spoilt = damage(kind, self.struck[kind], spoilt)
        if spoilt != whole:
            self.deed.wrong.append("its records are damaged")
        path.write_bytes(spoilt)

    def _look_after(self) -> None:
        """Health after the step, as far as the hooks ran; a GPU step without a sound one proves nothing."""
        unseen = self.site.rng("unseen", self.host.name).random() < 0.5
        sick = Kind.SICK_AFTERWARDS in self.struck or (self.host.name in self.site.sick and not unseen)
        if Kind.PREFLIGHT_MISSING not in self.struck:
            trouble, lost = "the GPU was reset" if sick else "", int(Kind.GPU_LOST in self.struck)
            self._health("after", self.minute + self.minutes, trouble=trouble, lost=lost)
            self.deed.seen_sick = sick
        if Kind.HEALTH_MISSING in self.struck:
            lose(self.folder, self.struck[Kind.HEALTH_MISSING])
        if Kind.HEALTH_CORRUPT in self.struck:
            spoil(self.folder, self.struck[Kind.HEALTH_CORRUPT])
        if self.struck.keys() & {Kind.PREFLIGHT_MISSING, Kind.HEALTH_MISSING, Kind.HEALTH_CORRUPT}:
            reasons = self.deed.doubtful if self.step.device == CPU else self.deed.wrong
            reasons.append("the health of its node is not recorded")
            self.deed.seen_sick = False


_EXITS = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 6, Outcome.DID_NOT_RUN: 4}


@dataclass(frozen=True)
class Written:
    """The records of a job's `results.jsonl`, and the exit status of its command."""

    build: BuildRecord
    records: list[Record]
    exit_status: int


def of_job(
    site: Site,
    step: PlannedStep,
    host: Host,
    deed: Deed,
    said: Said,
    struck: dict[Kind, int],
    image: str,
    minute: float,
) -> Written:
    """What a job records of one attempt at a step that began at `minute`."""
    environment = site.environment(step, host, image)
    decision = outcome.decide(
        outcome.Facts(kind_of(step), step.step.minimum, deed.ended, said.checks, said.stopped, said.problem)
    )
    claims = Kind.FALSE_CLAIM in struck and decision.outcome is not Outcome.PASS
    key, command = _named(site, step, struck)
    record = StepRecord(
        key=key,
        started=site.at(minute),
        seconds=60.0,
        exit_status=deed.ended,
        outcome=Outcome.PASS if claims else decision.outcome,
        message="all is well" if claims else decision.why,
        checks=len(said.checks),
        command=command,
        environment=environment,
    )
    lines: list[Record] = [CheckRecord(step=key, check=check) for check in said.checks]
    lines.append(record)
    failed = [check.id for check in said.checks if check.outcome is Outcome.FAIL]
    again = kind_of(step).failing_ids(said.checks)
    lines += [rerun(site, step, test, host, elsewhere=False) for test in again]
    if Kind.IMAGE_IMPOSTOR in struck and step.image is not None and image:
        content = site.plan.images.get(step.image, "")
        lines.append(ImageRecord(step=step.key, image=step.image, content=content, digest=image))
    # `hilgate run` judges its step with the quarantine, so that failures in quarantine hold up no dependant.
    excused = bool(failed) and all(site.excused(step, test) for test in failed)
    status = 0 if excused and deed.ended == 1 else _EXITS[decision.outcome]
    build = opening(site, step, host, image, minute, struck)
    return Written(build, [*lines, *_built(site, step, deed, struck)], status)


def opening(
    site: Site, step: PlannedStep, host: Host, image: str, minute: float, struck: dict[Kind, int]
) -> BuildRecord:
    """The line that opens a job's file."""
    return BuildRecord(
        started=site.at(minute),
        plan_digest=other(site.digest) if Kind.OTHER_PLAN in struck else site.digest,
        commit=other(site.plan.commit)[:40] if Kind.OTHER_COMMIT in struck else site.plan.commit,
        tree=other(TREE) if Kind.OTHER_TREE in struck else TREE,
        environment=site.environment(step, host, image),
    )


def rerun(
    site: Site, step: PlannedStep, test: str, host: Host, *, elsewhere: bool, claims_elsewhere: bool | None = None
) -> RerunRecord:
    """One failing test once more; `claims_elsewhere` is what the record says of the node, where that differs."""
    end = site.again(step, test, host, elsewhere=elsewhere)
    return RerunRecord(
        step=step.key,
        check=test,
        host=host.name,
        elsewhere=elsewhere if claims_elsewhere is None else claims_elsewhere,
        outcome=OUTCOMES[end],
        seconds=1.0,
        message=MESSAGES[end],
    )


def other(digest: str) -> str:
    """A digest that is not this one, of the same form."""
    prefix, _, _ = digest.rpartition(":")
    return (f"{prefix}:" if prefix else "") + hashlib.sha256(digest.encode()).hexdigest()


def _named(site: Site, step: PlannedStep, struck: dict[Kind, int]) -> tuple[str, str]:
    """The step and the command that the records name."""
    if Kind.OTHER_STEP in struck:
        others = [one for one in site.plan.steps if one.key != step.key]
        if not others:
            return "nowhere-cpu", step.step.command
        chosen = others[struck[Kind.OTHER_STEP] % len(others)]
        return chosen.key, chosen.step.command
    return step.key, f"{step.step.command} -k easy" if Kind.OTHER_COMMAND in struck else step.step.command


def _built(site: Site, step: PlannedStep, deed: Deed, struck: dict[Kind, int]) -> list[Record]:
    """The image that the step built, if it builds one."""
    if step.step.provides is None or deed.ended not in {0, 1}:
        return []
    planned = site.plan.images.get(step.step.provides, "")
    content = other(planned) if Kind.IMAGE_OTHER_CONTENT in struck else planned
    digest = "sha256:" + hashlib.sha256(f"{content}:{deed.attempt}".encode()).hexdigest()
    site.images[step.step.provides] = digest
    if Kind.IMAGE_OTHER_CONTENT in struck:
        site.spoilt_images.add(step.step.provides)
    else:
        site.spoilt_images.discard(step.step.provides)
    if Kind.IMAGE_NOT_RECORDED in struck:
        return []
    return [ImageRecord(step=step.key, image=step.step.provides, content=content, digest=digest)]


VRAM_MIB = 196_592
"""Of an MI300X as its driver reports it: 192 GiB less what the firmware keeps."""

IDLE_MIB = 285
RESET = "amdgpu 0000:05:00.0: amdgpu: GPU reset begin!"
GARBAGE = ("", "{", '{"healthy": true}', "null", "[]", "\x00\x01")
"""What may lie where a health file should."""


def write(
    folder: Path,
    step: PlannedStep,
    host: str,
    moment: Literal["before", "after"],
    taken: dt.datetime,
    *,
    trouble: str = "",
    lost: int = 0,
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
    path(folder, moment).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def spoil(folder: Path, number: int) -> None:
    """Put something unreadable where a health file was."""
    moment: Literal["before", "after"] = "before" if number % 2 else "after"
    path(folder, moment).write_text(GARBAGE[number // 2 % len(GARBAGE)], encoding="utf-8")


def lose(folder: Path, number: int) -> None:
    """Lose a health file."""
    path(folder, "before" if number % 2 else "after").unlink(missing_ok=True)


def path(folder: Path, moment: Literal["before", "after"]) -> Path:
    """Where a health file lies."""
    return folder / f"health-{moment}.json"


def damage(kind: Kind, number: int, whole: bytes) -> bytes:
    """Damage a file; `number` says where."""
    return _HOW[kind](random.Random(number), whole)


def _flip(rng: random.Random, whole: bytes) -> bytes:
    place = rng.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]


def _truncate(rng: random.Random, whole: bytes) -> bytes:
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    return whole[: rng.randrange(last, len(whole))]


def _not_a_number(rng: random.Random, whole: bytes) -> bytes:
    return _replace_value(rng, whole, lambda _: rng.choice(["NaN", "Infinity", "-Infinity"]))


def _wrong_type(rng: random.Random, whole: bytes) -> bytes:
    return _replace_value(
        rng, whole, lambda value: json.dumps(rng.choice([[value], {"value": value}, str(value), None]))
    )


def _replace_value(rng: random.Random, whole: bytes, other: Callable[[object], str]) -> bytes:
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
    text = other(record[name])
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


def _remove(rng: random.Random, whole: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _reorder(rng: random.Random, whole: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _fill_up(rng: random.Random, whole: bytes) -> bytes:
    return whole[: rng.randrange(len(whole))]


_HOW: dict[Kind, Callable[[random.Random, bytes], bytes]] = {
    Kind.FLIPPED_BIT: _flip,
    Kind.TRUNCATED: _truncate,
    Kind.NOT_A_NUMBER: _not_a_number,
    Kind.WRONG_TYPE: _wrong_type,
    Kind.LINE_REMOVED: _remove,
    Kind.LINES_REORDERED: _reorder,
    Kind.DISK_FULL: _fill_up,
    Kind.DUPLICATED: lambda _, whole: whole + whole,
}
DAMAGING = frozenset(_HOW)
"""Kinds that damage the file itself."""
