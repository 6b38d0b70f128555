# SPDX-License-Identifier: Apache-2.0
"""Limits of each GPU architecture (LDS, registers, lanes), and the largest tile that fits them.

A tile is sized from the LDS *and* the registers of the arch, never from the block size of the cache and never from a
fixed cap: the same kernel must fit 64 KiB of LDS (gfx90a, gfx942), 160 KiB (gfx950) and 227 KiB (sm_90).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


NEVER = 1 << 30


@dataclass(frozen=True)
class Arch:
    """Limits of one GPU architecture."""

    name: str
    lds_bytes: int
    """LDS (shared memory) that one program may use."""
    registers: int
    """Most 32-bit registers of one lane; on CDNA VGPRs and AGPRs together."""
    unit_registers: int
    """32-bit registers of a compute unit, shared by the lanes of all its programs."""
    unit_lds_bytes: int
    """LDS of a compute unit, shared by all its programs."""
    lanes: int
    """Lanes of a wave (warp)."""
    matrix: Literal["mfma", "wmma", "wgmma", "none"]
    """The device's matrix instructions: of CDNA, RDNA and Hopper."""
    compute_units: int
    """Compute units (multiprocessors), for the number of partitions; `device.current` asks the device."""
    operand_from_lds_rows: int = NEVER
    """Rows from which the matrix instruction takes K and V from LDS (wgmma: 64); otherwise they pass registers."""
    operand_copies: int = 1
    """Times that an operand of a product lies in the registers of a wave (RDNA3: lanes 16 to 31 repeat 0 to 15)."""
    least_waves: int = 1
    """Fewest waves of a program with products (see `aborts_on_one_wave`)."""
    async_copies: bool = False
    """Whether pipelined loads reach LDS past the registers (cp.async; on gfx950 see `copies_past_registers`)."""
    dependent_launches: bool = False
    """Whether a kernel can be started while the one before it ends (CUDA: programmatic dependent launch)."""
    fp8_pairs: bool = False
    """Whether decode takes FP8 codes in pairs: two bytes at a time are moved (ldmatrix), two codes converted."""
    compiled: bool = True
    """Whether kernels are compiled: then launches take few values, so that a service soon has all of them."""
    native_fp8: str = ""
    """The 4-bit-exponent FP8 format of the device's matrix and conversion instructions (CDNA3 and CDNA4 ISA, "FP8"; PTX
    ISA `.e4m3`); "" for none. The same byte read as the other format is wrong by a factor of 2."""

    tuning: str = ""
    """Stem of its file of launch data, if not its own name."""

    @property
    def tuning_file(self) -> str:
        """Its file of launch data, from the folder that holds `pagedkv`."""
        return f"pagedkv/tuning/{self.tuning or self.name}.toml"

    @property
    def amd(self) -> bool:
        """Whether AMD's compiler makes its code."""
        return self.matrix in ("mfma", "wmma")


# AMD CDNA2, CDNA3 and CDNA4 ISA documents: LDS of a workgroup, 512 unified VGPRs a lane, 4 SIMDs of 64 lanes.
_cdna = partial(Arch, registers=512, unit_registers=131_072, lanes=64, matrix="mfma")
# AMD RDNA3, RDNA3.5 and RDNA4 ISA documents: LDS of a workgroup, 256 VGPRs a lane. The unit is a workgroup processor,
# as HIP counts them: 4 SIMDs with 1,536 VGPRs for each of 32 lanes, and LDS of two workgroups.
_rdna = partial(
    Arch,
    lds_bytes=65_536,
    registers=256,
    unit_registers=196_608,
    unit_lds_bytes=131_072,
    lanes=32,
    matrix="wmma",
    tuning="rdna",
)

ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        # Compute units: one die of an MI250X, an MI300X, an MI355X (vendor data sheets).
        _cdna("gfx90a", lds_bytes=65_536, unit_lds_bytes=65_536, compute_units=110),
        _cdna("gfx942", lds_bytes=65_536, unit_lds_bytes=65_536, compute_units=304, native_fp8="e4m3fnuz"),
        _cdna("gfx950", lds_bytes=163_840, unit_lds_bytes=163_840, compute_units=256, native_fp8="e4m3fn"),
        # A Radeon RX 7900 XTX, a Ryzen AI Max+ 395 and a Radeon RX 9070 XT (vendor data sheets). Triton 3.6.0 writes no
        # conversions of FP8 for gfx1201, which has them: codes are decoded in software.
        _rdna("gfx1100", compute_units=48, operand_copies=2),
        _rdna("gfx1151", compute_units=20, operand_copies=2),
        _rdna("gfx1201", compute_units=32),
        # CUDA C++ programming guide, compute capability 9.0; multiprocessors of an H200.
        Arch(
            "sm_90",
            lds_bytes=232_448,
            registers=255,
            unit_registers=65_536,
            unit_lds_bytes=232_448,
            lanes=32,
            matrix="wgmma",
            operand_from_lds_rows=64,
            compute_units=132,
            async_copies=True,
            dependent_launches=True,
            fp8_pairs=True,
            native_fp8="e4m3fn",
        ),
        # Triton's interpreter has neither LDS nor registers, and one program at a time. These bounds keep tiles and
        # scores under 2^20 elements, the most that Triton lets a tensor have.
        Arch(
            "interpreter",
            lds_bytes=1 << 22,
            registers=1 << 21,
            unit_registers=1 << 21,
            unit_lds_bytes=1 << 22,
            lanes=1,
            matrix="none",
            operand_from_lds_rows=1,
            compute_units=1,
            compiled=False,
        ),
    )
}
"""Every arch the kernels have tuning data for."""


class UnsupportedArchError(ValueError):
    """The device is of an arch without limits and tuning data."""


ASYNC_COPIES_SINCE = {"gfx950": (3, 8)}
"""Triton's version from which on its AMD backend copies a pipelined tile into LDS past the registers unless asked not
to: loads of 16 bytes a lane, which CDNA4 has and CDNA3 has not. Of 3.6.0 they are an option, and decode is taken apart
into loads of 4 bytes with it (64 instead of 16, 563 instructions in the loop instead of 232)."""


def copies_past_registers(name: str, version: str, chosen: bool | None) -> bool:
    """Return whether pipelined loads of an arch reach LDS past the registers.

    Args:
        name: Name of an AMD arch.
        version: Version of Triton.
        chosen: `triton.knobs.amd.use_async_copy`, which is None from 3.8 on unless it is set.
    """
    if name not in ASYNC_COPIES_SINCE:
        return False
    since = _numbers(version) >= ASYNC_COPIES_SINCE[name]
    return since if chosen is None else chosen


def aborts_on_one_wave(arch: Arch, version: str) -> bool:
    """Return whether Triton aborts on products of WMMA in a program of one wave ("Expected basis of 'warp'")."""
    return arch.matrix == "wmma" and _numbers(version) >= (3, 8)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def limits(name: str) -> Arch:
    """Return the limits of the arch `name`; what its Triton changes of them `pagedkv.device.current` adds.

    Raises:
        UnsupportedArchError: if there are none.
    """
    if name not in ARCHES:
        raise UnsupportedArchError(
            f"got arch {name!r}; expected one of {', '.join(ARCHES)}. "
            f"To support it, add its limits to pagedkv/arch.py and its launch data as pagedkv/tuning/{name}.toml."
        )
    return ARCHES[name]


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def largest_tile(
    arch: Arch,
    *,
    lds: Callable[[int], Iterable[int]],
    registers: Callable[[int], Iterable[int]],
    spare: int,
    waves: int,
    occupancy: int,
    most: int,
) -> int:
    """Return the most tokens of a tile that fit: a power of two and at least 16, the smallest matrix operand, or 0.

    Args:
        arch: Limits of the device.
        lds: Terms, in bytes, whose sum is what a program with so many tokens holds in LDS.
        registers: Terms, in bytes, whose sum it holds in the registers of all its lanes.
        spare: Registers of a lane that are left for addresses and the rest.
        waves: Waves of the program.
        occupancy: Programs that must fit a compute unit together; each may use that fraction of it.
        most: Where more tokens are no longer faster (tuning data), at least 16.
    """
    lane_registers = min(arch.registers, arch.unit_registers // (occupancy * waves * arch.lanes))
    register_bytes = (lane_registers - spare) * 4 * arch.lanes * waves

    def fits(tokens: int) -> bool:
        share = min(arch.lds_bytes, arch.unit_lds_bytes // occupancy)
        return sum(lds(tokens)) <= share and sum(registers(tokens)) <= register_bytes

    tokens = 16
    if not fits(tokens):
        return 0
    while tokens < most and fits(2 * tokens):
        tokens *= 2
    return tokens
