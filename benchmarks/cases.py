"""What is measured, as data: shapes, layout, peer and goal of each case, and the bytes and operations it costs."""

from __future__ import annotations

import dataclasses
from typing import Literal

Op = Literal["decode", "prefill", "gather", "write"]
Yardstick = Literal["read", "copy", "matmul"]

YARDSTICKS: dict[Op, Yardstick] = {"decode": "read", "prefill": "matmul", "gather": "copy", "write": "copy"}
"""What bounds an operation: decode reads the cache, gather and write copy it, prefill multiplies matrices."""

UNIFIED = "kernel_unified_attention"
PAGED_2D = "kernel_paged_attention_2d"
GATHER = "cp_mha_gather_cache"
WRITE = "triton_reshape_and_cache_flash"


@dataclasses.dataclass(frozen=True)
class Goal:
    """When a case counts as good enough; every condition given must hold."""

    ratio: float = 1.0
    """Least peer time / our time."""
    fraction: float | None = None
    """Least fraction of the measured yardstick."""
    like: str | None = None
    """Name of an earlier case: our time at most 5 % above ours there (same bytes, another layout)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table. All sequences of a case are alike."""

    name: str
    op: Op
    num_seqs: int
    seq_len: int
    """Tokens of a sequence in the cache, those of this step included."""
    query_len: int = 1
    block_size: int = 16
    layout: str = "nhd"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    peer: str = UNIFIED
    goal: Goal = Goal()

    @property
    def yardstick(self) -> Yardstick:
        """The measured rate of this machine that bounds the case."""
        return YARDSTICKS[self.op]

    def cache_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of K and V of all sequences, each counted once."""
        return 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_size * element_bytes

    def bytes_moved(self, element_bytes: int = 2) -> int:
        """Fewest bytes the operation moves: each input read once, each output written once; indices are not counted."""
        if self.op in {"gather", "write"}:
            return 2 * self.cache_bytes(element_bytes)
        queries = self.num_seqs * self.query_len * self.num_q_heads * self.head_size * element_bytes
        return self.cache_bytes(element_bytes) + 2 * queries

    def flops(self) -> int:
        """Floating-point operations of the two products over the (query, key) pairs that the causal mask leaves."""
        if self.op in {"gather", "write"}:
            return 0
        context = self.seq_len - self.query_len
        pairs = self.query_len * context + self.query_len * (self.query_len + 1) // 2
        return 4 * self.num_seqs * pairs * self.num_q_heads * self.head_size


def _decode(name: str, num_seqs: int, seq_len: int, goal: Goal, **more: object) -> Case:
    return Case(name=f"decode {name}", op="decode", num_seqs=num_seqs, seq_len=seq_len, goal=goal, **more)


CASES: tuple[Case, ...] = (
    _decode("bs1 8k", 1, 8192, Goal(ratio=3)),
    _decode("bs1 32k", 1, 32768, Goal(ratio=3)),
    _decode("bs8 8k", 8, 8192, Goal(fraction=0.8)),
    _decode("bs32 4k", 32, 4096, Goal(fraction=0.8)),
    _decode("bs64 8k", 64, 8192, Goal(fraction=0.9)),
    _decode("bs256 2k", 256, 2048, Goal(fraction=0.9)),
    *(
        _decode(f"bs64 8k block {size}", 64, 8192, Goal(like="decode bs64 8k"), block_size=size, layout="interleaved")
        for size in (544, 784, 2048)
    ),
    _decode("bs64 8k d256", 64, 8192, Goal(), num_q_heads=16, num_kv_heads=2, head_size=256),
    _decode(
        "bs64 8k d256 block 784",
        64,
        8192,
        Goal(like="decode bs64 8k d256"),
        num_q_heads=16,
        num_kv_heads=2,
        head_size=256,
        block_size=784,
        layout="interleaved",
    ),
    _decode("bs64 8k block 16 / 2d", 64, 8192, Goal(like="decode bs64 8k"), peer=PAGED_2D),
    _decode(
        "bs64 8k block 2048 / 2d", 64, 8192, Goal(like="decode bs64 8k"), block_size=2048, peer=PAGED_2D
    ),
    Case("prefill 4 x 4k", "prefill", 4, 4096, 4096),
    Case("extend 512 on 16k", "prefill", 1, 16384 + 512, 512),
    Case("gather 262k", "gather", 32, 8192, peer=GATHER, goal=Goal(fraction=0.85)),
    Case("gather 262k block 784", "gather", 32, 8192, block_size=784, layout="interleaved", peer=GATHER,
         goal=Goal(fraction=0.85)),
    Case("write 262k random slots", "write", 32, 8192, peer=WRITE, goal=Goal(fraction=0.85)),
    Case("write 262k block 784", "write", 32, 8192, block_size=784, layout="interleaved", peer=WRITE,
         goal=Goal(fraction=0.85)),
)  # fmt: skip
"""Cases marked `/ 2d` compare with the decode kernel of vLLM's ROCM_ATTN, which reads an x-packed
copy of the cache."""

NOT_MEASURED: tuple[tuple[str, str], ...] = (
    ("MLA decode, 16 and 128 heads, bs 1 .. 128", "no MLA kernel in pagedkv yet"),
    ("FP8 caches", "no FP8 kernel in pagedkv yet"),
    ("AMD GPUs", "no AMD machine has run this; python -m pagedkv.audit reads what the compiler says"),
)
"""Goals without a measurement, and why; printed under every table."""


def smoke(case: Case) -> Case:
    """Return the case shrunk to what Triton's interpreter finishes in a second or two."""
    query_len = 1 if case.op == "decode" else 5
    return dataclasses.replace(
        case, num_seqs=2, seq_len=37, query_len=query_len, num_q_heads=4, num_kv_heads=2, head_size=32,
        block_size=min(case.block_size, 16) if case.layout == "nhd" else 24,
    )  # fmt: skip
