"""How far log-probabilities are from others. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


@dataclass(frozen=True)
class Error:
    """How far log-probabilities [rows, VOCABULARY] are from others."""

    worst: float
    """Of all entries."""
    typical: float
    """Median over rows of the worst entry of a row."""

    @classmethod
    def of(cls, got: torch.Tensor, want: torch.Tensor) -> Error:
        """Compare; NaN counts as infinitely far.

        Raises:
            ValueError: Another number of rows or of tokens.
        """
        if got.shape != want.shape:
            raise ValueError(f"log-probabilities of shape {list(got.shape)}, expected {list(want.shape)}")
        rows = (got.double() - want.double()).abs().nan_to_num(nan=math.inf).amax(-1)
        return cls(worst=rows.max().item(), typical=rows.median().item())

    @classmethod
    def largest(cls, errors: Iterable[Error]) -> Error:
        """The larger of each figure."""
        errors = list(errors)
        return cls(worst=max(e.worst for e in errors), typical=max(e.typical for e in errors))

    def times(self, factor: float) -> Error:
        """Both figures multiplied."""
        return Error(worst=self.worst * factor, typical=self.typical * factor)

    def within(self, tolerance: Error) -> bool:
        """Whether neither figure is larger than that of the tolerance."""
        return self.worst <= tolerance.worst and self.typical <= tolerance.typical
