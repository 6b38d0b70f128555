# SPDX-License-Identifier: Apache-2.0
"""The launch of a paged-attention call: a pure function of shapes and of `tuning/<arch>.toml`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from pagedkv.arch import NEVER, largest_tile, next_power_of_two
from pagedkv.errors import InvalidFileError
from pagedkv.launch import tuning

if TYPE_CHECKING:
    from pagedkv.arch import Arch
    from pagedkv.launch import Attention, Where

MEASURED_BYTES = 2
"""Bytes of an element of the queries for which launches are measured (`pagedkv.launch.Where`)."""

FIXED_SPLITS = 64
"""Most partitions of a fixed length: those of a longer sequence are longer, so that the scratch has a bound."""


@dataclass(frozen=True)
class AttentionLaunch:
    """The launch of one call of paged attention: compile-time constants, except for `num_splits`.

    A layer has few of them whatever the batch: a service compiles each once (`attention.warm_up`).
    """

    block_n: int
    """KV tokens of a tile."""
    block_m: int
    """Query rows of a program, a power of two >= 16."""
    block_q: int
    """Query tokens of a program (1 in decode)."""
    head_tiles: int
    """Programs that share the query heads of one KV head, where one program has no room for them; divides them."""
    fp8_pairs: bool
    """Whether the codes of a quantised cache may be loaded two at a time."""
    waves: int
    stages: int
    num_splits: int
    tiles_per_split: int
    """Tiles of a partition; 0 where partitions share the tiles of each sequence equally."""
    num_xcds: int
    """XCDs to spread programs over (`pagedkv.launch.Attention`)."""
    query_in_lds: bool
    """Whether a program leaves its query in LDS as it was loaded."""
    pre_load_v: bool
    """This and the next are explained in `pagedkv.launch.Where`."""
    load_k_by_token: bool
    compiler_options: tuple[tuple[str, int], ...]
    """Options of the compiler beyond waves and stages, by name."""


def reading_waves(arch: Arch, *, tile: int, head_size: int, element_bytes: int, most: int) -> int:
    """Return how many waves a program can have if each of their lanes is to read at least 16 bytes of a K tile.

    16 bytes is the widest load of a lane (global_load_dwordx4, ld.global.v4); with more waves than that the compiler
    shares the tile out in narrower pieces.
    """
    return max(arch.least_waves, min(most, tile * next_power_of_two(head_size) * element_bytes // (16 * arch.lanes)))


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
    packed: bool = False,
    staged_bytes: int | None = None,
) -> int:
    """Return how many tokens of K and V one program holds at once; 0 says that not even 16 fit.

    The two needs of a program with `rows` query rows and a tile of `t` tokens of `d` channels (`d` padded to a power
    of two), in bytes:

    * LDS: first the query, changing its register layout: `rows * d * e` for elements of `e` bytes. Then K and V for
      each pipeline stage but the one in flight, and the weights on their way to the second product:
      `(stages - 1) * 2 * t * d * e + rows * t * e`. (What Triton 3.6 allocates on CDNA.) With wgmma the query stays
      and every stage counts. So it does on CDNA where loads reach LDS past the registers, with 16 bytes of padding
      after each KiB (Triton 3.8, gfx950, prefill of 64 tokens and 128 channels: 66,528 instead of 32,768 bytes).
    * Registers: accumulator `4 * rows * d`, query `e * rows * d` unless it stays in LDS, scores and weights `8 * rows *
      t` (wgmma: `(4 + e) * rows * t`), K and V in flight `2 * t * d * e` unless loads reach LDS past the registers, and
      one of them as operand of the matrix instruction unless that reads LDS: `t * d * e`, in each wave anew where waves
      take different rows.
      Where K and V are packed, what is said of them counts twice on CDNA: they change their register layout on the way
      (with less, Triton 3.6 spilled 69 VGPRs on gfx950 at 256 channels).
    * Registers, WMMA: every wave holds the query of its rows, their scores and weights, all of K as operand, and of the
      accumulator and of V its share of the channels. The sum is within 45 registers of what Triton 3.6 takes on gfx1201
      at 128 and 256 channels, with 1 to 16 waves, and where it spills, within 25 of what is missing.

    Args:
        arch: Limits of the device.
        head_size: Channels of a head.
        element_bytes: Bytes of one cache element.
        rows: Query rows of the program (tokens times heads).
        waves: Waves of the program.
        stages: Pipeline stages that hold a K and a V tile in LDS.
        occupancy: Programs that must fit a compute unit together.
        most: Where more is no longer faster (tuning data), at least 16.
        packed: Whether the packing of the cache is not `rows`.
        staged_bytes: Bytes of an element of K and V in a tile, if not those of an element.
    """
    channels = next_power_of_two(head_size)
    query = rows * channels * element_bytes
    column = channels * (staged_bytes or element_bytes)  # of K or of V, for each token
    wgmma = rows >= arch.operand_from_lds_rows
    copies = 0 if wgmma else min(waves, rows // 16)
    in_flight = 0 if arch.async_copies and stages > 1 else 2
    sides = (in_flight + copies) * (2 if packed and arch.amd else 1)

    padded = arch.async_copies and stages > 1 and arch.amd

    def lds(tokens: int) -> tuple[int, ...]:
        if wgmma:
            return query, stages * 2 * tokens * column
        if padded:
            staged = stages * 2 * tokens * column
            return (max(query, staged + staged // 64 + rows * tokens * element_bytes),)
        staged = max(1, stages - 1) * 2 * tokens * column
        return (max(query, staged + rows * tokens * element_bytes),)

    def registers(tokens: int) -> tuple[int, ...]:
        if arch.matrix == "wmma":
            groups = min(waves, rows // 16)  # of waves, each with rows of its own
            operand = arch.operand_copies * tokens * column
            query_and_scores = rows // groups * (arch.operand_copies * channels * element_bytes + 8 * tokens)
            return 4 * rows * channels, waves * query_and_scores, waves * operand, groups * operand
        scores = (4 + (element_bytes if wgmma else 4)) * rows * tokens
        return 4 * rows * channels, 0 if query_in_lds(arch, rows) else query, scores, sides * tokens * column

    spare = 16 if arch.matrix == "wmma" else 64
    return largest_tile(arch, lds=lds, registers=registers, spare=spare, waves=waves, occupancy=occupancy, most=most)


def query_in_lds(arch: Arch, rows: int) -> bool:
    """Whether a program leaves its query in LDS as it was loaded (wgmma; H200, 128 rows: 420 TFLOP/s instead of 389).

    64 rows are those of one warpgroup, which holds them in registers: 450 TFLOP/s at 16k tokens instead of 439.
    """
    return rows > arch.operand_from_lds_rows


def choose_splits(
    programs: int, max_tiles: int, *, units: int, per_unit: int, fewest_tiles: int, at_once: int = 128
) -> int:
    """Return into how many partitions the KV of every sequence is split.

    About as many as fill `units * per_unit` places with programs, and no more than leaves `fewest_tiles` tiles to a
    partition of the longest sequence. It depends on shapes and on the bound of the lengths alone, so a captured graph
    stays valid. The number is rounded down

    * where that still fills five eighths of the places: the few programs that do not find one would cost a whole round
      more (H200, batch 1, 32k tokens: 49 partitions make 392 programs for 396 places and take 41.2 us; 50 make 400 and
      take 46.1 us; two partitions of 256 programs take 2 % less than one at 4k tokens, and 70 us more in the mixed
      batch at 8k);
    * to the `at_once` that the reduce loads at once, which saves it a loop (66 partitions of 32k tokens take 41.9 us,
      64 take 39.9).
    """
    places = units * per_unit
    fewer = places // max(programs, 1)
    wanted = fewer if 8 * programs * fewer >= 5 * places else fewer + 1
    if wanted > at_once and 8 * programs * at_once >= 5 * places:
        wanted = at_once
    return max(1, min(wanted, max_tiles // fewest_tiles, 128))


@dataclass(frozen=True)
class _Program:
    """Shape of one program."""

    block_n: int
    stages: int
    waves: int
    block_q: int
    head_tiles: int
    heads: int
    """Query heads of one KV head that it takes."""

    @property
    def block_m(self) -> int:
        return max(16, next_power_of_two(self.block_q * self.heads))


def _fitted(
    arch: Arch,
    data: Attention,
    *,
    tokens: int,
    group: int,
    waves: int,
    stages: int,
    **shape: Any,
) -> _Program:
    """Return the program that fits the arch: as wanted, else with fewer tokens or query heads.

    Args:
        arch: Limits of the device.
        data: Launch data of the phase.
        tokens: Most query tokens.
        group: Query heads of one KV head.
        waves: Most waves.
        stages: Most stages.
        shape: Further arguments of `tile_tokens`.

    Raises:
        InvalidFileError: if nothing fits.
    """
    heads, head_tiles = group, 1
    # MFMA: each wave has 16 rows of its own while they fit, because waves that share rows all compute their scores.
    alone = arch.amd
    while True:
        program = _Program(0, 0, waves, tokens, head_tiles, heads)
        rows = program.block_m
        used = max(arch.least_waves, min(waves, rows // 16)) if alone else waves
        # With what is wanted if 16 tokens fit, else with a lower occupancy, else with fewer stages.
        fit = functools.partial(tile_tokens, arch, rows=rows, waves=used, **shape)
        for deep, occupancy in product(range(stages, 0, -1), range(data.occupancy, 0, -1)):
            if tile := fit(stages=deep, occupancy=occupancy):
                return replace(program, block_n=tile, stages=deep, waves=used)
        if arch.matrix == "wmma" and used < waves:
            alone = False  # with 256 registers a lane: sooner than few rows, which read K and V more often
        elif tokens > 1:
            tokens //= 2
        elif waves < data.waves:
            waves = data.waves
        elif used < waves:
            alone = False
        elif arch.matrix == "wmma" and rows == 16:
            # It spills, and is not promised (audit/budgets.toml); a launch that is slow serves, and none does not.
            return replace(program, block_n=16, stages=1, waves=waves)
        elif heads > 1:
            head_tiles *= next(n for n in range(2, heads + 1) if heads % n == 0)
            heads = group // head_tiles
        else:
            raise InvalidFileError(
                f"{arch.tuning_file}: {rows} rows of {shape['head_size']} channels and a tile of 16 "
                f"tokens do not fit {arch.name} with {data}. Use more waves."
            )


@dataclass(frozen=True)
class _Layer:
    """An attention layer and its cache."""

    head_size: int
    element_bytes: int
    """Bytes of an operand of the products."""
    cache_bytes: int
    """Bytes of an element of the cache."""
    group: int
    """Query heads of one KV head."""
    packing: str
    block_size: int

    @property
    def packed(self) -> bool:
        return self.packing != "rows"

    @property
    def quantised(self) -> bool:
        return self.cache_bytes < self.element_bytes

    def measured(self, data: Attention, longest: int, query_rows: int, programs: int) -> Where | None:
        """Return the measured launch of this layer in a step: the first whose conditions hold, None where none does."""
        if self.element_bytes != MEASURED_BYTES:
            return None
        for where in data.where:
            of_layer = (
                where.cache_bytes == self.cache_bytes
                and where.packing == self.packing
                and where.head_size_padded == next_power_of_two(self.head_size)
                and where.block_at_least <= self.block_size
                and where.block_m >= self.group
            )
            of_step = (
                longest <= where.length_at_most
                and where.query_rows_at_least <= query_rows <= where.query_rows_at_most
                and where.programs_at_least <= programs <= where.programs_at_most
            )
            if of_layer and of_step:
                return where
        return None


def _derived(
    arch: Arch, data: Attention, layer: _Layer, *, decode: bool, fp8_pairs: bool, bounds: tuple[int, int] | None
) -> _Program:
    """Return the program that no measurement has decided; `bounds` of the lengths of queries and KV make it smaller."""
    most_rows = (layer.quantised and data.quantised_block_m) or data.block_m
    tokens = 1 if decode else max(1, most_rows // layer.group)
    most = data.fp8_pairs_block_n if fp8_pairs else data.block_n
    if bounds is not None:
        tokens, most = min(tokens, next_power_of_two(bounds[0])), min(most, next_power_of_two(bounds[1]))
    unquantised_stages = data.packed_stages if layer.packed else data.stages
    return _fitted(
        arch,
        data,
        tokens=tokens,
        group=layer.group,
        waves=data.quantised_waves if layer.quantised else data.waves,
        stages=(layer.quantised and data.quantised_stages) or unquantised_stages,
        packed=layer.packed,
        head_size=layer.head_size,
        element_bytes=layer.element_bytes,
        staged_bytes=layer.cache_bytes if fp8_pairs else layer.element_bytes,
        most=most,
    )


@functools.lru_cache(maxsize=4096)
def choose(
    arch: Arch,
    *,
    head_size: int,
    element_bytes: int,
    num_q_heads: int,
    num_kv_heads: int,
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    max_kv_len: int,
    num_splits: int | None,
    cache_bytes: int | None = None,
    packing: str = "rows",
    block_size: int = 1,
    windowed: bool = False,
    batch_invariant: bool = False,
) -> AttentionLaunch:
    """Return the launch of one paged-attention call; a pure function of shapes and of `tuning/<arch>.toml`.

    `element_bytes` is that of the operands of the products, `cache_bytes` that of what is read, if another.
    With `batch_invariant` the cache, heads, dtypes and phase (whether `max_query_len` is 1) decide everything but how
    many partitions of a fixed length there are, which is for `max_kv_len` to say.

    Raises:
        InvalidFileError: if the data ask for more registers or LDS than the arch has.
    """
    decode = max_query_len == 1
    tuned = tuning(arch.name)
    data = tuned.decode if decode else tuned.prefill
    layer = _Layer(
        head_size, element_bytes, cache_bytes or element_bytes, num_q_heads // num_kv_heads, packing, block_size
    )
    # What a sequence gets may not follow from a bound where the batch may not show.
    query_rows = NEVER if batch_invariant else max_query_len * layer.group
    programs = NEVER
    if not batch_invariant and num_splits is None:
        programs = query_tiles(num_tokens, num_seqs, 1, decode=decode) * num_kv_heads
    if arch.compiled and not decode and query_rows <= data.small_block_m:
        data = replace(data, block_m=data.small_block_m, quantised_block_m=0)
    measured = layer.measured(
        data,
        longest=NEVER if batch_invariant else max_kv_len,
        query_rows=query_rows,
        programs=programs // arch.compute_units,
    )
    fp8_pairs = measured is None and arch.fp8_pairs and decode and layer.quantised and not layer.packed
    fp8_pairs = fp8_pairs and element_bytes == 2
    if measured is not None:
        tokens = 1 if decode else measured.block_m // layer.group
        program = _Program(measured.block_n, measured.stages, measured.waves, tokens, 1, layer.group)
        data = replace(
            data,
            split_tokens=measured.split_tokens or data.split_tokens,
            programs_per_unit=measured.programs_per_unit or data.programs_per_unit,
        )
    else:
        bounds = None if arch.compiled or batch_invariant else (max_query_len, max_kv_len)
        program = _derived(arch, data, layer, decode=decode, fp8_pairs=fp8_pairs, bounds=bounds)
    tiles_per_split = 0
    if batch_invariant:
        # A window may begin at the last token of a tile.
        in_sight = max_kv_len + (program.block_n - 1 if windowed else 0)
        tiles_per_split, num_splits = _fixed_splits(data, program.block_n, in_sight)
    elif num_splits is None:
        tiles = live_tiles(num_tokens, num_seqs, max_query_len, program.block_q, decode=decode)
        num_splits = choose_splits(
            tiles * num_kv_heads * program.head_tiles,
            -(-max_kv_len // program.block_n),
            units=arch.compute_units,
            per_unit=data.programs_per_unit,
            fewest_tiles=max(1, data.split_tokens // program.block_n),
            at_once=tuned.reduce.block_splits,
        )
    waves = reading_waves(
        arch, tile=program.block_n, head_size=head_size, element_bytes=layer.cache_bytes, most=program.waves
    )
    if measured is not None:
        waves_per_eu, maxnreg = measured.waves_per_eu, measured.maxnreg
    else:
        channels = next_power_of_two(head_size)
        helps = program.block_n * channels <= 4096 * waves
        if arch.matrix == "wmma":
            helps = channels >= 256 or layer.quantised
        waves_per_eu, maxnreg = data.waves_per_eu if helps and element_bytes == 2 else 0, 0
    compiler_options = _compiler_options(arch, kpack=data.kpack, waves_per_eu=waves_per_eu, maxnreg=maxnreg)
    return AttentionLaunch(
        block_n=program.block_n,
        block_m=program.block_m,
        block_q=program.block_q,
        head_tiles=program.head_tiles,
        fp8_pairs=fp8_pairs,
        waves=waves,
        stages=program.stages,
        num_splits=num_splits,
        tiles_per_split=tiles_per_split,
        num_xcds=data.num_xcds,
        query_in_lds=query_in_lds(arch, program.block_m),
        pre_load_v=measured is not None and bool(measured.pre_load_v),
        load_k_by_token=measured is not None and bool(measured.load_k_by_token),
        compiler_options=tuple(compiler_options.items()),
    )


def _fixed_splits(data: Attention, tile: int, tokens: int) -> tuple[int, int]:
    """Return the tiles of a partition of fixed length, and how many partitions `tokens` tokens have."""
    tiles_per_split = max(1, data.fixed_split_tokens // tile)
    return tiles_per_split, min(-(-tokens // (tiles_per_split * tile)), FIXED_SPLITS)


def _compiler_options(arch: Arch, *, kpack: int, waves_per_eu: int, maxnreg: int) -> dict[str, int]:
    """Return the options of the compiler beyond waves and stages.

    On NVIDIA a measured launch may bound the registers. On AMD, MFMA of 16 rows whatever the tile: of 64 rows those of
    32 make two blocks for four waves, which compute Q.K twice. With registers bounded to those of two waves a SIMD
    products stay out of accumulation registers, to which and from which 72 of 470 instructions moved them in a loop.
    Where a tile of K is more than 8 KiB for a wave, or elements have four bytes, they would spill, and `choose` leaves
    the bound to the compiler. On RDNA it is the reverse: with 256 channels or codes that are decoded in software, the
    compiler of Triton 3.8 spills 7 to 48 registers for more waves than the five that a SIMD has room for, unless told.
    """
    if not arch.amd:
        return {"maxnreg": maxnreg} if maxnreg else {}
    return {"matrix_instr_nonkdim": 16, "kpack": kpack, "waves_per_eu": waves_per_eu}


def query_tiles(num_tokens: int, num_seqs: int, tokens: int, *, decode: bool) -> int:
    """Return how many query tiles a launch needs without looking at the lengths.

    In decode a program takes one sequence. Otherwise sequence `s` owns the tiles from
    `query_start_loc[s] // tokens + s` on: at least `ceil(query_len / tokens)` of them whatever the lengths, and
    `num_tokens // tokens + num_seqs` in all.
    """
    return num_seqs if decode else num_tokens // tokens + num_seqs


def live_tiles(num_tokens: int, num_seqs: int, max_query_len: int, tokens: int, *, decode: bool) -> int:
    """Return how many of the `query_tiles` can have a query; the programs of the others end at once."""
    tiles = query_tiles(num_tokens, num_seqs, tokens, decode=decode)
    return tiles if decode else min(tiles, num_seqs * -(-max_query_len // tokens))


def bound(length: int) -> int:
    """Return an upper bound of a length that few lengths share: of every power of two the eighths up to the next.

    A launch follows from the bound and not from the length, so calls of a growing sequence look alike.
    """
    if length <= 64:
        return length
    step = next_power_of_two(length) // 16
    return -(-length // step) * step


def bound_of_queries(length: int) -> int:
    """Return an upper bound of a query length that few lengths share: a power of two; 1 for a decode step."""
    return next_power_of_two(length) if length > 1 else length
