# SPDX-License-Identifier: Apache-2.0
"""Buildkite in simulated time: which job starts when and where, what is retried, and which artifacts can be fetched.

Discrete events and no clock: a build of two hours takes the time to write its files. Steps, queues, dependencies,
timeouts and retries come from the pipeline's text, never from the plan: what the text forgets is forgotten here too.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent_host.endings import Endings


NEVER = float("inf")
RETRY_DELAY_MINUTES = 0.1
"""Between the end of an attempt and the next; any short time does."""

LOST = -1
"""Exit status that Buildkite gives a job whose agent vanished."""


class JobState(enum.Enum):
    """What became of a step."""

    WAITING = "waiting"
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    BROKEN = "waiting failed"
    EXPIRED = "no agent"


_GOOD = frozenset({JobState.PASSED, JobState.SKIPPED})
_OPEN = frozenset({JobState.WAITING, JobState.RUNNING})


@dataclass
class Host:
    """A machine with one agent; `endings` is what one that fails every job at once remembers of them."""

    name: str
    busy: bool = False
    paused: bool = False
    endings: Endings | None = None


@dataclass(frozen=True)
class JobEnd:
    """How an attempt ended.

    Attributes:
        minutes: Simulated time that it took.
        state: Given where the exit status does not decide: cancelled, or passed although it failed (soft).
        inserted: Steps that it uploaded; they stand right after it.
    """

    exit_status: int
    minutes: float
    signal_reason: str = "none"
    state: JobState | None = None
    inserted: tuple[Command | Wait, ...] = ()


@dataclass(frozen=True)
class Upload:
    """A job folder in the artifact store.

    Attributes:
        arrives: Simulated minute from which it can be downloaded.
    """

    command: str
    attempt: int
    folder: str
    path: Path
    arrives: float


@dataclass
class Node:
    """A step of the running build."""

    spec: Command | Wait
    state: JobState = JobState.WAITING
    attempts: int = 0
    not_before: float = 0.0


@dataclass
class Build:
    """One build: steps, agents and artifacts.

    Attributes:
        perform: Does the work of an attempt (step, attempt from 0, host, minute) and says how it ended.
        skipped: Keys that somebody skips.
    """

    nodes: list[Node]
    hosts: dict[str, list[Host]]
    perform: Callable[[Command, int, Host, float], JobEnd]
    rng: random.Random
    skipped: frozenset[str] = frozenset()
    uploads: list[Upload] = field(default_factory=list)
    _events: list[tuple[float, int, Node, Host, JobEnd]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        """Run until nothing can happen any more."""
        now = 0.0
        while True:
            self._settle()
            while self._start(now):
                self._settle()
            if not self._events:
                return
            now, _, node, host, ended = heapq.heappop(self._events)
            self._end(node, host, ended, now)

    def state(self, key: str) -> JobState | None:
        """What became of a step; None for one that was never uploaded."""
        return self._states().get(key)

    def download(self, now: float) -> dict[str, Path]:
        """Folder -> where it lies: of every job that was not retried, what has arrived by now."""
        last = {n.spec.key: n.attempts - 1 for n in self.nodes if isinstance(n.spec, Command)}
        return {
            upload.folder: upload.path
            for upload in self.uploads
            if upload.attempt == last[upload.command] and upload.arrives <= now
        }

    def _states(self) -> dict[str, JobState]:
        return {n.spec.key: n.state for n in self.nodes if isinstance(n.spec, Command)}

    def _settle(self) -> None:
        """Find what can no longer run, and what is skipped, until nothing changes."""
        while self._settle_once():
            pass

    def _settle_once(self) -> bool:
        changed = blocked = failed = False
        states, before = self._states(), set[JobState]()
        for node in self.nodes:
            spec = node.spec
            if isinstance(spec, Wait):
                blocked = blocked or bool(before & _OPEN)
                failed = failed or (not spec.continue_on_failure and bool(before - _GOOD - _OPEN))
                continue
            if node.state is JobState.WAITING:
                needs = {states.get(need, JobState.BROKEN) for need in spec.depends_on}
                hopeless = bool(needs - _GOOD - _OPEN) and not spec.allow_dependency_failure
                if spec.key in self.skipped:
                    node.state = JobState.SKIPPED
                elif hopeless or (failed and not blocked):
                    node.state = JobState.BROKEN
                elif all(host.paused for host in self.hosts[spec.queue]):
                    node.state = JobState.EXPIRED
                changed = changed or node.state is not JobState.WAITING
            before.add(node.state)
        return changed

    def _start(self, now: float) -> bool:
        states, ready = self._states(), []
        blocked = False
        for node in self.nodes:
            if isinstance(node.spec, Wait):
                if blocked:
                    break
                continue
            blocked = blocked or node.state in _OPEN
            if node.state is JobState.WAITING and all(states.get(need) not in _OPEN for need in node.spec.depends_on):
                free = [host for host in self.hosts[node.spec.queue] if not host.busy and not host.paused]
                if free:
                    ready.append((node, node.spec, free))
        if not ready:
            return False
        node, spec, free = self.rng.choice(ready)
        idle = [host for host in free if host.endings]  # who ends every job at once has always waited longest
        host = self.rng.choice(idle or free)
        host.busy, node.state = True, JobState.RUNNING
        node.attempts += 1
        began = max(now, node.not_before)
        ended = self.perform(spec, node.attempts - 1, host, began)
        heapq.heappush(self._events, (began + ended.minutes, next(self._order), node, host, ended))
        return True

    def _end(self, node: Node, host: Host, ended: JobEnd, now: float) -> None:
        spec = node.spec
        assert isinstance(spec, Command)
        host.busy = False
        if ended.state is not None:
            node.state = ended.state
        elif ended.exit_status == 0 or spec.soft_fail:
            node.state = JobState.PASSED
        elif spec.retried(ended.exit_status, ended.signal_reason, node.attempts - 1):
            node.state, node.not_before = JobState.WAITING, now + RETRY_DELAY_MINUTES
        else:
            node.state = JobState.FAILED
        place = next(place for place, other in enumerate(self.nodes) if other is node)
        self.nodes[place + 1 : place + 1] = [Node(inserted) for inserted in ended.inserted]


JOBS = "results/jobs/"
_RUNS = re.compile(r"\bhilgate (?:run|job|recheck) ([a-z0-9_.-]+)")
_RESULTS = re.compile(r"--results results/jobs/([a-z0-9_.-]+)")


@dataclass(frozen=True)
class Retry:
    """One rule of `retry.automatic`; None matches anything."""

    exit_status: int | None
    signal_reason: str | None
    limit: int


@dataclass(frozen=True)
class Command:
    """A command step.

    Attributes:
        timeout_minutes: Buildkite's own.
        runs: The planned step that its command runs; empty for a step of the flow itself.
        folder: Name of the folder below `results/jobs` that its command writes; empty for none.
        uploads: Whether its `artifact_paths` cover that folder.
    """

    key: str
    queue: str
    depends_on: tuple[str, ...]
    allow_dependency_failure: bool
    timeout_minutes: float
    retries: tuple[Retry, ...]
    soft_fail: bool
    runs: str
    folder: str
    uploads: bool

    @property
    def rechecks(self) -> bool:
        """Whether it runs failing checks once more instead of the step."""
        return self.folder != self.runs

    def retried(self, exit_status: int, signal_reason: str, before: int) -> bool:
        """Whether an attempt that ended so is followed by another, after `before` automatic retries."""
        for rule in self.retries:
            if rule.exit_status in {None, exit_status} and rule.signal_reason in {None, signal_reason}:
                return before < rule.limit
        return False


@dataclass(frozen=True)
class Wait:
    """A wait step: what stands after it waits for all that stands before it."""

    continue_on_failure: bool


def parse(text: str) -> tuple[Command | Wait, ...]:
    """The steps of a pipeline in order; groups are opened.

    Raises:
        DeclarationError: A step is of a kind that no pipeline of ours may hold.
    """
    document: dict[str, Any] = yaml.load(text, Loader=_Loader)
    return tuple(_parse(document["steps"]))


def _parse(steps: list[Any]) -> Iterator[Command | Wait]:
    for step in steps:
        if step == "wait":
            yield Wait(continue_on_failure=False)
        elif "wait" in step:
            yield Wait(bool(step.get("continue_on_failure")))
        elif "group" in step:
            yield from _parse(step["steps"])
        elif "command" in step or "commands" in step:
            yield _command(step)
        else:
            raise DeclarationError(
                f"the simulator knows no such step: {', '.join(map(str, step))}",
                where="the pipeline",
                remedy="use command steps, waits and groups",
            )


def _command(step: dict[str, Any]) -> Command:
    lines = "\n".join(_listed(step.get("command") or step.get("commands")))
    runs, folder = _RUNS.search(lines), _RESULTS.search(lines)
    name = folder[1] if folder else ""
    return Command(
        key=step["key"],
        queue=step["agents"]["queue"],
        depends_on=tuple(need if isinstance(need, str) else need["step"] for need in _listed(step.get("depends_on"))),
        allow_dependency_failure=bool(step.get("allow_dependency_failure")),
        timeout_minutes=step["timeout_in_minutes"],
        retries=tuple(_retry(rule) for rule in (step.get("retry") or {}).get("automatic") or ()),
        soft_fail=bool(step.get("soft_fail")),
        runs=runs[1] if runs and folder else "",
        folder=name,
        uploads=any(path.split("*")[0] in {f"{JOBS}{name}/", JOBS} for path in _listed(step.get("artifact_paths"))),
    )


def _listed(value: str | list[Any] | None) -> list[Any]:
    """Where the format takes one thing or a list of them."""
    return [value] if isinstance(value, str) else value or []


def _retry(rule: dict[str, Any]) -> Retry:
    status = rule.get("exit_status", "*")
    return Retry(None if status == "*" else status, rule.get("signal_reason"), rule.get("limit", 2))


_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
