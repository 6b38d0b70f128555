# SPDX-License-Identifier: Apache-2.0
"""The tables of `schedule.plan`, made on the device: each program finds the work items of one group by itself.

They are filled where the lengths are, once a step and for all layers, and their sizes follow from shapes alone. A
captured graph therefore stays right with other lengths: either it holds `fill`, or `fill` runs before each replay and
overwrites the same tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.device import current, on
from pagedkv.mla.launch import MlaLaunch, MlaShape, choose
from pagedkv.mla.schedule import Schedule, Work, sizes
from pagedkv.prepared import signature

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

BLOCK_SEQS = 256
"""Sequences whose prefix sum is taken in one go."""


@dataclass(frozen=True)
class Tables:
    """A schedule on the device, int32 and contiguous, for one launch configuration."""

    launch: MlaLaunch
    works: Tensor
    """[num_seqs + groups - 1, 4]: seq, kv_begin, kv_end, partial; rows after the last work item mean nothing."""
    work_indptr: Tensor
    """[groups + 1]."""
    reduce_indptr: Tensor
    """[num_seqs + 1]."""

    @cached_property
    def signature(self) -> Hashable:
        """Signatures of its tensors (`pagedkv.prepared.signature`), and the launch."""
        return self.launch, *map(signature, (self.works, self.work_indptr, self.reduce_indptr))

    def of(self, num_seqs: int) -> Tables:
        """Return the same memory as tables of a step of at most as many sequences."""
        works = self.works[: sizes(num_seqs, self.launch.groups).works]
        return Tables(self.launch, works, self.work_indptr, self.reduce_indptr[: num_seqs + 1])

    def schedule(self) -> Schedule:
        """Return the tables as `schedule.check` takes them (reads device memory)."""
        indptr = tuple(self.work_indptr.tolist())
        works = tuple(Work(*row) for row in self.works[: indptr[-1]].tolist())
        return Schedule(works, indptr, tuple(self.reduce_indptr.tolist()))


def allocate(like: Tensor, shape: MlaShape, num_seqs: int) -> Tables:
    """Return empty tables for steps of a shape.

    Args:
        like: Any tensor on the device of the step.
        shape: Shape of the steps.
        num_seqs: Sequences of a step, those that pad a captured graph included.
    """
    launch = choose(current(like), shape)

    def table(*extents: int) -> Tensor:
        return like.new_empty(extents, dtype=torch.int32)

    works = table(sizes(num_seqs, launch.groups).works, 4)
    return Tables(launch, works, table(launch.groups + 1), table(num_seqs + 1))


def fill(tables: Tables, seq_lens: Tensor, query_start_loc: Tensor) -> None:
    """Fill the tables for the lengths of a step; never waits for the device.

    Args:
        tables: From `allocate`.
        seq_lens: `[num_seqs]` int32.
        query_start_loc: `[num_seqs + 1]` int32.
    """
    launch, num_seqs = tables.launch, seq_lens.shape[0]
    with on(seq_lens):
        mla_schedule_kernel[(launch.groups + 1,)](
            seq_lens,
            query_start_loc,
            tables.works,
            tables.work_indptr,
            tables.reduce_indptr,
            num_seqs,
            launch.groups,
            GRANULARITY=launch.block_n,
            FIXED_TILES=launch.fixed_tiles,
            MIN_TILES=launch.min_tiles,
            BLOCK_SEQS=BLOCK_SEQS,
            num_warps=1,
        )


@triton.jit
def _units(seq_lens, query_start_loc, seq, num_seqs, GRANULARITY: tl.constexpr):
    """Return the units of each sequence; 0 for one without tokens or without queries."""
    is_seq = seq < num_seqs
    start = tl.load(query_start_loc + seq, mask=is_seq, other=0)
    end = tl.load(query_start_loc + seq + 1, mask=is_seq, other=0)
    length = tl.load(seq_lens + seq, mask=is_seq, other=0)
    return tl.where(end > start, (tl.maximum(length, 0) + GRANULARITY - 1) // GRANULARITY, 0)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["seq_lens", "query_start_loc"])
def mla_schedule_kernel(
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    works,  # [num_seqs + groups - 1, 4] int32
    work_indptr,  # [groups + 1] int32
    reduce_indptr,  # [num_seqs + 1] int32
    num_seqs,
    groups,
    GRANULARITY: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """Fill the tables of one group; grid [groups + 1], the last program fills what ends them."""
    group = tl.program_id(0)
    line = 0
    for chunk in range(0, num_seqs, BLOCK_SEQS):
        units = _units(seq_lens, query_start_loc, chunk + tl.arange(0, BLOCK_SEQS), num_seqs, GRANULARITY)
        line += tl.sum(units + tl.where(units > 0, FIXED_TILES, 0), axis=0)
    quota = tl.maximum(tl.maximum((line + groups - 1) // groups, MIN_TILES), 1)

    # What precedes the chunk: units of the line, work items, partial results, and work items of earlier groups.
    begin = 0
    num_works = 0
    num_partials = 0
    earlier = 0
    for chunk in range(0, num_seqs, BLOCK_SEQS):
        seq = chunk + tl.arange(0, BLOCK_SEQS)
        units = _units(seq_lens, query_start_loc, seq, num_seqs, GRANULARITY)
        cost = units + tl.where(units > 0, FIXED_TILES, 0)
        start = begin + tl.cumsum(cost, axis=0) - units
        first = start // quota
        last = tl.maximum(first, (start + units - max(FIXED_TILES, 1)) // quota)
        count = tl.where(units > 0, last - first + 1, 0)
        split = tl.where(count > 1, count, 0)
        work = num_works + tl.cumsum(count, axis=0) - count + group - first
        partial = num_partials + tl.cumsum(split, axis=0) - split
        low = tl.where(group == first, 0, (group * quota - start) * GRANULARITY)
        high = ((group + 1) * quota - start) * GRANULARITY
        high = tl.where(group == last, tl.load(seq_lens + seq, mask=seq < num_seqs, other=0), high)
        here = (units > 0) & (group >= first) & (group <= last)
        row = works + work * 4
        tl.store(row, seq, mask=here)
        tl.store(row + 1, low, mask=here)
        tl.store(row + 2, high, mask=here)
        tl.store(row + 3, tl.where(split > 0, partial + group - first, -1), mask=here)
        tl.store(reduce_indptr + seq, partial, mask=(seq < num_seqs) & (group == groups))
        earlier += tl.sum(tl.minimum(tl.maximum(group - first, 0), count), axis=0)
        begin += tl.sum(cost, axis=0)
        num_works += tl.sum(count, axis=0)
        num_partials += tl.sum(split, axis=0)
    tl.store(work_indptr + group, earlier)
    if group == groups:
        tl.store(reduce_indptr + num_seqs, num_partials)
