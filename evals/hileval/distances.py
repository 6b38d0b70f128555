# SPDX-License-Identifier: Apache-2.0
"""How far next-token distributions are from another engine's, and what rounding explains. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIKELIEST = 5
"""Next tokens whose log-probabilities `distance` compares."""
ASKED = 20
"""Next tokens that an engine is asked for, and that a divergence looks at."""
SLACK = 2.0
"""Factor on `Distances`: two engines may be off in opposite directions."""
EXACT = 1e-5
"""Nats. A CPU in float32 often gives the same bits both ways: whatever is so near is rounding. In 16 bits none is."""
EXACT_KL = 1e-8
"""Nats of divergence, which is of second order: float32 on a CPU leaves 1e-10 at worst."""

Floor = tuple[float, float, float]
"""Nats of median, 90 % and worst."""
FLOOR: Floor = (EXACT_KL, EXACT_KL, EXACT_KL)
SLACKS = (6.0, 6.0, 32.0)
"""Times rounding that a right attention may be off, in median, 90 % and worst. The worst of a thousand places says
little of the worst of another thousand. docs/reference/drift.md says how often they failed a right attention."""

Row = Mapping[int, float]
"""Log-probability of each of the ASKED likeliest next tokens; vLLM adds the prompt's own token, however unlikely."""
Rows = list[list[dict[int, float]]]
"""Such rows of each sequence, one for each of its places."""

LEFT = 1e-6
"""What a row may be off in float32 where its probabilities are added up."""


class UnmeasuredError(ValueError):
    """There is nothing to compare or to time; the message says what is missing."""


def likeliest(row: Row, count: int = ASKED) -> dict[int, float]:
    """The `count` likeliest tokens of a row, the likeliest first."""
    return dict(sorted(row.items(), key=lambda entry: (-entry[1], entry[0]))[:count])


def distance(got: Row, want: Row) -> float:
    """How far the log-probabilities of the LIKELIEST tokens of `want` are off at most, in nats.

    A token that is not among those of `got` counts as the last of them: it is at least so far off.

    Returns:
        Infinity where one of all these is NaN or infinite.
    """
    if not all(map(math.isfinite, (*got.values(), *want.values()))):
        return math.inf
    got = likeliest(got)
    floor = min(got.values())
    return max(abs(value - got.get(token, floor)) for token, value in likeliest(want, LIKELIEST).items())


def divergence(got: Row, want: Row) -> float:
    """Kullback and Leibler's divergence of `got` from `want` in nats: the ASKED likeliest tokens, and the rest as one.

    What a side does not name of the other's tokens is taken to be as near as its own row allows (`_completed`): two
    tokens of one probability that swap the last place cost nothing.

    Returns:
        Infinity where one of all these is NaN or infinite.
    """
    if not got or not want or not all(map(math.isfinite, (*got.values(), *want.values()))):
        return math.inf
    got, want = likeliest(got), likeliest(want)
    p, q = _completed(want, got), _completed(got, want)
    shares = [(p[token], q[token]) for token in p]
    shares.append(tuple(max(1e-9, 1.0 - sum(side)) for side in zip(*shares, strict=True)))
    totals = [sum(side) for side in zip(*shares, strict=True)]
    return max(0.0, math.fsum(p / totals[0] * math.log(p / totals[0] / (q / totals[1])) for p, q in shares if p))


def _completed(row: Row, other: Row) -> dict[int, float]:
    """Probabilities of the tokens of both rows; of those that `other` alone names, what it says as far as that can be.

    Each is at most as likely as the last token that `row` names, and all of them together at most what `row` leaves.
    """
    found = {token: math.exp(value) for token, value in row.items()}
    last = min(found.values())
    missing = {token: min(math.exp(value), last) for token, value in other.items() if token not in row}
    left = max(0.0, 1.0 - sum(found.values())) + LEFT
    fits = min(1.0, left / total) if (total := sum(missing.values())) else 1.0
    return found | {token: max(1e-30, share * fits) for token, share in missing.items()}


@dataclass(frozen=True)
class Distances:
    """Distances between two engines' answers to some sequences."""

    half: float
    """At most so far off in nats are half of them,"""
    most: float
    """and nine tenths of them."""
    sequences: int

    @classmethod
    def between(cls, got: Sequence[Row | None], want: Sequence[Row]) -> Distances:
        """Compare what two engines say after some sequences; None is not compared.

        Raises:
            UnmeasuredError: Fewer than half are there to compare, or fewer than two.
        """
        distances = [distance(row, right) for row, right in zip(got, want, strict=True) if row is not None]
        if len(distances) < max(2, len(want) / 2):
            raise UnmeasuredError(f"only {len(distances)} of {len(want)} sequences can be compared")
        return cls(statistics.median(distances), _nine_tenths(distances), len(distances))

    def within(self, rounding: Distances) -> bool:
        """Whether rounding explains both; NaN is not explained."""
        pairs = (self.half, rounding.half), (self.most, rounding.most)
        return all(value <= SLACK * max(explained, EXACT) for value, explained in pairs)


@dataclass(frozen=True)
class Drift:
    """Divergences of the distributions of some sequences, at every place."""

    half: float
    most: float
    worst: float
    """The largest of all: a fault of one sequence in fifty moves neither of the others."""
    places: int

    @classmethod
    def between(cls, got: Sequence[Sequence[Row]], want: Sequence[Sequence[Row]]) -> Drift:
        """Compare the rows of two engines, sequence by sequence and place by place.

        Raises:
            UnmeasuredError: They are not of the same places, or there are none.
        """
        return cls.of(_divergences(got, want))

    @classmethod
    def rounding(cls, got: Sequence[Sequence[Row]], want: Sequence[Sequence[Row]]) -> Drift:
        """Compare an engine's rows with its own, at the places where they differ at all.

        Equal bits say that the same was done twice, and not how far rounding goes: of Falcon-H1-7B in bfloat16 on a GPU
        nine places in ten are the same in other batches, and the tenth is 0.06 nats off in the median.

        Raises:
            UnmeasuredError: They are not of the same places, or there are none.
        """
        return cls.changed(_divergences(got, want))

    @classmethod
    def changed(cls, found: Sequence[float]) -> Drift:
        """Summarise the divergences that are not 0, or all where all are 0."""
        return cls.of([value for value in found if value > 0] or found)

    @classmethod
    def of(cls, found: Sequence[float]) -> Drift:
        """Summarise divergences in nats."""
        return cls(statistics.median(found), _nine_tenths(found), max(found), len(found))

    @classmethod
    def largest(cls, *drifts: Drift) -> Drift:
        """The largest of each figure: what rounding does at most."""
        figures = zip(*((one.half, one.most, one.worst, one.places) for one in drifts), strict=True)
        return cls(*map(max, figures))

    def within(self, rounding: Drift, floor: Floor = FLOOR) -> bool:
        """Whether rounding explains all three; NaN is not explained. `floor`: nats that are explained anyway."""
        limit = rounding.limit(floor)
        return self.half <= limit.half and self.most <= limit.most and self.worst <= limit.worst

    def limit(self, floor: Floor = FLOOR) -> Drift:
        """The largest figures that this rounding explains."""
        figures = zip((self.half, self.most, self.worst), floor, SLACKS, strict=True)
        half, most, worst = (slack * max(rounding, least) for rounding, least, slack in figures)
        return Drift(half, most, worst, self.places)

    def __str__(self) -> str:
        return f"{self.half:.1e} / {self.most:.1e} / {self.worst:.1e}"


def _divergences(got: Sequence[Sequence[Row]], want: Sequence[Sequence[Row]]) -> list[float]:
    if [len(rows) for rows in got] != [len(rows) for rows in want] or not any(map(len, want)):
        raise UnmeasuredError("distributions of other places, or none")
    pairs = [(a, b) for rows, others in zip(got, want, strict=True) for a, b in zip(rows, others, strict=True)]
    return [divergence(a, b) for a, b in pairs]


def _nine_tenths(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
