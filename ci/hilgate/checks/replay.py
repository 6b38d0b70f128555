# SPDX-License-Identifier: Apache-2.0
"""Replay past changes through the selection: what it saves against running everything, and what it misses.

A step is missed when it is not selected although it is known to break. Pure: declarations and lists in, numbers out.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import MisuseError, NothingSelectedError
from hilgate.git import Changes
from hilgate.plan.estimate import estimate
from hilgate.plan.make import assemble
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hilgate.declare.imports import Imports
    from hilgate.declare.load import Declarations
    from hilgate.model import Key
    from hilgate.model.declaration import Profile
    from hilgate.model.plan import Plan

BROKE = "=>"


@dataclass(frozen=True)
class PastChange:
    """One change that happened."""

    line: int
    files: tuple[str, ...]
    broke: tuple[Key, ...] = ()
    """Declared steps that it is known to have broken."""

    @property
    def title(self) -> str:
        """Its first file, and how many more there are."""
        return self.files[0] + (f" and {len(self.files) - 1} more" if len(self.files) > 1 else "")


@dataclass(frozen=True)
class Replayed:
    """What the selection does for one change."""

    change: PastChange
    steps: int
    """Planned steps."""
    gpu_minutes: float
    missed: Mapping[Key, str]
    """Step that ought to have been selected -> why."""


@dataclass(frozen=True)
class Replay:
    """What it does for all of them, and what running everything each time would take."""

    profile: Profile
    of: int
    """Planned steps of run-all."""
    run_all_minutes: float
    """GPU-minutes of run-all."""
    lines: tuple[Replayed, ...]

    @property
    def gpu_minutes(self) -> float:
        """Of all selections."""
        return sum(line.gpu_minutes for line in self.lines)

    @property
    def run_all_gpu_minutes(self) -> float:
        """Of running everything for each line."""
        return self.run_all_minutes * len(self.lines)

    @property
    def missed(self) -> int:
        """Steps missed, over all lines."""
        return sum(len(line.missed) for line in self.lines)


def parse(text: str, where: str, steps: Collection[Key]) -> tuple[PastChange, ...]:
    """Read lists of changed files, one per line; `#` begins a line of remark, `=> step ...` ends a list.

    A list is names with spaces between, quoted as for a shell where they contain any.

    Raises:
        MisuseError: A line is no list, or names a step that is not declared; or there is no list at all.
    """
    changes = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("# "):
            continue
        place = f"{where}:{number}"
        listed, _, broken = line.partition(f"{BROKE} ") if BROKE in line.split() else (line, "", "")
        broke = tuple(broken.split())
        for step in broke:
            if step not in steps:
                raise MisuseError(f"no step is called {step!r}", where=place, remedy=suggest(step, steps))
        try:
            files = tuple(shlex.split(listed))
        except ValueError as error:
            raise MisuseError(f"cannot be split: {error}", where=place, remedy="close the quotes") from error
        if not files:
            raise MisuseError("names no changed file", where=place, remedy="write at least one, or remove the line")
        changes.append(PastChange(number, files, broke))
    if not changes:
        raise MisuseError("there is no list of changed files", where=where, remedy="write one per line")
    return tuple(changes)


def replay_changes(
    changes: Iterable[PastChange],
    declarations: Declarations,
    graph: Imports | None,
    history: Mapping[Key, float],
    profile: Profile = "pr",
) -> Replay:
    """Plan each change as the agents would, against today's declarations and import graph, and everything once.

    `history` has measured minutes by planned key.
    """

    def plan_of(files: tuple[str, ...] | None) -> Plan:
        change = Changes("", dirty=False, base=None if files is None else "replayed", files=files)
        return assemble(declarations, change, None, profile=profile, graph=graph)

    everything = plan_of(None)
    known = {step.step.key for step in everything.steps}
    lines = []
    for change in changes:
        try:
            plan = plan_of(change.files)
        except NothingSelectedError:  # a real build would be red; for what is missed it selects nothing
            plan = everything.model_copy(update={"steps": ()})
        selected = {step.step.key for step in plan.steps}
        touched = dict.fromkeys(change.broke, "it is known to break")
        missed = {step: why for step, why in touched.items() if step in known and step not in selected}
        lines.append(Replayed(change, len(plan.steps), estimate(plan, history).gpu_minutes, missed))
    run_all = estimate(everything, history).gpu_minutes
    return Replay(profile, len(everything.steps), run_all, tuple(lines))
