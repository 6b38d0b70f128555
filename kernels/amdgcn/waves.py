# SPDX-License-Identifier: Apache-2.0
"""Groups of waves at one program counter: registers, exec masks, late loads, twins, accesses to memory and LDS.

Registers are uint32 arrays, [waves, lanes] vector and [waves] scalar, and are never written in place: an instruction
binds a new array, so copies are free and a load can deliver its value later.

Every wave exists twice. The twins differ in what undefined registers, LDS and scratch hold, and in what a register
holds between a load and its wait. Where their addresses, stored data, branch conditions or exec masks differ, the
program used something undefined. Loads arrive when an `s_waitcnt` guarantees them and no earlier (vector memory and
LDS in order, scalar memory only at lgkmcnt(0)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from . import matrix
from .arithmetic import Array, L, Q, U, pair, sign_extend
from .errors import ProgramFault
from .lds import offsets
from .memory import Access
from .targets import EXEC

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .lds import Lds
    from .memory import Memory, Region, Sharing
    from .targets import Target
    from .text import Program

Register = tuple[str, int]
_LINEAR = np.array([1, 1 << 20, 1 << 40])


def merge(enabled: Array | None, new: Array, old: Array | None) -> Array:
    """The register after a write by the lanes that are on; None is all of them."""
    return new if enabled is None or old is None else np.where(enabled, new, old)


def unless_full(mask: Array) -> Array | None:
    """None for a mask with all lanes on."""
    return None if mask.all() else mask


def both(enabled: Array | None, also: Array | None) -> Array | None:
    """Lanes in both masks."""
    return enabled if also is None else also if enabled is None else enabled & also


@dataclass(frozen=True)
class Outstanding:
    """A memory operation that was issued and is not waited for."""

    counter: str
    """One of `targets.Counter`; dx for a lane permute, which counts as ds and leaves LDS alone."""
    targets: tuple[Register, ...]
    values: tuple[Array, ...]
    enabled: Array | None
    accesses: tuple[tuple[int, Array, bool], ...] = ()
    """Accesses to LDS: bytes, place of each lane, whether it is a write."""
    into_lds: tuple[int, int] | None = None
    """(instruction, bytes of a lane) of a load that goes there; its values are LDS addresses and words."""
    shared: tuple[int, ...] = ()
    """Numbers in `Sharing` of accesses to memory that the launch may write."""


class Host(Protocol):
    """What a group of waves has of the launch that it is part of: `machine.Machine`."""

    program: Program
    target: Target
    memory: Memory
    lds: Lds
    sharing: Sharing
    junk: tuple[int, int]
    twins: int
    races: bool
    interval: int


class Waves:
    """Waves that run the same block together. The second half of the rows are the twins of the first."""

    V: list[Array | None]
    S: list[Array | None]
    scc: Array
    twin: Array
    wave: Array
    """Number of each wave in its workgroup."""
    workgroup: Array
    """[waves, 3]"""
    row: Array
    """Row of each wave's workgroup in the LDS."""

    def __init__(self, machine: Host, count: int) -> None:
        self.machine, self.n, self.lanes = machine, count, machine.target.lanes
        self._upper = machine.target.words - 1
        self.outstanding: list[Outstanding] = []
        self._signalled: list[Outstanding] | None = None
        self.E: Array | None = None
        self.block, self.waiting = 0, False
        self.scratch: dict[int, Array] = {}
        self._accesses: list[tuple[int, Array, bool]] = []
        self._shared: list[int] = []
        self._masks: dict[int, tuple[Array, Array, Array]] = {}

    @property
    def real(self) -> int:
        """Waves without their twins."""
        return self.n // self.machine.twins

    def refresh(self) -> None:
        """Junk of this group's size; call after the rows are known."""
        junk = np.array(self.machine.junk, U)[self.twin]
        self.junk, self.scalar_junk = np.broadcast_to(junk[:, None], (self.n, self.lanes)), junk
        self._masks = {}

    def take(self, rows: Array) -> Waves:
        """A group of some of the rows."""
        other = _regrouped([self], len(rows), lambda arrays: arrays[0][rows])
        other.E = None if other.E is None else unless_full(other.E)
        return other

    def signature(self) -> tuple[object, ...]:
        """Equal for groups that may run as one."""
        return self.block, self.waiting, tuple((each.counter, each.targets, each.into_lds) for each in self.outstanding)

    def join(self, other: Waves) -> Waves:
        """Both groups as one."""
        a, b = self.real, other.real

        def rows(arrays: Sequence[Array]) -> Array:
            x, y = arrays
            return np.concatenate([x[:a], y[:b], x[a:], y[b:]])

        return _regrouped([self, other], self.n + other.n, rows)

    def fault(self, what: str, row: int, lane: int | None, index: int, buffer: str = "") -> ProgramFault:
        """A fault at a place: wave, lane, instruction, Python line."""
        group, wave = tuple(int(each) for each in self.workgroup[row]), int(self.wave[row])
        at = "" if lane is None else f" lane {lane}"
        instruction = self.machine.program.instructions[index]
        where = {"kernel": self.machine.program.name, "buffer": buffer, "workgroup": group, "wave": wave, "lane": lane}
        where |= {"instruction": " ".join(instruction.text.split()), "line": instruction.source}
        return ProgramFault(f"{what}: wave {wave} of workgroup {group}{at}; {instruction}", where)

    def same(self, index: int, value: Array, enabled: Array | None, used_as: str) -> None:
        """Raise where the twins differ: something undefined was used."""
        if self.machine.twins != 2 or value.shape[0] != self.n:
            return
        half = self.n // 2
        differs = value[:half] != value[half:]
        if enabled is not None and differs.ndim == 2:
            differs = differs & enabled[:half]
        if differs.any():
            place = np.argwhere(differs)[0]
            lane = int(place[1]) if len(place) > 1 else None
            what = f"undefined value (never written, or its load not waited for) used as {used_as}"
            raise self.fault(what, int(place[0]), lane, index)

    # Masks

    def mask(self, register: int) -> Array:
        """A scalar register for each 32 lanes as [waves, lanes] bool."""
        first, second = self.S[register], self.S[register + self._upper]
        assert first is not None
        assert second is not None
        kept = self._masks.get(register)
        if kept is not None and kept[0] is first and kept[1] is second:
            return kept[2]
        words = np.stack([first, second][: self._upper + 1], 1)
        bits: Array = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)
        self._masks[register] = (first, second, bits)
        return bits

    def set_mask(self, register: int, bits: Array, enabled: Array | None) -> None:
        """Write a mask; bits of lanes that are off are 0."""
        bits = np.broadcast_to(bits, (self.n, self.lanes))
        bits = bits if enabled is None else bits & enabled
        words = np.ascontiguousarray(np.packbits(bits, axis=1, bitorder="little")).view(U)
        first = second = words[:, 0].copy()
        self.S[register] = first
        if self._upper:
            self.S[register + 1] = second = words[:, 1].copy()
        self._masks[register] = (first, second, bits)

    def enabled(self, index: int) -> Array | None:
        """Lanes that are on, after exec was written."""
        for register in range(EXEC, EXEC + self._upper + 1):
            value = self.S[register]
            assert value is not None
            self.same(index, value, None, "exec")
        return unless_full(self.mask(EXEC))

    def first_lane(self, enabled: Array | None) -> Array | int:
        """First lane that is on, 0 if none is."""
        return 0 if enabled is None else np.argmax(enabled, 1)

    # Late loads

    def issue(self, counter: str, targets: Sequence[Register], values: Sequence[Array], enabled: Array | None) -> None:
        """Note an operation; its destination is undefined until it is waited for."""
        for kind, register in targets:
            if kind == "V":
                self.V[register] = merge(enabled, self.junk, self.V[register])
            else:
                self.S[register] = self.scalar_junk
        accesses, self._accesses = tuple(self._accesses), []
        shared, self._shared = tuple(self._shared), []
        self.outstanding.append(Outstanding(counter, tuple(targets), tuple(values), enabled, accesses, shared=shared))
        if len(self.outstanding) > self.machine.target.holds["ds"]:
            self.wait(self.machine.target.holds)

    def wait(self, limits: Mapping[str, int]) -> None:
        """`s_waitcnt`: deliver what these counts guarantee; what has none is not waited for."""
        newer, keep = {"vm": 0, "ds": 0, "sm": 0, "st": 0}, []
        for each in reversed(self.outstanding):
            counter = "ds" if each.counter == "dx" else each.counter
            newer[counter] += 1
            limit = limits.get(counter)
            if limit is None or newer[counter] <= limit:
                keep.append(each)
        keep.reverse()
        kept = set(map(id, keep))
        for each in self.outstanding:
            if id(each) in kept:
                continue
            if each.into_lds:
                address, *words = each.values
                self.lds_write(each.into_lds[0], address, each.enabled, each.into_lds[1], words)
                self._accesses = []
                continue
            for (kind, register), value in zip(each.targets, each.values, strict=True):
                if kind == "V":
                    self.V[register] = merge(each.enabled, value, self.V[register])
                else:
                    self.S[register] = value
        self.outstanding = keep

    # Global memory

    def load(
        self, index: int, address: Array, enabled: Array | None, size: int, signed: bool, beyond: Array | None = None
    ) -> list[Array]:
        """Read `size` bytes for each lane into registers; lanes `beyond` the range of a descriptor get 0."""
        on = enabled if beyond is None else both(enabled, ~beyond)
        values: list[Array] | None = None
        for region, lanes, at in self._locate(index, address, on, size, store=False):
            self._share(index, region, lanes, at, size)
            read = _read(
                region.views, at if lanes is None else np.where(lanes, at, region.start // 4 * 4), size, signed
            )
            read = [self._of_twins(each) for each in read]
            if values is None or lanes is None:
                values = read
            else:
                where = self._of_twins(lanes)
                values = [np.where(where, x, y) for x, y in zip(read, values, strict=True)]
        if values is None:
            values = [np.zeros((self.n, self.lanes), U)] * max(1, size // 4)
        return values if beyond is None else [np.where(beyond, U(0), each) for each in values]

    def store(
        self,
        index: int,
        address: Array,
        enabled: Array | None,
        size: int,
        values: list[Array],
        beyond: Array | None = None,
    ) -> None:
        """Write `size` bytes of each lane, unless it is `beyond` the range of a descriptor."""
        on = enabled if beyond is None else both(enabled, ~beyond)
        places = self._locate(index, address, on, size, store=True)
        mask = U(0xFF if size == 1 else 0xFFFF if size == 2 else 0xFFFFFFFF)
        values = [np.broadcast_to(each & mask, (self.n, self.lanes)) for each in values]
        for each in values:
            self.same(index, each, on, "stored data")
        for region, lanes, at in places:
            words = [each[: self.real] for each in values]
            before = _read(region.views, np.where(True if lanes is None else lanes, at, 0), size, signed=False)
            self._share(index, region, lanes, at, size, words, before)
            _write(region.views, at, lanes, size, words)
        self.issue(self.machine.target.stores, (), (), on)

    def atomic(
        self,
        index: int,
        address: Array,
        enabled: Array | None,
        change: Callable[..., Array],
        values: list[Array],
        beyond: Array | None = None,
    ) -> list[Array]:
        """Change a word of memory for each lane, those of one address one after the other, and return what was there.

        Args:
            index: Of the instruction.
            address: Of each lane.
            enabled: Lanes that are on.
            change: Makes the new word of the old one and the values.
            values: Data of each lane.
            beyond: Lanes beyond the range of a descriptor: they change nothing and get 0.
        """
        on = enabled if beyond is None else both(enabled, ~beyond)
        values = [np.broadcast_to(each, (self.n, self.lanes)) for each in values]
        for each in values:
            self.same(index, each, on, "stored data")
        found = np.zeros((self.real, self.lanes), U)
        for region, lanes, at in self._locate(index, address, on, 4, store=True):
            where = np.ones((self.real, self.lanes), bool) if lanes is None else lanes
            words, memory = at[where] >> 2, region.views[4]
            data, old = [each[: self.real][where] for each in values], np.empty(words.size, U)
            order = np.argsort(words, kind="stable")
            first = np.flatnonzero(np.r_[True, words[order][1:] != words[order][:-1]])
            turn = np.empty(words.size, L)
            turn[order] = np.arange(words.size) - np.repeat(first, np.diff(np.r_[first, words.size]))
            for k in range(int(turn.max(initial=-1)) + 1):
                now = turn == k
                old[now] = memory[words[now]]
                memory[words[now]] = change(old[now], *(each[now] for each in data))
            found[where] = old
            self._share(index, region, lanes, at, 4, atomic=True)
        return [self._of_twins(found)]

    def _share(
        self,
        index: int,
        region: Region,
        lanes: Array | None,
        at: Array,
        size: int,
        words: list[Array] | None = None,
        before: list[Array] | None = None,
        *,
        atomic: bool = False,
    ) -> None:
        """Note which wave met which bytes, of memory that this launch may write."""
        if not self.machine.races or region.readonly:
            return
        on: Any = slice(None) if lanes is None else lanes

        def flat(each: Array) -> Array:
            return np.broadcast_to(each, at.shape)[on].ravel()

        access = Access(
            index,
            size,
            region.base + flat(at),
            flat((self.workgroup[: self.real] @ _LINEAR)[:, None]),
            flat(self.wave[: self.real, None]),
            self.machine.interval,
            region,
            scalar=self.machine.program.instructions[index].mnemonic.startswith("s_"),
            atomic=atomic,
        )
        if words is not None and before is not None:
            changes = np.any([flat(old != new) for old, new in zip(before, words, strict=True)], axis=0)
            access = replace(access, words=np.stack([flat(each) for each in words], 1), changes=changes)
        if atomic:
            count = access.address.size
            compares = self.machine.program.instructions[index].mnemonic.endswith("_cmpswap")
            access = replace(access, words=np.zeros((count, 1), U), changes=np.ones(count, bool), compares=compares)
        self._shared.append(self.machine.sharing.note(access))

    def _of_twins(self, x: Array) -> Array:
        return np.concatenate((x, x)) if self.machine.twins == 2 else x

    def _locate(
        self, index: int, address: Array, enabled: Array | None, size: int, *, store: bool
    ) -> list[tuple[Region, Array | None, Array]]:
        """(region, lanes or None, offsets) of the first twins' accesses; both see the same memory."""
        self.same(index, address, enabled, "address")
        address = np.broadcast_to(address, (self.n, address.shape[1]))[: self.real]
        on = None if enabled is None else enabled[: self.real]
        number, offset = self.machine.memory.split(address)
        numbers = np.unique(number if on is None else number[on]).tolist()
        found: list[tuple[Region, Array | None, Array]] = []
        verb = "write" if store else "read"
        for each in numbers:
            lanes = both(on, number == each) if len(numbers) > 1 else on
            if not 1 <= each <= len(self.machine.memory.regions):
                row, lane = map(int, np.argwhere(np.ones_like(number, bool) if lanes is None else lanes)[0])
                raise self.fault(f"{verb} of {size} bytes at no tensor's address", row, lane, index)
            region = self.machine.memory.regions[each - 1]
            bad = ~region.owns(offset, size) | ((offset & (min(size, 4) - 1)) != 0)
            if store and region.readonly:
                bad = np.ones_like(bad)
            bad = bad if lanes is None else bad & lanes
            if bad.any():
                row, lane = map(int, np.argwhere(bad)[0])
                at, length = int(offset[row, lane]) - region.start, region.end - region.start
                raise self.fault(
                    f"{verb} of {size} bytes at offset {at} of {region.name} "
                    f"({length} bytes{self._why(region, at, size, store=store)})",
                    row,
                    lane,
                    index,
                    region.name,
                )
            found.append((region, lanes, offset))
        return found

    @staticmethod
    def _why(region: Region, at: int, size: int, *, store: bool) -> str:
        if store and region.readonly:
            return ", read-only"
        inside = at >= 0 and at + size <= region.end - region.start
        return ", not its own bytes, or unaligned" if inside else ""

    def buffer(
        self, index: int, register: int, lanes: Array | None, scalar: Array | np.uint32, offset: int
    ) -> tuple[Array, Array]:
        """Addresses through a descriptor, and which of them are beyond its range.

        The range is compared with each access's first byte; hardware compares each dword.
        """
        words = [self.S[register + k] for k in range(4)]
        for word in words:
            assert word is not None
            self.same(index, word, None, "descriptor")
        low_, high_, records, flags = words
        if (high_ >> U(16)).any() or np.any(flags != self.machine.target.buffer_flags):  # type: ignore[operator]
            raise self.fault("descriptor that is not of plain bytes", 0, None, index)
        base = pair(low_, high_ & U(0xFFFF))[:, None]  # type: ignore[arg-type,operator]
        moved = np.full((self.n, self.lanes), offset, U) if lanes is None else lanes + U(offset)
        added = np.broadcast_to(np.asarray(scalar), (self.n, 1)).astype(L)
        beyond = moved.astype(L) >= records.astype(L)[:, None] - added  # type: ignore[union-attr]
        return base + moved.astype(Q) + added.astype(Q), beyond

    def load_to_lds(self, index: int, size: int, offset: int, words: list[Array], enabled: Array | None) -> None:
        """Lanes' words go to LDS side by side, from M0 and the offset on; there is junk until they are waited for."""
        base = self.S[self.machine.target.names["m0"][0]]
        assert base is not None
        self.same(index, base, None, "LDS address")
        address = base[:, None] + U(offset) + np.arange(self.lanes, dtype=U) * U(size)
        self.lds_write(index, address, enabled, size, [self.junk] * max(1, size // 4))
        self._accesses = []
        shared, self._shared = tuple(self._shared), []
        self.outstanding.append(Outstanding("vm", (), (address, *words), enabled, (), (index, size), shared))

    def scalar_load(self, index: int, base: Array, offset: int, size: int, signed: bool) -> list[Array]:
        """Read `size` bytes for each wave."""
        address = (base + Q(offset & (2**64 - 1)))[:, None]
        return [each[:, 0] for each in self.load(index, address, None, size, signed)]

    def scratch_store(self, at: int, values: list[Array], enabled: Array | None) -> None:
        """Write registers to a lane's own scratch."""
        for k, value in enumerate(values):
            self.scratch[at + 4 * k] = merge(enabled, value, self.scratch.get(at + 4 * k, self.junk))
        self.issue(self.machine.target.stores, (), (), enabled)

    def scratch_load(self, at: int, count: int) -> list[Array]:
        """Read registers from a lane's own scratch."""
        return [self.scratch.get(at + 4 * k, self.junk) for k in range(count)]

    # LDS

    def _lds(self, index: int, address: Array, enabled: Array | None, size: int) -> Array:
        lds = self.machine.lds
        address = np.broadcast_to(address, (self.n, self.lanes))
        self.same(index, address, enabled, "LDS address")
        at = offsets(address)
        bad = (at + size > lds.size) | ((at & (min(size, 4) - 1)) != 0)
        bad = bad if enabled is None else bad & enabled
        if bad.any():
            row, lane = map(int, np.argwhere(bad)[0])
            what = f"LDS access of {size} bytes at {int(at[row, lane])} outside {lds.size} bytes, or unaligned"
            raise self.fault(what, row, lane, index)
        moved = at + self.row[:, None] * lds.pitch
        return moved if enabled is None else np.where(enabled, moved, 0)

    def _race(
        self, index: int, at: Array, enabled: Array | None, size: int, values: tuple[Array, Array] | None = None
    ) -> None:
        real, mine = self.real, self._tags()
        self._accesses.append((size, at, values is not None))
        on = slice(None) if enabled is None else enabled[:real]
        places = at[:real][on].ravel()
        noted = None if values is None else (values[0][:real][on].ravel(), values[1][:real][on].ravel())
        found = self.machine.lds.race(places, size, mine[on].ravel(), index, noted)
        if found is None:
            return
        first, count, other, where = found
        rows = np.broadcast_to(np.arange(real)[:, None], (real, self.lanes))[on].ravel()
        instructions = self.machine.program.instructions
        verb = "read" if values is None else "write"
        raise self.fault(
            f"LDS race: {verb} of byte {int(places[first]) % self.machine.lds.pitch} ({count} lanes) with no barrier "
            f"since wave {other}'s {instructions[where] if where >= 0 else 'access in this very instruction'}",
            int(rows[first]),
            None,
            index,
        )

    def _tags(self) -> Array:
        """Interval between barriers and wave, of each real wave's lanes."""
        tags = (self.machine.interval * 16 + self.wave[: self.real]).astype(np.int32)
        return np.broadcast_to(tags[:, None], (self.real, self.lanes))

    def signal(self) -> None:
        """`s_barrier_signal`: others need not wait for what is outstanding now, also where this wave does."""
        self._signalled = list(self.outstanding)

    def cross_barrier(self) -> None:
        """Operations that are outstanding at a barrier happen in the interval after it as well."""
        waves = self.workgroup[: self.real] @ _LINEAR * 16 + self.wave[: self.real]
        late = self.outstanding if self._signalled is None else self._signalled
        self._signalled = None
        for each in late:
            for number in each.shared:
                self.machine.sharing.cross(number, waves, self.machine.interval)
            on = slice(None) if each.enabled is None else each.enabled[: self.real]
            for size, at, writes in each.accesses:
                self.machine.lds.note(at[: self.real][on].ravel(), size, self._tags()[on].ravel(), writes=writes)

    def lds_read(self, index: int, address: Array, enabled: Array | None, size: int, signed: bool) -> list[Array]:
        """Read `size` bytes of LDS for each lane."""
        at = self._lds(index, address, enabled, size)
        if self.machine.races:
            self._race(index, at, enabled, size)
        return _read(self.machine.lds.views, at, size, signed)

    def lds_write(self, index: int, address: Array, enabled: Array | None, size: int, values: list[Array]) -> None:
        """Write `size` bytes of LDS for each lane."""
        at, views = self._lds(index, address, enabled, size), self.machine.lds.views
        if size < 4:
            values = [values[0] & U((1 << 8 * size) - 1)]
        before = _read(views, at, size, signed=False) if self.machine.races else []
        _write(views, at, enabled, size, [np.broadcast_to(each, (self.n, self.lanes)) for each in values])
        if self.machine.races:
            after = _read(views, at, size, signed=False)
            changes, lost = np.zeros((2, self.n, self.lanes), bool)
            for old, now, value in zip(before, after, values, strict=True):
                changes |= old != value
                lost |= now != value
            self._race(index, at, enabled, size, (changes, lost))

    def transposed(self, index: int, kind: str, address: Array, enabled: Array | None) -> list[Array]:
        """`ds_read_b64_tr_`: elements of this type."""
        self.all_on(index, enabled)
        words = np.stack(self.lds_read(index, address, enabled, 8, signed=False), -1)
        moved = np.ascontiguousarray(matrix.transpose(words.view(kind))).view(U)
        return [moved[..., 0].copy(), moved[..., 1].copy()]

    # Lanes of other lanes

    def all_on(self, index: int, enabled: Array | None) -> None:
        """Raise where a lane is off: what the instruction makes of it then is not written down."""
        if enabled is not None:
            row, lane = map(int, np.argwhere(~enabled)[0])
            raise self.fault("lanes change places with lanes that are off", row, lane, index)

    def dpp(
        self, x: Array, enabled: Array | None, source: Array, exists: Array, bounded: bool
    ) -> tuple[Array, Array | None]:
        """First source of a DPP instruction, and which lanes write (None for all); a lane that is off reads as 0."""
        at = np.where(exists, source, 0)
        valid = np.broadcast_to(exists, x.shape) if enabled is None else exists & enabled[:, at]
        return np.where(valid, x[:, at], U(0)), None if bounded else valid


def _regrouped(groups: Sequence[Waves], count: int, rows: Callable[[Sequence[Array]], Array]) -> Waves:
    """A group of `count` waves of groups that may run as one; `rows` picks its rows from an array of each of them."""
    first, new = groups[0], Waves(groups[0].machine, count)

    def mask(masks: Sequence[Array | None]) -> Array | None:
        if all(each is None for each in masks):
            return None
        return rows(
            [np.ones((g.n, g.lanes), bool) if each is None else each for g, each in zip(groups, masks, strict=True)]
        )

    for name in ("V", "S"):
        registers = zip(*(getattr(group, name) for group in groups), strict=True)
        setattr(new, name, [None if any(each is None for each in same) else rows(same) for same in registers])
    for name in ("scc", "twin", "wave", "workgroup", "row"):
        setattr(new, name, rows([getattr(group, name) for group in groups]))
    new.E = mask([group.E for group in groups])
    new.block, new.waiting = first.block, first.waiting
    for same in zip(*(group.outstanding for group in groups), strict=True):
        values = tuple(rows(each) for each in zip(*(one.values for one in same), strict=True))
        accesses = tuple(
            (each[0][0], rows([at for _, at, _ in each]), each[0][2])
            for each in zip(*(one.accesses for one in same), strict=True)
        )
        enabled = mask([one.enabled for one in same])
        shared = tuple(dict.fromkeys(number for one in same for number in one.shared))
        new.outstanding.append(replace(same[0], values=values, enabled=enabled, accesses=accesses, shared=shared))
    for at in set().union(*(group.scratch for group in groups)):
        new.scratch[at] = rows([group.scratch.get(at, group.junk) for group in groups])
    new.refresh()
    return new


def _read(views: dict[int, Array], at: Array, size: int, signed: bool) -> list[Array]:
    if size < 4:
        value = views[size][at // size].astype(U)
        return [sign_extend(value, 8 * size).view(U) if signed else value]
    word = at >> 2
    return [views[4][word + k] for k in range(size // 4)]


def _write(views: dict[int, Array], at: Array, lanes: Array | None, size: int, values: list[Array]) -> None:
    if lanes is not None:
        at, values = at[lanes], [each[lanes] for each in values]
    if size < 4:
        views[size][at // size] = values[0].astype(views[size].dtype)
        return
    for k, value in enumerate(values):
        views[4][(at >> 2) + k] = value
