# SPDX-License-Identifier: Apache-2.0
"""Registers, LDS and waves of a compute unit of each AMD arch: the occupancy of a kernel.

Sources, by the names used below:

* CDNA2, CDNA3, CDNA4: AMD's instruction set architecture documents, chapter "Wavefront State", sections "VGPR
  Allocation and Alignment" (a wave has up to 512 vector registers, 256 architectural and 256 accumulation, given out
  in groups of 8), "SGPR Allocation and Storage" (groups of 16) and "LDS Allocation and Clamping".
* AMDGPUUsage: LLVM's user guide for the AMDGPU backend, kernel descriptor fields `GRANULATED_WORKITEM_VGPR_COUNT`
  (gfx90a, gfx942, gfx950: groups of 8) and `GRANULATED_LDS_SIZE` (128 dwords; gfx950: 320 dwords).
* IsaInfo: LLVM's AMDGPUBaseInfo.cpp. Since gfx90a 512 VGPRs and 800 SGPRs per SIMD, at most 8 waves per SIMD, at most
  16 workgroups of more than one wave per compute unit (the barriers). RDNA with large register files in waves of 32
  lanes: 1,536 VGPRs in groups of 24, at most 16 waves per SIMD, SGPRs never the limit. Its compute unit here is the
  workgroup processor, as Triton compiles for that mode: 4 SIMDs, 32 barriers.

LLVM prints its own estimate (`; Occupancy:`) into the assembly. It leaves LDS out, because Triton's LDS is dynamic; for
the registers alone both must agree, and the audit fails where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedkv.arch import ARCHES, Arch, limits

SIMDS = 4
"""SIMDs of a compute unit. Counts below are per SIMD for registers and waves, per compute unit for workgroups."""


@dataclass(frozen=True)
class Machine:
    """What a compute unit gives to waves and workgroups."""

    vgprs: int
    """Vector registers; on CDNA architectural and accumulation registers of one wave share them."""
    vgpr_granule: int
    sgprs: int
    max_waves: int
    max_workgroups: int
    """Workgroups of more than one wave."""
    lds_granule: int = 512
    """Bytes in which LDS is given out."""


SGPR_GRANULE = 16
_KINDS = {
    "mfma": Machine(vgprs=512, vgpr_granule=8, sgprs=800, max_waves=8, max_workgroups=16),
    "wmma": Machine(vgprs=1536, vgpr_granule=24, sgprs=16 * 128, max_waves=16, max_workgroups=32),
}
MACHINES = {name: _KINDS[arch.matrix] for name, arch in ARCHES.items() if arch.amd}
"""The archs that are audited."""
MACHINES["gfx950"] = replace(MACHINES["gfx950"], lds_granule=1280)
_SMALL = replace(_KINDS["wmma"], vgprs=1024, vgpr_granule=16)
"""RDNA2, and RDNA3 with small register files (LLVM: without the feature 1_5xVGPRs)."""
_OTHERS = {
    "gfx908": (ARCHES["gfx90a"], replace(_KINDS["mfma"], vgprs=256, vgpr_granule=4, max_waves=10)),
    **dict.fromkeys(("gfx1101", "gfx1200"), (ARCHES["gfx1100"], _KINDS["wmma"])),
    **dict.fromkeys(
        ("gfx1030", "gfx1031", "gfx1032", "gfx1102", "gfx1103", "gfx1150", "gfx1152"), (ARCHES["gfx1100"], _SMALL)
    ),
}
"""Archs without launch data of ours, each with one whose LDS and lanes it has: other kernels compile for them."""
ANY_MACHINE = MACHINES | {name: machine for name, (_, machine) in _OTHERS.items()}


def any_limits(name: str) -> Arch:
    """Return the limits of one of `ANY_MACHINE`; those of the registers are in it."""
    return replace(_OTHERS[name][0], name=name) if name in _OTHERS else limits(name)


CDNA = [name for name in MACHINES if limits(name).matrix == "mfma"]


def register_waves(arch: str, *, vgpr: int, sgpr: int) -> int:
    """Waves that the register files of one SIMD can hold.

    Args:
        arch: One of `ANY_MACHINE`.
        vgpr: Unified total of a wave, as in the code object's `.vgpr_count`.
        sgpr: As in `.sgpr_count`, VCC and the like included.

    Returns:
        0 to `max_waves`; 0 means the kernel cannot start at all.
    """
    machine = ANY_MACHINE[arch]
    by_vgprs = machine.vgprs // _granted(vgpr, machine.vgpr_granule)
    return min(machine.max_waves, by_vgprs, machine.sgprs // _granted(sgpr, SGPR_GRANULE))


def waves_per_simd(arch: str, *, vgpr: int, sgpr: int, lds_bytes: int, num_waves: int) -> float:
    """Waves per SIMD when a compute unit is full of workgroups of this kernel.

    Args:
        arch: One of `ANY_MACHINE`.
        vgpr: Unified total of a wave.
        sgpr: Scalar registers of a wave.
        lds_bytes: Of a workgroup.
        num_waves: Waves of a workgroup (Triton's num_warps).

    Returns:
        The mean over the four SIMDs, so one workgroup of two waves is 0.5; 0 when not even one workgroup fits.
    """
    machine, limit = ANY_MACHINE[arch], any_limits(arch)
    waves_a_simd_gets = -(-num_waves // SIMDS)
    slots = register_waves(arch, vgpr=vgpr, sgpr=sgpr)
    by_registers = slots // waves_a_simd_gets if num_waves >= SIMDS else slots * SIMDS // num_waves
    by_lds = by_registers
    if lds_bytes:
        granted = _granted(lds_bytes, machine.lds_granule)
        by_lds = limit.unit_lds_bytes // granted if lds_bytes <= limit.lds_bytes else 0
    by_barriers = machine.max_workgroups if num_waves > 1 else machine.max_waves * SIMDS
    return min(by_registers, by_lds, by_barriers) * num_waves / SIMDS


def _granted(wanted: int, granule: int) -> int:
    """`wanted` rounded up to what the allocator gives; a kernel that wants none is still given one group."""
    return max(1, -(-wanted // granule)) * granule
