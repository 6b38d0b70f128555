"""One simulated build from its plan to its verdict, beside what it deserved.

The one place where the simulator meets what it tests: results are read, reruns asked for, and the verdict given.
"""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.errors import Exit, RecordsError
from hilgate.judge.verdict import VERDICT_FILE, read_verdict
from hilgate.model import Loosening
from hilgate.plan.make import plan_digest, read_plan
from hilgate.report import write
from hilgate.run import recheck, results
from hilgate.simulate import job as records
from hilgate.simulate.buildkite import LOST, Build, Ended, Host, Node, State, Upload
from hilgate.simulate.faults import Fault, Kind
from hilgate.simulate.job import run_job
from hilgate.simulate.site import Site, quarantine_of
from hilgate.simulate.truth import Truth, deserved

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Quarantine, Record, Verdict
    from hilgate.simulate.buildkite import Command
    from hilgate.simulate.scenarios import Scenario


PLAN_FILE = "plan.json"
HOSTS = 3
"""Machines of each queue: enough for a step to move twice."""

APPROVER = "a maintainer"
SHORT_MINUTES = 1.0


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
    site: Site


def run_build(scenario: Scenario, name: str, faults: tuple[Fault, ...], folder: Path) -> Finished:
    """Run one build.

    Args:
        scenario: Plan and pipeline.
        name: Seed of all that is drawn while it runs.
        faults: What goes wrong.
        folder: Empty; receives the attempts' folders and what each step of the flow downloads.
    """
    kinds = {fault.kind for fault in faults}
    loosened = bool(kinds & {Kind.LOOSENED, Kind.LOOSENED_APPROVED})
    plan = scenario.plan.model_copy(
        update={
            "commit": hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(),
            "loosened": (Loosening(path="tests/support/tolerances.py", what="fp16: 1e-3 -> 1e-1"),) * loosened,
        }
    )
    site = Site(name, plan, plan_digest(plan), folder / "attempts", faults)
    flow = _Flow(site, scenario, folder, quarantine_of(site))
    if Kind.LOOSENED in kinds:
        site.ledger.wrong.append("the gate is loosened and nobody approved")
    flow.approved_by = APPROVER if Kind.LOOSENED_APPROVED in kinds and Kind.LOOSENED not in kinds else ""
    flow.build.run()
    return Finished(
        faults=faults,
        passed=flow.build.state("verdict") is State.PASSED,
        verdict=flow.verdict,
        broke_down=flow.broke_down,
        truth=deserved(plan, site.ledger),
        site=site,
    )


@dataclass
class _Flow:
    """The steps of the flow itself: plan, recheck, verdict."""

    site: Site
    scenario: Scenario
    folder: Path
    quarantine: Quarantine
    approved_by: str = ""
    verdict: Verdict | None = None
    broke_down: str = ""
    build: Build = field(init=False)

    def __post_init__(self) -> None:
        skipped = frozenset(fault.step for fault in self.site.faults if fault.kind is Kind.SKIPPED)
        hosts = {queue: [Host(f"{queue}-{number}") for number in range(HOSTS)] for queue in self.scenario.queues}
        nodes = [Node(step) for step in self.scenario.flow]
        self.build = Build(nodes, hosts, self.perform, random.Random(f"{self.site.name}:agents"), skipped)

    def perform(self, command: Command, attempt: int, host: Host, minute: float) -> Ended:
        """Do the work of any step of the build."""
        if command.runs:
            job = _recheck if command.rechecks else run_job
            return job(self.site, self.build, command, attempt, host, minute)
        if command.key == "plan":
            return self._plan(attempt)
        if command.key == "recheck":
            return self._recheck(minute, attempt)
        return self._verdict(minute, attempt)

    def _struck(self, kind: Kind) -> int | None:
        """The number of a fault of the build, or None."""
        return next((fault.number for fault in self.site.faults if fault.kind is kind), None)

    def _plan(self, attempt: int) -> Ended:
        if self._struck(Kind.PLAN_FAILED) is not None:
            self.site.ledger.planned = False
            return Ended(int(Exit.INVALID_DECLARATION), SHORT_MINUTES)
        self.site.plan.save(self.folder / PLAN_FILE)
        self._alter_plan(self.folder / PLAN_FILE)
        lost = self._struck(Kind.PLAN_AGENT_LOST)
        if lost is not None and attempt == 0:
            return Ended(LOST, SHORT_MINUTES, inserted=self.scenario.generated if lost % 2 else ())
        if lost is not None and lost % 2:
            # Buildkite refuses the same keys a second time, so the retry of a plan that was uploaded fails.
            return Ended(int(Exit.FAIL), SHORT_MINUTES)
        return Ended(0, SHORT_MINUTES, inserted=self.scenario.generated)

    def _alter_plan(self, path: Path) -> None:
        """What the flow downloads is not what the jobs were given: cut off, a step fewer, or one that promises less."""
        number = self._struck(Kind.PLAN_ALTERED)
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

    def _recheck(self, minute: float, attempt: int) -> Ended:
        try:
            here = self._download(f"recheck.{attempt}", minute)
            plan = read_plan(here / PLAN_FILE)
            recorded = results.read_all(here, here / "jobs", plan, plan_digest(plan))
            wanted = recheck.pending(plan, recorded)
            inserted = self.scenario.rechecks(tuple(sorted(wanted)))
        except RecordsError as error:
            return Ended(int(error.exit_status), SHORT_MINUTES)
        except Exception as error:  # noqa: BLE001 - whatever breaks it is a finding of the simulation
            self.broke_down = f"{type(error).__name__}: {error}"
            return Ended(int(Exit.BUG), SHORT_MINUTES)
        self.site.failing.update(wanted)
        return Ended(0, SHORT_MINUTES, inserted=inserted)

    def _verdict(self, minute: float, attempt: int) -> Ended:
        if attempt == 0 and self._struck(Kind.VERDICT_AGENT_LOST) is not None:
            return Ended(LOST, SHORT_MINUTES)
        self.site.ledger.verdict_at = minute
        try:
            here = self._download(f"verdict.{attempt}", minute)
            judged = write.decide(
                here,
                write.read_plan_or_say_so(here / PLAN_FILE, here),
                jobs=here / "jobs",
                approved_by=self.approved_by,
                decided=self.site.at(minute),
                quarantine=lambda: self.quarantine,
            )
            self.verdict = read_verdict(here / VERDICT_FILE)
            return Ended(int(write.status_of(judged)), SHORT_MINUTES)
        except RecordsError as error:
            return Ended(int(error.exit_status), SHORT_MINUTES)
        except Exception as error:  # noqa: BLE001 - whatever breaks the judge is a finding of the simulation
            self.broke_down = f"{type(error).__name__}: {error}"
            return Ended(int(Exit.BUG), SHORT_MINUTES)

    def _download(self, name: str, minute: float) -> Path:
        """What has arrived by now, as hard links in a folder of its own."""
        here = self.folder / name
        (here / "jobs").mkdir(parents=True)
        if (self.folder / PLAN_FILE).exists():
            os.link(self.folder / PLAN_FILE, here / PLAN_FILE)
        for job, path in self.build.download(minute).items():
            files = list(path.iterdir())
            if files:
                (here / "jobs" / job).mkdir()
            for file in files:
                os.link(file, here / "jobs" / job / file.name)
        return here


def _recheck(site: Site, build: Build, command: Command, attempt: int, host: Host, minute: float) -> Ended:
    """Run failing tests once more on another node than the one they failed on."""
    step = site.steps[command.runs]
    deed = site.ledger.last(step.key)
    struck = site.striking(step.key, 0)
    claims = None
    if Kind.RECHECK_SAME_NODE in struck and deed is not None:
        host, claims = Host(deed.host), True
    if deed is not None and host.name == deed.host and not struck.get(Kind.RECHECK_SAME_NODE, 0) % 2:
        return Ended(int(Exit.SICK_NODE), SHORT_MINUTES)
    folder = site.folder / f"{command.folder}.{attempt}"
    folder.mkdir(parents=True)
    elsewhere = deed is None or host.name != deed.host
    image = site.images.get(step.image or "", "")
    lines: list[Record] = []
    for test in site.failing[step.key]:
        rerun = records.rerun(site, step, test, host, elsewhere=elsewhere, claims_elsewhere=claims)
        lines.append(rerun)
        if elsewhere and rerun.outcome.value == "pass":
            site.cleared.add(step.key)
    results.write(folder, records.opening(site, step, host, image, minute, {}), lines)
    build.uploads.append(Upload(command.key, attempt, command.folder, folder, minute + SHORT_MINUTES))
    return Ended(0, SHORT_MINUTES)
