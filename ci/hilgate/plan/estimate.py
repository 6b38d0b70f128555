# SPDX-License-Identifier: Apache-2.0
"""Estimate how long a plan takes, from measured or else declared minutes and the order in which steps start."""

from __future__ import annotations

import contextlib
import heapq
import json
import socket
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError

from hilgate.errors import MisuseError, RecordsError
from hilgate.model import Key, StrictModel
from hilgate.model.declaration import CPU
from hilgate.model.record import Outcome
from hilgate.plan.machine import detect, on_ci

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from hilgate.declare.load import Declarations
    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import StepRecord

HISTORY_FOLDER = "results/history"
"""A folder of builds (`hilgate.history.store`), whose names sort by time."""

PASSES = 20
"""How many of the last passes count: a step that became slower shows after ten, and one slow node does not."""

RECENT_BUILDS = 200
"""How many builds are looked at: about a month of a busy repository."""

PASSES_FILE = "results/passes.json"
"""File with the times of steps on this machine. `hilgate gate` and `run` write it; only forecasts read it."""

RECENT_PASSES = 5
"""Times kept of each step: older ones say little about today's kernels."""

UNIT_SECONDS = 0.11
"""Seconds that `slowness` measures on an idle machine of the kind on which declared minutes were measured."""


class Passed(StrictModel):
    """The time of one step that passed on this machine."""

    key: Key
    command: str
    """Kept because a part of a step takes another time than the whole."""
    host: str
    cores: int
    declared: float = Field(gt=0)
    """The step's declared minutes at that time."""
    minutes: float = Field(gt=0)
    ended: float
    """Seconds since 1970 (UTC); tells a pass that was read again from another one."""


class Passes(StrictModel):
    """`results/passes.json`."""

    schema_version: Literal[1] = 1
    passes: tuple[Passed, ...] = ()

    @classmethod
    def read(cls, root: Path) -> Passes:
        """Those of this machine; none where there is no such file, or none that can be believed."""
        try:
            found = cls.model_validate_json((root / PASSES_FILE).read_bytes())
        except (OSError, ValidationError):
            return cls()
        return cls(passes=tuple(one for one in found.passes if one.host == socket.gethostname()))


def remember(root: Path, plan: Plan, records: Iterable[StepRecord]) -> None:
    """Store the times of the steps of a local plan that passed, whole or as smoke subsets.

    Only forecasts read them, so no trouble with the file stops a gate.
    """
    declared = {step.key: step.step.minutes for step in plan.steps if plan.local and step.as_declared}
    known = {(one.key, one.command, one.ended): one for one in Passes.read(root).passes}
    for record in records:
        ended, here = record.started.timestamp() + record.seconds, record.environment
        counts = record.key in declared and record.outcome is Outcome.PASS and record.seconds > 0
        if counts and here.host == socket.gethostname():
            known[record.key, record.command, ended] = Passed(
                key=record.key,
                command=record.command,
                host=here.host,
                cores=here.cores,
                declared=declared[record.key],
                minutes=record.seconds / 60,
                ended=ended,
            )
    kept: dict[tuple[Key, str], list[Passed]] = defaultdict(list)
    for one in sorted(known.values(), key=lambda one: one.ended):
        kept[one.key, one.command].append(one)
    if (path := root / PASSES_FILE).parent.is_dir():
        with contextlib.suppress(OSError):
            Passes(passes=tuple(one for of_step in kept.values() for one in of_step[-RECENT_PASSES:])).save(path)


SAMPLES = 3
"""Measurements that `slowness` makes. The shortest counts: whatever else the machine does only adds time."""


@cache
def slowness() -> float:
    """Return how many times longer a fixed piece of Python takes here and now than `UNIT_SECONDS`."""
    took = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        for _ in range(40):
            sorted({number: str(number * number % 65537) for number in range(8000)}.items(), key=lambda item: item[1])
        took.append(time.perf_counter() - began)
    return min(took) / UNIT_SECONDS


def pace(root: Path, cores: int) -> float:
    """Return measured by declared minutes: the median of this machine's passes, or `slowness` where it has none."""
    passes = [one for one in Passes.read(root).passes if one.cores == cores]
    return statistics.median(one.minutes / one.declared for one in passes) if passes else slowness()


def stretch(plan: Plan, root: Path, cores: int) -> float:
    """Return the factor by which timeouts of a plan are longer than declared; 1 for agents and on a CI machine.

    Elsewhere it is the larger of `pace` and `slowness`, and at least 1: a machine that was quick last week may be busy
    today.
    """
    return round(max(1.0, pace(root, cores), slowness()), 1) if plan.local and not on_ci() else 1.0


def expected(
    plan: Plan, root: Path, history: Mapping[Key, float], cores: int
) -> tuple[dict[Key, float], frozenset[Key]]:
    """Return the expected minutes of each step of a local plan, and the keys of those that were measured.

    A time of this machine comes first, then one of the history. A step with neither gets its declared minutes times
    `pace`.
    """
    times: dict[tuple[Key, str], list[float]] = defaultdict(list)
    for one in (one for one in Passes.read(root).passes if one.cores == cores):
        times[one.key, one.command].append(one.minutes)
    known = {step.key: times[step.key, step.step.command] for step in plan.steps}
    minutes = {key: statistics.median(found) for key, found in known.items() if found}
    if plan.profile == "gate":
        whole = [step.key for step in plan.steps if not step.arguments]
        minutes = {key: history[key] for key in whole if key in history} | minutes
    seen, missing = frozenset(minutes), [step for step in plan.steps if step.key not in minutes]
    if missing:
        scale = pace(root, cores)
        for step in missing:
            minutes[step.key] = step.step.minutes * scale * step.step.cores / min(step.step.cores, cores)
    return minutes, seen


def measured(root: Path, given: Path | None = None) -> dict[Key, float]:
    """Return minutes by planned key, each the median of the last `PASSES` passes; `given` replaces the default folder.

    Raises:
        MisuseError: A folder was given and is not there.
        RecordsError: A verdict in it cannot be read; says which.
    """
    folder = given or root / HISTORY_FOLDER
    if given and not given.is_dir():
        raise MisuseError(
            "there is no such history", where=str(given), remedy="leave out --history to use declared minutes"
        )
    passes: dict[Key, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("[0-9]*Z-*-*/verdict.json"), reverse=True)[:RECENT_BUILDS]:
        try:
            for step in json.loads(path.read_bytes())["steps"]:
                if step["outcome"] == Outcome.PASS and step["seconds"] is not None:
                    passes[step["key"]].append(step["seconds"] / 60)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordsError(
                f"not a verdict: {str(error).splitlines()[0]}",
                where=str(path),
                remedy="remove that build from the history: the estimate then uses the others",
            ) from error
    return {key: statistics.median(minutes[:PASSES]) for key, minutes in passes.items()}


def in_order(steps: Sequence[PlannedStep]) -> list[Key]:
    """Return the order in which steps start as cores become free: one quick step, then the longest chain of dependants.

    With a quick step first, something is known soon. The order follows declared minutes and is the same everywhere.
    """
    minutes = {step.key: step.step.minutes for step in steps}
    chains = longest_chains(steps, minutes)
    keys = sorted(minutes, key=lambda key: (-chains[key][0], key))
    known = minutes.keys()
    free = [step.key for step in steps if known.isdisjoint(step.depends_on)]
    quick = min(free, key=lambda key: (minutes[key], key), default=None)
    return keys if quick is None else [quick, *(key for key in keys if key != quick)]


def fits(step: PlannedStep, running: Sequence[PlannedStep], cores: int) -> bool:
    """Return whether a step's GPU and cores are free; a step that wants more cores than there are runs alone."""
    if step.device != CPU and any(other.device == step.device for other in running):
        return False
    busy = sum(min(other.step.cores, cores) for other in running)
    return busy + min(step.step.cores, cores) <= cores


def forecast(steps: Sequence[PlannedStep], minutes: Mapping[Key, float], cores: int) -> float:
    """Minutes from the first start to the last end when steps take these minutes and run as `run.runner` runs them."""
    known = {step.key: step for step in steps}
    waiting, running, ended, now = in_order(steps), list[tuple[float, Key]](), set[Key](), 0.0
    while waiting or running:
        for key in list(waiting):
            needs = {need for need in known[key].depends_on if need in known}
            if needs <= ended and fits(known[key], [known[other] for _, other in running], cores):
                waiting.remove(key)
                heapq.heappush(running, (now + minutes[key], key))
        now, key = heapq.heappop(running)
        ended.add(key)
    return now


@dataclass(frozen=True)
class Estimate:
    """How big a plan is, in minutes: measured where there is a history, else as declared (usual time on 2 cores)."""

    minutes: float
    """Sum over all steps."""
    chain: tuple[Key, ...]
    """The longest chain of steps that must wait for each other."""
    chain_minutes: float
    on_gpus: float
    """Minutes of the steps that run on GPUs."""
    gpu_minutes: float
    """The same times the GPUs of each step: what the fleet pays."""
    measured: frozenset[Key]
    """Steps whose minutes were measured."""
    each: Mapping[Key, float]
    """Planned key -> minutes."""
    wall: float = 0.0
    """Minutes of the local run, from the first start to the last end; 0 in plans of agents."""
    cores: int = 0
    """Cores that the local run fills; 0 in plans of agents."""


def size_of(
    plan: Plan, root: Path, given: Path | None = None, *, keys: frozenset[Key] | None = None, cores: int | None = None
) -> Estimate:
    """Return the estimate of a plan; that of a local run uses this machine's times and says when the last step ends.

    `given` is another history than the default. `keys` are what is to run (None is all), on at most `cores` (None is
    the machine's).

    Raises:
        MisuseError: A history was given and is not there.
        RecordsError: A verdict in it cannot be read; says which.
    """
    history = measured(root, given)
    if not plan.local:
        return estimate(plan, history)
    here = detect().cores
    minutes, known = expected(plan, root, history, here)
    running = [step for step in plan.steps if keys is None or step.key in keys]
    size = estimate(plan.model_copy(update={"steps": tuple(running)}), minutes)
    wall = forecast(running, minutes, cores or here)
    return replace(size, measured=known, each=minutes, wall=wall, cores=cores or here)


def budget_of(plan: Plan, declarations: Declarations) -> float | None:
    """Minutes that the gate of a local plan may take on 2 idle cores, as the project declares; None for no budget."""
    budgets, always = declarations.project.budgets, {area.area for area in declarations.areas if area.always}
    if plan.profile == "smoke":
        return budgets.smoke
    if not any(one.cause == "not affected" for one in plan.omissions):
        return budgets.all
    return budgets.always if all(step.area in always for step in plan.steps) else budgets.change


def estimate(plan: Plan, history: Mapping[Key, float] | None = None) -> Estimate:
    """Return the sums and the longest chain of a plan; `history` has measured minutes by planned key."""
    known = history or {}
    minutes = {step.key: known.get(step.key, step.step.minutes) for step in plan.steps}
    chain_minutes, chain = max(longest_chains(plan.steps, minutes).values(), default=(0.0, ()))
    gpu_steps = [step for step in plan.steps if step.device != CPU]
    return Estimate(
        minutes=sum(minutes.values()),
        chain=chain,
        chain_minutes=chain_minutes,
        on_gpus=sum(minutes[step.key] for step in gpu_steps),
        gpu_minutes=sum(minutes[step.key] * step.gpus for step in gpu_steps),
        measured=frozenset(step.key for step in plan.steps if step.key in known),
        each=minutes,
    )


def longest_chains(
    steps: Sequence[PlannedStep], minutes: Mapping[Key, float]
) -> dict[Key, tuple[float, tuple[Key, ...]]]:
    """Minutes and keys of the longest chain of dependants that begins with each step, itself included.

    Each step stands behind what it depends on, as in a plan; `minutes` are by planned key.
    """
    chains: dict[Key, tuple[float, tuple[Key, ...]]] = {}
    after: dict[Key, tuple[float, tuple[Key, ...]]] = defaultdict(lambda: (0.0, ()))
    for step in reversed(steps):
        longest, keys = after[step.key]
        chains[step.key] = (longest + minutes[step.key], (step.key, *keys))
        for need in step.depends_on:
            after[need] = max(after[need], chains[step.key])
    return chains
