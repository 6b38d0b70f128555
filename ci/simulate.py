# SPDX-License-Identifier: Apache-2.0
"""Simulate a day of a fleet: its jobs and GPU-hours, how long jobs wait, and how many gate agents it needs.

    python ci/simulate.py [--builds 1000] [--agents 100] [--commits 300] [--seed 0]

Each build has the change of a random commit of this repository, planned by the planner as it is now. Builds arrive at
random, half of them in a quarter of the day. A step takes as long as it last took on this machine where it runs here,
else its declared minutes; a job takes `JOB_MINUTES` more. Agents are given to queues by their share of the work, at
least one to each. Images count as built, and no records of launched kernels are asked, which select fewer steps
(`ci/selection_figures.py`). The first day fills the queues, the second one is reported.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
import statistics
import sys
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mutants import positive
from selection_figures import git_says

from hilgate.declare.imports import build
from hilgate.declare.load import find_root, load
from hilgate.errors import MisuseError, NothingSelectedError, Parser, ending
from hilgate.git import Changes
from hilgate.plan.estimate import last_minutes
from hilgate.plan.make import ChangeFacts, assemble

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hilgate.model.plan import Plan

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


def commits(root: Path, number: int) -> list[Changes]:
    """The changes of the last commits with one parent that changed any file."""
    words = ("log", "--no-merges", "--no-renames", "--name-only", "--format=%x00%H %P", "-n", str(number))
    found = []
    for entry in git_says(root, *words).split("\0")[1:]:
        line, *names = entry.split("\n")
        sha, _, parent = line.partition(" ")
        files = tuple(filter(None, names))
        if parent and files:
            found.append(Changes(commit=sha, dirty=False, base="main", files=files, merge_base=parent))
    return found


def plans_of(root: Path, changes: Iterable[Changes]) -> list[Plan]:
    """Plans for the agents of those changes that select a step, by the declarations and imports of now."""
    declarations = load(root)
    graph = build(root, declarations.project.python_path)
    images = dict.fromkeys(declarations.project.images, "0" * 64)
    facts = ChangeFacts(images=images, digests=dict.fromkeys(images, f"sha256:{'0' * 64}"))
    plans = []
    for change in changes:
        with contextlib.suppress(NothingSelectedError):
            plans.append(assemble(declarations, change, None, profile="pr", graph=graph, facts=facts))
    return plans


def jobs_of(plan: Plan, minutes: Mapping[str, float]) -> list[Job]:
    """The jobs of a plan, as the pipeline shares them."""
    members = {tuple(step.key for step in steps): steps for steps in plan.jobs().values()}
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


@ending
def main() -> int:
    """Simulate, and print the agents, the work, and how long jobs and builds took.

    Raises:
        MisuseError: No change selects a step.
    """
    parser = Parser(description="Simulate a day of a fleet.")
    parser.add_argument("--builds", type=positive, default=1000, help="builds a day (1000)")
    parser.add_argument("--agents", type=positive, default=100, help="agents beside those of the gate (100)")
    parser.add_argument("--commits", type=positive, default=300, help="last commits that changes are drawn from (300)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    root = find_root(Path.cwd())
    minutes, chance = last_minutes(root), random.Random(given.seed)
    plans = plans_of(root, commits(root, given.commits))
    if not plans:
        raise MisuseError("no change selects a step", where=str(root), remedy="take a clone with its history")
    jobs = [jobs_of(plan, minutes) for plan in plans]
    builds = [(at, chance.choice(jobs)) for at in arrivals(given.builds, 2, chance)]
    gate = gate_agents(builds)
    agents = fleet([each for _, each in builds], given.agents)
    day = Fleet(builds, agents | {GATE: gate}, DAY).run()
    waits = [wait for queue, each in day.waited.items() if queue != GATE for wait in each]
    for line in (
        f"{given.builds:,} builds with changes of the last {given.commits} commits, {len(minutes)} steps measured here",
        f"agents: {', '.join(f'{number} {queue}' for queue, number in sorted(agents.items()))}; gate agents: {gate}",
        f"{day.jobs:,} jobs, {day.gpu_minutes / 60:,.0f} GPU-hours",
        f"a job waits {_usually(waits)} minutes, the verdict comes after {_usually(day.took)}",
    ):
        sys.stdout.write(f"{line}\n")
    return 0


def _usually(minutes: Sequence[float]) -> str:
    """`12 (95 %: 40)`: a median, and what nineteen of twenty stay below."""
    return f"{statistics.median(minutes):.0f} (95 %: {statistics.quantiles(minutes, n=20)[-1]:.0f})"


if __name__ == "__main__":
    sys.exit(main())
