"""The two sides of a case, whatever the operation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclasses.dataclass
class Side:
    """Ours or the peer: one `run` covers every set of inputs."""

    run: Callable[[], None]
    poison: Callable[[], None]
    """Fill every output with NaN."""
    error: Callable[[], float]
    """Worst error over all sets of inputs, against the oracle."""


@dataclasses.dataclass
class Work:
    """Both sides of a case. `peer` is a function because what stops it must not stop ours."""

    ours: Side
    peer: Callable[[], Side]
    bound: float
    """Largest error that is right."""
    sets: int


def side(sets: list[tuple], call: Callable, outputs: list[Tensor], error: Callable[[], float]) -> Side:
    """Return the side that calls `call` on every set and writes to `outputs`."""

    def run() -> None:
        for each in sets:
            call(*each)

    def poison() -> None:
        for out in outputs:
            out.fill_(float("nan"))

    return Side(run, poison, error)
