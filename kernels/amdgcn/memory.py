# SPDX-License-Identifier: Apache-2.0
"""Global memory as regions, one for each tensor argument, with bounds, alignment and a tensor's own bytes.

Regions lie 2^40 bytes apart, so a pointer that leaves its tensor meets nothing instead of another tensor. Each is a
view of the tensor's real memory: tensors that share bytes see each other's writes, and still each may touch its own
only. So a read of V through K's pointer is a fault although K and V are interleaved in one pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import Array, L, Q, U

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHIFT = 40


@dataclass
class Region:
    """Bytes of one argument."""

    name: str
    views: dict[int, Array]
    """The bytes as elements of 1, 2 and 4 bytes, from a 16-byte boundary on."""
    start: int
    """Begin of the tensor in them."""
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

    def split(self, address: Array) -> tuple[Array, Array]:
        """Region number from 1 on, and offset in it."""
        return (address >> Q(_SHIFT)).astype(L), (address & Q((1 << _SHIFT) - 1)).astype(L)


@dataclass(frozen=True)
class Access:
    """What the lanes of a group of waves did to memory that the launch may write, by one instruction."""

    index: int
    """Index of the instruction."""
    size: int
    """Bytes of each."""
    address: Array
    """Real addresses."""
    workgroup: Array
    wave: Array
    """Number of each wave in its workgroup."""
    interval: int
    """Number of barriers before it."""
    region: Region
    words: Array | None = None
    """[n, size / 4 rounded up] uint32 of a write."""
    changes: Array | None = None
    """Whether a write changed what was there."""
    number: int = 0
    """How many accesses came before it."""
    scalar: bool = False
    """Whether it went through the scalar cache."""
    atomic: bool = False
    """Whether it read and wrote at once; its words are 0."""
    compares: bool = False
    """Whether it is a compare and swap."""


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders."""

    address: int
    write: int
    """The instruction that writes."""
    other: int
    workgroup: int | None = None
    """Workgroup in which two waves meet; None if two workgroups do."""
    waves: tuple[int, int] = (0, 0)


class Sharing:
    """Which waves write and read which bytes of a launch.

    Nothing orders workgroups, so no two may meet. Waves of one workgroup may meet only with a barrier between them.
    Writing the value that another one writes as well is no race, as in LDS. Atomics may meet atomics, and order nothing
    else; a read whose value the same wave's compare and swap checks afterwards may meet them too (LLVM begins its loops
    of them so).

    The vector cache of a compute unit keeps the accesses of a workgroup's waves in order (LLVM, AMDGPUUsage, memory
    models of gfx90a and gfx942), so a barrier is enough for vector accesses that are outstanding there. It is not where
    one of the two is a scalar load, or the waves may be on several units (`tg_split`).

    Args:
        split: Whether the descriptor sets `tg_split`.
    """

    def __init__(self, *, split: bool = False) -> None:
        self._split = split
        self.accesses: list[Access] = []
        self._crossed: list[tuple[int, Array, int]] = []

    def note(self, access: Access) -> int:
        """Note an access and return its number."""
        self.accesses.append(replace(access, number=len(self.accesses)))
        return len(self.accesses) - 1

    def cross(self, number: int, waves: Array, interval: int) -> None:
        """Note that an access was outstanding at a barrier: it may happen in the interval after it as well.

        Args:
            number: What `note` returned.
            waves: Which waves it is outstanding for, `workgroup * 16 + wave`.
            interval: Behind the barrier.
        """
        self._crossed.append((number, waves, interval))

    def race(self) -> Race | None:
        """Look for a race among all accesses that were noted."""
        written = [
            (region.base, region.base + region.views[1].size)
            for region in {id(each.region): each.region for each in self.accesses if each.words is not None}.values()
        ]
        if not written:
            return None

        def touched(region: Region) -> bool:
            return any(region.base < end and begin < region.base + region.views[1].size for begin, end in written)

        noted = [each for each in self.accesses if touched(each.region)]
        late = []
        for number, waves, interval in self._crossed:
            each = self.accesses[number]
            if touched(each.region):
                rows = np.isin(each.workgroup * 16 + each.wave, waves)
                parts = {name: getattr(each, name) for name in ("address", "workgroup", "wave", "words", "changes")}
                parts = {name: None if part is None else part[rows] for name, part in parts.items()}
                late.append(replace(each, interval=interval, **parts))
        step = min(4, *(each.size for each in noted))
        plain, atomics = ([each for each in noted if each.atomic == wanted] for wanted in (False, True))
        writes = _Elements([each for each in plain if each.words is not None], step)
        reads = _Elements([each for each in plain if each.words is None], step)
        found = _between_workgroups(writes, reads) or _inside_workgroups(writes, reads)
        if not found and atomics:
            checked = _Elements([each for each in atomics if each.compares], step)
            changes = _Elements(atomics, step)
            for others in (writes, _unchecked(reads, checked)):
                found = found or _between_workgroups(changes, others, among_writes=False)
                found = found or _inside_workgroups(changes, others, among_writes=False, own_is_read=False)
        if found or not late or not (self._split or any(each.scalar for each in noted)):
            return found
        all_ = [*noted, *late]
        writes = _Elements([each for each in all_ if each.words is not None], step)
        reads = _Elements([each for each in all_ if each.words is None and (self._split or each.scalar)], step)
        return _inside_workgroups(writes, reads, among_writes=self._split)


class _Elements:
    """Accesses taken apart into elements of `step` bytes, one array for each thing that is known of them."""

    def __init__(self, accesses: Sequence[Access], step: int) -> None:
        pieces = [each.size // step for each in accesses]

        def joined(parts: Iterable[Array], kind: Any = np.int64) -> Array:
            return np.concatenate([np.zeros(0, kind), *parts])

        def each_piece(name: str) -> Array:
            return joined(np.repeat(getattr(each, name), n) for each, n in zip(accesses, pieces, strict=True))

        steps = [np.arange(0, each.size, step) for each in accesses]
        self.at = joined((each.address[:, None] + k).ravel() for each, k in zip(accesses, steps, strict=True))
        self.workgroup, self.wave = each_piece("workgroup"), each_piece("wave")
        sizes = [each.address.size * n for each, n in zip(accesses, pieces, strict=True)]
        self.index = np.repeat(np.array([each.index for each in accesses], np.int64), sizes)
        self.interval = np.repeat(np.array([each.interval for each in accesses], np.int64), sizes)
        self.number = np.repeat(np.array([each.number for each in accesses], np.int64), sizes)
        kind = np.dtype(f"u{step}")
        self.value = joined(
            (
                np.ascontiguousarray(each.words).view(kind)[:, :n].ravel()
                for each, n in zip(accesses, pieces, strict=True)
                if each.words is not None
            ),
            kind,
        )
        self.changes = joined(
            (np.repeat(each.changes, n) for each, n in zip(accesses, pieces, strict=True) if each.changes is not None),
            bool,
        )

    def take(self, rows: Array) -> _Elements:
        """Some of the elements, or all of them in another order."""
        other = object.__new__(_Elements)
        for name, part in vars(self).items():
            setattr(other, name, part[rows] if part.size else part)
        return other


def _unchecked(reads: _Elements, checks: _Elements) -> _Elements:
    """Reads but for those that the same wave reads again at once with a change, after them."""
    last: dict[tuple[int, int, int], int] = {}
    for at, group, wave, number in zip(checks.at, checks.workgroup, checks.wave, checks.number, strict=True):
        last[int(at), int(group), int(wave)] = max(int(number), last.get((int(at), int(group), int(wave)), -1))
    if not last:
        return reads
    keys = zip(reads.at.tolist(), reads.workgroup.tolist(), reads.wave.tolist(), strict=True)
    check = np.array([last.get(key, -1) for key in keys], np.int64)
    return reads.take(np.flatnonzero(check <= reads.number))


def _between_workgroups(writes: _Elements, reads: _Elements, *, among_writes: bool = True) -> Race | None:
    """Find a race between two workgroups; two writes race only with `among_writes`."""
    if not writes.at.size:
        return None
    writes = writes.take(np.argsort(writes.at, kind="stable"))
    first = np.flatnonzero(np.r_[True, writes.at[1:] != writes.at[:-1]])
    low, high = np.minimum.reduceat(writes.workgroup, first), np.maximum.reduceat(writes.workgroup, first)
    differ = np.minimum.reduceat(writes.value, first) != np.maximum.reduceat(writes.value, first)
    for place in np.flatnonzero((low != high) & differ & among_writes)[:1]:
        mine = slice(first[place], first[place + 1] if place + 1 < first.size else None)
        return Race(int(writes.at[first[place]]), int(writes.index[mine][0]), int(writes.index[mine][-1]))
    places = np.minimum(np.searchsorted(writes.at[first], reads.at), first.size - 1)
    met = writes.at[first][places] == reads.at
    met &= (low[places] != reads.workgroup) | (high[places] != reads.workgroup)
    for k in np.flatnonzero(met)[:1]:
        return Race(int(reads.at[k]), int(writes.index[first[places[k]]]), int(reads.index[k]))
    return None


def _inside_workgroups(
    writes: _Elements, reads: _Elements, *, among_writes: bool = True, own_is_read: bool = True
) -> Race | None:
    """Find a race between two waves of a workgroup with no barrier between; two writes race only with `among_writes`.

    With `own_is_read` a read is not met by another wave's write of the value that its own wave wrote before it:
    replicated layouts do so.
    """
    if not writes.at.size:
        return None
    places = np.unique(writes.at)
    groups, group_of = np.unique(np.r_[writes.workgroup, reads.workgroup], return_inverse=True)
    intervals = 1 + max(writes.interval.max(), reads.interval.max(initial=0))

    def keys(elements: _Elements, group: Array) -> Array:
        at = np.searchsorted(places, elements.at)
        key: Array = (at * groups.size + group) * intervals + elements.interval
        return key

    key = keys(writes, group_of[: writes.at.size])
    order = np.lexsort((writes.number, key))
    writes, key = writes.take(order), key[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    low, high = np.minimum.reduceat(writes.wave, first), np.maximum.reduceat(writes.wave, first)
    differ = np.minimum.reduceat(writes.value, first) != np.maximum.reduceat(writes.value, first)
    for place in np.flatnonzero((low != high) & differ & among_writes)[:1]:
        end = int(first[place + 1]) if place + 1 < first.size else key.size
        one = int(first[place])
        other = next(k for k in range(one, end) if writes.wave[k] != writes.wave[one])
        waves = int(writes.wave[one]), int(writes.wave[other])
        group, index = int(writes.workgroup[one]), int(writes.index[one])
        return Race(int(writes.at[one]), index, int(writes.index[other]), group, waves)
    known = np.isin(reads.at, places)
    read_key = keys(reads.take(known), group_of[writes.at.size :][known])
    reads = reads.take(known)
    place = np.minimum(np.searchsorted(key[first], read_key), first.size - 1)
    met = (key[first][place] == read_key) & ((low[place] != reads.wave) | (high[place] != reads.wave))
    for k in np.flatnonzero(met).tolist():
        mine = slice(first[place[k]], first[place[k] + 1] if place[k] + 1 < first.size else None)
        others = (writes.wave[mine] != reads.wave[k]) & writes.changes[mine]
        own = (writes.wave[mine] == reads.wave[k]) & (writes.number[mine] < reads.number[k])
        if others.any() and not (own_is_read and own.any()):
            other = int(np.flatnonzero(others)[0]) + int(first[place[k]])
            waves = int(writes.wave[other]), int(reads.wave[k])
            group, index = int(reads.workgroup[k]), int(writes.index[other])
            return Race(int(reads.at[k]), index, int(reads.index[k]), group, waves)
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
