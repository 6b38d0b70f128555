# SPDX-License-Identifier: Apache-2.0
"""Which program of MLA decode attends to which tokens: work items of nearly equal cost, and what is merged afterwards.

A step has `num_seqs` sequences. The rows of a sequence are its query tokens times heads, row `token * num_heads +
head`, cut into tiles of `rows`; `tiles` of them hold the longest query. The device has `slots` places for programs.
Program `group * tiles + tile` serves row tile `tile` of all work items of its group, so the programs that read the
same tokens of the latent cache are neighbours and run together.

Work is laid out on one line: a sequence takes `fixed + ceil(seq_len / granularity)` units of it, `fixed` being what a
work item costs whatever its length. The line is cut every `quota` units and each piece is a group's. A cut inside a
sequence splits it; a remainder shorter than `fixed` is left to the group before, because a work item of its own would
cost more. Everything follows from one prefix sum, so a device can compute each group without the others
(`tables.py`), and the sizes of the tables follow from shapes alone:

    works    <= num_seqs + groups - 1               every cut adds one work item
    partials <= min(works, 2 * (groups - 1))        a sequence with c cuts has c + 1 <= 2 c partial results
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GRANULARITY = 16
"""Tokens: the smallest operand of a matrix instruction, and so the smallest tile of a program."""


class ScheduleError(ValueError):
    """A schedule would compute something else than attention over all tokens of each sequence, once."""


@dataclass(frozen=True)
class Work:
    """One work item: tokens `kv_begin .. kv_end - 1` of one sequence, for all its row tiles."""

    seq: int
    kv_begin: int
    kv_end: int
    partial: int
    """Slot of its result among those to reduce; -1: it is the only one of its sequence and writes the output."""


@dataclass(frozen=True)
class Schedule:
    """The tables of one step."""

    works: tuple[Work, ...]
    work_indptr: tuple[int, ...]
    """[groups + 1]: group g has the works `work_indptr[g] .. work_indptr[g + 1] - 1`."""
    reduce_indptr: tuple[int, ...]
    """[num_seqs + 1]: the partial results `reduce_indptr[s] .. reduce_indptr[s + 1] - 1` merge into sequence s."""


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of the tables, known before the lengths are."""

    works: int
    partials: int


def sizes(num_seqs: int, groups: int) -> Sizes:
    """Return the bounds of a schedule; they hold for all lengths."""
    works = num_seqs + groups - 1
    return Sizes(works, min(works, 2 * (groups - 1)))


def plan(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    groups: int,
    granularity: int = GRANULARITY,
    fixed: int = 0,
    least: int = 1,
) -> Schedule:
    """Return the schedule of a step.

    Args:
        seq_lens: Tokens of each sequence; a sequence without any gets no work.
        query_lens: Query tokens of each sequence; a sequence without any gets no work.
        groups: Groups of programs.
        granularity: Tokens of a unit; cuts lie on multiples of it.
        fixed: Units that a work item costs whatever its length.
        least: Fewest units that a group is given while others have none.
    """
    units = [-(-n // granularity) if n > 0 and q > 0 else 0 for n, q in zip(seq_lens, query_lens, strict=True)]
    line = sum(n + fixed for n in units if n)
    quota = max(-(-line // groups), least, 1)
    works: list[Work] = []
    counts = [0] * groups
    reduce_indptr = [0]
    begin = 0
    for seq, count in enumerate(units):
        partials = 0
        if count:
            start = begin + fixed
            first = start // quota
            last = max(first, (start + count - max(fixed, 1)) // quota)
            partials = last - first + 1 if last > first else 0
            for group in range(first, last + 1):
                low = 0 if group == first else (group * quota - start) * granularity
                high = seq_lens[seq] if group == last else ((group + 1) * quota - start) * granularity
                works.append(Work(seq, low, high, reduce_indptr[-1] + group - first if partials else -1))
                counts[group] += 1
            begin = start + count
        reduce_indptr.append(reduce_indptr[-1] + partials)
    work_indptr = [0]
    for n in counts:
        work_indptr.append(work_indptr[-1] + n)
    return Schedule(tuple(works), tuple(work_indptr), tuple(reduce_indptr))


def check(
    schedule: Schedule, seq_lens: Sequence[int], query_lens: Sequence[int], *, granularity: int = GRANULARITY
) -> None:
    """Check what the kernels rely on. It knows nothing of how the schedule was made.

    Raises:
        ScheduleError: if the work items of a sequence do not partition its tokens, if a reduce group does not hold
            exactly the partial results of its sequence, or if the tables exceed what is allocated.
    """
    _check_bounds(schedule, len(seq_lens))
    of: dict[int, list[Work]] = {seq: [] for seq in range(len(seq_lens))}
    for work in schedule.works:
        if work.seq not in of:
            raise ScheduleError(f"work {work}: got sequence {work.seq}; expected 0 <= seq < {len(seq_lens)}")
        of[work.seq].append(work)
    for seq, (length, queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        _check_cover(seq, of[seq], length if queries > 0 else 0, granularity)
        got = sorted(work.partial for work in of[seq])
        begin, end = schedule.reduce_indptr[seq : seq + 2]
        wanted = list(range(begin, end)) or [-1] * len(of[seq])
        if got != wanted or len(wanted) != len(of[seq]) or end - begin == 1:
            raise ScheduleError(
                f"sequence {seq}: got partial results {got} of {len(of[seq])} work items; expected {wanted}, "
                f"what its reduce group {begin} .. {end - 1} merges (two or more), or -1 for a single work item"
            )


def _check_bounds(schedule: Schedule, num_seqs: int) -> None:
    most = sizes(num_seqs, len(schedule.work_indptr) - 1)
    for name, table, end, bound in (
        ("work_indptr", schedule.work_indptr, len(schedule.works), most.works),
        ("reduce_indptr", schedule.reduce_indptr, schedule.reduce_indptr[-1], most.partials),
    ):
        if table[0] != 0 or table[-1] != end or any(b < a for a, b in pairwise(table)):
            raise ScheduleError(f"{name}: got {list(table)}; expected it to rise from 0 to {end}")
        if end > bound:
            raise ScheduleError(f"{name}: got {end} entries; expected at most {bound}, which is what is allocated")
    if len(schedule.reduce_indptr) != num_seqs + 1:
        raise ScheduleError(f"reduce_indptr: got {len(schedule.reduce_indptr)} entries; expected {num_seqs + 1}")


def _check_cover(seq: int, works: list[Work], length: int, granularity: int) -> None:
    """Check that the works of a sequence, in any order, partition its tokens at multiples of `granularity`."""
    edges = sorted((work.kv_begin, work.kv_end) for work in works)
    reached = 0
    for begin, end in edges:
        if begin != reached or end <= begin or begin % granularity:
            break
        reached = end
    else:
        if reached == length:
            return
    raise ScheduleError(
        f"sequence {seq}: got works over {edges}; expected a partition of 0 .. {length} at multiples of {granularity}"
    )
