# SPDX-License-Identifier: Apache-2.0
"""Global memory as regions, one for each tensor argument, with bounds, alignment and a tensor's own bytes.

Regions lie 2^40 bytes apart, so a pointer that leaves its tensor meets nothing instead of another tensor. Each is a
view of the tensor's real memory: tensors that share bytes see each other's writes, and still each may touch its own
only. So a read of V through K's pointer is a fault although K and V are interleaved in one pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import Array, L, Q, U

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHIFT = 40


@dataclass
class Region:
    """Bytes of one argument."""

    name: str
    views: dict[int, Array]
    """The bytes as elements of 1, 2 and 4 bytes, from a 16-byte boundary on."""
    start: int
    """Of the tensor in them."""
    end: int
    readonly: bool
    steps: tuple[tuple[int, int], ...]
    """(stride in bytes, size) of the axes above the innermost dense run, outermost first; empty if all is dense."""
    run: int
    """Bytes of that run."""

    @property
    def base(self) -> int:
        """Where the bytes really are: regions of tensors that overlap share them."""
        return int(self.views[1].ctypes.data)

    def owns(self, offset: Array, size: int) -> Array:
        """Whether the bytes of each access belong to elements of the tensor."""
        rest = offset - self.start
        inside = (rest >= 0) & (offset + size <= self.end)
        if self.steps:
            for stride, count in self.steps:
                rest = rest - np.minimum(rest // stride, count - 1) * stride
            inside &= rest + size <= self.run
        return inside


class Memory:
    """All regions of one launch."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(
        self,
        name: str,
        data: Array,
        *,
        start: int = 0,
        end: int | None = None,
        readonly: bool = False,
        shape: Sequence[int] = (),
        strides: Sequence[int] = (),
        itemsize: int = 1,
    ) -> int:
        """Add an argument and return its address.

        Args:
            name: For faults.
            data: uint8, from a 16-byte boundary on.
            start: First byte that is the tensor's.
            end: Behind its last byte.
            readonly: Whether a write is a fault.
            shape: Of the tensor; none for bytes without axes.
            strides: In bytes.
            itemsize: In bytes.
        """
        size = data.size
        views = {1: data, 2: data[: size // 2 * 2].view(np.uint16), 4: data[: size // 4 * 4].view(U)}
        steps, run = own_steps(shape, strides, itemsize)
        self.regions.append(Region(name, views, start, size if end is None else end, readonly, steps, run))
        return (len(self.regions) << _SHIFT) + start

    def relocated(self, words: Array) -> Array:
        """Int64 words of which real addresses have become those in the region that owns the byte; others stay."""
        found = words.copy()
        for number, region in enumerate(self.regions, start=1):
            offset = words - region.base
            owned = region.owns(offset, 1)
            found[owned] = (number << _SHIFT) + offset[owned]
        return found

    def split(self, address: Array) -> tuple[Array, Array]:
        """Region number from 1 on, and offset in it."""
        return (address >> Q(_SHIFT)).astype(L), (address & Q((1 << _SHIFT) - 1)).astype(L)


class Sharing:
    """Which workgroups write and read which bytes of a launch: nothing orders workgroups, so no two may meet.

    Writing the value that another workgroup writes as well is no race, as in LDS.
    """

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, Array, Array, Array]] = []
        self.reads: list[tuple[int, int, Array, Array]] = []

    def note(self, index: int, size: int, address: Array, group: Array, values: list[Array] | None) -> None:
        """Note an access of `size` bytes at each address, with the 32-bit words of a write."""
        if values is None:
            self.reads.append((index, size, address, group))
        else:
            self.writes.append((index, size, address, group, np.stack(values, 1)))

    def race(self) -> tuple[int, int, int] | None:
        """(address, instruction that wrote, other instruction) of a race; None if there is none."""
        if not self.writes:
            return None
        step = min(4, *(each[1] for each in (*self.writes, *self.reads)))

        def spread(entries: Sequence[Any]) -> list[Array]:
            parts: list[Array] = [np.arange(0, each[1], step) for each in entries]
            return [
                np.concatenate([(each[2][:, None] + part).ravel() for each, part in zip(entries, parts, strict=True)]),
                np.concatenate([np.repeat(each[3], part.size) for each, part in zip(entries, parts, strict=True)]),
                np.concatenate(
                    [np.full(each[2].size * part.size, each[0]) for each, part in zip(entries, parts, strict=True)]
                ),
            ]

        at, group, index = spread(self.writes)
        kind = np.dtype(f"u{step}")
        values = ((size, np.ascontiguousarray(words).view(kind)) for _, size, _, _, words in self.writes)
        value = np.concatenate([each[:, : size // step].ravel() for size, each in values])
        order = np.argsort(at, kind="stable")
        at, group, index, value = at[order], group[order], index[order], value[order]
        first = np.flatnonzero(np.r_[True, at[1:] != at[:-1]])
        low, high = np.minimum.reduceat(group, first), np.maximum.reduceat(group, first)
        differ = np.minimum.reduceat(value, first) != np.maximum.reduceat(value, first)
        for place in np.flatnonzero((low != high) & differ)[:1]:
            mine = slice(first[place], first[place + 1] if place + 1 < first.size else None)
            return int(at[first[place]]), int(index[mine][0]), int(index[mine][-1])
        if not self.reads:
            return None
        read_at, read_group, read_index = spread(self.reads)
        places = np.minimum(np.searchsorted(at[first], read_at), first.size - 1)
        met = (at[first][places] == read_at) & ((low[places] != read_group) | (high[places] != read_group))
        for k in np.flatnonzero(met)[:1]:
            return int(read_at[k]), int(index[first[places[k]]]), int(read_index[k])
        return None


def own_steps(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """Axes above the innermost dense run, and that run's bytes.

    Axes that overlap (a sliding window of one buffer) cannot be separated by division; then every byte between first
    and last counts as the tensor's.
    """
    axes = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1 and stride > 0)
    run, extent = itemsize, itemsize
    steps: list[tuple[int, int]] = []
    for stride, size in axes:
        if stride < extent:
            return (), 0
        if stride == run and not steps:
            run = extent = stride * size
        else:
            steps.append((stride, size))
            extent = stride * (size - 1) + extent
    return tuple(reversed(steps)), run
