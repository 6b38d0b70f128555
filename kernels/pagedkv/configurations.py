# SPDX-License-Identifier: Apache-2.0
"""Configurations that CI promises to support: one list, as data, for the tests and for the code-object audit.

The block sizes are those engines really choose: 16 by default; 544, 784, 1056 and 2048 where the attention page of a
hybrid model is rounded up to its Mamba state (Qwen3-Next, Qwen3.5, Jamba); 48 as the smallest that is no power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagedkv.fp8.formats import FormatName

    from .layout import Name

Op = Literal["write", "gather", "attention", "merge"]
Phase = Literal["copy", "decode", "extend", "prefill"]
Dtype = Literal["float32", "float16", "bfloat16"]
Scales = Literal["tensor", "head", "token"]


BLOCKS = (
    16,
    48,
    80,
    144,
    160,
    208,
    272,
    400,
    416,
    528,
    544,
    784,
    800,
    1040,
    1056,
    1072,
    1568,
    1584,
    2048,
    2080,
    2096,
    2144,
)
"""Tokens of a block, as published hybrids get them on 1, 2, 4 and 8 ranks with a cache in their own dtype or in FP8,
and two that users have met: tests/kernels/routing holds them against the models' configs."""


@dataclass(frozen=True)
class Configuration:
    """One promised case of one operation."""

    op: Op
    phase: Phase
    """`copy` for all but attention. Of attention: one query token a sequence, several with context, several without."""
    dtype: Dtype
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    layout: Name
    window: int | None = None
    """Sliding window in tokens."""
    causal: bool = True
    splits: int | None = None
    """Split-KV partitions; None lets the tuning data decide."""
    quantised: FormatName | None = None
    """FP8 format of the cache; `dtype` is then that of the query, or of what is written or gathered."""
    scales: Scales = "tensor"
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    """Whether the sums of exponentials are asked for too."""
    batch_invariant: bool = False

    @property
    def id(self) -> str:
        """A name to paste back: op-phase-dtype-heads-head_size-block_size-layout and what is special."""
        special = [f"w{self.window}"] if self.window else []
        special += [] if self.causal else ["full"]
        special += [f"s{self.splits}"] if self.splits else []
        special += [f"{self.quantised}-{self.scales}"] if self.quantised else []
        special += [f"cap{self.softcap:g}"] if self.softcap else []
        special += [name for name in ("alibi", "sinks", "lse", "batch_invariant") if getattr(self, name)]
        name = (
            f"{self.op}-{self.phase}-{self.dtype}-q{self.num_q_heads}kv{self.num_kv_heads}"
            f"-d{self.head_size}-bs{self.block_size}-{self.layout}"
        )
        return "-".join([name, *special])


def _copies(op: Op) -> tuple[Configuration, ...]:
    rows: tuple[tuple[Dtype, int, int, int, Name], ...] = (
        ("float16", 2, 80, 784, "interleaved"),
        ("float16", 2, 80, 784, "native-interleaved"),
        ("bfloat16", 8, 128, 16, "native"),
        ("float32", 3, 20, 48, "native"),
        ("bfloat16", 8, 128, 16, "shuffle"),
        ("float16", 5, 192, 544, "shuffle-interleaved"),
        ("float32", 2, 576, 16, "hnd"),
        ("float16", 1, 18, 48, "packed"),
        ("bfloat16", 2, 128, 784, "interleaved"),
        ("bfloat16", 8, 128, 16, "packed"),
        ("bfloat16", 4, 256, 544, "interleaved"),
        ("float16", 3, 96, 48, "hnd"),
        ("float32", 1, 40, 16, "nhd"),
        ("bfloat16", 1, 64, 2048, "interleaved"),
        ("float16", 5, 192, 1056, "packed"),
        ("float32", 8, 64, 16, "nhd"),
    )
    return tuple(
        Configuration(op, "copy", dtype, heads, heads, head_size, block_size, layout)
        for dtype, heads, head_size, block_size, layout in rows
    )


def _attention(phase: Phase) -> tuple[Configuration, ...]:
    """Attention over the shapes of published models, in one phase."""
    rows: tuple[tuple[Dtype, int, int, int, int, Name], ...] = (
        ("float16", 16, 2, 256, 544, "interleaved"),
        ("bfloat16", 16, 2, 256, 544, "interleaved"),
        ("bfloat16", 32, 8, 128, 16, "nhd"),
        ("bfloat16", 32, 8, 128, 784, "interleaved"),
        ("float16", 6, 2, 80, 48, "packed"),
        ("float16", 8, 8, 64, 2048, "interleaved"),
        ("float32", 7, 1, 96, 16, "hnd"),
        ("float32", 4, 2, 160, 1056, "interleaved"),
        ("float16", 10, 2, 112, 784, "interleaved"),
        ("bfloat16", 24, 8, 192, 16, "packed"),
        ("float32", 4, 4, 40, 16, "nhd"),
        ("float16", 3, 3, 32, 48, "nhd"),
        ("bfloat16", 32, 8, 128, 16, "native"),
        ("float16", 6, 2, 80, 784, "native-interleaved"),
        ("bfloat16", 16, 2, 256, 544, "native-interleaved"),
        ("bfloat16", 32, 8, 128, 16, "shuffle"),
        ("float16", 16, 2, 256, 1056, "shuffle-interleaved"),
        ("float32", 4, 2, 64, 48, "shuffle-interleaved"),
    )
    return tuple(
        Configuration("attention", phase, dtype, q_heads, kv_heads, head_size, block_size, layout)
        for dtype, q_heads, kv_heads, head_size, block_size, layout in rows
    )


def _special() -> tuple[Configuration, ...]:
    """Attention with windows, splits, soft caps and other options."""

    def case(phase: Phase, dtype: Dtype, block_size: int, layout: Name, **more: object) -> Configuration:
        return Configuration("attention", phase, dtype, 8, 2, 64, block_size, layout, **more)  # type: ignore[arg-type]

    return (
        case("decode", "float16", 48, "interleaved", window=50),
        case("extend", "float32", 48, "interleaved", window=50),
        case("extend", "bfloat16", 16, "packed", window=33),
        case("decode", "bfloat16", 784, "interleaved", window=100),
        case("prefill", "float32", 16, "nhd", window=7),
        case("decode", "float32", 16, "interleaved", splits=5),
        case("decode", "bfloat16", 784, "interleaved", splits=7),
        case("extend", "float16", 48, "packed", splits=3),
        case("decode", "float16", 48, "packed", window=50, splits=3),
        case("prefill", "float32", 48, "packed", causal=False),
        case("extend", "bfloat16", 16, "nhd", causal=False),
        case("decode", "float16", 784, "interleaved", causal=False),
        case("decode", "float16", 48, "native-interleaved", window=50, splits=3),
        case("extend", "float32", 48, "shuffle", window=50),
        case("decode", "float32", 48, "interleaved", softcap=5.0),
        case("extend", "bfloat16", 16, "packed", softcap=5.0),
        case("decode", "float32", 48, "interleaved", alibi=True),
        case("decode", "bfloat16", 16, "packed", alibi=True, splits=3),
        case("prefill", "float32", 48, "packed", alibi=True),
        case("extend", "float16", 16, "interleaved", alibi=True),
        case("decode", "float32", 48, "interleaved", sinks=True),
        case("decode", "bfloat16", 16, "packed", sinks=True, splits=3, window=50),
        case("extend", "float32", 48, "nhd", sinks=True, splits=3),
        case("extend", "float16", 48, "shuffle-interleaved", sinks=True, softcap=5.0, alibi=True, window=50),
        case("decode", "float32", 16, "interleaved", lse=True),
        case("decode", "float32", 16, "interleaved", lse=True, splits=3, sinks=True),
        case("extend", "bfloat16", 16, "nhd", lse=True, causal=False),
        case("decode", "float32", 16, "interleaved", batch_invariant=True),
        case("decode", "bfloat16", 784, "interleaved", batch_invariant=True, window=100, sinks=True),
        case("extend", "float16", 48, "packed", batch_invariant=True),
        case("decode", "float16", 48, "packed", quantised="e4m3fn"),
        case("decode", "bfloat16", 784, "interleaved", quantised="e4m3fnuz", scales="head"),
        case("extend", "float16", 48, "interleaved", quantised="e5m2", scales="head"),
        case("decode", "float32", 48, "interleaved", quantised="e4m3fnuz", scales="token"),
        case("extend", "bfloat16", 16, "packed", quantised="e4m3fn", scales="token"),
        case("decode", "float16", 16, "native-interleaved", quantised="e4m3fn"),
        case("decode", "float16", 16, "shuffle", quantised="e4m3fnuz", scales="head", splits=3),
    )


def _merges() -> tuple[Configuration, ...]:
    """A merge knows no cache: block size and layout say nothing here."""
    rows: tuple[tuple[Dtype, int, int, bool], ...] = (
        ("bfloat16", 32, 128, False),
        ("float16", 10, 80, True),
        ("float32", 7, 256, True),
    )
    return tuple(
        Configuration("merge", "copy", dtype, heads, heads, head_size, 16, "nhd", lse=lse)
        for dtype, heads, head_size, lse in rows
    )


def _quantised_copies(op: Op) -> tuple[Configuration, ...]:
    rows: tuple[tuple[Dtype, int, int, Name, FormatName, Scales], ...] = (
        ("float16", 64, 48, "packed", "e4m3fn", "tensor"),
        ("bfloat16", 128, 16, "interleaved", "e4m3fnuz", "head"),
        ("float32", 80, 48, "interleaved", "e5m2", "token"),
        ("float16", 64, 16, "native-interleaved", "e4m3fnuz", "tensor"),
        ("float32", 128, 16, "shuffle", "e4m3fn", "head"),
        ("float16", 96, 16, "shuffle-interleaved", "e4m3fnuz", "token"),
    )
    return tuple(
        Configuration(op, "copy", dtype, 3, 3, head_size, block_size, layout, quantised=kind, scales=scales)
        for dtype, head_size, block_size, layout, kind, scales in rows
    )


def _quantised_attention(phase: Phase) -> tuple[Configuration, ...]:
    """Serving shapes: as large as heads and tiles get, with decoding in registers on top."""
    return tuple(
        Configuration("attention", phase, dtype, q_heads, kv_heads, head_size, block_size, layout, **kind)  # type: ignore[arg-type]
        for dtype, q_heads, kv_heads, head_size, block_size, layout, kind in (
            ("bfloat16", 32, 8, 128, 16, "shuffle", {"quantised": "e4m3fnuz", "scales": "head"}),
            ("float16", 16, 2, 256, 544, "interleaved", {"quantised": "e4m3fn", "scales": "tensor"}),
            ("bfloat16", 32, 8, 128, 784, "packed", {"quantised": "e4m3fnuz", "scales": "token"}),
            ("bfloat16", 32, 8, 128, 784, "native-interleaved", {"quantised": "e5m2", "scales": "tensor"}),
        )
    )


CONFIGURATIONS: tuple[Configuration, ...] = (
    *_copies("write"),
    *_copies("gather"),
    *_quantised_copies("write"),
    *_quantised_copies("gather"),
    *_attention("decode"),
    *_attention("extend"),
    *_attention("prefill"),
    *_special(),
    *_quantised_attention("decode"),
    *_quantised_attention("prefill"),
    *_merges(),
)
"""Every promised case."""


def promised(op: Op) -> tuple[Configuration, ...]:
    """Return the promised cases of one operation."""
    return tuple(c for c in CONFIGURATIONS if c.op == op)
