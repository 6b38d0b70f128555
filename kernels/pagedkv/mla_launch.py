"""The launch of one MLA decode step: a pure function of shapes and of `tuning/<arch>.toml`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .arch import NEVER, next_power_of_two
from .launch import TuningError, tuning
from .mla_schedule import groups, row_tiles

if TYPE_CHECKING:
    from .arch import Arch


@dataclass(frozen=True)
class MlaLaunch:
    """What a step launches and how its tables are laid out; two calls that share tables must agree in all of it."""

    rows: int
    """(token, head) rows of a program, a power of two >= 16."""
    tiles: int
    """Row tiles of the longest query."""
    tile: int
    """KV tokens of a tile, and the granularity of the schedule."""
    waves: int
    stages: int
    groups: int
    """Groups of `tiles` programs; the grid is `groups * tiles`."""
    fixed: int
    """What a work item costs whatever its length, in tiles."""
    least: int
    """Fewest tiles worth a group of their own."""


def tile_tokens(
    arch: Arch,
    *,
    latent_size: int,
    rope_size: int,
    element_bytes: int,
    rows: int,
    waves: int,
    stages: int,
    occupancy: int,
    most: int,
) -> int:
    """Return how many rows of the latent cache a program holds at once, a power of two >= 16; 0 if not even 16 fit.

    With `w = latent + rope` channels of `e` bytes, both sizes padded to powers of two, and a tile of `t` tokens:

    * LDS: half of the query's latent channels, changing their register layout; then the tile for each pipeline stage
      but the one in flight (at least half of its latent channels), and the weights on their way to the second product.
      On sm_90 the whole query stays there.
    * Registers, wgmma: accumulator `4 * rows * latent` and scores with weights `8 * rows * t`.
    * Registers, mma.sync: twice the accumulator, which changes its layout when it is stored, and the tile `t * w * e`.
    * Registers, MFMA: that, and each wave holds its operands whole: up to 32 rows of the query, and the tile once for
      every stage.

    64 registers a lane are left for addresses. The formulas follow what Triton 3.6 allocates for 512 + 64 channels of
    bf16, 16 to 64 rows, 16 to 64 tokens, 1 to 4 stages on gfx90a, gfx942, gfx950 and sm_90: what they let pass does not
    spill. MFMA with 32 rows is the loosest: 426 registers instead of the 361 that gfx942 takes.

    Args:
        arch: Limits of the device.
        latent_size: Channels that are key and value.
        rope_size: Channels that are key alone.
        element_bytes: Bytes of one cache element.
        rows: Rows of the program.
        waves: Waves of the program.
        stages: Pipeline stages.
        occupancy: Programs that shall fit a compute unit together.
        most: Where more is no longer faster (tuning data), at least 16.
    """
    latent, rope = next_power_of_two(latent_size), next_power_of_two(rope_size)
    width = (latent + rope) * element_bytes
    half = latent // 2 * element_bytes
    wgmma = rows >= arch.operand_from_lds_rows
    mfma = arch.operand_from_lds_rows == NEVER
    lds_bytes = arch.lds_bytes // occupancy
    lane_registers = min(arch.registers, arch.unit_registers // (occupancy * waves * arch.lanes))
    register_bytes = (lane_registers - 64) * 4 * arch.lanes * waves

    def fits(tokens: int) -> bool:
        staged = max(tokens * half, (stages - 1) * tokens * width) + rows * tokens * element_bytes
        lds = max(rows * half, staged) if mfma else rows * width + staged
        registers = 4 * rows * latent + 8 * rows * tokens if wgmma else 8 * rows * latent + tokens * width
        if mfma:
            # Rows beyond 16 are shared by two waves, so 64 rows are 16 for each of 4 waves again.
            query_rows = 32 if rows == 32 else 16
            registers += waves * (query_rows + stages * tokens) * width
        return lds <= lds_bytes and registers <= register_bytes

    tokens = 16
    if not fits(tokens):
        return 0
    while tokens < most and fits(2 * tokens):
        tokens *= 2
    return tokens


@functools.lru_cache(maxsize=1024)
def choose(
    arch: Arch,
    *,
    latent_size: int,
    rope_size: int,
    element_bytes: int,
    num_heads: int,
    max_query_len: int,
    programs: int | None,
) -> MlaLaunch:
    """Return the launch of a step.

    As many rows as the tuning data want and the queries have; where they do not fit with 16 tokens, with fewer programs
    a compute unit, then with fewer stages, then with half the rows.

    Args:
        arch: Limits of the device.
        latent_size: Channels that are key and value.
        rope_size: Channels that are key alone.
        element_bytes: Bytes of one cache element.
        num_heads: Query heads.
        max_query_len: Upper bound of the query lengths.
        programs: Programs that run at a time; None lets the tuning data decide.

    Raises:
        TuningError: if nothing fits.
    """
    data = tuning(arch.name).mla
    rows = min(data.rows, max(16, next_power_of_two(num_heads * max_query_len)))
    while rows >= 16:
        for stages in range(data.stages, 0, -1):
            for occupancy in range(data.programs_per_unit, 0, -1):
                tile = tile_tokens(
                    arch,
                    latent_size=latent_size,
                    rope_size=rope_size,
                    element_bytes=element_bytes,
                    rows=rows,
                    waves=data.waves,
                    stages=stages,
                    occupancy=occupancy,
                    most=data.tokens,
                )
                if tile:
                    tiles = row_tiles(max_query_len, num_heads, rows)
                    slots = arch.compute_units * occupancy if programs is None else programs
                    return MlaLaunch(
                        rows,
                        tiles,
                        tile,
                        data.waves,
                        stages,
                        groups(slots, tiles),
                        fixed=-(-data.fixed_tokens // tile),
                        least=-(-data.split_tokens // tile),
                    )
        rows //= 2
    raise TuningError(
        f"pagedkv/tuning/{arch.name}.toml: 16 rows of {latent_size} + {rope_size} channels and a tile of 16 tokens do "
        f"not fit {arch.name} with {data}. Use more waves."
    )
