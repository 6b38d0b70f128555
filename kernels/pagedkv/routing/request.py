# SPDX-License-Identifier: Apache-2.0
"""Request of one attention layer, validated, and the layout of its cache that all its kernels must serve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from pagedkv.arch import ARCHES
from pagedkv.errors import CommandError, Exit
from pagedkv.layout import PACKINGS, Packing, vector_elements

Sides = Literal["planes", "interleaved"]
Phase = Literal["decode", "extend", "prefill", "mixed"]
Dtype = Literal["float32", "float16", "bfloat16"]
KvCacheDtype = Literal["auto", "e4m3fn", "e4m3fnuz", "e5m2"]
KvScales = Literal["none", "unit", "tensor", "head", "token"]
AttnType = Literal["decoder", "encoder", "encoder_only", "encoder_decoder"]

ELEMENT_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class RequestError(CommandError):
    """A field of a request has a value that no attention layer has, or contradicts another field.

    Attributes:
        field: Its name.
        got: Its value.
        expected: What it may be.
        remedy: What it contradicts, or what to do; may be empty.
    """

    exit_status = Exit.MISUSE

    def __init__(self, field: str, *, got: object, expected: str, remedy: str = "") -> None:
        self.field, self.got, self.expected, self.remedy = field, got, expected, remedy
        super().__init__(f"{field}: got {got!r}; expected {expected}." + (f" {remedy}" if remedy else ""))


@dataclass(frozen=True)
class CacheLayout:
    """The cache of one layer: `num_blocks` blocks of K and as many of V."""

    packing: Packing
    """Axes of a block, see `pagedkv.layout`."""
    sides: Sides
    """`planes`: all blocks of K, then all of V. `interleaved`: K and V of a block lie side by side, as in every pool
    that attention shares with Mamba."""
    block_size: int
    """Tokens."""
    num_kv_heads: int
    head_size: int
    element_bytes: int

    @property
    def has_native_kv_cache_layout(self) -> bool:
        """Whether the blocks of K follow each other without a gap, and those of V too (vLLM PR 38502)."""
        return self.sides == "planes"

    def __str__(self) -> str:
        return f"{self.packing}, {self.sides}, {self.block_size} tokens a block"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One attention layer on one arch. Counts are those of one rank.

    Raises:
        RequestError: a field has an impossible value or contradicts another.
    """

    arch: str
    phase: Phase
    """What will be asked of the layer; `mixed` is all of it, which is what a server does."""
    head_size: int
    num_q_heads: int
    num_kv_heads: int
    dtype: Dtype
    kv_cache_dtype: KvCacheDtype
    """`auto` is `dtype`."""
    kv_scales: KvScales = "none"
    """Scales of an FP8 cache: all 1, per tensor, per KV head, or per token and KV head."""
    block_size: int
    packing: Packing
    sides: Sides
    window: int | None = None
    """Keys a query may see, itself included."""
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    scale: float | None = None
    """Factor on the logits; None is 1/sqrt(head_size)."""
    q_len: int = 1
    """Most query tokens of a sequence in a decode step: 1, or 1 + speculated tokens."""
    causal: bool = True
    attn_type: AttnType = "decoder"
    max_num_seqs: int
    """Most sequences of a batch. A route never depends on how many there are."""
    max_seq_len: int
    """Longest sequence, in tokens."""
    num_blocks: int | None = None
    """Blocks of the pool; None is not known yet, and a kernel with a limit on it is then not chosen."""

    def __post_init__(self) -> None:
        for field, allowed in _WORDS.items():
            if getattr(self, field) not in allowed:
                raise RequestError(field, got=getattr(self, field), expected=f"one of {', '.join(allowed)}")
        for field in _COUNTS:
            value = getattr(self, field)
            absent = value is None and field in {"window", "num_blocks"}
            if not absent and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise RequestError(field, got=value, expected="an integer >= 1")
        for field in ("softcap", "scale"):
            value = getattr(self, field)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise RequestError(field, got=value, expected="None or a finite number > 0")
        for field in ("alibi", "sinks", "causal"):
            if not isinstance(getattr(self, field), bool):
                raise RequestError(field, got=getattr(self, field), expected="True or False")
        vector = vector_elements(self.layout.element_bytes)
        whole_vectors, take_rows = f"a multiple of {vector}", "Take packing 'rows', which has no such bound."
        quantised, packed = self.kv_cache_dtype != "auto", self.packing != "rows"
        scales = "unit, tensor, head or token" if quantised else "none"
        name_scales = f"Name the scales that a KV cache of {self.kv_cache_dtype} has."
        contradictions = (
            (
                self.num_q_heads % self.num_kv_heads,
                "num_q_heads",
                f"a multiple of num_kv_heads {self.num_kv_heads}",
                "",
            ),
            ((self.kv_scales == "none") == quantised, "kv_scales", scales, name_scales),
            (packed and self.head_size % vector, "head_size", whole_vectors, take_rows),
            (self.packing == "shuffle" and self.block_size % vector, "block_size", whole_vectors, take_rows),
            (self.window is not None and not self.causal, "window", "None where causal is False", ""),
            (self.attn_type != "decoder" and self.causal, "causal", f"False for attention type {self.attn_type}", ""),
        )
        for wrong, field, expected, remedy in contradictions:
            if wrong:
                raise RequestError(field, got=getattr(self, field), expected=expected, remedy=remedy)

    @property
    def layout(self) -> CacheLayout:
        """The cache of the layer, from which every kernel of a route is chosen."""
        element = 1 if self.kv_cache_dtype != "auto" else ELEMENT_BYTES[self.dtype]
        return CacheLayout(self.packing, self.sides, self.block_size, self.num_kv_heads, self.head_size, element)

    @property
    def custom_scale(self) -> float | None:
        """The scale, where it is another than 1/sqrt(head_size) to float32 precision."""
        usual = self.scale is None or math.isclose(self.scale, self.head_size**-0.5, rel_tol=2**-24)
        return None if usual else self.scale


_WORDS: dict[str, tuple[str, ...]] = {
    "arch": tuple(ARCHES),
    "phase": get_args(Phase),
    "dtype": get_args(Dtype),
    "kv_cache_dtype": get_args(KvCacheDtype),
    "kv_scales": get_args(KvScales),
    "packing": PACKINGS,
    "sides": get_args(Sides),
    "attn_type": get_args(AttnType),
}
_COUNTS = (
    *("head_size", "num_q_heads", "num_kv_heads", "block_size", "q_len", "max_num_seqs", "max_seq_len"),
    *("window", "num_blocks"),
)
