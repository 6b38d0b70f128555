"""What one compute unit offers, and the largest tile that fits it.

A tile is sized from the LDS *and* the registers of the arch, never from the block size of the cache and never from a
fixed cap: the same kernel must fit 64 KiB of LDS (gfx90a, gfx942), 160 KiB (gfx950) and 227 KiB (sm_90).
"""

from __future__ import annotations

from dataclasses import dataclass


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
    lanes: int
    """Lanes of a wave (warp)."""
    operand_from_lds_rows: int
    """Rows from which the matrix instruction takes K and V from LDS (wgmma: 64); otherwise they pass registers."""
    compute_units: int
    """Compute units (multiprocessors) of the device, for the number of split-KV partitions."""
    async_copies: bool = False
    """Whether pipelined loads reach LDS past the registers (cp.async)."""
    native_fp8: str = ""
    """The FP8 format that the device converts in one instruction and `fp8.decode` in several; "" for none."""


NEVER = 1 << 30

ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        # AMD CDNA2, CDNA3 and CDNA4 ISA documents: LDS of a workgroup, 512 unified VGPRs a lane, 4 SIMDs of 64 lanes.
        # Compute units: one die of an MI250X, an MI300X, an MI355X (vendor data sheets).
        Arch(
            "gfx90a",
            lds_bytes=65_536,
            registers=512,
            unit_registers=131_072,
            lanes=64,
            operand_from_lds_rows=NEVER,
            compute_units=110,
        ),
        Arch(
            "gfx942",
            lds_bytes=65_536,
            registers=512,
            unit_registers=131_072,
            lanes=64,
            operand_from_lds_rows=NEVER,
            compute_units=304,
            native_fp8="e4m3fnuz",
        ),
        Arch(
            "gfx950",
            lds_bytes=163_840,
            registers=512,
            unit_registers=131_072,
            lanes=64,
            operand_from_lds_rows=NEVER,
            compute_units=256,
            native_fp8="e4m3fn",
        ),
        # CUDA C++ programming guide, compute capability 9.0; multiprocessors of an H200.
        Arch(
            "sm_90",
            lds_bytes=232_448,
            registers=255,
            unit_registers=65_536,
            lanes=32,
            operand_from_lds_rows=64,
            compute_units=132,
            async_copies=True,
            native_fp8="e4m3fn",
        ),
        # Triton's interpreter has neither LDS nor registers, and one program at a time. These bounds keep tiles and
        # scores under 2^20 elements, the most that Triton lets a tensor have.
        Arch(
            "interpreter",
            lds_bytes=1 << 22,
            registers=1 << 21,
            unit_registers=1 << 21,
            lanes=1,
            operand_from_lds_rows=1,
            compute_units=1,
        ),
    )
}
"""Every arch the kernels have tuning data for."""


class UnsupportedArchError(ValueError):
    """The device is of an arch without limits and tuning data."""


def limits(name: str) -> Arch:
    """Return the limits of the arch `name`.

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


def reading_waves(arch: Arch, *, tile: int, head_size: int, element_bytes: int, most: int) -> int:
    """Return how many waves a program can have if each of their lanes is to read at least 16 bytes of a K tile.

    16 bytes is the widest load of a lane (global_load_dwordx4, ld.global.v4); with more waves than that the compiler
    shares the tile out in narrower pieces.
    """
    return max(1, min(most, tile * next_power_of_two(head_size) * element_bytes // (16 * arch.lanes)))


def tile_tokens(
    arch: Arch,
    *,
    head_size: int,
    element_bytes: int,
    rows: int,
    waves: int,
    stages: int,
    occupancy: int,
    most: int,
    columns: int = 1,
    packed: bool = False,
) -> int:
    """Return how many tokens of K and V one attention program holds at once.

    It is a power of two and at least 16, the smallest matrix operand; 0 says that not even 16 fit.

    `occupancy` programs share a compute unit, so each may use that fraction of LDS and of registers. The two needs of a
    program with `rows` query rows and a tile of `t` columns of `d` channels (`d` padded to a power of two), in bytes:

    * LDS: first the query, changing its register layout: `rows * d * e` for elements of `e` bytes. Then K and V for
      each pipeline stage but the one in flight, and the weights on their way to the second product:
      `(stages - 1) * 2 * t * d * e + rows * t * e`. (What Triton 3.6 allocates on CDNA.)
    * Registers: accumulator `4 * rows * d`, query `e * rows * d`, scores and weights `8 * rows * t`, K and V in flight
      `2 * t * d * e`, and one of them as operand of the matrix instruction: `t * d * e`, in each wave anew where waves
      take different rows. Neither counts where the instruction reads LDS and loads reach it past the registers. 64
      registers a lane are left for addresses.
      Where K and V are packed, what is said of them counts twice on CDNA: they change their register layout on the way
      (with less, Triton 3.6 spilled 69 VGPRs on gfx950 at 256 channels).

    Args:
        arch: Limits of the device.
        head_size: Channels of a head.
        element_bytes: Bytes of one cache element.
        rows: Query rows of the program (sequences times tokens times heads).
        waves: Waves of the program.
        stages: Pipeline stages that hold a K and a V tile in LDS.
        occupancy: Programs that shall fit a compute unit together.
        most: Where more is no longer faster (tuning data), at least 16.
        columns: Columns of one token: KV heads times sequences of the program.
        packed: Whether the packing of the cache is not `rows`.
    """
    channels = next_power_of_two(head_size)
    lds_bytes = arch.lds_bytes // occupancy
    lane_registers = min(arch.registers, arch.unit_registers // (occupancy * waves * arch.lanes))
    register_bytes = (lane_registers - 64) * 4 * arch.lanes * waves
    copies = 0 if rows >= arch.operand_from_lds_rows else min(waves, rows // 16)

    in_flight = 0 if arch.async_copies and stages > 1 and not copies else 2
    sides = (in_flight + copies) * (2 if packed and arch.operand_from_lds_rows == NEVER else 1)

    def fits(tokens: int) -> bool:
        t = tokens * columns
        side = t * channels * element_bytes
        lds = max(rows * channels * element_bytes, max(1, stages - 1) * 2 * side + rows * t * element_bytes)
        registers = rows * channels * (4 + element_bytes) + 8 * rows * t + sides * side
        return lds <= lds_bytes and registers <= register_bytes

    tokens = 16
    if not fits(tokens):
        return 0
    while tokens < most and fits(2 * tokens):
        tokens *= 2
    return tokens
