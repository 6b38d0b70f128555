# SPDX-License-Identifier: Apache-2.0
"""The launch of one MLA decode step: a pure function of shapes and of `tuning/<arch>.toml`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from pagedkv.arch import UnsupportedArchError, largest_tile, next_power_of_two
from pagedkv.errors import InvalidFileError
from pagedkv.launch import tuning

if TYPE_CHECKING:
    from pagedkv.arch import Arch
    from pagedkv.launch import Mla, MlaReduce


CODE_BYTES = 12
"""Registers that a code takes on CDNA on its way to a number, beside the number's own: 64 rows and 16 tokens on gfx950
take 467 registers a lane with Triton 3.8.0 where numbers take 367, which is 11 bytes for each of 16 * (512 + 64) codes.
With 12 nothing spills with 3.8.0, in either format on gfx90a, gfx942 and gfx950; with 4 there would be tiles of 32
tokens, and codes that are decoded in software would spill 27 to 115 registers."""


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Shape of a step, from which the launch follows."""

    latent_size: int
    """Channels that are key and value."""
    rope_size: int
    """Channels that are key alone."""
    element_bytes: int
    """Bytes of one query element, and of one cache element once it is a number."""
    num_heads: int
    """Query heads."""
    max_query_len: int
    """Upper bound of the query lengths."""
    quantised: bool = False
    """Whether the cache holds FP8 codes."""
    programs: int | None = None
    """Programs that run at a time; None lets the tuning data decide."""


@dataclass(frozen=True)
class MlaLaunch:
    """The launch of a step and the layout of its tables; calls that share tables must have equal ones."""

    block_m: int
    """(token, head) rows of a program, a power of two >= 16."""
    row_tiles: int
    """Programs that share the rows of the longest query."""
    block_n: int
    """KV tokens of a tile, and the granularity of the schedule."""
    waves: int
    stages: int
    occupancy: int
    """Programs that fit a compute unit together."""
    groups: int
    """Groups of `row_tiles` programs; the grid is `groups * row_tiles`."""
    fixed_tiles: int
    """Fixed cost of a work item, in tiles."""
    min_tiles: int
    """Fewest tiles worth a group of their own."""
    fp8_pairs: bool
    """Whether the codes of a quantised cache may be loaded two at a time."""
    split_k_warps: int = 1
    """Waves that share the channels of a score's product; with 1 each wave computes all scores that it needs."""


def tile_tokens(arch: Arch, shape: MlaShape, *, rows: int, waves: int, stages: int, occupancy: int, most: int) -> int:
    """Return how many rows of the latent cache a program holds at once, a power of two >= 16; 0 if not even 16 fit.

    With `w = latent + rope` channels of `e` bytes, both sizes padded to powers of two, and a tile of `t` tokens:

    * LDS: half of the query's latent channels, changing their register layout; then the tile for each pipeline stage
      but the one in flight (at least half of its latent channels), and the weights on their way to the second product.
      On sm_90 the whole query stays there.
    * Registers, wgmma: accumulator `4 * rows * latent` and scores with weights `8 * rows * t`.
    * Registers, mma.sync: twice the accumulator, which changes its layout when it is stored, and the tile `t * w * e`.
    * Registers, MFMA: the accumulator, twice in a pipelined loop, the tile, and the operands, which each wave holds
      whole: up to 32 rows of the query, and the tile once for every stage.
    * Codes on their way to numbers take CODE_BYTES each on CDNA, 4 elsewhere; pairs take none, and one byte in LDS.

    What is left for addresses and the rest: 64 registers a lane, 56 on CDNA. The formulas follow what Triton 3.6
    allocates for 512 + 64 channels of bf16, 16 to 64 rows, 16 to 64 tokens, 1 and 2 stages on gfx90a, gfx942
    (with `options`) and sm_90: on CDNA what they let pass does not spill, with two exceptions: 64 rows and 32 tokens
    on gfx950, and 64 rows of codes with Triton 3.6.0 (audit/declared.toml).

    Args:
        arch: Limits of the device.
        shape: Shape of the step; heads, query lengths and programs do not matter.
        rows: Rows of the program.
        waves: Waves of the program.
        stages: Pipeline stages.
        occupancy: Programs that must fit a compute unit together.
        most: Where more is no longer faster (tuning data), at least 16.
    """
    latent, rope = max(64, next_power_of_two(shape.latent_size)), next_power_of_two(shape.rope_size)
    pairs = fp8_pairs(arch, shape, rows)
    width = (latent + rope) * shape.element_bytes
    stored = latent + rope if pairs else width
    half = latent // 2 * shape.element_bytes
    accumulator = 4 * rows * latent
    wgmma = rows >= arch.operand_from_lds_rows
    mfma = arch.amd

    def lds(tokens: int) -> tuple[int, ...]:
        staged = max(tokens * half, (stages - 1) * tokens * stored) + rows * tokens * shape.element_bytes
        return (max(rows * half, staged),) if mfma else (rows * width, staged)

    def registers(tokens: int) -> tuple[int, ...]:
        coded = shape.quantised and not pairs
        tile, codes = tokens * width, (CODE_BYTES if mfma else 4) * tokens * (latent + rope) * coded
        if wgmma:
            return accumulator, 8 * rows * tokens, codes
        if mfma:
            # Rows beyond 16 are shared by two waves, so 64 rows are 16 for each of 4 waves again.
            query = (32 if rows == 32 else 16) * width
            whole = 1 if split_k_warps(arch, shape, rows=rows, waves=waves) > 1 else waves
            return min(stages, 2) * accumulator, tile, whole * (query + stages * tile), codes
        # One half of the latent at a time passes registers on its way to the product.
        return accumulator, tile // 2, codes

    spare = 56 if mfma else 64
    return largest_tile(arch, lds=lds, registers=registers, spare=spare, waves=waves, occupancy=occupancy, most=most)


def fp8_pairs(arch: Arch, shape: MlaShape, rows: int) -> bool:
    """Whether the codes of a step may be read in pairs: wgmma, for many rows, takes its operands from LDS instead."""
    narrow = rows < arch.operand_from_lds_rows and shape.rope_size > 16
    return arch.fp8_pairs and shape.quantised and shape.element_bytes == 2 and narrow


def split_k_warps(arch: Arch, shape: MlaShape, *, rows: int, waves: int) -> int:
    """Return how many waves of MFMA share the channels of the scores' products.

    With 16 rows there is one block of scores a tile: without this each wave computes it from all channels. Each wave
    has products of at least 16 channels of rope, which come first, and of 32 of the latent.
    """
    if rows > 16 or not arch.amd or shape.element_bytes != 2:
        return 1
    enough = (
        next_power_of_two(shape.rope_size) >= 16 * waves and next_power_of_two(shape.latent_size) // 2 >= 32 * waves
    )
    return waves if enough else 1


def launch_data(arch: Arch) -> tuple[Mla, Mla, MlaReduce]:
    """Return the launch data of many rows, of at most 16, and of the reduce.

    Raises:
        UnsupportedArchError: if MLA decode does not run on the arch.
    """
    data = tuning(arch.name)
    if data.mla is None or data.mla_narrow is None or data.mla_reduce is None:
        raise UnsupportedArchError(
            f"MLA decode does not run on {arch.name}: its 512 latent channels do not fit {arch.registers} registers a "
            "lane without spills. Serve models with MLA on gfx90a, gfx942, gfx950 or sm_90."
        )
    return data.mla, data.mla_narrow, data.mla_reduce


@functools.lru_cache(maxsize=1024)
def choose(arch: Arch, shape: MlaShape) -> MlaLaunch:
    """Return the launch of a step.

    As many rows as the tuning data want and the queries have; where they do not fit with 16 tokens, with fewer programs
    a compute unit, then with fewer stages, then with half the rows.

    Raises:
        InvalidFileError: if nothing fits.
        UnsupportedArchError: if MLA decode does not run on the arch.
    """
    longest = shape.num_heads * shape.max_query_len
    rows = max(16, next_power_of_two(longest))
    wide, narrow, _ = launch_data(arch)
    data = wide if rows > 16 else narrow
    most = (shape.quantised and data.quantised_block_n) or data.block_n
    most_stages = (shape.quantised and data.quantised_stages) or data.stages
    rows = min(data.block_m, rows)
    while rows >= 16:
        for stages, occupancy in product(range(most_stages, 0, -1), range(data.programs_per_unit, 0, -1)):
            bounds = {"waves": data.waves, "stages": stages, "occupancy": occupancy}
            if tile := tile_tokens(arch, shape, rows=rows, **bounds, most=most):
                tiles = -(-longest // rows)  # folded before they are padded: 2 tokens of 24 heads are 3 tiles of 16
                slots = arch.compute_units * occupancy if shape.programs is None else shape.programs
                return MlaLaunch(
                    **bounds,
                    block_m=rows,
                    row_tiles=tiles,
                    block_n=tile,
                    groups=max(1, slots // tiles),  # so that every row has a program
                    fixed_tiles=-(-data.fixed_tokens // tile),
                    min_tiles=-(-data.split_tokens // tile),
                    fp8_pairs=fp8_pairs(arch, shape, rows),
                    split_k_warps=split_k_warps(arch, shape, rows=rows, waves=data.waves),
                )
        rows //= 2
    raise InvalidFileError(
        f"{arch.tuning_file}: 16 rows of {shape.latent_size} + {shape.rope_size} channels and a tile of "
        f"16 tokens do not fit {arch.name} with {data}. Use more waves."
    )


def options(arch: Arch, launch: MlaLaunch) -> dict[str, int]:
    """Return the options of the AMD compiler beyond waves and stages; none on other devices.

    MFMA of 16 rows whatever the tile, and the waves of a SIMD (a compute unit has 4): without them Triton 3.6 takes 272
    to 288 registers on gfx942 where 240 do, and one program a unit fewer runs.
    """
    if not arch.amd:
        return {}
    waves = max(1, launch.occupancy * launch.waves // 4)
    return {"matrix_instr_nonkdim": 16, "kpack": launch_data(arch)[0].kpack, "waves_per_eu": waves}
