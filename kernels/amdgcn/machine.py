# SPDX-License-Identifier: Apache-2.0
"""The machine: all waves of a launch, in groups, block after block, with barriers.

Up to `WAVES` waves of whole workgroups run together. A branch splits a group exactly; the group with the lowest block
runs first, and groups at the same block with the same outstanding loads are one again. A barrier holds a group until no
other can run. Whatever the order, a race-free program gives the same result, and a race is looked for apart from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import Array, U
from .errors import LaunchError, ProgramFault
from .lds import Lds
from .memory import Sharing
from .targets import EXEC
from .waves import Waves

if TYPE_CHECKING:
    from .memory import Memory, Race
    from .translate import Translated

WAVES = 64
"""Waves that run together; more are no faster."""
LIMIT = 4_000_000
"""Instructions of a group after which a launch counts as endless."""

_MODES = {
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
    "dx10_clamp": 1,
    "ieee_mode": 1,
}
_SYSTEM = ("user_sgpr_private_segment_size", "system_sgpr_workgroup_info", "uses_dynamic_stack")
_BEFORE_ARGUMENTS = {"user_sgpr_private_segment_buffer": 4, "user_sgpr_dispatch_ptr": 2, "user_sgpr_queue_ptr": 2}
"""Scalar registers in front of the pointer to the arguments (AMDGPUUsage, initial kernel execution state)."""


class Machine:
    """One launch of one kernel.

    Args:
        translated: The kernel.
        memory: Its arguments.
        lds_bytes: Of a workgroup.
        twins: 2 looks for undefined values, 1 does not.
        races: Whether to look for races in LDS and in memory.
        junk: What is undefined in a wave and in its twin; None takes the pair of the target.
    """

    def __init__(
        self,
        translated: Translated,
        memory: Memory,
        lds_bytes: int,
        *,
        twins: int = 2,
        races: bool = True,
        junk: tuple[int, int] | None = None,
    ) -> None:
        self.translated, self.program, self.memory = translated, translated.program, memory
        self.target = self.program.target
        self.lds_bytes, self.twins, self.races = lds_bytes, twins, races
        self.junk = junk or self.target.junk
        self.steps = self.interval = self.wave_instructions = 0
        self.lds: Lds
        descriptor = self.program.descriptor
        self.sharing = Sharing(split=bool(descriptor.get("tg_split") or descriptor.get("workgroup_processor_mode")))
        modes = _MODES | {"wavefront_size32": int(self.target.lanes == 32)}
        odd = {name: descriptor.get(name) for name, value in modes.items() if descriptor.get(name, value) != value}
        odd |= {name: descriptor[name] for name in _SYSTEM if descriptor.get(name)}
        if odd:
            raise LaunchError(f"{self.program.name}: the descriptor sets what the machine does not have: {odd}")

    def run(self, grid: tuple[int, int, int], num_waves: int, kernarg: int) -> None:
        """Run all workgroups.

        Args:
            grid: Workgroups along x, y, z.
            num_waves: Waves of a workgroup.
            kernarg: Address of the kernel's arguments.

        Raises:
            ProgramFault: The program did what no right program does.
        """
        groups = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        together = max(1, WAVES // num_waves)
        with np.errstate(all="ignore"):
            for first in range(0, len(groups), together):
                self._together(np.array(groups[first : first + together]), num_waves, kernarg)
        if found := self.sharing.race():
            raise self._met(found)

    def _met(self, race: Race) -> ProgramFault:
        """The fault of a race in global memory."""
        writes, other = (self.program.instructions[index] for index in (race.write, race.other))
        region = next(each for each in self.memory.regions if 0 <= race.address - each.base < each.views[1].size)
        place = f"at offset {race.address - region.base - region.start} of {region.name}"
        where = {"kernel": self.program.name, "buffer": region.name, "instruction": writes.text, "line": writes.source}
        if race.workgroup is None:
            return ProgramFault(f"global race: two workgroups meet {place}, unordered: {writes} and {other}", where)
        group = tuple(race.workgroup >> 20 * axis & (1 << 20) - 1 for axis in range(3))
        one, two = race.waves
        what = f"global race: waves {one} and {two} of workgroup {group} meet {place} with no barrier between them"
        return ProgramFault(f"{what}: {writes} and {other}", where | {"workgroup": group, "wave": one})

    def _start(self, workgroups: Array, num_waves: int, kernarg: int) -> Waves:
        """Make the waves of some workgroups, with their first registers as the hardware sets them."""
        count = len(workgroups) * num_waves
        group = Waves(self, count * self.twins)
        group.twin = np.repeat(np.arange(self.twins), count)
        group.wave = np.tile(np.arange(num_waves), len(workgroups) * self.twins)
        group.workgroup = np.tile(np.repeat(workgroups, num_waves, 0), (self.twins, 1))
        group.row = np.repeat(np.arange(len(workgroups) * self.twins), num_waves)
        group.refresh()
        group.scc = group.twin == 1
        used = self.translated
        group.V = [group.junk if each else None for each in used.vectors]
        group.S = [group.scalar_junk if each else None for each in used.scalars]
        first = sum(size for name, size in _BEFORE_ARGUMENTS.items() if self.program.descriptor.get(name))
        group.S[first] = np.full(group.n, kernarg & 0xFFFFFFFF, U)
        group.S[first + 1] = np.full(group.n, kernarg >> 32, U)
        group.S[EXEC] = group.S[EXEC + 1] = np.full(group.n, 0xFFFFFFFF, U)
        register, ids = self.program.descriptor["user_sgpr_count"], group.workgroup.astype(U)
        if self.target.gfx12:  # (AMDGPUUsage, initial kernel execution state)
            group.S[self.target.names["ttmp9"][0]] = ids[:, 0].copy()
            group.S[self.target.names["ttmp7"][0]] = ids[:, 1] | (ids[:, 2] << U(16))
        else:
            for axis, name in enumerate("xyz"):
                if self.program.descriptor.get(f"system_sgpr_workgroup_id_{name}"):
                    group.S[register] = ids[:, axis].copy()
                    register += 1
        group.V[0] = (group.wave[:, None] * group.lanes + np.arange(group.lanes)[None]).astype(U)
        return group

    def _together(self, workgroups: Array, num_waves: int, kernarg: int) -> None:
        self.interval = 0
        self.lds = Lds(len(workgroups) * self.twins, self.lds_bytes, self.translated.lds_element, self.twins, self.junk)
        live = [self._start(workgroups, num_waves, kernarg)]
        while live:
            ready = [group for group in live if not group.waiting]
            if not ready:
                self.interval += 1
                for group in live:
                    group.waiting = False
                    group.cross_barrier()
                continue
            block = min(group.block for group in ready)
            merged: dict[tuple[object, ...], Waves] = {}
            for group in ready:
                if group.block == block:
                    key = group.signature()
                    merged[key] = merged[key].join(group) if key in merged else group
            live = [group for group in live if group.waiting or group.block != block]
            for group in merged.values():
                live += self._step(group)

    def _step(self, group: Waves) -> list[Waves]:
        """Run one block and return what goes on, as one group or two."""
        block, length = group.block, len(self.program.blocks[group.block].instructions)
        self.steps += length
        if self.steps > LIMIT:
            raise ProgramFault(f"{self.program.name} does not end: {self.steps} instructions of groups have run")
        self.wave_instructions += length * group.real
        following = self.translated.run(block, group)
        if following is None:
            return []
        if isinstance(following, int):
            group.block = following
            return [group]
        condition, index, target, otherwise = following
        group.same(index, condition, None, "branch condition")
        if condition.all() or not condition.any():
            group.block = target if condition.all() else otherwise
            return [group]
        taken, rest = group.take(np.flatnonzero(condition)), group.take(np.flatnonzero(~condition))
        taken.block, rest.block = target, otherwise
        return [taken, rest]
