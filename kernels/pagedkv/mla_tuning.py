"""What the tables [mla], [mla_narrow] (at most 16 rows) and [mla_reduce] of `tuning/<arch>.toml` say."""

from __future__ import annotations

from dataclasses import dataclass


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
