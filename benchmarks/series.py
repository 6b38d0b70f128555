# SPDX-License-Identifier: Apache-2.0
"""Data series of the charts: which records, which axis, which line. Pure; `charts.py` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cases import PAGED_2D, UNIFIED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .cases import BenchmarkCase, Op
    from .record import BenchmarkRow

GOALS = (80, 85, 90)
"""Percent of the measured bandwidth that the goals of `cases.py` ask for."""

OURS, OURS_NATIVE, LEAST = "ours", "ours, native packing", "the bytes at the measured read rate"
THEIRS = {UNIFIED: f"vLLM {UNIFIED}", PAGED_2D: f"vLLM {PAGED_2D}"}


@dataclass(frozen=True)
class Bar:
    """One case in a bar chart."""

    name: str
    op: Op
    value: float | None
    """None where a side did not run or was wrong."""
    goal: float | None
    """None where the case sets none of its own."""

    @property
    def missed(self) -> bool:
        """Whether the case has a goal and is below it."""
        return self.goal is not None and (self.value is None or self.value < self.goal)


@dataclass(frozen=True)
class ChartLine:
    """One line of a line chart: (x, microseconds), ascending in x."""

    name: str
    points: tuple[tuple[int, float], ...]


def ratios(rows: Sequence[BenchmarkRow]) -> list[Bar]:
    """Return the peer's time over ours, per case."""
    return [Bar(row.case.name, row.case.op, row.record.ratio, row.case.goal.ratio) for row in rows]


def bandwidths(rows: Sequence[BenchmarkRow]) -> list[Bar]:
    """Return percent of the measured read or copy rate, per case that such a rate alone bounds."""
    return [
        Bar(
            row.case.name,
            row.case.op,
            None if row.record.fraction is None else 100 * row.record.fraction,
            None if row.case.goal.fraction is None else 100 * row.case.goal.fraction,
        )
        for row in rows
        if row.case.op != "mixed" and row.case.yardstick in {"read", "copy"}
    ]


def over_block_size(rows: Sequence[BenchmarkRow]) -> list[ChartLine]:
    """Return time against tokens of a block: decode of 64 sequences of 8k tokens, head size 128."""
    return _lines(
        [row for row in rows if _is_decode(row.case, 64, 128) and row.case.seq_len == 8192 and not _shuffled(row.case)],
        lambda case: case.block_size,
    )


def over_context(rows: Sequence[BenchmarkRow]) -> list[ChartLine]:
    """Return time against tokens in the cache: decode of one sequence, head size 128, blocks of 16."""
    chosen = [row for row in rows if _is_decode(row.case, 1, 128) and row.case.block_size == 16]
    least = {row.case.seq_len: row.case.bytes_moved() / row.record.yardstick_rate * 1e6 for row in chosen}
    return [*_lines(chosen, lambda case: case.seq_len), *_line(LEAST, least)]


def _is_decode(case: BenchmarkCase, num_seqs: int, head_size: int) -> bool:
    return case.op == "decode" and case.plain and (case.num_seqs, case.head_size) == (num_seqs, head_size)


def _shuffled(case: BenchmarkCase) -> bool:
    return case.layout.startswith("shuffle")


def _lines(rows: Sequence[BenchmarkRow], axis: Callable[[BenchmarkCase], int]) -> list[ChartLine]:
    """Return ours, then each peer's; of two records at one place the earlier counts."""
    times: dict[str, dict[int, float]] = {name: {} for name in (OURS, OURS_NATIVE, *THEIRS.values())}
    for row in rows:
        ours = OURS_NATIVE if row.case.layout.startswith("native") else OURS
        for name, time in ((ours, row.record.ours_us), (THEIRS.get(row.case.peer), row.record.peer_us)):
            if name is not None and time is not None:
                times[name].setdefault(axis(row.case), time)
    return [line for name, found in times.items() for line in _line(name, found)]


def _line(name: str, found: dict[int, float]) -> list[ChartLine]:
    """Return the line, or nothing where there are not two points to join."""
    return [ChartLine(name, tuple(sorted(found.items())))] if len(found) > 1 else []
