# SPDX-License-Identifier: Apache-2.0
"""Compare the answers and the rates of two engines. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hileval.distances import ASKED, EXACT, SLACK, Distances, UnmeasuredError, distance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .engine import Drive

__all__ = ["ASKED", "Distances", "UnmeasuredError", "distance"]
STEADY = 0.1
"""Spread over median above which a rate is not shown: something else than serving was timed."""


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ; None where they are the same.

    Raises:
        UnmeasuredError: There is none to compare, or they are not equally long.
    """
    if not one or len(one) != len(other):
        raise UnmeasuredError(f"answers of {len(one)} and {len(other)} tokens")
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def lead(row: Mapping[int, float], ours: int, theirs: int) -> float:
    """By how many nats an engine prefers its own token to ours; infinite where it does not name one of them.

    Args:
        row: Log-probability of each of its ASKED likeliest next tokens.
        ours: What ours wrote where the texts part.
        theirs: What it wrote itself.
    """
    gap = row[theirs] - row[ours] if ours in row and theirs in row else math.inf
    return math.inf if math.isnan(gap) else gap


@dataclass(frozen=True)
class Rate:
    """Tokens a second of several drives of one engine."""

    median: float
    spread: float
    """Largest minus smallest."""

    @classmethod
    def of(cls, rates: Sequence[float]) -> Rate:
        """Sum up."""
        return cls(statistics.median(rates), max(rates) - min(rates))


def decode(drives: Sequence[Drive]) -> Rate:
    """Of all requests together: each drive's rate is that of its median step.

    Raises:
        UnmeasuredError: In a drive the requests never decoded all at once.
    """
    if not all(drive.steps for drive in drives):
        raise UnmeasuredError("the requests never decoded all at once: ask for longer answers")
    return Rate.of([len(drive.tokens) / statistics.median(drive.steps) for drive in drives])


def prefill(drives: Sequence[Drive], tokens: int) -> Rate:
    """Prompt tokens a second, until the last request has its first token."""
    return Rate.of([tokens / drive.prefill_seconds for drive in drives])


@dataclass(frozen=True)
class Speed:
    """One case of one model. Rates of ours, then of the peer."""

    case: str
    decode: tuple[Rate, Rate]
    prefill: tuple[Rate, Rate]
    requests: int
    same: int
    """Requests with the same answer to the last token."""


@dataclass(frozen=True)
class ServingVerdict:
    """One model."""

    model: str
    layers: str
    block_size: int
    ours: Distances
    """Ours, writing token by token, from the peer, reading: after each prompt and answer up to where the two part."""
    rounding: Distances
    """The peer, writing token by token, from itself, reading the same."""
    control: Distances
    """The peer from itself, with one block of each prompt replaced."""
    lead: float
    """The most by which the peer prefers its own token to ours where the two part."""

    @property
    def right(self) -> bool:
        """Whether rounding explains ours, tokens and all, and the same rule would have noticed a lost block.

        Two log-probabilities stand behind a lead, each off by as much as `rounding` says.
        """
        tied = self.lead <= 2 * SLACK * max(self.rounding.most, EXACT)
        return tied and self.ours.within(self.rounding) and not self.control.within(self.rounding)


def records(verdict: ServingVerdict, speeds: Sequence[Speed], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As JSON, one object a case. A model that is not right has no rates."""
    common = asdict(verdict) | {"right": verdict.right, **facts}
    rows = [asdict(speed) | common for speed in speeds]
    return rows if verdict.right else [row | {"decode": None, "prefill": None} for row in rows]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records as Markdown."""
    lines = [
        "| model | requests x prompt | decode tok/s (spread) | TRITON_ATTN | ratio | prefill ratio | same answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row["right"]:
            lines.append(
                f"| {row['model']} | {row['case']} | **not right** | | | | {row['same']} of {row['requests']} |"
            )
            continue
        ours, peer = (f"{rate['median']:,.0f} ({rate['spread']:,.0f})" for rate in row["decode"])
        lines.append(
            f"| {row['model']} | {row['case']} | {ours} | {peer} | {_ratio(row['decode'])} | {_ratio(row['prefill'])} "
            f"| {row['same']} of {row['requests']} |"
        )
    return "\n".join(lines)


def _ratio(rates: Sequence[Mapping[str, float]]) -> str:
    """Ours over the peer's, where both are steady."""
    if any(rate["spread"] > STEADY * rate["median"] for rate in rates):
        return "-"
    ours, peer = (rate["median"] for rate in rates)
    return f"{ours / peer:.2f}"
