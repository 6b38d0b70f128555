# SPDX-License-Identifier: Apache-2.0
"""Whether a change is slower than its base, from times that were taken in turns. Pure: no device, no clock.

A quad is base, change, change, base: a drift of the clock that is a straight line drops out of its log ratio. The quads
of one session share inputs, memory and temperature, so their mean counts once, and the interval is Student's over the
sessions (Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013: the interval rests on the highest
level that is repeated). A case is red if the lower end lies above the margin, and of m cases each has its lower end at
false_alarms / m (Bonferroni): no more than `false_alarms` of the runs in which no case is slower than the margin have a
red one. It passes if the upper end lies below the margin. That end needs no correction, because a run passes only if
every case does (intersection-union test, Berger 1982): a slow case gets through in `false_alarms` of runs at most.
"""

from __future__ import annotations

import functools
import math
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy import stats

from pagedkv.errors import InvalidFileError

if TYPE_CHECKING:
    from collections.abc import Sequence

RULES = Path(__file__).with_name("against.toml")


Share = Annotated[float, Field(gt=0, lt=0.5, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]


class Rules(BaseModel):
    """What `against.toml` says; its comments explain the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    margin: Share
    false_alarms: Share
    sessions: Annotated[int, Field(ge=3, strict=True)]
    quads: Count
    replays: Count


def load_rules(path: Path = RULES) -> Rules:
    """Read the rules.

    Raises:
        InvalidFileError: A key is missing or unknown, or a value cannot be.
    """
    try:
        return Rules.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidFileError(f"{path}: {first['loc'][0]}: {first['msg']}; got {first['input']!r}") from error
    except (OSError, ValueError) as error:
        raise InvalidFileError(f"{path}: {error}") from error


def log_ratio(quad: Sequence[float]) -> float:
    """Log of change over base, of the times of base, change, change and base."""
    first, second, third, fourth = map(math.log, quad)
    return (second + third - first - fourth) / 2


@dataclass(frozen=True)
class Slowdown:
    """Change over base, 1 for equal, with its interval."""

    ratio: float
    low: float
    high: float

    def outcome(self, margin: float) -> Literal["pass", "fail", "inconclusive"]:
        """Slower than the margin, not slower than it, or neither is known."""
        if self.low > 1 + margin:
            return "fail"
        return "pass" if self.high < 1 + margin else "inconclusive"


def slowdown(sessions: Sequence[Sequence[Sequence[float]]], *, cases: int, false_alarms: float) -> Slowdown:
    """Estimate the slow-down of one case.

    Args:
        sessions: Of each the quads, each of four times.
        cases: How many cases of the run are judged.
        false_alarms: Of all of them together.
    """
    means = [statistics.fmean(map(log_ratio, quads)) for quads in sessions]
    middle = statistics.fmean(means)
    error = statistics.stdev(means) / math.sqrt(len(means))
    down, up = (_quantile(tail, len(means) - 1) * error for tail in (false_alarms / cases, false_alarms))
    return Slowdown(*map(math.exp, (middle, middle - down, middle + up)))


@functools.cache
def _quantile(tail: float, freedom: int) -> float:
    """Student's t that so much of the distribution lies beyond."""
    return float(stats.t.isf(tail, freedom))
