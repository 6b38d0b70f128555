# SPDX-License-Identifier: Apache-2.0
"""Simulated builds from plan to verdict, many of them, each verdict held against what really happened in its build.

The one place where the simulator meets what it tests: `report.write.judge_and_report` gives the verdict, as it does in
CI. What is wrong with a verdict is shown with the fewest faults that bring it about.
"""

from __future__ import annotations

import enum
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.simulate.buildkite import LOST, Build, Host, JobEnd, JobState, Node
from support.simulate.job import SHORT_MINUTES, BuildSite, quarantine_of, run_job, run_recheck
from support.simulate.scenarios import DEFAULT_RATE, Fault, FaultKind, draw, rechecks, scenarios_of
from support.simulate.truth import PASSED, Truth, deserved

from hilgate.errors import Exit, MisuseError, RecordsError
from hilgate.judge.verdict import read_verdict
from hilgate.model import JOBS_FOLDER, PLAN_FILE, VERDICT_FILE
from hilgate.model.plan import ProtectedChange
from hilgate.model.verdict import Ruling
from hilgate.plan.make import plan_digest, read_plan
from hilgate.report import write
from hilgate.run import recheck, results

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.simulate.buildkite import Command
    from support.simulate.scenarios import Scenario, Scenarios
    from support.simulate.truth import Event, Ledger

    from hilgate.model.declaration import Quarantine
    from hilgate.model.plan import PlannedStep
    from hilgate.model.verdict import StepVerdict, Verdict


HOSTS = 3
"""Machines of each queue: enough for a step to move twice."""

APPROVER = "a maintainer"
LOOSENING = ProtectedChange(path="tests/support/tolerances.py", what="fp16: 1e-3 -> 1e-1")


@dataclass(frozen=True)
class Finished:
    """A build that is over.

    Attributes:
        passed: Whether the required context was posted as a success.
        verdict: As posted; None when there was no plan, none was posted or the judge broke down.
        broke_down: What the judge raised; empty for nothing.
        site: Everything that happened.
    """

    faults: tuple[Fault, ...]
    passed: bool
    verdict: Verdict | None
    broke_down: str
    truth: Truth
    site: BuildSite


def run_build(scenario: Scenario, name: str, faults: tuple[Fault, ...], folder: Path) -> Finished:
    """Run one build.

    `name` seeds all that is drawn. `folder` is empty, and gets the attempts' folders and what the flow downloads.
    """
    loosened = {fault.kind for fault in faults} & {FaultKind.LOOSENED, FaultKind.LOOSENED_APPROVED}
    plan = scenario.plan.model_copy(
        update={
            "commit": hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(),
            "loosened": (LOOSENING,) if loosened else (),
        }
    )
    site = BuildSite(name, plan, plan_digest(plan), folder / "attempts", faults)
    if FaultKind.LOOSENED in loosened:
        site.ledger.wrong.append("a protected change has no approval")
    approved_by = APPROVER if loosened == {FaultKind.LOOSENED_APPROVED} else ""
    flow = _Flow(site, scenario, folder, quarantine_of(site), approved_by)
    flow.build.run()
    passed = flow.build.state("verdict") is JobState.PASSED
    return Finished(faults, passed, flow.verdict, flow.broke_down, deserved(plan, site.ledger), site)


@dataclass
class _Flow:
    """The steps of the flow itself: plan, recheck, verdict."""

    site: BuildSite
    scenario: Scenario
    folder: Path
    quarantine: Quarantine
    approved_by: str
    verdict: Verdict | None = None
    broke_down: str = ""
    build: Build = field(init=False)

    def __post_init__(self) -> None:
        skipped = frozenset(fault.step for fault in self.site.faults if fault.kind is FaultKind.SKIPPED)
        hosts = {
            queue: [Host(f"{queue}-{number}") for number in range(HOSTS)]
            for queue in self.scenario.declarations.agents.queues
        }
        nodes = [Node(step) for step in self.scenario.flow]
        self.build = Build(nodes, hosts, self.perform, random.Random(f"{self.site.name}:agents"), skipped)

    def perform(self, command: Command, attempt: int, host: Host, minute: float) -> JobEnd:
        """Do the work of any step of the build."""
        if command.runs:
            job = run_recheck if command.rechecks else run_job
            return job(self.site, self.build, command, attempt, host, minute)
        if command.key == "plan":
            return self._plan(attempt)
        try:
            return (self._recheck if command.key == "recheck" else self._verdict)(minute, attempt)
        except RecordsError as error:
            return JobEnd(int(error.exit_status), SHORT_MINUTES)
        except Exception as error:  # noqa: BLE001 - whatever breaks the judge is a finding of the simulation
            self.broke_down = f"{type(error).__name__}: {error}"
            return JobEnd(int(Exit.BUG), SHORT_MINUTES)

    def _struck(self, kind: FaultKind) -> int | None:
        """The number of a fault of the build, or None."""
        return next((fault.number for fault in self.site.faults if fault.kind is kind), None)

    def _plan(self, attempt: int) -> JobEnd:
        if self._struck(FaultKind.PLAN_FAILED) is not None:
            self.site.ledger.planned = False
            return JobEnd(int(Exit.INVALID_DECLARATION), SHORT_MINUTES)
        self.site.plan.save(self.folder / PLAN_FILE)
        self._alter_plan(self.folder / PLAN_FILE)
        lost = self._struck(FaultKind.PLAN_AGENT_LOST)
        if lost is not None and attempt == 0:
            return JobEnd(LOST, SHORT_MINUTES, inserted=self.scenario.generated if lost % 2 else ())
        if lost is not None and lost % 2:
            # Buildkite refuses the same keys a second time, so the retry of a plan that was uploaded fails.
            return JobEnd(int(Exit.FAIL), SHORT_MINUTES)
        return JobEnd(0, SHORT_MINUTES, inserted=self.scenario.generated)

    def _alter_plan(self, path: Path) -> None:
        """What the flow downloads is not what the jobs were given: cut off, a step fewer, or one that promises less."""
        number = self._struck(FaultKind.PLAN_ALTERED)
        if number is None:
            return
        self.site.ledger.wrong.append("the plan was altered")
        plan = self.site.plan
        if number % 3 == 0:
            path.write_bytes(path.read_bytes()[:-2])
        elif number % 3 == 1:
            plan.model_copy(update={"steps": plan.steps[:-1]}).save(path)
        else:
            easier = plan.steps[-1].redeclared(minimum=1, label="easier")
            plan.model_copy(update={"steps": (*plan.steps[:-1], easier)}).save(path)

    def _recheck(self, minute: float, attempt: int) -> JobEnd:
        here = self._download(f"recheck.{attempt}", minute)
        plan = read_plan(here / PLAN_FILE)
        wanted = recheck.pending(plan, results.read_all(here, here / JOBS_FOLDER, plan, plan_digest(plan)))
        inserted = rechecks(self.scenario, tuple(sorted(wanted)))
        self.site.failing.update(wanted)
        return JobEnd(0, SHORT_MINUTES, inserted=inserted)

    def _verdict(self, minute: float, attempt: int) -> JobEnd:
        if attempt == 0 and self._struck(FaultKind.VERDICT_AGENT_LOST) is not None:
            return JobEnd(LOST, SHORT_MINUTES)
        self.site.ledger.verdict_at = minute
        here = self._download(f"verdict.{attempt}", minute)
        judged = write.judge_and_report(
            here,
            write.read_plan_or_say_so(here / PLAN_FILE, here),
            jobs=here / JOBS_FOLDER,
            approved_by=self.approved_by,
            decided=self.site.at(minute),
            quarantine=lambda: self.quarantine,
        )
        self.verdict = read_verdict(here / VERDICT_FILE)
        return JobEnd(int(write.status_of(judged)), SHORT_MINUTES)

    def _download(self, name: str, minute: float) -> Path:
        """What has arrived by now, as hard links in a folder of its own."""
        here = self.folder / name
        (here / JOBS_FOLDER).mkdir(parents=True)
        if (self.folder / PLAN_FILE).exists():
            os.link(self.folder / PLAN_FILE, here / PLAN_FILE)
        for job, path in self.build.download(minute).items():
            files = list(path.iterdir())
            if files:
                (here / JOBS_FOLDER / job).mkdir()
            for file in files:
                if "\\" not in file.name:
                    os.link(file, here / JOBS_FOLDER / job / file.name)
        for job, path in self.build.download(minute).items():
            for file in path.glob("*\\*"):
                _land(file, here, f"{JOBS_FOLDER}/{job}")
        return here


def _land(file: Path, here: Path, folder: str) -> None:
    r"""Put a file where buildkite-agent does, to whom a `\\` in its name is a `/`, after all others and over them."""
    inner = file.name.replace("\\", "/")
    target = here / os.path.normpath(f"/{folder}/{inner}").lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, f"{target}.new")
    Path(f"{target}.new").replace(target)


SHRUNK = 5
"""How many failing builds are shrunk; the others only say how to repeat them."""


@dataclass(frozen=True)
class Failing:
    """A build whose verdict is wrong.

    Attributes:
        shrunk: A list of faults of which none can be left out; empty when it was not looked for.
    """

    reproduce: str
    problem: WrongVerdict
    shrunk: tuple[Fault, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "reproduce": self.reproduce,
            "kind": self.problem.kind.value,
            "why": self.problem.why,
            "faults": [str(fault) for fault in self.shrunk],
        }


@dataclass
class Tally:
    """What a campaign found.

    Attributes:
        unseen_failures: Failures outside the quarantine in attempts that Buildkite retried, in builds that passed.
    """

    seed: str
    rate: float
    builds: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    rulings: Counter[str] = field(default_factory=Counter)
    deserved: Counter[str] = field(default_factory=Counter)
    problems: Counter[Wrong] = field(default_factory=Counter)
    unseen_failures: int = 0
    failing: list[Failing] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether no build passed that must not, and no result was lost."""
        return not self.problems[Wrong.FALSE_PASS] and not self.problems[Wrong.LOST_RESULT]

    def as_json(self) -> dict[str, Any]:
        """For `--json`: the same names whatever happened."""
        return {
            "seed": self.seed,
            "rate": self.rate,
            "builds": self.builds,
            "steps": self.steps,
            "faults": dict(self.faults.most_common()),
            "deserved": dict(self.deserved),
            "verdicts": dict(self.verdicts.most_common()),
            "rulings": dict(self.rulings.most_common()),
            "false_passes": self.problems[Wrong.FALSE_PASS],
            "lost_results": self.problems[Wrong.LOST_RESULT],
            "false_blames": self.problems[Wrong.FALSE_BLAME],
            "needless_blocks": self.problems[Wrong.NEEDLESS_BLOCK],
            "unseen_failures": self.unseen_failures,
            "failing": [failing.as_json() for failing in self.failing],
            "seconds": round(self.seconds, 2),
        }

    def add(self, finished: Finished) -> None:
        """Count a build."""
        self.builds += 1
        self.steps += len(finished.site.plan.steps)
        self.faults.update(fault.kind.value for fault in finished.faults)
        truth = finished.truth
        self.deserved["must not pass" if truth.forbidden else "may pass" if truth.doubtful else "must pass"] += 1
        if finished.verdict is None:
            self.verdicts["no verdict" if finished.site.ledger.planned else "no plan, so no pass"] += 1
        else:
            self.verdicts[finished.verdict.outcome.value] += 1
            self.rulings.update(step.ruling.value for step in finished.verdict.steps)
        if finished.passed:
            ledger = finished.site.ledger
            self.unseen_failures += sum(
                bool(event.failures() - ledger.excused(step, event.failures()))
                for step in finished.site.plan.steps
                for event in ledger.events.get(step.key, [])[:-1]
            )


@dataclass(frozen=True)
class Campaign:
    """A series of builds.

    Attributes:
        only: The one build of the series to run; None runs all.
        keep: Where each build's folder is kept; None keeps nothing.
        kinds: Kinds of fault that may strike.
    """

    root: Path
    builds: int
    seed: str
    rate: float = DEFAULT_RATE
    only: int | None = None
    keep: Path | None = None
    kinds: frozenset[FaultKind] = frozenset(FaultKind)

    def run(self, tick: Callable[[int], None] = lambda _: None) -> Tally:
        """Run the series; `tick` hears of each finished build.

        Raises:
            MisuseError: `keep` holds something already.
        """
        began = time.monotonic()
        scenarios = scenarios_of(self.root, self.seed)
        tally = Tally(self.seed, self.rate)
        numbers = range(self.builds) if self.only is None else (self.only,)
        with tempfile.TemporaryDirectory(prefix="hilgate-simulate-", dir=_memory()) as scratch:
            for number in numbers:
                folder = self._folder(number, Path(scratch))
                scenario, faults = self.drawn(scenarios, number)
                finished = run_build(scenario, self._name(number), faults, folder)
                tally.add(finished)
                self._look(tally, finished, number, scenario, Path(scratch))
                if self.keep is None:
                    shutil.rmtree(folder)
                tick(tally.builds)
        tally.seconds = time.monotonic() - began
        return tally

    def drawn(self, scenarios: Scenarios, number: int) -> tuple[Scenario, tuple[Fault, ...]]:
        """Plan and faults of a build of the series."""
        rng = random.Random(self._name(number))
        scenario = scenarios.draw(rng)
        return scenario, draw(rng, scenario.plan, self.rate, self.kinds)

    def _name(self, number: int) -> str:
        return f"{self.seed}:{number}"

    def _folder(self, number: int, scratch: Path) -> Path:
        folder = (self.keep or scratch) / str(number)
        if folder.exists():
            raise MisuseError(
                "a simulated build is kept here already", where=str(folder), remedy="name an empty folder with --keep"
            )
        folder.mkdir(parents=True)
        return folder

    def _look(self, tally: Tally, finished: Finished, number: int, scenario: Scenario, scratch: Path) -> None:
        """Compare a verdict with the truth, and shrink what is wrong with it."""
        for kind, problem in {problem.kind: problem for problem in problems(finished)}.items():
            tally.problems[kind] += 1
            shrunk: tuple[Fault, ...] = ()
            if len(tally.failing) < SHRUNK:
                shrunk = shrink(scenario, self._name(number), finished.faults, kind, scratch)
            rate = "" if self.rate == DEFAULT_RATE else f" --rate {self.rate:g}"
            line = f"make simulate ARGS='--builds 1 --seed {self._name(number)}{rate}'"
            tally.failing.append(Failing(line, problem, shrunk))


def shrink(scenario: Scenario, name: str, faults: tuple[Fault, ...], kind: Wrong, scratch: Path) -> tuple[Fault, ...]:
    """Leave out one fault after the other, as long as the verdict stays wrong in the same way."""
    for fault in faults:
        fewer = tuple(other for other in faults if other != fault)
        folder = Path(tempfile.mkdtemp(dir=scratch))
        found = problems(run_build(scenario, name, fewer, folder))
        shutil.rmtree(folder)
        if any(problem.kind is kind for problem in found):
            return shrink(scenario, name, fewer, kind, scratch)
    return faults


def _memory() -> Path | None:
    """A folder in memory where there is one: a build writes dozens of small files and syncs each."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else None


_REACH_OTHERS = frozenset({FaultKind.OTHER_TREE, FaultKind.OTHER_STEP, FaultKind.PLAN_ALTERED})
"""Kinds that spoil the evidence of steps beside the one they strike."""


class Wrong(enum.StrEnum):
    """How a verdict can be wrong."""

    FALSE_PASS = "false pass"
    LOST_RESULT = "lost result"
    FALSE_BLAME = "false blame"
    NEEDLESS_BLOCK = "needless block"


@dataclass(frozen=True)
class WrongVerdict:
    """One way in which a verdict is wrong, and why."""

    kind: Wrong
    why: str


def problems(finished: Finished) -> tuple[WrongVerdict, ...]:
    """Everything that is wrong with the verdict of a build."""
    found = []
    truth = finished.truth
    if finished.passed and truth.forbidden:
        found.append(WrongVerdict(Wrong.FALSE_PASS, truth.forbidden[0]))
    if not finished.passed and not truth.forbidden and not truth.doubtful:
        why = finished.verdict.why if finished.verdict else finished.broke_down or "no verdict was posted"
        found.append(WrongVerdict(Wrong.NEEDLESS_BLOCK, why))
    if finished.broke_down:
        found.append(WrongVerdict(Wrong.LOST_RESULT, f"the judge broke down: {finished.broke_down}"))
    if finished.verdict is not None:
        found += [WrongVerdict(Wrong.LOST_RESULT, why) for why in _lost(finished, finished.verdict)]
        found += [WrongVerdict(Wrong.FALSE_BLAME, why) for why in _blamed(finished, finished.verdict)]
    return tuple(found)


def _lost(finished: Finished, verdict: Verdict) -> list[str]:
    """Findings that arrived sound and in time, and that the verdict does not report.

    What ran in an image that nobody knows of is no finding.
    """
    ledger, steps = finished.site.ledger, finished.site.steps
    if any(fault.kind in _REACH_OTHERS for fault in finished.faults):
        return []
    reported = {step.key: step for step in verdict.steps}
    found = []
    unproven = {step.step.provides for key, step in steps.items() if step.step.provides and not _arrived(ledger, key)}
    for key, step in steps.items():
        event = ledger.last(key)
        if event is None or not _arrived(ledger, key) or not event.tests or step.image in unproven:
            continue
        if key not in reported:
            found.append(f"{key} is not in the verdict")
        elif why := _unreported(step, event, reported[key], ledger):
            found.append(f"{key}: {why}")
    return found


def _arrived(ledger: Ledger, key: str) -> bool:
    """Whether the records of a step are there whole and in time, and nothing is wrong with how they came about."""
    event = ledger.last(key)
    return event is not None and not event.wrong and not event.doubtful and event.arrives <= ledger.verdict_at


def _unreported(step: PlannedStep, event: Event, judged: StepVerdict, ledger: Ledger) -> str:
    excused = ledger.excused(step, event.tests)
    if judged.counts.failed != len(event.failures()):
        return f"{len(event.failures())} tests failed and the verdict counts {judged.counts.failed}"
    passed = {test for test, end in event.tests.items() if end == PASSED}
    if judged.counts.passed != len(passed):
        return f"the verdict counts {judged.counts.passed} passed tests"
    if missing := (event.failures() & excused) - set(judged.quarantined):
        return f"{min(missing)} failed in quarantine and is not listed"
    if missing := (excused & passed) - set(judged.unexpected_passes):
        return f"{min(missing)} passed in quarantine and is not listed"
    return ""


def _blamed(finished: Finished, verdict: Verdict) -> list[str]:
    """Steps ruled a regression or unfinished, which blames the change, although only infrastructure went wrong.

    No injustice where nobody could know better: its hooks saw a sick node as sound, and no run elsewhere passed.
    """
    site = finished.site
    found = []
    for judged in verdict.steps:
        event = site.ledger.last(judged.key)
        if judged.ruling not in {Ruling.REGRESSION, Ruling.UNFINISHED}:
            continue
        if event is None:
            found.append(f"{judged.key} never ran: {judged.why}")
            continue
        unknowable = event.host in site.sick and not event.seen_sick and judged.key not in site.cleared
        own = site.failing_by_nature(site.steps[judged.key])
        if event.innocent and not own and not unknowable and not judged.unexpected_passes:
            found.append(f"{judged.key}: {'; '.join(event.wrong) or 'nothing went wrong'}, ruled: {judged.why}")
    return found
