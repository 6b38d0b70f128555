# SPDX-License-Identifier: Apache-2.0
"""Which of many in a row broke a check: bisection by Bayes' rule, which knows how often the check fails for nothing.

The row is commits of a red range, or the tests that ran before one that fails only in their company: in both a run up
to a place fails if what broke it stands there or before. A check that fails now and then leads plain bisection astray;
here each run moves probabilities, the next place is the one whose answer says most, and the search ends when one
candidate has `SURE` of the probability. Pure but for `observed`, which asks the history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.errors import MisuseError
from hilgate.history import queries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

SURE = 0.95
"""Probability at which a candidate is named: one name in twenty may be wrong, and none more."""
SHOWS = 0.99
"""How often a run fails that holds what broke it: a pass that is luck must not end a search for good."""
LEAST_FLAKE_RATE = 0.005
"""Of a check that was never flaky: nobody has seen it often enough to say never."""
NONE = 0.05
"""How likely it is before any run that no candidate broke the check: a flake made the range red."""
MOST_RUNS = 60
"""A search that is not sure by then is of a check that answers nothing."""


@dataclass
class Search:
    """A search among `count` candidates in a row.

    Attributes:
        flake_rate: How often a run fails that does not hold what broke the check.
        shows: How often one fails that does.
        weights: Probability of each candidate by what was seen so far, and last that it is none; the sum is 1.
    """

    count: int
    flake_rate: float
    shows: float = SHOWS
    weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.flake_rate < self.shows <= 1:
            raise MisuseError(
                f"no search among {self.count} candidates with a flake rate of {self.flake_rate:g}",
                remedy="give a range with a commit in it; a check that fails for nothing as often as not says nothing",
            )
        self.weights = [*([(1 - NONE) / self.count] * self.count), NONE]

    def saw(self, place: int, *, failed: bool) -> None:
        """Take in a run up to and with `place`."""
        held, without = (self.shows, self.flake_rate) if failed else (1 - self.shows, 1 - self.flake_rate)
        weights = [weight * (held if candidate <= place else without) for candidate, weight in enumerate(self.weights)]
        total = math.fsum(weights)
        if total > 0:  # a run that no candidate allows moves nothing
            self.weights = [weight / total for weight in weights]

    @property
    def best(self) -> tuple[int, float]:
        """The likeliest candidate, `count` for none of them, and how likely that is."""
        place = max(range(self.count + 1), key=self.weights.__getitem__)
        return place, self.weights[place]

    @property
    def next_place(self) -> int:
        """The place whose run is expected to say most."""
        gains, before = [], 0.0
        for weight in self.weights[:-1]:
            before += weight
            gains.append(self._information(min(1.0, before)))
        return max(range(self.count), key=gains.__getitem__)

    def _information(self, held: float) -> float:
        """Bits that a run tells about what broke the check, which it holds with this probability."""
        fails = held * self.shows + (1 - held) * self.flake_rate
        return _entropy(fails) - held * _entropy(self.shows) - (1 - held) * _entropy(self.flake_rate)


def _entropy(chance: float) -> float:
    return -sum(one * math.log2(one) for one in (chance, 1 - chance) if 0 < one < 1)


@dataclass(frozen=True)
class Found:
    """How a search ended: the candidate (the number of them for none), how sure that is, and how many runs it took."""

    place: int
    sure: float
    runs: int


def find(search: Search, fails: Callable[[int], bool], *, sure: float = SURE, most: int = MOST_RUNS) -> Found:
    """Run up to one place after another, by `fails`, until a candidate is `sure` or `most` runs were made."""
    runs = 0
    while search.best[1] < sure and runs < most:
        place = search.next_place
        search.saw(place, failed=fails(place))
        runs += 1
    return Found(*search.best, runs)


@dataclass(frozen=True)
class Observed:
    """What the history knows of a check: (commit, failed) of each run, oldest first, and how often it was flaky."""

    runs: tuple[tuple[str, bool], ...]
    flaky: int
    builds: int

    @property
    def flake_rate(self) -> float:
        """Smoothed: of few builds nobody knows it well."""
        return max(LEAST_FLAKE_RATE, self.flaky / (self.builds + 1))


def observed(history: Path, step: str, check: str, branch: str) -> Observed:
    """Runs of a check (planned key, id) in the builds of a branch.

    Raises:
        MisuseError: It ran in none.
        NothingSelectedError: The history is empty.
        RecordsError: It is damaged.
    """
    with queries.connect(history) as connection:
        rows = connection.execute(_RUNS, {"step": step, "check": check, "branch": branch}).fetchall()
    if not rows:
        raise MisuseError(
            f"no build of {branch} ran {check!r} in {step}",
            where=str(history),
            remedy="take the step's planned key and the id as the report names them",
        )
    runs: list[tuple[str, bool]] = []
    for commit, outcome, flaky in rows:
        runs += [(commit, True), (commit, False)] if flaky else [(commit, outcome == "fail")]
    return Observed(tuple(runs), sum(flaky for *_, flaky in rows), len(rows))


_RUNS = """
select c."commit", c.outcome, list_contains(s.flaky, c.id) as flaky
from chosen_checks c join chosen_steps s using (build, key)
where c.key = $step and c.id = $check and s.branch = $branch and c.outcome in ('pass', 'fail')
order by c.time
"""


def red_range(seen: Sequence[tuple[str, bool]], good: str = "", bad: str = "") -> tuple[str, str]:
    """The commit before the range and its last one: the newest pass that failures follow, and the newest failure.

    Raises:
        MisuseError: There is no failure, or no pass before it.
    """
    failed = [at for at, (_, red) in enumerate(seen) if red]
    if not bad and not failed:
        raise MisuseError("it failed in no build of the history", remedy="give --bad SHA")
    last = failed[-1] if failed else len(seen)
    passed = [commit for commit, red in seen[:last] if not red]
    if not good and not passed:
        raise MisuseError("it passed in no build before it failed", remedy="give --good SHA")
    return good or passed[-1], bad or seen[last][0]


def weigh(search: Search, commits: Sequence[str], seen: Iterable[tuple[str, bool]]) -> None:
    """Take in what the history saw at these commits, each the end of a run up to it."""
    places = {commit: place for place, commit in enumerate(commits)}
    for commit, failed in seen:
        if commit in places:
            search.saw(places[commit], failed=failed)
