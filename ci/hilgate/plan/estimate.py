"""How long steps take: the median of what was measured, else what is declared."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import MisuseError, RecordsError
from hilgate.model import CPU, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from hilgate.model import Key, Plan

HISTORY_FOLDER = "results/history"
HISTORY_FILE = "steps.jsonl"
"""One JSON object per line; those of kind "step" have the planned key, the outcome and the seconds."""

PASSES = 20
"""How many of the last passes count: a step that became slower shows after ten, and one slow node does not."""


def measured(root: Path, given: Path | None = None) -> dict[Key, float]:
    """Planned key -> minutes: the median of its last passes. `given` is another folder than the default.

    Raises:
        MisuseError: A folder was given and holds no history.
        RecordsError: A line is no record; says which.
    """
    path = (given or root / HISTORY_FOLDER) / HISTORY_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        if given:
            raise MisuseError(
                "there is no such history", where=str(path), remedy="leave out --history to use declared minutes"
            ) from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise RecordsError(f"the history cannot be read: {error}", where=str(path), remedy="remove it") from error
    return medians(lines, str(path))


def medians(lines: Iterable[str], where: str) -> dict[Key, float]:
    """Planned key -> median minutes of the last `PASSES` passes, oldest line first.

    Raises:
        RecordsError: A line is no record.
    """
    passes: dict[Key, deque[float]] = defaultdict(lambda: deque(maxlen=PASSES))
    for number, line in enumerate(lines, 1):
        try:
            found = _passed(line) if line.strip() else None
        except (ValueError, TypeError, KeyError) as error:
            raise RecordsError(
                f"not a record of a step: {type(error).__name__}: {error}",
                where=f"{where}:{number}",
                remedy="remove that line, or the file: the estimate then uses declared minutes",
            ) from error
        if found:
            passes[found[0]].append(found[1])
    return {key: statistics.median(minutes) for key, minutes in passes.items()}


def _passed(line: str) -> tuple[Key, float] | None:
    """Key and minutes of a step that passed; None for any other record."""
    record = json.loads(line)
    if record["kind"] != "step" or record["outcome"] != Outcome.PASS:
        return None
    seconds = float(record["seconds"])
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{seconds} seconds")
    return str(record["key"]), seconds / 60


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
    measured: int
    """Steps whose minutes were measured."""


def estimate(plan: Plan, history: Mapping[Key, float] | None = None) -> Estimate:
    """Sums and longest chain of a plan; `history` has measured minutes by planned key."""
    known = history or {}
    minutes = {step.key: known.get(step.key, step.step.minutes) for step in plan.steps}
    chains: dict[Key, tuple[float, tuple[Key, ...]]] = {}
    for step in plan.steps:  # dependencies stand before their dependants
        longest, keys = max((chains[need] for need in step.depends_on), default=(0.0, ()))
        chains[step.key] = (longest + minutes[step.key], (*keys, step.key))
    chain_minutes, chain = max(chains.values(), default=(0.0, ()))
    gpu_steps = [step for step in plan.steps if step.device != CPU]
    return Estimate(
        minutes=sum(minutes.values()),
        chain=chain,
        chain_minutes=chain_minutes,
        on_gpus=sum(minutes[step.key] for step in gpu_steps),
        # Plans written before steps had a number of GPUs say 0 and meant one.
        gpu_minutes=sum(minutes[step.key] * step.gpus for step in gpu_steps),
        measured=sum(step.key in known for step in plan.steps),
    )
