# SPDX-License-Identifier: Apache-2.0
"""What is measured, as data: shapes, layout, peer and goal of each case, and the bytes and operations it costs."""

from __future__ import annotations

import dataclasses
from typing import Literal

Op = Literal["decode", "mla", "mixed", "prefill", "gather", "write", "scan", "gdn", "gdn decode"]
Yardstick = Literal["read", "copy", "matmul", "launch"]
Scales = Literal["none", "tensor", "token"]

YARDSTICKS: dict[Op, Yardstick] = {
    "decode": "read",
    "mla": "read",
    "mixed": "read",
    "prefill": "matmul",
    "gather": "copy",
    "write": "copy",
    "scan": "copy",
    "gdn": "copy",
    "gdn decode": "read",
}
"""What bounds an operation: decode reads the cache, gather and write copy it, prefill multiplies matrices. A mixed
batch does both and is held against the reading, which the products of its prefill come on top of. So is MLA decode with
few heads; 128 heads multiply more than they read. A prefill of Mamba-2, or of a gated delta net, makes rows of the rows
that it reads. Decode of the gated delta rule writes as much as it reads, and is held against the reading all the same.
The host's time is held against the launch of a kernel without arguments."""
RECURRENCES = ("scan", "gdn", "gdn decode")
"""Operations with a state."""
MATMUL_HEADS = 128
"""Heads at which MLA is bound by arithmetic: 2 * 128 * (576 + 512) operations on a row of 1152 bytes are 242 a byte,
more than a GPU has for each."""

UNIFIED = "kernel_unified_attention"
PAGED_2D = "kernel_paged_attention_2d"
GATHER = "cp_mha_gather_cache"
WRITE = "triton_reshape_and_cache_flash"
SHUFFLE_WRITE = "reshape_and_cache_shuffle_triton"
MLA_GROUPED = "_fwd_grouped_kernel_stage1"
SSD = "_mamba_chunk_scan_combined_fwd"
"""vLLM's five kernels of a Mamba-2 prefill, and what it does between them."""
FLA = "chunk_gated_delta_rule"
"""What vLLM's layer launches from the convolution's output to its own: a split with norms and gates, the gather of
states, the seven kernels of this function, the scatter of states, and the copy of the outputs."""
KDA = "chunk_kda_with_fused_gate"
"""What vLLM's layer launches where each key has a decay: norms, gates and six kernels, from dense q, k and v."""
GDN_DECODE = "fused_recurrent_gated_delta_rule_packed_decode_kernel"
GDN_VERIFY = "fused_sigmoid_gating_delta_rule_update_kernel"
"""vLLM's where sequences have drafts. It writes the state after each token."""

ELEMENT_BYTES = 2
"""Bytes of an element of queries, outputs and an unquantised cache: bf16, and fp16 where an interpreter cannot do
bf16."""
SCALE_BYTES = 4
STATE_BYTES = 4
"""Bytes of an element of a state."""


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
class BenchmarkCase:
    """One row of the table. The sequences of a case are alike, but for the prefill of a mixed batch."""

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
    scales: Scales = "none"
    """Scales of an FP8 cache: one for K and one for V, or one for each token and head; none says that it is not
    quantised."""
    window: int | None = None
    """Tokens that a query sees, its own included."""
    capped: bool = False
    """Whether scores are soft-capped and heads have sinks."""
    prefill_tokens: int = 0
    """Tokens of one more sequence, all of them new."""
    num_splits: int | None = None
    """Partitions of the KV whatever the batch, so that a sequence gets the same bits alone and in company. The peer
    then does what vLLM does where batch invariance is asked for: it does not split."""
    latent_size: int = 0
    """MLA: how many of the `head_size` channels of a cached row are the value too."""
    state_size: int = 0
    """Scan: elements of a channel's state. The peer's chunk is `block_size`, its groups are `num_kv_heads`. Delta rule:
    channels of a key; `num_kv_heads` are the key heads."""
    by_key: bool = False
    """Delta rule: whether each key has a decay."""
    runs: bool = False
    """Whether a write fills blocks in runs, as a prefill does, and not slots in random order."""
    host: bool = False
    """Whether the host is timed until a call without a graph returns, and not the device; one set of inputs."""

    @property
    def yardstick(self) -> Yardstick:
        """The measured rate of this machine that bounds the case."""
        if self.host:
            return "launch"
        return "matmul" if self.op == "mla" and self.num_q_heads >= MATMUL_HEADS else YARDSTICKS[self.op]

    @property
    def plain(self) -> bool:
        """Whether it is attention without scales, window, soft cap, given splits or host time."""
        return not (self.scales != "none" or self.window or self.capped or self.num_splits or self.host)

    @property
    def vendor(self) -> bool:
        """Whether the vendor's library has the operation: attention of whole prompts, MLA decode of bf16 rows.

        For gated delta nets that library is FlashInfer.
        """
        whole_prompts = self.op == "prefill" and self.query_len == self.seq_len
        return self.plain and (whole_prompts or self.op == "mla" or (self.op == "gdn" and not self.by_key))

    @property
    def lens(self) -> tuple[tuple[int, int], ...]:
        """(seq_len, query_len) of every sequence."""
        return ((self.seq_len, self.query_len),) * self.num_seqs + ((self.prefill_tokens,) * 2,) * bool(
            self.prefill_tokens
        )

    def cache_bytes(self) -> int:
        """Bytes of K and V of all tokens that a query sees, and of their scales, each counted once.

        In a latent cache V is part of K. Of a scan, all that it reads: x, B, C, dt and the states before it. Of decode
        of the gated delta rule likewise: q, k, v, gates, states, and what was kept of drafts, which are all accepted.
        """
        tokens = sum(min(seq, (self.window or seq) + query - 1) for seq, query in self.lens)
        if self.op in RECURRENCES:
            # dt of a scan; of a delta rule the decay and the strength of a write.
            gates = 1 if self.op == "scan" else 1 + (self.state_size if self.by_key else 1)
            row = 2 * self.num_kv_heads * self.state_size + self.num_q_heads * (self.head_size + gates)
            return self.states_bytes() + self.drafts_bytes() + tokens * row * ELEMENT_BYTES
        if self.op == "mla":
            return tokens * self.head_size * (ELEMENT_BYTES if self.scales == "none" else 1)
        quantised = self.head_size + SCALE_BYTES * (self.scales == "token")
        row = ELEMENT_BYTES * self.head_size if self.scales == "none" else quantised
        return 2 * tokens * self.num_kv_heads * row

    def states_bytes(self) -> int:
        """Return the bytes of the states of a scan or a delta rule, one for each sequence."""
        return self.num_seqs * self.num_q_heads * self.head_size * self.state_size * STATE_BYTES

    def drafts_bytes(self) -> int:
        """Return the bytes of what a step of the gated delta rule keeps of its drafts; 0 for other operations."""
        if self.op != "gdn decode":
            return 0
        kept = (
            self.num_kv_heads * self.state_size * ELEMENT_BYTES + self.num_q_heads * (self.head_size + 1) * STATE_BYTES
        )
        return self.num_seqs * (self.query_len - 1) * kept

    def bytes_moved(self) -> int:
        """Fewest bytes the operation moves: each input read once, each output written once; indices are not counted."""
        if self.op in {"gather", "write"}:
            return 2 * self.cache_bytes()
        rows = sum(query for _, query in self.lens) * self.num_q_heads
        if self.op in RECURRENCES:
            written = self.states_bytes() + self.drafts_bytes()
            return self.cache_bytes() + rows * ELEMENT_BYTES * self.head_size + written
        return self.cache_bytes() + rows * ELEMENT_BYTES * (self.head_size + (self.latent_size or self.head_size))

    def flops(self) -> int:
        """Floating-point operations of the two products over the (query, key) pairs that mask and window leave.

        Of a scan those of the recurrence, which adds to the state of a token and multiplies with it; a delta rule
        multiplies twice.
        """
        if self.op in {"gather", "write", "gdn decode"}:
            return 0
        if self.op in RECURRENCES:
            each = 4 if self.op == "scan" else 6
            return each * self.num_seqs * self.seq_len * self.num_q_heads * self.head_size * self.state_size
        pairs = sum(
            min(seen, self.window or seen) for seq, query in self.lens for seen in range(seq - query + 1, seq + 1)
        )
        return 2 * pairs * self.num_q_heads * (self.head_size + (self.latent_size or self.head_size))


def _decode(name: str, num_seqs: int, seq_len: int, goal: Goal, **more: object) -> BenchmarkCase:
    return BenchmarkCase(name=f"decode {name}", op="decode", num_seqs=num_seqs, seq_len=seq_len, goal=goal, **more)


def _prefill(name: str, num_seqs: int, length: int, *, fraction: float | None = None, **more: object) -> BenchmarkCase:
    return BenchmarkCase(f"prefill {name}", "prefill", num_seqs, length, length, goal=Goal(fraction=fraction), **more)


def _mla(num_seqs: int, num_heads: int, block_size: int = 16, scales: Scales = "none", **goal: float) -> BenchmarkCase:
    name = f"mla {num_heads} heads bs{num_seqs} 8k" + (f" block {block_size}" if block_size != 16 else "")
    return BenchmarkCase(
        name + " fp8" * (scales != "none"),
        "mla",
        num_seqs,
        8192,
        block_size=block_size,
        num_q_heads=num_heads,
        num_kv_heads=1,
        head_size=576,
        latent_size=512,
        peer=MLA_GROUPED,
        goal=Goal(**goal),
        scales=scales,
    )


def _scan(
    num_heads: int,
    head_size: int,
    state_size: int,
    num_groups: int = 1,
    *,
    chunk: int = 256,
    num_seqs: int = 16,
    length: int = 512,
) -> BenchmarkCase:
    name = f"scan {num_seqs} x {length} {num_heads} heads d{head_size} n{state_size}"
    return BenchmarkCase(
        name,
        "scan",
        num_seqs,
        length,
        length,
        block_size=chunk,
        num_q_heads=num_heads,
        num_kv_heads=num_groups,
        head_size=head_size,
        state_size=state_size,
        peer=SSD,
    )


def _gdn(
    key_heads: int, heads: int, num_seqs: int, length: int, ratio: float = 1.0, *, by_key: bool = False
) -> BenchmarkCase:
    return BenchmarkCase(
        f"kda {num_seqs} x {length} {heads} heads"
        if by_key
        else f"gdn {num_seqs} x {length} {key_heads} k {heads} v heads",
        "gdn",
        num_seqs,
        length,
        length,
        num_q_heads=heads,
        num_kv_heads=key_heads,
        state_size=128,
        by_key=by_key,
        peer=KDA if by_key else FLA,
        goal=Goal(ratio=ratio),
    )


def _gdn_decode(num_seqs: int, heads: int, key_heads: int = 16, drafts: int = 0) -> BenchmarkCase:
    return BenchmarkCase(
        f"gdn decode bs{num_seqs} {heads} heads" + f" {drafts} drafts" * bool(drafts),
        "gdn decode",
        num_seqs,
        1 + drafts,
        1 + drafts,
        num_q_heads=heads,
        num_kv_heads=key_heads,
        state_size=128,
        peer=GDN_VERIFY if drafts else GDN_DECODE,
        goal=Goal(fraction=0.85 if num_seqs >= 64 and heads >= 32 and not drafts else None),
    )


def _gather(name: str, **more: object) -> BenchmarkCase:
    goal = Goal(fraction=0.85)
    return BenchmarkCase(f"gather 262k{name}", "gather", 32, 8192, peer=GATHER, goal=goal, **more)


def _write(name: str, layout: str = "nhd", peer: str = WRITE, **more: object) -> BenchmarkCase:
    return BenchmarkCase(
        f"write 262k {name}", "write", 32, 8192, layout=layout, peer=peer, goal=Goal(fraction=0.85), **more
    )


def _host(case: BenchmarkCase, name: str) -> BenchmarkCase:
    """Return a case of the host's time: one that the device is done with sooner than the host."""
    return dataclasses.replace(case, name=f"host {name}", host=True, goal=Goal())


SIXTY_FOUR = Goal(like="decode bs64 8k")
D256 = {"num_q_heads": 16, "num_kv_heads": 2, "head_size": 256}
"""Head size 256, as in Qwen3-Next and Qwen3.5."""
TP2 = {"num_q_heads": 8, "num_kv_heads": 1, "head_size": 256}
HEADS_24 = {"num_q_heads": 24, "num_kv_heads": 4}
GDN_HEADS = ((32, 16), (48, 16), (64, 16), (8, 2))
"""Heads and key heads of Qwen3-Next and of larger ones, and of a rank of 8."""
BLOCKS_784 = {"block_size": 784, "layout": "interleaved"}
"""Blocks as large as a hybrid's states make them."""

CASES: tuple[BenchmarkCase, ...] = (
    _decode("bs1 2k", 1, 2048, Goal()),
    _decode("bs1 8k", 1, 8192, Goal(ratio=3)),
    _decode("bs1 32k", 1, 32768, Goal(ratio=3)),
    _decode("bs1 128k", 1, 131072, Goal(ratio=3)),
    _decode("bs8 8k", 8, 8192, Goal(fraction=0.8)),
    _decode("bs32 4k", 32, 4096, Goal(fraction=0.8)),
    _decode("bs64 8k", 64, 8192, Goal(fraction=0.9)),
    _decode("bs256 2k", 256, 2048, Goal(fraction=0.9)),
    *(
        _decode(f"bs64 8k block {size}", 64, 8192, SIXTY_FOUR, block_size=size, layout="interleaved")
        for size in (544, 784, 2048)
    ),
    _decode("bs64 8k d256", 64, 8192, Goal(), **D256),
    _decode("bs64 8k d256 block 784", 64, 8192, Goal(like="decode bs64 8k d256"), **D256, **BLOCKS_784),
    _decode("bs1 8k d256 block 784", 1, 8192, Goal(), **D256, **BLOCKS_784),
    _decode("bs8 8k d256 block 784", 8, 8192, Goal(), **D256, **BLOCKS_784),
    _decode("bs32 8k 2 tokens d256 block 784", 32, 8192, Goal(), query_len=2, **D256, **BLOCKS_784),
    _decode("bs64 8k fp8 d256 block 784", 64, 8192, Goal(fraction=0.8), scales="tensor", **D256, **BLOCKS_784),
    _decode("bs1 32k 8 / 1 heads d256 block 1056", 1, 32768, Goal(), **TP2, block_size=1056, layout="interleaved"),
    _decode("bs8 2k d80 32 / 32 heads", 8, 2048, Goal(), num_kv_heads=32, head_size=80),
    _decode("bs8 8k d64 block 544", 8, 8192, Goal(), head_size=64, block_size=544, layout="interleaved"),
    _decode("bs64 8k 4 / 1 heads", 64, 8192, Goal(), num_q_heads=4, num_kv_heads=1),
    _decode("bs32 8k 24 / 4 heads block 1568", 32, 8192, Goal(), **HEADS_24, block_size=1568, layout="interleaved"),
    _decode("bs256 512", 256, 512, Goal()),
    _decode("bs16 1k", 16, 1024, Goal()),
    _decode("bs64 8k block 16 / 2d", 64, 8192, SIXTY_FOUR, peer=PAGED_2D),
    _decode("bs64 8k block 2048 / 2d", 64, 8192, SIXTY_FOUR, block_size=2048, peer=PAGED_2D),
    *(
        _decode(f"bs64 8k native {size}", 64, 8192, SIXTY_FOUR, block_size=size, layout="native", peer=PAGED_2D)
        for size in (16, 544, 784, 2048)
    ),
    *(
        _decode(f"bs64 8k shuffle {size}", 64, 8192, SIXTY_FOUR, block_size=size, layout="shuffle", peer=PAGED_2D)
        for size in (16, 784)
    ),
    _decode("bs1 32k fp8", 1, 32768, Goal(), scales="tensor"),
    _decode("bs64 8k fp8", 64, 8192, Goal(fraction=0.8), scales="tensor"),
    _decode("bs64 8k fp8 per token", 64, 8192, Goal(fraction=0.8), scales="token"),
    *(_decode(f"bs{n} 8k fp8 shuffle", n, 8192, Goal(), layout="shuffle", scales="tensor") for n in (1, 8, 64)),
    _decode("bs32 8k 4 tokens", 32, 8192, Goal(fraction=0.8), query_len=4),
    _decode("bs32 32k window 4k", 32, 32768, Goal(like="decode bs32 4k"), window=4096),
    _decode("bs64 8k softcap sinks", 64, 8192, SIXTY_FOUR, capped=True),
    _decode("bs1 8k 16 splits", 1, 8192, Goal(like="decode bs1 8k"), num_splits=16),
    _decode("bs64 8k 16 splits", 64, 8192, SIXTY_FOUR, num_splits=16),
    _mla(1, 16),
    _mla(8, 16),
    _mla(32, 16, fraction=0.8),
    _mla(128, 16, fraction=0.8),
    _mla(32, 16, block_size=784, fraction=0.8),
    _mla(32, 8),
    *(_mla(32, heads, scales="tensor") for heads in (8, 16)),
    *(_mla(num_seqs, 128) for num_seqs in (1, 8, 32, 128)),
    BenchmarkCase("mixed 32 x 8k + prefill 2k", "mixed", 32, 8192, prefill_tokens=2048),
    BenchmarkCase("prefill 4 x 4k", "prefill", 4, 4096, 4096),
    BenchmarkCase("prefill 4 x 4k block 784", "prefill", 4, 4096, 4096, block_size=784, layout="interleaved"),
    BenchmarkCase("extend 512 on 16k", "prefill", 1, 16384 + 512, 512),
    BenchmarkCase("extend 512 on 16k block 784", "prefill", 1, 16384 + 512, 512, block_size=784, layout="interleaved"),
    _prefill("4 x 4k d256", 4, 4096, fraction=0.58, **D256),
    _prefill("4 x 4k d256 block 784", 4, 4096, fraction=0.58, **D256, **BLOCKS_784),
    _prefill("4 x 4k d192 16 / 4 heads", 4, 4096, fraction=0.4, num_q_heads=16, num_kv_heads=4, head_size=192),
    _prefill("4 x 4k d64 block 544", 4, 4096, fraction=0.44, head_size=64, block_size=544, layout="interleaved"),
    _prefill("4 x 4k d80 32 / 32 heads", 4, 4096, num_kv_heads=32, head_size=80),
    _prefill("4 x 4k 24 / 4 heads block 1568", 4, 4096, **HEADS_24, block_size=1568, layout="interleaved"),
    _prefill("4 x 4k 8 / 1 heads", 4, 4096, num_q_heads=8, num_kv_heads=1),
    _prefill("16 x 512", 16, 512),
    _prefill("16 x 512 d256 block 784", 16, 512, **D256, **BLOCKS_784),
    _prefill("64 x 128", 64, 128),
    _prefill("1 x 16k", 1, 16384),
    _prefill("4 x 4k fp8", 4, 4096, scales="tensor"),
    _prefill("4 x 4k fp8 d256 block 784", 4, 4096, scales="tensor", **D256, **BLOCKS_784),
    _prefill("4 x 4k native 784", 4, 4096, block_size=784, layout="native"),
    _prefill("4 x 4k window 1k", 4, 4096, window=1024),
    BenchmarkCase("extend 512 on 16k d256 block 784", "prefill", 1, 16384 + 512, 512, **D256, **BLOCKS_784),
    BenchmarkCase("extend 64 on 4k x 16", "prefill", 16, 4096 + 64, 64),
    BenchmarkCase("mixed 32 x 8k + prefill 2k d256", "mixed", 32, 8192, prefill_tokens=2048, **D256),
    _scan(128, 64, 128),
    _scan(64, 64, 64, num_groups=2),
    _scan(24, 128, 256),
    _scan(128, 64, 128, num_groups=8, chunk=128, num_seqs=4, length=2048),
    _scan(128, 64, 128, num_groups=8, chunk=128, num_seqs=1, length=8192),
    _scan(48, 64, 128, num_seqs=1, length=8192),
    _scan(16, 64, 128, chunk=128, num_seqs=1, length=8192),
    _scan(24, 128, 256, num_seqs=1, length=8192),
    # Qwen3.5 with 32, 48 and 64 heads, and a rank of 8 of the last.
    _gdn(16, 32, 1, 8192, ratio=1.6),
    _gdn(16, 32, 4, 2048, ratio=2.8),
    _gdn(16, 32, 16, 512, ratio=3.0),
    *(_gdn(*heads, *shape) for heads in ((16, 48), (16, 64), (2, 8)) for shape in ((1, 8192), (4, 2048), (16, 512))),
    *(_gdn(32, 32, *shape, by_key=True) for shape in ((1, 8192), (4, 2048), (16, 512))),
    *(_gdn_decode(num_seqs, *heads) for heads in GDN_HEADS for num_seqs in (1, 8, 64, 256)),
    *(_gdn_decode(num_seqs, *heads, drafts=3) for heads in GDN_HEADS for num_seqs in (8, 64)),
    _gather(""),
    _gather(" block 784", **BLOCKS_784),
    *(_gather(f" {packing}", layout=packing) for packing in ("native", "shuffle")),
    _write("random slots"),
    _write("block 784", "interleaved", block_size=784),
    _write("native", "native"),
    _write("shuffle", "shuffle", SHUFFLE_WRITE),
    _write("runs", runs=True),
    _write("native runs", "native", runs=True),
    _write("shuffle runs", "shuffle", SHUFFLE_WRITE, runs=True),
    _host(_decode("", 8, 256, Goal()), "decode"),
    _host(_decode("", 8, 256, Goal(), scales="tensor"), "decode fp8"),
    _host(BenchmarkCase("", "prefill", 4, 64, query_len=64), "prefill"),
    _host(dataclasses.replace(_mla(8, 16), seq_len=256), "mla"),
    _host(dataclasses.replace(_write(""), num_seqs=8, seq_len=16), "write"),
    _host(dataclasses.replace(_scan(64, 64, 64, num_groups=2), num_seqs=1, seq_len=256, query_len=256), "scan"),
)
"""`kernel_paged_attention_2d`, the decode kernel of vLLM's ROCM_ATTN, reads the native packing: in the cases marked
`/ 2d` and `shuffle`, where ours reads another one, it gets a copy of the same data. So do vLLM's gather, which reads
rows and shuffle, in the native case, and its unified kernel, which reads rows, beside an FP8 shuffle cache."""

NOT_MEASURED: tuple[tuple[str, str], ...] = (
    ("write and gather of FP8 caches", "no case here yet"),
    ("AMD GPUs", "no AMD machine has run this; python -m pagedkv.audit reads what the compiler says"),
)
"""Goals without a measurement, and why; printed under every table."""


def smoke(case: BenchmarkCase) -> BenchmarkCase:
    """Return the case shrunk to what Triton's interpreter finishes in a second or two."""
    gdn = case.op in {"gdn", "gdn decode"}
    lengths = {"prefill": 5, "scan": 37, "gdn": 37, "gdn decode": case.query_len}
    query_len = lengths.get(case.op, min(case.query_len, 2))
    return dataclasses.replace(
        case,
        num_seqs=2,
        seq_len=query_len if gdn else 37,
        query_len=query_len,
        num_q_heads=4,
        num_kv_heads=4 if case.by_key else min(case.num_kv_heads, 2),
        head_size=64 if gdn else 48 if case.op == "mla" else 32,
        latent_size=min(case.latent_size, 32),
        state_size=64 if gdn else min(case.state_size, 32),
        block_size=16 if case.block_size == 16 or case.op == "scan" else 24,
        window=case.window and 9,
        prefill_tokens=min(case.prefill_tokens, 5),
        num_splits=case.num_splits and 2,
    )
