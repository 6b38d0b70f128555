# SPDX-License-Identifier: Apache-2.0
"""The drift gate: ours beside the engine's own attention by their log-probabilities, each asked in its own process.

Exact match sees a fault when an answer becomes wrong; distributions move long before that. Nothing is stored: the
engine's own attention answers in the same job, and how much it differs from itself is how far rounding goes. Reading
all tokens at once and writing them one by one round differently, so each has a rounding of its own. The same rule must
notice a block of tokens that was replaced, or a pass means nothing.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hileval.distances import FLOOR, divergence
from hilgate.errors import RecordsError
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hileval.distances import Floor, Row
    from hileval.records.answers import Side, SideName
    from hilgate.model import Number

SLACKS = (6.0, 6.0, 32.0)
"""Times rounding that a right attention may be off, in median, 90 % and worst. The worst of a thousand places says
little of the worst of another thousand. docs/reference/drift.md says how often they failed a right attention."""


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
            RecordsError: They are not of the same places, or there are none.
        """
        return cls.of(_divergences(got, want))

    @classmethod
    def rounding(cls, got: Sequence[Sequence[Row]], want: Sequence[Sequence[Row]]) -> Drift:
        """Compare an engine's rows with its own, at the places where they differ at all.

        Equal bits say that the same was done twice, and not how far rounding goes: of Falcon-H1-7B in bfloat16 on a GPU
        nine places in ten are the same in other batches, and the tenth is 0.06 nats off in the median.

        Raises:
            RecordsError: They are not of the same places, or there are none.
        """
        divergences = _divergences(got, want)
        return cls.of([value for value in divergences if value > 0] or divergences)

    @classmethod
    def of(cls, divergences: Sequence[float]) -> Drift:
        """Summarise divergences in nats."""
        tenths = statistics.quantiles(divergences, n=10, method="inclusive") if len(divergences) > 1 else divergences
        return cls(statistics.median(divergences), tenths[-1], max(divergences), len(divergences))

    @classmethod
    def largest(cls, *drifts: Drift) -> Drift:
        """The largest of each figure: what rounding does at most."""
        figures = zip(*((drift.half, drift.most, drift.worst, drift.places) for drift in drifts), strict=True)
        return cls(*map(max, figures))

    def within(self, rounding: Drift, floor: Floor = FLOOR) -> bool:
        """Return whether rounding explains all three; it never explains NaN. It always explains the nats of `floor`."""
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
        raise RecordsError("distributions of other places, or none", remedy="run the gate again")
    pairs = [(a, b) for rows, others in zip(got, want, strict=True) for a, b in zip(rows, others, strict=True)]
    return [divergence(a, b) for a, b in pairs]


def compare_sides(name: str, floor: Floor, sides: Mapping[SideName, Side]) -> list[Check]:
    """The checks of a drift gate: who served each side that can say, and what they answered."""
    ours, peer, second = sides["ours"], sides["peer"], sides.get("second")
    reads = [Drift.rounding(peer.read_alone, peer.read)]
    writes = [Drift.rounding(peer.wrote, peer.read_again["peer"])]
    if second is not None:
        reads.append(Drift.rounding(second.read, peer.read))
        writes.append(Drift.rounding(second.wrote, peer.read_again["second"]))
    unchanged = [row[-len(changed_rows) :] for row, changed_rows in zip(peer.read, peer.changed, strict=True)]
    checks = judge_drift(
        name,
        Compared(Drift.between(ours.read, peer.read), Drift.largest(*reads)),
        Compared(Drift.between(ours.wrote, peer.read_again["ours"]), Drift.largest(*writes)),
        Drift.between(peer.changed, unchanged),
        floor,
    )
    served = {which: side.served for which, side in sides.items() if side.served is not None}
    if any(check.outcome is not Outcome.PASS for check in served.values()):
        checks = [check.model_copy(update={"outcome": Outcome.DID_NOT_RUN}) for check in checks]
    return [*served.values(), *_second_is_another(name, served), *checks]


def _second_is_another(name: str, served: Mapping[SideName, Check]) -> list[Check]:
    """A finding if the second trusted attention is the peer's own, which would make rounding look too small."""
    backends = [served[which].labels.get("backend") for which in ("peer", "second") if which in served]
    if len(backends) < 2 or None in backends or backends[0] != backends[1]:
        return []
    message = (
        f"the second trusted attention is the peer's own, {backends[0]}: how much two attentions differ is not known "
        "here; name two backends, `peer` and `second`, that this machine serves differently"
    )
    return [Check(id=f"{name}/second", outcome=Outcome.INCONCLUSIVE, message=message)]


@dataclass(frozen=True)
class Compared:
    """Ours beside the peer, in one way of asking."""

    ours: Drift
    """Ours from the peer."""
    rounding: Drift
    """Right attentions from one another: the peer from itself, and from a second trusted one."""


def judge_drift(name: str, reading: Compared, writing: Compared, control: Drift, floor: Floor) -> list[Check]:
    """The checks of a drift gate.

    Args:
        name: The gate's key; check ids start with it.
        reading: All tokens are given at once. Rounding: the peer reading each sequence alone, and a second attention.
        writing: Tokens are written one by one, and the peer reads them at once. Rounding: the peer writing, and a
            second attention writing, from the peer reading what they wrote.
        control: The peer from itself, with one block of each sequence replaced, at the places after it.
        floor: Nats of each figure that are explained anyway.
    """
    ways = {"reading": reading, "writing": writing}
    noticed = {way: not control.within(compared.rounding, floor) for way, compared in ways.items()}
    limits = "; ".join(f"{way} may be off by {compared.rounding.limit(floor)}" for way, compared in ways.items())
    checks = [
        Check(
            id=f"{name}/control",
            outcome=Outcome.PASS if all(noticed.values()) else Outcome.INCONCLUSIVE,
            message=f"a replaced block {'is' if all(noticed.values()) else 'IS NOT'} noticed: {control} nats of "
            f"median / 90 % / worst; {limits}",
            numbers=_numbers(control),
        )
    ]
    for way, compared in ways.items():
        limit = compared.rounding.limit(floor)
        close = compared.ours.within(compared.rounding, floor)
        outcome = Outcome.PASS if noticed[way] else Outcome.INCONCLUSIVE
        checks.append(
            Check(
                id=f"{name}/{way}",
                outcome=outcome if close else Outcome.FAIL,
                message=f"{compared.ours} nats at {compared.ours.places} places "
                f"{'are' if close else 'ARE NOT'} explained: rounding of {compared.rounding} explains up to {limit}",
                numbers=_numbers(compared.ours),
            )
        )
    return checks


def _numbers(drift: Drift) -> dict[str, Number]:
    return {key: value if math.isfinite(value) else 1e9 for key, value in asdict(drift).items()}
