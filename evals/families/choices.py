# SPDX-License-Identifier: Apache-2.0
"""Which experts the routers of a reference choose: what they chose is noted, repeated in another dtype, or changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Sequence


class OpenChoice(NamedTuple):
    """One place where rounding may decide for another expert."""

    call: int
    """Which call of `topk` in a forward pass."""
    row: int
    """Row of its scores, counted over all leading axes."""


@dataclass(frozen=True)
class Choice:
    """What one call of `topk` chose, for each row of its scores."""

    chosen: torch.Tensor
    """Indices [rows, k], best first."""
    next: torch.Tensor
    """Index [rows] of the best score that was not chosen."""
    lead: torch.Tensor
    """Lead [rows] of the last score that was chosen over the next one."""


class Choices(TorchFunctionMode):
    """Takes part in every `topk` of a forward pass that leaves scores unchosen: routers choose experts by it.

    Args:
        repeat: What to choose, one entry for each call; None chooses by the scores.
        other: A place at which the next score takes the place of the last that was chosen.
    """

    def __init__(self, repeat: Sequence[Choice] | None = None, other: OpenChoice | None = None) -> None:
        super().__init__()
        self._repeat, self._other = repeat, other
        self.seen: list[Choice] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass every torch function on but `topk`."""
        kwargs = kwargs or {}
        if function not in (torch.topk, torch.Tensor.topk):
            return function(*args, **kwargs)
        return self._choose(function, *args, **kwargs)

    def _choose(
        self, function: Any, scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, **order: bool
    ) -> Any:
        """Choose `k` of the last axis of `scores`; over another axis, or of the smallest, it is no router's."""
        if k >= scores.shape[dim] or dim % scores.ndim != scores.ndim - 1 or not largest:
            return function(scores, k, dim=dim, largest=largest, **order)
        rows, call = scores.reshape(-1, scores.shape[-1]), len(self.seen)
        if self._repeat is None:
            best = rows.topk(k + 1).indices
            chosen, following = best[:, :k], best[:, k]
        else:
            chosen, following = (
                index.to(rows.device) for index in (self._repeat[call].chosen, self._repeat[call].next)
            )
        lead = rows.gather(-1, chosen[:, -1:])[:, 0] - rows.gather(-1, following[:, None])[:, 0]
        self.seen.append(Choice(chosen, following, lead))
        if self._other is not None and self._other.call == call:
            chosen = chosen.clone()
            chosen[self._other.row, -1] = following[self._other.row]
        chosen = chosen.reshape(*scores.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def moved_leads(exact: Sequence[Choice], rounded: Sequence[Choice]) -> list[float]:
    """By how much rounding moves a lead at most, for each call; `rounded` repeated what `exact` chose."""
    return [(b.lead.double() - a.lead.double()).abs().max().item() for a, b in zip(exact, rounded, strict=True)]


def open_choices(seen: Sequence[Choice], reach: Sequence[float]) -> list[OpenChoice]:
    """The places where a lead is smaller than `reach`, which has one entry for each call."""
    return [
        OpenChoice(call, row)
        for call, (choice, least) in enumerate(zip(seen, reach, strict=True))
        for row in (choice.lead < least).nonzero()[:, 0].tolist()
    ]
