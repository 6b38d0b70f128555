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

from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeUnit:
    """Compute unit of one gfx arch. Counts are per SIMD for registers and waves, per compute unit for LDS."""

    name: str
    lds_bytes: int
    """LDS of a compute unit, which is also the most that one workgroup may have (CDNA2-4)."""
    lds_granule: int
    """Bytes; AMDGPUUsage."""
    compute_units: int
    """Of the largest product; only reported to Triton, no figure depends on it."""
    vgprs: int = 512
    """Unified file: architectural and accumulation registers of one wave share it (CDNA2, since gfx90a)."""
    vgpr_granule: int = 8
    sgprs: int = 800
    sgpr_granule: int = 16
    max_waves: int = 8
    simds: int = 4
    max_workgroups: int = 16
    max_workgroup: int = 1024
    """Work-items."""
    wave_size: int = 64


COMPUTE_UNITS = {
    "gfx90a": ComputeUnit("gfx90a", lds_bytes=65536, lds_granule=512, compute_units=110),
    "gfx942": ComputeUnit("gfx942", lds_bytes=65536, lds_granule=512, compute_units=304),
    "gfx950": ComputeUnit("gfx950", lds_bytes=163840, lds_granule=1280, compute_units=256),
}
"""MI200 (MI250X), MI300 (MI300X), MI350 (MI355X)."""


def register_waves(arch: ComputeUnit, *, vgpr: int, sgpr: int) -> int:
    """Waves that the register files of one SIMD can hold.

    Args:
        arch: Where.
        vgpr: Unified total of a wave, as in the code object's `.vgpr_count`.
        sgpr: As in `.sgpr_count`, VCC and the like included.

    Returns:
        0 to `arch.max_waves`; 0 means the kernel cannot start at all.
    """
    by_vgpr = arch.vgprs // _granted(vgpr, arch.vgpr_granule)
    by_sgpr = arch.sgprs // _granted(sgpr, arch.sgpr_granule)
    return min(arch.max_waves, by_vgpr, by_sgpr)


def waves_per_simd(arch: ComputeUnit, *, vgpr: int, sgpr: int, lds_bytes: int, num_waves: int) -> float:
    """Waves per SIMD when a compute unit is full of workgroups of this kernel.

    Args:
        arch: Where.
        vgpr: Unified total of a wave.
        sgpr: Scalar registers of a wave.
        lds_bytes: Of a workgroup.
        num_waves: Waves of a workgroup (Triton's num_warps).

    Returns:
        The mean over the four SIMDs, so one workgroup of two waves is 0.5; 0 when not even one workgroup fits.
    """
    waves_a_simd_gets = -(-num_waves // arch.simds)
    slots = register_waves(arch, vgpr=vgpr, sgpr=sgpr)
    by_registers = slots // waves_a_simd_gets if num_waves >= arch.simds else slots * arch.simds // num_waves
    by_lds = arch.lds_bytes // _granted(lds_bytes, arch.lds_granule) if lds_bytes else by_registers
    by_barriers = arch.max_workgroups if num_waves > 1 else arch.max_waves * arch.simds
    return min(by_registers, by_lds, by_barriers) * num_waves / arch.simds


def _granted(wanted: int, granule: int) -> int:
    """`wanted` rounded up to what the allocator gives; a kernel that wants none is still given one group."""
    return max(1, -(-wanted // granule)) * granule
