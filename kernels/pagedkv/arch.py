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
    compute_units: int
    """Compute units (multiprocessors) of the device, for the number of split-KV partitions."""


ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        # AMD CDNA2, CDNA3 and CDNA4 ISA documents: LDS of a workgroup, 512 unified VGPRs a lane, four SIMDs of 64 lanes.
        # Compute units: one die of an MI250X, an MI300X, an MI355X (vendor data sheets).
        Arch("gfx90a", lds_bytes=65_536, registers=512, unit_registers=131_072, lanes=64, compute_units=110),
        Arch("gfx942", lds_bytes=65_536, registers=512, unit_registers=131_072, lanes=64, compute_units=304),
        Arch("gfx950", lds_bytes=163_840, registers=512, unit_registers=131_072, lanes=64, compute_units=256),
        # CUDA C++ programming guide, compute capability 9.0; multiprocessors of an H200.
        Arch("sm_90", lds_bytes=232_448, registers=255, unit_registers=65_536, lanes=32, compute_units=132),
        # Triton's interpreter has neither LDS nor registers; what bounds it is host memory. One program at a time.
        Arch("interpreter", lds_bytes=1 << 28, registers=1 << 26, unit_registers=1 << 26, lanes=1, compute_units=1),
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


def tile_tokens(
    arch: Arch, *, head_size: int, element_bytes: int, rows: int, waves: int, stages: int, occupancy: int, most: int
) -> int:
    """Return how many tokens of K and V one attention program holds at once: a power of two, at least 16.

    `occupancy` programs share a compute unit, so each may use that fraction of LDS and of registers. The two needs of a
    program with `rows` query rows and a tile of `t` tokens of `d` channels (`d` padded to a power of two):

    * LDS: K and V tiles, once for every pipeline stage: `stages * 2 * t * d * element_bytes`.
    * Registers, in bytes over all lanes: the fp32 accumulator and the rescaled one `2 * rows * d * 4`, scores and
      probabilities `2 * rows * t * 4`, and one K and one V operand `2 * t * d * element_bytes`; 48 registers a lane are
      left for addresses and loop state.

    Args:
        arch: Limits of the device.
        head_size: Channels of a head.
        element_bytes: Bytes of one cache element.
        rows: Query rows of the program (tokens times heads).
        waves: Waves of the program.
        stages: Pipeline stages that hold a K and a V tile in LDS.
        occupancy: Programs that shall fit a compute unit together.
        most: Where more is no longer faster (tuning data), at least 16.

    Raises:
        ValueError: if not even 16 tokens (the smallest matrix operand) fit.
    """
    channels = next_power_of_two(head_size)
    lds = arch.lds_bytes // occupancy
    lane_registers = min(arch.registers, arch.unit_registers // (occupancy * waves * arch.lanes))
    register_bytes = (lane_registers - 48) * 4 * arch.lanes * waves

    def fits(tokens: int) -> bool:
        tile = 2 * tokens * channels * element_bytes
        need = 2 * rows * channels * 4 + 2 * rows * tokens * 4 + tile
        return stages * tile <= lds and need <= register_bytes

    tokens = 16
    if not fits(tokens):
        raise ValueError(
            f"{rows} rows of {channels} channels with 16 tokens do not fit {arch.name} at occupancy {occupancy} with "
            f"{waves} waves and {stages} stages; use fewer rows, fewer stages or more waves (pagedkv/tuning/{arch.name}.toml)"
        )
    while tokens < most and fits(2 * tokens):
        tokens *= 2
    return tokens
