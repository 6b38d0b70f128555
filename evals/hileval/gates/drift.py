# SPDX-License-Identifier: Apache-2.0
"""Drift of log-probabilities: how far next-token distributions are from another engine's, and what rounding explains.

Exact match sees a fault when an answer becomes wrong; the distributions behind it move long before that. Nothing is
stored: the engine's own attention answers in the same job, and what it differs from itself, writing token by token
against reading the same tokens at once, or reading each sequence alone, is what rounding does. The same rule
must notice a block of tokens that was replaced, or a pass means nothing. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from hilgate.model import Check, Number, Outcome

LIKELIEST = 5
"""Next tokens whose log-probabilities `distance` compares."""
ASKED = 20
"""Next tokens that an engine is asked for."""
SLACK = 2.0
"""Of two engines each may be off in its own direction."""
EXACT = 1e-5
"""Nats. A CPU in float32 often gives the same bits both ways: whatever is so near is rounding. In 16 bits none is."""
EXACT_KL = 1e-8
"""Nats of divergence, which is of second order: float32 on a CPU leaves 1e-10 at worst."""

Floor = tuple[float, float, float]
"""Nats of median, 90 % and worst."""
FLOOR: Floor = (EXACT_KL, EXACT_KL, EXACT_KL)

Row = Mapping[int, float]
"""Log-probability of each of the ASKED likeliest next tokens."""


class UnmeasuredError(ValueError):
    """There is nothing to compare or to time; the message says what is missing."""


def distance(got: Row, want: Row) -> float:
    """How far the log-probabilities of the LIKELIEST tokens of `want` are off at most, in nats.

    A token that is not among those of `got` counts as the last of them: it is at least so far off.

    Returns:
        Infinity where one of all these is NaN or infinite.
    """
    if not all(map(math.isfinite, (*got.values(), *want.values()))):
        return math.inf
    likeliest = sorted(want, key=want.__getitem__, reverse=True)[:LIKELIEST]
    floor = min(got.values())
    return max(abs(want[token] - got.get(token, floor)) for token in likeliest)


def divergence(got: Row, want: Row) -> float:
    """Kullback and Leibler's divergence of `got` from `want` in nats, all further tokens together being one.

    A token that is not among those of `got` counts as the last of them.

    Returns:
        Infinity where one of all these is NaN or infinite.
    """
    if not got or not want or not all(map(math.isfinite, (*got.values(), *want.values()))):
        return math.inf
    floor = min(got.values())
    shares = [(math.exp(value), math.exp(got.get(token, floor))) for token, value in want.items()]
    shares.append(tuple(max(1e-9, 1.0 - sum(side)) for side in zip(*shares, strict=True)))
    totals = [sum(side) for side in zip(*shares, strict=True)]
    return max(0.0, math.fsum(p / totals[0] * math.log(p / totals[0] / (q / totals[1])) for p, q in shares))


@dataclass(frozen=True)
class Distances:
    """Of the answers of some sequences."""

    half: float
    """At most so far off in nats are half of them,"""
    most: float
    """and nine tenths of them."""
    sequences: int

    @classmethod
    def between(cls, got: Sequence[Row | None], want: Sequence[Row]) -> Distances:
        """Of what an engine says after some sequences from what another says; None is not compared.

        Raises:
            UnmeasuredError: Fewer than half are there to compare, or fewer than two.
        """
        distances = [distance(row, right) for row, right in zip(got, want, strict=True) if row is not None]
        if len(distances) < max(2, len(want) / 2):
            raise UnmeasuredError(f"only {len(distances)} of {len(want)} sequences can be compared")
        return cls(statistics.median(distances), _nine_tenths(distances), len(distances))

    def within(self, rounding: Distances) -> bool:
        """Whether rounding explains both; NaN is not explained."""
        return _explained(self.half, rounding.half, EXACT) and _explained(self.most, rounding.most, EXACT)


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
        """Of an engine's rows, sequence by sequence and place by place, from another's.

        Raises:
            UnmeasuredError: They are not of the same places, or there are none.
        """
        return cls.of(_divergences(got, want))

    @classmethod
    def rounding(cls, got: Sequence[Sequence[Row]], want: Sequence[Sequence[Row]]) -> Drift:
        """Of an engine's rows from its own, at the places where they differ at all.

        Equal bits say that the same was done twice, and not how far rounding goes: of Falcon-H1-7B in bfloat16 on a GPU
        nine places in ten are the same in other batches, and the tenth is 0.06 nats off in the median.

        Raises:
            UnmeasuredError: They are not of the same places, or there are none.
        """
        return cls.changed(_divergences(got, want))

    @classmethod
    def changed(cls, found: Sequence[float]) -> Drift:
        """Of those divergences that are not 0; of all where all are."""
        return cls.of([value for value in found if value > 0] or found)

    @classmethod
    def of(cls, found: Sequence[float]) -> Drift:
        """Of divergences in nats."""
        return cls(statistics.median(found), _nine_tenths(found), max(found), len(found))

    @classmethod
    def largest(cls, *drifts: Drift) -> Drift:
        """The largest of each figure: what rounding does at most."""
        figures = zip(*((one.half, one.most, one.worst, one.places) for one in drifts), strict=True)
        return cls(*map(max, figures))

    def within(self, rounding: Drift, floor: Floor = FLOOR) -> bool:
        """Whether rounding explains all three; NaN is not explained. `floor`: nats that are explained anyway."""
        figures = zip(
            (self.half, self.most, self.worst), (rounding.half, rounding.most, rounding.worst), floor, strict=True
        )
        return all(_explained(*figure) for figure in figures)

    def __str__(self) -> str:
        return f"{self.half:.1e} / {self.most:.1e} / {self.worst:.1e}"


def judge_drift(
    name: str, reading: Drift, writing: Drift, rounding: Drift, control: Drift, floor: Floor
) -> list[Check]:
    """The checks of a drift gate.

    Args:
        name: The gate's key; check ids start with it.
        reading: Ours, given all tokens at once, from the peer, given the same.
        writing: Ours, token by token, from the peer, given the tokens that ours wrote.
        rounding: The peer, token by token, from itself, given the same tokens at once; or reading each
            sequence alone.
        control: The peer from itself, with one block of each sequence replaced, at the places behind it.
        floor: Nats of each figure that are explained anyway.
    """
    trips = not control.within(rounding, floor)
    said = f"rounding {rounding}, replaced block {control} nats of median / 90 % / worst"
    checks = [
        Check(
            id=f"{name}/control",
            outcome=Outcome.PASS if trips else Outcome.INCONCLUSIVE,
            message=f"a replaced block {'is' if trips else 'IS NOT'} noticed: {said}",
            numbers=_numbers(control),
        )
    ]
    for kind, drift in (("reading", reading), ("writing", writing)):
        close = drift.within(rounding, floor)
        checks.append(
            Check(
                id=f"{name}/{kind}",
                outcome=Outcome.PASS if close and trips else Outcome.INCONCLUSIVE if close else Outcome.FAIL,
                message=f"{drift} nats at {drift.places} places; {SLACK:g} times rounding {rounding} "
                f"(at least {Drift(*floor, 0)}) {'explains it' if close else 'does not explain it'}",
                numbers=_numbers(drift),
            )
        )
    return checks


def _divergences(got: Sequence[Sequence[Row]], want: Sequence[Sequence[Row]]) -> list[float]:
    if [len(rows) for rows in got] != [len(rows) for rows in want] or not any(map(len, want)):
        raise UnmeasuredError("distributions of other places, or none")
    pairs = [(a, b) for rows, others in zip(got, want, strict=True) for a, b in zip(rows, others, strict=True)]
    return [divergence(a, b) for a, b in pairs]


def _numbers(drift: Drift) -> dict[str, Number]:
    return {key: value if math.isfinite(value) else 1e9 for key, value in asdict(drift).items()}


def _nine_tenths(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def _explained(value: float, rounding: float, floor: float) -> bool:
    return value <= SLACK * max(rounding, floor)
