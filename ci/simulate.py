# SPDX-License-Identifier: Apache-2.0
"""Simulate a day of a fleet: GPU-hours, waiting and gate agents, with and without shared jobs and records of kernels.

    python ci/simulate.py [--builds 1000] [--agents 100] [--seed 0] [--records RESULTS ...]

Each build has the change of a random commit of this repository, planned by the planner as it is now. Builds arrive at
random, half of them in a quarter of the day. A step takes as long as it last took on this machine where it runs here,
else its declared minutes; a job takes `JOB_MINUTES` more. Agents are given to queues by their share of the work in the
first way, at least one to each. Images count as built. The first day fills the queues, the second one is reported.

RESULTS are folders with the `kernels.txt` of steps, as for `ci/selection_figures.py`; GPUs are taken to launch what the
CPU did. With them, a second table has builds that each edit the body of one kernel.
"""

from __future__ import annotations

import ast
import heapq
import itertools
import math
import random
import statistics
import sys
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mutants import positive
from selection_figures import git_says, read_records

from hilgate import git
from hilgate.declare.imports import build
from hilgate.declare.load import find_root, load
from hilgate.errors import MisuseError, NothingSelectedError, Parser, ending
from hilgate.git import Changes
from hilgate.model.declaration import CPU
from hilgate.plan.estimate import last_minutes
from hilgate.plan.launched import Launched, Launches, edited_bodies, jitted
from hilgate.plan.make import ChangeFacts, assemble

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

    from hilgate.declare.imports import Imports
    from hilgate.declare.load import Declarations
    from hilgate.model.plan import Plan, PlannedStep

DAY = 24 * 60.0
BUSY_SHARE, BUSY_MINUTES = 0.5, DAY / 4
"""Share of the builds that arrive in the busy part of the day, and the length of that part."""
JOB_MINUTES = 1.0
"""What a job takes beside its steps: vLLM measured 1.0 to 1.1 minutes (vllm#52322)."""
GATE = "gate"
GATE_MINUTES = {"plan": 1.0, "recheck": 0.5, "verdict": 1.0}
"""Minutes of a build's own jobs, beside `JOB_MINUTES`."""
PATIENCE = 1.0
"""Minutes that at most one gate job in twenty may wait, with the gate agents that are reported."""


@dataclass(frozen=True)
class Job:
    """A Buildkite job of a build: its queue, its minutes, its GPUs, and the jobs of the build that it waits for."""

    key: str
    queue: str
    minutes: float
    gpus: int
    needs: frozenset[str] = frozenset()


@dataclass
class Day:
    """What happened to the builds that arrived on the reported day."""

    waited: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Queue -> minutes that each job waited for an agent."""
    took: list[float] = field(default_factory=list)
    """Minutes of each build from its arrival to its verdict."""
    gpu_minutes: float = 0.0
    jobs: int = 0


@dataclass(frozen=True)
class Commit:
    """A commit of the past, or one that edits a kernel."""

    sha: str
    parent: str
    files: tuple[str, ...]
    """What it changes."""
    edited: Mapping[str, frozenset[str]] = field(hash=False)
    """File -> the jitted functions whose bodies are all that it changes there."""


def commits(root: Path, number: int) -> list[Commit]:
    """The last commits with one parent that changed any file."""
    words = ("log", "--no-merges", "--no-renames", "--name-only", "--format=%x00%H %P", "-n", str(number))
    text = git_says(root, *words)
    found = []
    for one in text.split("\0")[1:]:
        line, *files = one.split("\n")
        sha, _, parent = line.partition(" ")
        names = tuple(filter(None, files))
        if parent and names:
            found.append(Commit(sha, parent, names, edited_between(root, parent, sha, names)))
    return found


def edited_between(root: Path, parent: str, sha: str, files: Iterable[str]) -> dict[str, frozenset[str]]:
    """File -> the jitted functions whose bodies are all that differs in it between two commits."""
    sources = [name for name in files if name.endswith(".py")]
    before, after = (git.files_at(root, which, sources) for which in (parent, sha))
    edited = {name: edited_bodies(before.get(name), after.get(name)) for name in sources}
    return {name: bodies for name, bodies in edited.items() if bodies}


def kernel_edits(root: Path) -> list[Commit]:
    """An edit of each kernel's body, as often as commits touched its file."""
    head = git.inspect(root, None).commit
    found = []
    for name in git.tracked_files(root):
        if name.startswith("kernels/") and name.endswith(".py"):
            functions = [one.name for one in jitted(ast.parse((root / name).read_text(encoding="utf-8")))]
            touched = len(git_says(root, "log", "--format=%h", "--", name).split())
            edits = [Commit(head, head, (name,), {name: frozenset({function})}) for function in functions]
            found += edits * max(1, round(touched / max(1, len(edits))))
    return found


@dataclass
class _Recorded(Launched):
    """Records that hold for a commit of the past, whose edited bodies are given."""

    edited: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def bodies(self) -> Mapping[str, frozenset[str]]:
        return self.edited

    def _outdated(self, key: str, record: Launches) -> str:
        del key, record
        return ""


@dataclass(frozen=True)
class Planner:
    """Plans changes of the past with the declarations and the import graph of now, and with built images."""

    root: Path
    declarations: Declarations
    graph: Imports
    facts: ChangeFacts

    @classmethod
    def of(cls, root: Path) -> Planner:
        """The planner of a checkout."""
        declarations = load(root)
        images = dict.fromkeys(declarations.project.images, "0" * 64)
        facts = ChangeFacts(images=images, digests=dict.fromkeys(images, f"sha256:{'0' * 64}"))
        return cls(root, declarations, build(root, declarations.project.python_path), facts)

    def plan(self, commit: Commit, records: Mapping[str, frozenset[str]]) -> Plan | None:
        """The plan of a commit's change for the agents; None where it selects nothing."""
        change = Changes(commit=commit.sha, dirty=False, base="main", files=commit.files, merge_base=commit.parent)
        launched = None
        if records:

            def recorded(step: str, _device: str) -> list[Launches]:
                names = records.get(f"{step}-{CPU}")
                return [] if names is None else [Launches(commit.parent, names)]

            launched = _Recorded(self.root, change, self.declarations.areas, self.graph, recorded, edited=commit.edited)
        try:
            return assemble(
                self.declarations,
                change,
                None,
                profile="pr",
                graph=self.graph,
                launched=launched,
                facts=self.facts,
            )
        except NothingSelectedError:
            return None


def jobs_of(plan: Plan, minutes: Mapping[str, float], *, shared: bool) -> list[Job]:
    """The jobs of a plan, one for each step or as the pipeline shares them."""
    groups: Iterable[Sequence[PlannedStep]] = plan.jobs().values() if shared else ([step] for step in plan.steps)
    members = {tuple(step.key for step in steps): steps for steps in groups}
    job_of = {key: keys[0] for keys in members for key in keys}
    return [
        Job(
            keys[0],
            steps[0].queue or GATE,
            sum(minutes.get(step.key, step.step.minutes) for step in steps) + JOB_MINUTES,
            max(step.gpus for step in steps),
            frozenset(job_of[need] for step in steps for need in step.depends_on if need not in keys),
        )
        for keys, steps in members.items()
    ]


def arrivals(builds: int, days: int, chance: random.Random) -> list[float]:
    """Sorted minutes at which builds arrive."""
    times = []
    for day in range(days):
        for _ in range(builds):
            busy = chance.random() < BUSY_SHARE
            begin, length = (DAY / 3, BUSY_MINUTES) if busy else (0.0, DAY)
            times.append(day * DAY + begin + chance.random() * length)
    return sorted(times)


class Fleet:
    """Builds on agents. A build plans, runs its jobs, looks for failures to run again (there are none) and judges."""

    def __init__(
        self, builds: Sequence[tuple[float, Sequence[Job]]], agents: Mapping[str, int], reported: float
    ) -> None:
        self.day = Day()
        self._builds, self._reported = builds, reported
        self._free = Counter(agents)
        self._queued: defaultdict[str, deque[tuple[int, Job, float]]] = defaultdict(deque)
        self._left: dict[int, dict[str, Job]] = {}
        self._order = itertools.count()
        self._events: list[tuple[float, int, int, Job]] = []
        """(Minute at which a job ends, order of equal minutes, build, job); a build arrives as its job "arrival"."""

    def run(self) -> Day:
        """Run all builds, first come, first served."""
        for number, (at, _) in enumerate(self._builds):
            self._push(at, number, Job("arrival", "", 0.0, 0))
        while self._events:
            now, _, number, job = heapq.heappop(self._events)
            self._free[job.queue] += 1
            self._ended(now, number, job)
            self._start(now, job.queue)
        return self.day

    def _ended(self, now: float, number: int, job: Job) -> None:
        arrived, jobs = self._builds[number]
        if job.key == "arrival":
            self._enqueue(now, number, [_own("plan")])
        elif job.key == "plan":
            self._left[number] = {one.key: one for one in jobs}
            self._enqueue(now, number, [one for one in jobs if not one.needs])
        elif job.key == "recheck":
            self._enqueue(now, number, [_own("verdict")])
        elif job.key != "verdict":
            left = self._left[number]
            del left[job.key]
            ready = [one for one in left.values() if job.key in one.needs and not one.needs & left.keys()]
            self._enqueue(now, number, ready if left else [_own("recheck")])
        elif arrived >= self._reported:
            self.day.took.append(now - arrived)

    def _enqueue(self, now: float, number: int, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._queued[job.queue].append((number, job, now))
            self._start(now, job.queue)

    def _start(self, now: float, queue: str) -> None:
        while self._queued[queue] and self._free[queue]:
            number, job, since = self._queued[queue].popleft()
            self._free[queue] -= 1
            if self._builds[number][0] >= self._reported:
                self.day.waited[queue].append(now - since)
                self.day.gpu_minutes += job.minutes * job.gpus
                self.day.jobs += 1
            self._push(now + job.minutes, number, job)

    def _push(self, at: float, number: int, job: Job) -> None:
        heapq.heappush(self._events, (at, next(self._order), number, job))


def _own(name: str) -> Job:
    """A job of every build, on a gate agent."""
    return Job(name, GATE, GATE_MINUTES[name] + JOB_MINUTES, 0)


def fleet(days: Sequence[Sequence[Job]], agents: int) -> dict[str, int]:
    """Agents by queue, in proportion to the minutes that the jobs of these builds take; at least one each."""
    work: Counter[str] = Counter()
    for jobs in days:
        for job in jobs:
            work[job.queue] += math.ceil(job.minutes)
    whole = sum(work.values())
    return {queue: max(1, round(agents * minutes / whole)) for queue, minutes in work.items()}


def gate_agents(builds: Sequence[tuple[float, Sequence[Job]]]) -> int:
    """The fewest gate agents with which at most one gate job in twenty waits longer than `PATIENCE`."""
    quick = [(at, [Job("steps", "steps", 10.0, 0)]) for at, _ in builds]
    for number in itertools.count(1):
        day = Fleet(quick, {GATE: number, "steps": len(builds)}, DAY).run()
        if statistics.quantiles(day.waited[GATE], n=20)[-1] <= PATIENCE:
            return number
    raise AssertionError


def _row(name: str, day: Day) -> str:
    waits = [wait for queue, each in day.waited.items() if queue != GATE for wait in each]
    late = statistics.quantiles(waits, n=20)[-1]
    took = statistics.quantiles(day.took, n=20)
    return (
        f"{name:<26}{day.jobs:>8,}{day.gpu_minutes / 60:>11,.0f}{statistics.median(waits):>9.1f}{late:>9.1f}"
        f"{statistics.median(day.took):>9.0f}{took[-1]:>9.0f}"
    )


def _table(
    name: str,
    planner: Planner,
    changes: Sequence[Commit],
    records: Mapping[str, frozenset[str]],
    given: argparse.Namespace,
) -> None:
    """Simulate builds with changes out of these, in each way, and print a row for each.

    Raises:
        MisuseError: No change selects a step.
    """
    planned: dict[Commit, tuple[Plan | None, Plan | None]] = {}
    for one in dict.fromkeys(changes):
        planned[one] = planner.plan(one, {}), planner.plan(one, records)
    made = [(without, recorded or without) for without, recorded in map(planned.__getitem__, changes) if without]
    if not made:
        raise MisuseError("no change selects a step", where=str(planner.root), remedy="take a clone with its history")
    minutes, chance = last_minutes(planner.root), random.Random(given.seed)
    drawn = [(at, *chance.choice(made)) for at in arrivals(given.builds, 2, chance)]
    ways = {
        "one job for each step": [(at, jobs_of(plan, minutes, shared=False)) for at, plan, _ in drawn],
        "small steps share a job": [(at, jobs_of(plan, minutes, shared=True)) for at, plan, _ in drawn],
    }
    if records:
        ways["and records of kernels"] = [(at, jobs_of(plan, minutes, shared=True)) for at, _, plan in drawn]
    first = next(iter(ways.values()))
    gate = gate_agents(first)
    agents = fleet([jobs for _, jobs in first], given.agents) | {GATE: gate}
    named = ", ".join(f"{number} {queue}" for queue, number in sorted(agents.items()) if queue != GATE)
    sys.stdout.write(f"{name}: {given.builds:,} builds a day, {len(minutes)} steps measured here\n")
    sys.stdout.write(f"agents: {named}; gate agents needed: {gate}\n")
    sys.stdout.write(f"{'':<26}{'jobs':>8}{'GPU-hours':>11}{'wait':>9}{'95 %':>9}{'verdict':>9}{'95 %':>9}\n")
    for way, builds in ways.items():
        sys.stdout.write(_row(way, Fleet(builds, agents, DAY).run()) + "\n")
    sys.stdout.flush()


@ending
def main() -> int:
    """Simulate, and print one row for each way to run the same builds."""
    parser = Parser(description="Simulate a day of a fleet.")
    parser.add_argument("--builds", type=positive, default=1000, help="builds a day (1000)")
    parser.add_argument("--agents", type=positive, default=100, help="agents beside those of the gate (100)")
    parser.add_argument("--commits", type=positive, default=300, help="last commits that changes are drawn from (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, nargs="*", help="folders with the kernels.txt of steps")
    given = parser.parse_args()
    root = find_root(Path.cwd())
    planner = Planner.of(root)
    records = read_records(given.records) if given.records else {}
    mixes = {f"changes of the last {given.commits} commits": commits(root, given.commits)}
    if records:
        mixes["edits of one kernel's body"] = kernel_edits(root)
    for name, changes in mixes.items():
        _table(name, planner, changes, records, given)
    sys.stdout.write("minutes; waiting of a job for its agent, time of a build to its verdict: median and 95 %\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
