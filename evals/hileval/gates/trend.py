# SPDX-License-Identifier: Apache-2.0
"""Trend of exact match over stored nights: many small drops, none of which a gate can see, add up to one.

A changepoint test (Hawkins, Qiu and Kang 2003): the last 1 to WINDOW nights are compared with all nights before them,
and the most improbable split is what counts,

    z = (mean drop of the last nights - mean drop before) / sqrt(v (1 / answers before + 1 / answers since)).

Only nights are compared with nights: what their baseline was lucky with, or where ours rounds otherwise for good, is in
all of them. v, the variance of one answer, is d / 2 of the stored runs, or what neighbouring nights show if that is
more (von Neumann 1941: half the mean squared difference of successive values), and never less than half a question a
night. An alarm is z >= ALARM. The largest of so many z has no closed form: `alarms` replays it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.model import PLAN_FILE, Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[np.floating]

ALARM = 4.5
"""In a year of nights of an unchanged model at most one in a hundred gives an alarm (`alarms`)."""
FEWEST, BEFORE, WINDOW = 10, 5, 30
"""Nights below which nothing is said; nights before a change at least; nights since it at most."""
YEAR = 365


@dataclass(frozen=True)
class Night:
    """What a gate said in one night."""

    build: str
    """Folder in the history: time and commit."""
    drop: float
    """Mean exact match of the baseline less that of the night, of the same questions."""
    answers: int
    d: float
    """Discordance of the stored runs."""
    baseline: str
    """Which one: a new baseline begins a new series."""


def read_nights(history: Path) -> dict[str, list[Night]]:
    """The nights of each accuracy step (a gate on a device), the oldest first, since its newest baseline.

    Raises:
        CannotRunHereError: There is no such folder.
        RecordsError: A build in it is damaged.
    """
    if not history.is_dir():
        raise CannotRunHereError(
            "there is no history here", where=str(history), remedy="set HILGATE_HISTORY to the folder of builds"
        )
    found: dict[str, list[Night]] = defaultdict(list)
    for build in sorted(history.glob("[0-9]*Z-*-*")):
        try:
            if json.loads((build / PLAN_FILE).read_bytes())["profile"] != "nightly":
                continue
            lines = (build / "results.jsonl").read_bytes().splitlines()
            for line in (json.loads(one) for one in lines if b'/accuracy"' in one and b'"check"' in one):
                check = line["check"]
                numbers, said = check["numbers"], check["labels"].get("baseline", "")
                if check["outcome"] != Outcome.DID_NOT_RUN and "drop" in numbers:
                    answers = int(numbers["n"]) * int(numbers["runs"])
                    night = Night(build.name, float(numbers["drop"]), answers, float(numbers.get("d", 0.0)), said)
                    found[line["step"]].append(night)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordsError(
                f"a damaged build: {type(error).__name__}: {error}",
                where=str(build),
                remedy="restore that build, or remove its folder from the history",
            ) from error
    return {
        step: [night for night in nights if night.baseline == nights[-1].baseline] for step, nights in found.items()
    }


def scan(drops: Array, answers: Array, d: float) -> tuple[Array, NDArray[np.int64]]:
    """Largest z after the last night, and how many nights it is of; zero where there are too few.

    Args:
        drops: Of each night, [..., nights].
        answers: [nights].
        d: Discordance of the stored runs.
    """
    nights = drops.shape[-1]
    z, since = np.zeros(drops.shape[:-1]), np.zeros(drops.shape[:-1], dtype=np.int64)
    if nights < FEWEST:
        return z, since
    steps = np.diff(drops) ** 2 / (1 / answers[1:] + 1 / answers[:-1])
    v = np.maximum(steps.mean(axis=-1), max(d / 2, 0.5 / float(answers.mean())))
    weight, total = answers.cumsum(), (drops * answers).cumsum(axis=-1)
    for last in range(1, min(WINDOW, nights - BEFORE) + 1):
        before, now = weight[-last - 1], weight[-1] - weight[-last - 1]
        moved = (total[..., -1] - total[..., -last - 1]) / now - total[..., -last - 1] / before
        found = moved / np.sqrt(v * (1 / before + 1 / now))
        since = np.where(found > z, last, since)
        z = np.maximum(found, z)
    return z, since


def judge_nights(series: Mapping[str, Sequence[Night]]) -> list[Check]:
    """One check per step: an alarm fails, with the night since when and by how much; too few nights pass and say so."""
    checks = []
    for step, nights in series.items():
        drops, answers = (
            np.array([getattr(night, key) for night in nights], dtype=float) for key in ("drop", "answers")
        )
        z, since = scan(drops, answers, max(night.d for night in nights))
        alarm, last = bool(z >= ALARM), int(since)
        if len(nights) < FEWEST:
            message = f"{len(nights)} nights; a trend is looked for from {FEWEST} on"
        else:
            now, before = np.average(drops[-last:], weights=answers[-last:]) if last else 0.0, 0.0
            before = np.average(drops[:-last], weights=answers[:-last]) if last else 0.0
            message = f"{len(nights)} nights: z {float(z):.1f}, an alarm from {ALARM} on"
            if last:
                message += (
                    f"; the last {last} lie {now - before:.2%} below those before them, since {nights[-last].build}"
                )
        numbers = {"nights": len(nights), "z": float(z), "since": last, "alarm": ALARM}
        outcome = Outcome.FAIL if alarm else Outcome.PASS
        checks.append(
            Check(
                id=f"{step}/trend", outcome=outcome, message=f"TREND: {message}" if alarm else message, numbers=numbers
            )
        )
    return checks or [Check(id="history/trend", outcome=Outcome.PASS, message="no night of any gate is stored yet")]


def alarms(
    d: float, n: int, *, shift: float = 0.0, ramp: float = 0.0, good: int, nights: int, replays: int, seed: int
) -> float:
    """Share of replayed histories with an alarm in one of `nights`, after `good` ones of the unchanged model.

    A share 2 d of the questions is a coin toss each night, as in `hileval.gates.power`.

    Args:
        d: Discordance.
        n: Questions a night.
        shift: Drop of each night after the good ones, as a share.
        ramp: The same, more of it each night.
        good: Nights before; none of theirs counts as an alarm.
        nights: Nights looked at.
        replays: How many histories.
        seed: Of the replay.
    """
    rng = np.random.default_rng(seed)
    tossed = round(2 * d * n)
    later = np.maximum(np.arange(good + nights) - good + 1, 0)
    drops = (tossed / 2 - rng.binomial(tossed, 0.5, (replays, good + nights))) / n + shift * (later > 0) + ramp * later
    answers = np.full(good + nights, float(n))
    ends: Iterable[int] = range(max(good, 0) + 1, good + nights + 1)
    found = [scan(drops[:, :end], answers[:end], d)[0] >= ALARM for end in ends]
    return float(np.any(found, axis=0).mean())
