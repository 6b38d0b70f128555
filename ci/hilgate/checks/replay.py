"""Measures the selection on lists of changed files: what it saves against running everything, and what it misses.

A step is missed when it is not selected although it is known to break, or although it was seen to read a changed file
(`hilgate.checks.reads`), which the selection itself knows nothing of. Pure: declarations, lists and records in,
numbers out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.errors import MisuseError, NothingSelectedError
from hilgate.git import Changes
from hilgate.plan.estimate import Estimate, estimate
from hilgate.plan.make import assemble
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hilgate.declare.imports import Imports
    from hilgate.declare.load import Declarations
    from hilgate.model import Key, Plan, Profile

BROKE = "=>"


@dataclass(frozen=True)
class Case:
    """One change that happened."""

    line: int
    files: tuple[str, ...]
    broke: tuple[Key, ...] = ()
    """Declared steps that it is known to have broken."""


@dataclass(frozen=True)
class Missed:
    """A step that ought to have been selected."""

    step: Key
    why: str


@dataclass(frozen=True)
class Replayed:
    """What the selection does for one change."""

    case: Case
    steps: int
    """Planned steps."""
    gpu_minutes: float
    missed: tuple[Missed, ...]


@dataclass(frozen=True)
class Replay:
    """What it does for all of them, and what running everything each time would take."""

    profile: Profile
    of: int
    """Planned steps of run-all."""
    everything: Estimate
    readers: int
    """Steps whose reads are recorded."""
    lines: tuple[Replayed, ...]

    @property
    def gpu_minutes(self) -> float:
        """Of all selections."""
        return sum(line.gpu_minutes for line in self.lines)

    @property
    def run_all_gpu_minutes(self) -> float:
        """Of running everything for each line."""
        return self.everything.gpu_minutes * len(self.lines)

    @property
    def missed(self) -> int:
        """Steps missed, over all lines."""
        return sum(len(line.missed) for line in self.lines)


def parse(text: str, where: str, steps: Collection[Key]) -> tuple[Case, ...]:
    """Read lists of changed files, one per line; `#` begins a line of remark, `=> step ...` ends a list.

    A list is names with spaces between, or a JSON array (for names that contain spaces).

    Raises:
        MisuseError: A line is no list, or names a step that is not declared; or there is no list at all.
    """
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("# "):
            continue
        place = f"{where}:{number}"
        listed, _, broken = line.partition(f"{BROKE} ") if BROKE in line.split() else (line, "", "")
        broke = tuple(broken.split())
        for step in broke:
            if step not in steps:
                raise MisuseError(f"no step is called {step!r}", where=place, remedy=suggest(step, steps))
        files = _files(listed.strip(), place)
        if not files:
            raise MisuseError("names no changed file", where=place, remedy="write at least one, or remove the line")
        cases.append(Case(number, files, broke))
    if not cases:
        raise MisuseError("there is no list of changed files", where=where, remedy="write one per line")
    return tuple(cases)


def _files(listed: str, where: str) -> tuple[str, ...]:
    if not listed.startswith("["):
        return tuple(listed.split())
    try:
        names = json.loads(listed)
    except ValueError as error:
        raise MisuseError(f"not a JSON array: {error}", where=where, remedy='write ["a file", "another"]') from error
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise MisuseError("not an array of file names", where=where, remedy='write ["a file", "another"]')
    return tuple(names)


@dataclass
class Replayer:
    """Replays changes against today's declarations and import graph.

    Attributes:
        reads: Declared step -> the files that it was seen to read.
        history: Planned key -> measured minutes.
    """

    declarations: Declarations
    graph: Imports | None
    reads: Mapping[Key, Iterable[str]]
    history: Mapping[Key, float]
    profile: Profile = "pr"
    _sizes: dict[frozenset[Key], Estimate] = field(default_factory=dict)

    def replay(self, cases: Iterable[Case]) -> Replay:
        """Plan each change as the agents would, and everything once."""
        everything = self._plan(None)
        known = {step.step.key for step in everything.steps}
        readers: dict[str, list[Key]] = {}
        for step, files in self.reads.items():
            for name in files:
                readers.setdefault(name, []).append(step)
        lines = tuple(self._line(case, known, readers) for case in cases)
        return Replay(self.profile, len(everything.steps), self._size(everything), len(self.reads), lines)

    def _line(self, case: Case, known: Collection[Key], readers: Mapping[str, Iterable[Key]]) -> Replayed:
        try:
            plan = self._plan(case.files)
        except NothingSelectedError:  # a real build would be red; for what is missed it selects nothing
            plan = None
        selected = {step.step.key for step in plan.steps} if plan else set()
        missed = dict.fromkeys(case.broke, "it is known to break")
        for name in case.files:
            for step in readers.get(name, ()):
                missed.setdefault(step, f"it reads {name}")
        return Replayed(
            case=case,
            steps=len(plan.steps) if plan else 0,
            gpu_minutes=self._size(plan).gpu_minutes if plan else 0.0,
            missed=tuple(Missed(step, why) for step, why in missed.items() if step in known and step not in selected),
        )

    def _plan(self, files: tuple[str, ...] | None) -> Plan:
        change = Changes("", dirty=False, base=None if files is None else "replayed", files=files)
        return assemble(self.declarations, change, None, profile=self.profile, graph=self.graph)

    def _size(self, plan: Plan) -> Estimate:
        keys = frozenset(step.key for step in plan.steps)
        if keys not in self._sizes:
            self._sizes[keys] = estimate(plan, self.history)
        return self._sizes[keys]
