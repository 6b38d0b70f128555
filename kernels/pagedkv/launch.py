# SPDX-License-Identifier: Apache-2.0
"""Launch data: the tables of `tuning/<arch>.toml` as dataclasses, for the launches of each operation."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from importlib import resources
from typing import get_type_hints

from pagedkv import toml
from pagedkv.arch import limits, next_power_of_two

LARGEST_CHUNK = 1024
"""Tokens of a chunk of Mamba-2's scan."""


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
    pair_tokens: int
    """Likewise where codes are read in pairs."""
    tiles_at_least: int
    """Least number of tiles (of 32 tokens or more) per sequence: half of the tile at the causal diagonal is wasted."""
    waves: int
    quantised_waves: int
    """Likewise where the cache is quantised: with fewer, each decodes more of a tile and waits less for the others."""
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
    kpack: int
    """As in `Mla`."""
    quantised_rows: int = 0
    """`rows` where the cache is quantised: decoded tiles take registers; 0 is no other number."""
    quantised_stages: int = 0
    """Stages where the cache is quantised; 0 takes those of the packing."""
    waves_per_eu: int = 0
    """AMD: waves of a SIMD that registers shall suffice for, of elements of two bytes; 0 leaves it to the compiler."""


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
    kpack: int
    """AMD: how many operands of MFMA are read from LDS at once, 2 before gfx950 and 1 there. Elsewhere unused."""
    fixed_tokens: int = 0
    """What a work item costs whatever its length, as the KV tokens that take as long."""
    quantised_tokens: int = 0
    """`tokens` where the cache is quantised; 0 is no other number."""
    quantised_stages: int = 0
    """Likewise."""
    wide_addresses: int = 0
    """AMD: 1 addresses a cache below 2 GiB with 64 bits too, where a program has `rows` rows. With 32 bits of buffer
    loads the compiler keeps more in registers than it has, and spills."""


@dataclass(frozen=True)
class MlaReduce:
    """How the reduce of MLA decode is launched; extents are powers of two."""

    rows: int
    """(token, head) rows of one program."""
    channels: int
    chunk: int
    """Partial results that one program loads at once."""
    waves: int


@dataclass(frozen=True)
class ChunkScan:
    """How the last step of a chunked scan is launched; extents are powers of two."""

    rows: int
    """Most tokens of one program, at least 16."""
    tile: int
    """Most tokens of one tile of products, at least 16."""
    channels: int
    """Most channels of one program, at least 16."""
    state_tile: int
    """Most elements of the state's last axis that are loaded at once, at least 16."""
    waves: int
    stages: int
    kpack: int
    """As in `Mla`."""
    long_tile: int = 0
    """`tile` of a head that does not fill a program and has fewer channels than state: there a larger one costs one of
    four programs a compute unit (H200). 0 is no other number."""

    def of(self, head_size: int, state: int, chunk_size: int = LARGEST_CHUNK) -> ChunkScan:
        """What a layer is launched with: nothing larger than it has."""
        rows = min(self.rows, chunk_size)
        channels = min(self.channels, max(16, next_power_of_two(head_size)))
        return replace(
            self,
            rows=rows,
            tile=min((state > channels < self.channels and self.long_tile) or self.tile, rows),
            channels=channels,
            state_tile=min(self.state_tile, max(16, next_power_of_two(state))),
        )


@dataclass(frozen=True)
class Tuning:
    """`tuning/<arch>.toml`."""

    write: Write
    gather: Gather
    reduce: Reduce
    decode: Attention
    decode_native: Attention
    """Where blocks of packing `native` hold at least a tile of it; what a file does not say is as in `decode`."""
    prefill: Attention
    prefill_large: Attention
    """Likewise, where blocks of packing `rows` do and queries fill its rows; as `prefill`."""
    mla: Mla
    mla_narrow: Mla
    """Where one token has at most 16 heads."""
    mla_reduce: MlaReduce
    scan: ChunkScan


def parse(text: str, where: str) -> Tuning:
    """Read a tuning file; every number is at least 1.

    Raises:
        InvalidFileError: if it is not TOML or its keys or values are not those of `Tuning`.
    """
    kinds = get_type_hints(Tuning)
    data = toml.parse(where, text, kinds, every=True)
    for name, base in (("decode_native", data["decode"]), ("prefill_large", data["prefill"])):
        if isinstance(base, dict) and isinstance(data[name], dict):
            data[name] = base | data[name]
    return Tuning(**{name: toml.entry(f"{where} [{name}]", data[name], kind, least=1) for name, kind in kinds.items()})


@functools.cache
def tuning(arch: str) -> Tuning:
    """Return the tuning data of an arch.

    Raises:
        UnsupportedArchError: if there is none.
        InvalidFileError: if its file is wrong.
    """
    limits(arch)
    file = resources.files("pagedkv") / "tuning" / f"{arch}.toml"
    return parse(file.read_text(encoding="utf-8"), f"pagedkv/tuning/{arch}.toml")
