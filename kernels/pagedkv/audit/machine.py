# SPDX-License-Identifier: Apache-2.0
"""Registers, LDS and waves of a compute unit of each CDNA arch: the occupancy of a kernel.

Sources, by the names used below:

* CDNA2, CDNA3, CDNA4: AMD's instruction set architecture documents, chapter "Wavefront State", sections "VGPR
  Allocation and Alignment" (a wave has up to 512 vector registers, 256 architectural and 256 accumulation, given out
  in groups of 8), "SGPR Allocation and Storage" (groups of 16) and "LDS Allocation and Clamping".
* AMDGPUUsage: LLVM's user guide for the AMDGPU backend, kernel descriptor fields `GRANULATED_WORKITEM_VGPR_COUNT`
  (gfx90a, gfx942, gfx950: groups of 8) and `GRANULATED_LDS_SIZE` (128 dwords; gfx950: 320 dwords).
* IsaInfo: LLVM's AMDGPUBaseInfo.cpp: 512 VGPRs and 800 SGPRs per SIMD, at most 8 waves per SIMD since gfx90a, at most
  16 workgroups of more than one wave per compute unit (the barriers).

LLVM prints its own estimate (`; Occupancy:`) into the assembly. It leaves LDS out, because Triton's LDS is dynamic; for
the registers alone both must agree, and the audit fails where they do not.
"""

from __future__ import annotations

from pagedkv.arch import limits

LDS_GRANULES = {"gfx90a": 512, "gfx942": 512, "gfx950": 1280}
"""Bytes in which LDS is given out on MI200, MI300 and MI350 (AMDGPUUsage): the archs that are audited."""

SIMDS = 4
"""SIMDs of a compute unit. Counts below are per SIMD for registers and waves, per compute unit for workgroups."""
VGPRS, VGPR_GRANULE = 512, 8
"""Unified file: architectural and accumulation registers of one wave share it (CDNA2, since gfx90a)."""
SGPRS, SGPR_GRANULE = 800, 16
MAX_WAVES = 8
MAX_WORKGROUPS = 16
"""Work-items."""


def register_waves(*, vgpr: int, sgpr: int) -> int:
    """Waves that the register files of one SIMD can hold.

    Args:
        vgpr: Unified total of a wave, as in the code object's `.vgpr_count`.
        sgpr: As in `.sgpr_count`, VCC and the like included.

    Returns:
        0 to `MAX_WAVES`; 0 means the kernel cannot start at all.
    """
    return min(MAX_WAVES, VGPRS // _granted(vgpr, VGPR_GRANULE), SGPRS // _granted(sgpr, SGPR_GRANULE))


def waves_per_simd(arch: str, *, vgpr: int, sgpr: int, lds_bytes: int, num_waves: int) -> float:
    """Waves per SIMD when a compute unit is full of workgroups of this kernel.

    Args:
        arch: One of `LDS_GRANULES`.
        vgpr: Unified total of a wave.
        sgpr: Scalar registers of a wave.
        lds_bytes: Of a workgroup.
        num_waves: Waves of a workgroup (Triton's num_warps).

    Returns:
        The mean over the four SIMDs, so one workgroup of two waves is 0.5; 0 when not even one workgroup fits.
    """
    waves_a_simd_gets = -(-num_waves // SIMDS)
    slots = register_waves(vgpr=vgpr, sgpr=sgpr)
    by_registers = slots // waves_a_simd_gets if num_waves >= SIMDS else slots * SIMDS // num_waves
    by_lds = limits(arch).lds_bytes // _granted(lds_bytes, LDS_GRANULES[arch]) if lds_bytes else by_registers
    by_barriers = MAX_WORKGROUPS if num_waves > 1 else MAX_WAVES * SIMDS
    return min(by_registers, by_lds, by_barriers) * num_waves / SIMDS


def _granted(wanted: int, granule: int) -> int:
    """`wanted` rounded up to what the allocator gives; a kernel that wants none is still given one group."""
    return max(1, -(-wanted // granule)) * granule
