"""Buildkite in simulated time: which job starts when and where, what is retried, and which artifacts can be fetched.

Discrete events and no clock: a build of two hours takes the time to write its files.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.simulate.pipeline import Command, Wait

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

NEVER = float("inf")
RETRY_DELAY_MINUTES = 0.1
"""Between the end of an attempt and the next; any short time does."""

LOST = -1
"""Exit status that Buildkite gives a job whose agent vanished."""


class State(enum.Enum):
    """What became of a step."""

    WAITING = "waiting"
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    BROKEN = "waiting failed"
    EXPIRED = "no agent"


_GOOD = frozenset({State.PASSED, State.SKIPPED})
_OPEN = frozenset({State.WAITING, State.RUNNING})


@dataclass
class Host:
    """A machine with one agent."""

    name: str
    busy: bool = False
    paused: bool = False


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        minutes: Simulated time that it took.
        state: Given where the exit status does not decide: cancelled, or passed although it failed (soft).
        inserted: Steps that it uploaded; they stand right after it.
    """

    exit_status: int
    minutes: float
    signal_reason: str = "none"
    state: State | None = None
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
    state: State = State.WAITING
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
    perform: Callable[[Command, int, Host, float], Ended]
    rng: random.Random
    skipped: frozenset[str] = frozenset()
    uploads: list[Upload] = field(default_factory=list)
    _events: list[tuple[float, int, Node, Host, Ended]] = field(default_factory=list)
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

    def state(self, key: str) -> State | None:
        """What became of a step; None for one that was never uploaded."""
        return next((n.state for n in self.nodes if isinstance(n.spec, Command) and n.spec.key == key), None)

    def download(self, now: float) -> dict[str, Path]:
        """Folder -> where it lies: of every job that was not retried, what has arrived by now."""
        last = {n.spec.key: n.attempts - 1 for n in self.nodes if isinstance(n.spec, Command)}
        return {
            upload.folder: upload.path
            for upload in self.uploads
            if upload.attempt == last[upload.command] and upload.arrives <= now
        }

    def last_attempt(self, key: str) -> int:
        """The attempt that was not retried, from 0; -1 when none began."""
        return next((n.attempts - 1 for n in self.nodes if isinstance(n.spec, Command) and n.spec.key == key), -1)

    def _settle(self) -> None:
        """Find what can no longer run, and what is skipped, until nothing changes."""
        changed = True
        while changed:
            changed = False
            states = {n.spec.key: n.state for n in self.nodes if isinstance(n.spec, Command)}
            blocked = failed = False
            for node in self.nodes:
                if isinstance(node.spec, Wait):
                    blocked = blocked or any(n.state in _OPEN for n in self._before(node))
                    failed = failed or (
                        not node.spec.continue_on_failure
                        and any(n.state not in _GOOD | _OPEN for n in self._before(node))
                    )
                    continue
                if node.state is not State.WAITING:
                    continue
                needs = [states.get(need, State.BROKEN) for need in node.spec.depends_on]
                hopeless = any(need not in _GOOD | _OPEN for need in needs) and not node.spec.allow_dependency_failure
                if node.spec.key in self.skipped:
                    node.state, changed = State.SKIPPED, True
                elif hopeless or (failed and not blocked):
                    node.state, changed = State.BROKEN, True
                elif all(host.paused for host in self.hosts[node.spec.queue]):
                    node.state, changed = State.EXPIRED, True

    def _before(self, wait: Node) -> list[Node]:
        place = next(place for place, node in enumerate(self.nodes) if node is wait)
        return [node for node in self.nodes[:place] if isinstance(node.spec, Command)]

    def _start(self, now: float) -> bool:
        states = {n.spec.key: n.state for n in self.nodes if isinstance(n.spec, Command)}
        ready = []
        for node in self.nodes:
            if isinstance(node.spec, Wait):
                if any(n.state in _OPEN for n in self._before(node)):
                    break
            elif node.state is State.WAITING and all(states.get(need) not in _OPEN for need in node.spec.depends_on):
                free = [host for host in self.hosts[node.spec.queue] if not host.busy and not host.paused]
                if free:
                    ready.append((node, node.spec, free))
        if not ready:
            return False
        node, spec, free = self.rng.choice(ready)
        host = self.rng.choice(free)
        host.busy, node.state = True, State.RUNNING
        node.attempts += 1
        began = max(now, node.not_before)
        ended = self.perform(spec, node.attempts - 1, host, began)
        heapq.heappush(self._events, (began + ended.minutes, next(self._order), node, host, ended))
        return True

    def _end(self, node: Node, host: Host, ended: Ended, now: float) -> None:
        spec = node.spec
        assert isinstance(spec, Command)
        host.busy = False
        if ended.state is not None:
            node.state = ended.state
        elif ended.exit_status == 0 or spec.soft_fail:
            node.state = State.PASSED
        elif spec.retried(ended.exit_status, ended.signal_reason, node.attempts - 1):
            node.state, node.not_before = State.WAITING, now + RETRY_DELAY_MINUTES
        else:
            node.state = State.FAILED
        place = next(place for place, other in enumerate(self.nodes) if other is node)
        self.nodes[place + 1 : place + 1] = [Node(inserted) for inserted in ended.inserted]
