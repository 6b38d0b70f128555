"""Launch configurations: data in `tuning/<arch>.toml`, turned into a launch by pure functions.

What the tables [write], [gather], [reduce], [decode] and [prefill] of `tuning/<arch>.toml` say.

What the tables [mla], [mla_narrow] (at most 16 rows) and [mla_reduce] of `tuning/<arch>.toml` say.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from pagedkv.arch import limits, next_power_of_two, reading_waves, tile_tokens

if TYPE_CHECKING:
    from pagedkv.arch import Arch


class TuningError(ValueError):
    """A tuning file lacks a key, has an unknown one, holds a wrong value, or asks for more than the arch has."""


@dataclass(frozen=True)
class Tuning:
    """`tuning/<arch>.toml`."""

    write: Write
    gather: Gather
    reduce: Reduce
    decode: Attention
    prefill: Attention
    mla: Mla
    mla_narrow: Mla
    """Where one token has at most 16 heads."""
    mla_reduce: MlaReduce


@dataclass(frozen=True)
class AttentionLaunch:
    """What one call of paged attention launches; all of it compile-time constants but `splits`."""

    tile: int
    """KV tokens of a tile."""
    rows: int
    """Query rows of a program, a power of two >= 16."""
    tokens: int
    """Query tokens of a program (1 in decode)."""
    seqs: int
    heads: int
    """KV heads of a program; divides num_kv_heads."""
    waves: int
    stages: int
    splits: int
    split_tiles: int
    """Tiles of a partition; 0 where partitions share the tiles of each sequence equally."""


def _section(kind: type, where: str, values: object) -> Any:
    names = set(kind.__dataclass_fields__)
    if not isinstance(values, dict) or set(values) != names:
        got = sorted(values) if isinstance(values, dict) else values
        raise TuningError(f"{where}: got {got}; expected exactly the keys {sorted(names)}")
    wrong = {key: value for key, value in values.items() if type(value) is not int or value < 1}
    if wrong:
        raise TuningError(f"{where}: got {wrong}; expected integers >= 1")
    return kind(**values)


def parse(text: str, where: str) -> Tuning:
    """Read a tuning file.

    Raises:
        TuningError: if it is not TOML or its keys or values are not those of `Tuning`.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TuningError(f"{where}: {error}") from error
    kinds = {"write": Write, "gather": Gather, "reduce": Reduce, "decode": Attention, "prefill": Attention}
    kinds |= {"mla": Mla, "mla_narrow": Mla, "mla_reduce": MlaReduce}
    if set(data) != set(kinds):
        raise TuningError(f"{where}: got the tables {sorted(data)}; expected exactly {sorted(kinds)}")
    return Tuning(**{name: _section(kind, f"{where} [{name}]", data[name]) for name, kind in kinds.items()})


@functools.cache
def tuning(arch: str) -> Tuning:
    """Return the tuning data of an arch.

    Raises:
        UnsupportedArchError: if there is none.
        TuningError: if its file is wrong.
    """
    limits(arch)
    file = resources.files("pagedkv") / "tuning" / f"{arch}.toml"
    return parse(file.read_text(encoding="utf-8"), f"pagedkv/tuning/{arch}.toml")


def power_of_two_divisor(n: int, most: int) -> int:
    """Return the largest power of two that divides n and is at most `most` (>= 1)."""
    return min(n & -n, 1 << (most.bit_length() - 1))


def choose_splits(programs: int, max_tiles: int, *, units: int, per_unit: int, fewest_tiles: int) -> int:
    """Return into how many partitions the KV of every sequence is split.

    About as many as fill `units * per_unit` places with programs, and no more than leaves `fewest_tiles` tiles to a
    partition of the longest sequence. Rounded down where that still fills three quarters of the places: the few
    programs that do not find one would cost a whole round more (H200, batch 1, 32k tokens: 49 partitions make 392
    programs for 396 places and take 41.2 us; 50 make 400 and take 46.1 us). It depends on shapes and on the bound of
    the lengths alone, so a captured graph stays valid.
    """
    places = units * per_unit
    fewer = places // max(programs, 1)
    wanted = fewer if 4 * programs * fewer >= 3 * places else fewer + 1
    return max(1, min(wanted, max_tiles // fewest_tiles, 128))


def _tile_and_stages(arch: Arch, data: Attention, most_stages: int, **shape: int) -> tuple[int, int]:
    """Return tile and stages: those wanted if 16 tokens fit, else with a lower occupancy, else with fewer stages."""
    for stages in range(most_stages, 0, -1):
        for occupancy in range(data.occupancy, 0, -1):
            if tile := tile_tokens(arch, **shape, waves=data.waves, stages=stages, occupancy=occupancy):
                return tile, stages
    return 0, 0


@functools.lru_cache(maxsize=4096)
def attention(
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
    packed: bool = False,
    windowed: bool = False,
    batch_invariant: bool = False,
) -> AttentionLaunch:
    """Return the launch of one paged-attention call; a pure function of shapes and of `tuning/<arch>.toml`.

    `element_bytes` is that of the operands of the products, `cache_bytes` that of what is read, if another;
    `packed` says that the packing of the cache is not `rows`.
    With `batch_invariant` heads, dtypes and phase (whether `max_query_len` is 1) decide everything but how many
    partitions of a fixed length there are, which is for `max_kv_len` to say.

    Raises:
        TuningError: if the data ask for more registers or LDS than the arch has.
    """
    decode = max_query_len == 1
    data = tuning(arch.name).decode if decode else tuning(arch.name).prefill
    group = num_q_heads // num_kv_heads
    heads = power_of_two_divisor(num_kv_heads, data.heads)
    seqs = 1 if batch_invariant or not decode else min(data.seqs, next_power_of_two(num_seqs))
    tokens, most = 1 if decode else max(1, data.rows // (group * heads)), data.tokens
    if not batch_invariant:
        longest = next_power_of_two(max_kv_len)
        tokens = min(tokens, next_power_of_two(max_query_len))
        most = min(most, longest, max(32, longest // data.tiles_at_least))
    while True:
        rows = max(16, next_power_of_two(tokens * seqs * group * heads))
        tile, stages = _tile_and_stages(
            arch,
            data,
            data.packed_stages if packed else data.stages,
            packed=packed,
            rows=rows,
            columns=heads * seqs,
            head_size=head_size,
            element_bytes=element_bytes,
            most=most,
        )
        if tile:
            break
        if seqs > 1:
            seqs //= 2
        elif heads > 1:
            heads //= 2
        elif tokens > 1:
            tokens //= 2
        else:
            raise TuningError(
                f"pagedkv/tuning/{arch.name}.toml: {rows} rows of {head_size} channels and a tile of 16 tokens do not "
                f"fit {arch.name} with {data}. Use more waves."
            )
    split_tiles = 0
    if batch_invariant:
        split_tiles = max(1, data.fixed_split_tokens // tile)
        # A window may begin at the last token of a tile.
        num_splits = -(-(max_kv_len + (tile - 1 if windowed else 0)) // (split_tiles * tile))
    elif num_splits is None:
        programs = query_tiles(num_tokens, num_seqs, tokens, seqs, decode=decode) * (num_kv_heads // heads)
        num_splits = choose_splits(
            programs,
            -(-max_kv_len // tile),
            units=arch.compute_units,
            per_unit=data.programs_per_unit,
            fewest_tiles=max(1, data.split_tokens // tile),
        )
    read = cache_bytes or element_bytes
    waves = reading_waves(arch, tile=tile, head_size=head_size, element_bytes=read, most=data.waves)
    return AttentionLaunch(tile, rows, tokens, seqs, heads, waves, stages, num_splits, split_tiles)


def query_tiles(num_tokens: int, num_seqs: int, tokens: int, seqs: int, *, decode: bool) -> int:
    """Return how many query tiles a launch needs without looking at the lengths.

    In decode a program takes `seqs` sequences. Otherwise sequence `s` owns the tiles from
    `query_start_loc[s] // tokens + s` on: at least `ceil(query_len / tokens)` of them whatever the lengths, and
    `num_tokens // tokens + num_seqs` in all.
    """
    return -(-num_seqs // seqs) if decode else num_tokens // tokens + num_seqs


@dataclass(frozen=True)
class Write:
    """How a write is launched."""

    rows: int
    """Head rows that one program handles, a power of two."""
    slice: int
    """Channels of a program that writes into a packed cache, a power of two; it takes as many tokens more."""
    waves: int


@dataclass(frozen=True)
class Gather:
    """How a gather is launched."""

    rows: int
    """Head rows, from a packed cache tokens, that one program handles; a power of two."""
    waves: int


@dataclass(frozen=True)
class Reduce:
    """How the split-KV reduce is launched."""

    rows: int
    """(token, head) rows of one program, a power of two."""
    chunk: int
    """Partitions that one program loads at once, a power of two."""
    waves: int


@dataclass(frozen=True)
class Attention:
    """How attention is launched in one phase (decode: one query token a sequence; prefill: more)."""

    rows: int
    """Most query rows (tokens times heads) of one program, a power of two >= 16; one token's heads may exceed it."""
    tokens: int
    """Most KV tokens of one tile; fewer where LDS or registers say so."""
    tiles_at_least: int
    """Tiles, of 32 tokens and more, that the longest sequence shall fill: half of one at the diagonal is lost."""
    waves: int
    stages: int
    packed_stages: int
    """Likewise where K and V are packed: more loads of a tile, with addresses of their own, are in flight there."""
    occupancy: int
    """Programs that shall fit one compute unit."""
    heads: int
    """Most KV heads of one program."""
    seqs: int
    """Most sequences of one program (decode only)."""
    split_tokens: int
    """Fewest KV tokens worth a partition of their own."""
    programs_per_unit: int
    """Programs per compute unit below which the KV is split."""
    fixed_split_tokens: int
    """KV tokens of a partition where the split may not depend on the batch."""


@dataclass(frozen=True)
class Mla:
    """How MLA decode is launched."""

    rows: int
    """Most (token, head) rows of one program, a power of two >= 16."""
    tokens: int
    """Most KV tokens of one tile, a power of two >= 16; fewer where LDS or registers say so."""
    waves: int
    stages: int
    programs_per_unit: int
    """Programs that shall fit one compute unit; the grid has as many."""
    split_tokens: int
    """Fewest KV tokens worth a program of their own."""
    fixed_tokens: int
    """What a work item costs whatever its length, as the KV tokens that take as long."""
    kpack: int
    """AMD: how many operands of MFMA are read from LDS at once, 2 before gfx950 and 1 there. Elsewhere unused."""


@dataclass(frozen=True)
class MlaReduce:
    """How the reduce of MLA decode is launched; extents are powers of two."""

    rows: int
    """(token, head) rows of one program."""
    channels: int
    chunk: int
    """Partial results that one program loads at once."""
    waves: int
