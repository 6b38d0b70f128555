"""What the tables [write], [gather], [reduce], [decode] and [prefill] of `tuning/<arch>.toml` say."""

from __future__ import annotations

from dataclasses import dataclass


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
