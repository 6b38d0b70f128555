"""How fast decode reads the cache: `python -m pagedkv.bench`, on a GPU.

Each case replays a captured graph over several copies of its inputs that together exceed the last-level cache, and is
checked against the float64 reference in the same run: a time without its error is not printed. GB/s counts every byte of
K and V once; the yardstick is the copy bandwidth measured first, in the same run.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys

import torch

from . import layout, reference
from .device import INTERPRETED, current
from .paged_attention import paged_attention

CACHE_BYTES = 512 << 20
"""More than any last-level cache of the arches we know (256 MiB on an MI300X)."""
WORST_ERROR = 2 * 2.0**-8
"""Of a row against its float64 reference, in bf16 (the derivation is in tests/tolerances.py)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode step in bf16."""

    num_seqs: int
    seq_len: int
    block_size: int
    layout: layout.Name
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V of all sequences."""
        return self.num_seqs * self.seq_len * self.num_kv_heads * self.head_size * 2 * 2


CASES = tuple(
    Case(num_seqs, seq_len, block_size, name)
    for num_seqs, seq_len in ((1, 8192), (1, 32768), (32, 4096), (64, 8192))
    for block_size, name in ((16, "nhd"), (784, "interleaved"), (16, "packed"))
)


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return query, K cache, V cache and metadata with permuted block ids and unit-normal data."""
    per_seq = -(-case.seq_len // case.block_size)
    num_blocks = case.num_seqs * per_seq
    plan = layout.describe(case.layout, num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    storage = torch.randn(plan.elements, device="cuda", dtype=torch.bfloat16)
    key, value = (storage.as_strided(plan.shape, side.strides, side.offset) for side in (plan.key, plan.value))
    query = torch.randn(case.num_seqs, case.num_q_heads, case.head_size, device="cuda", dtype=torch.bfloat16)
    metadata = {
        "block_table": torch.randperm(num_blocks, device="cuda").view(case.num_seqs, per_seq).int(),
        "seq_lens": torch.full((case.num_seqs,), case.seq_len, device="cuda", dtype=torch.int32),
        "query_start_loc": torch.arange(case.num_seqs + 1, device="cuda", dtype=torch.int32),
    }
    return query, key, value, metadata


def error(case: Case, out: torch.Tensor, data: tuple) -> float:
    """Return the largest |out - ref| / |ref| over the heads of the last sequence."""
    query, key, value, metadata = data
    row = metadata["block_table"][-1].long()
    golden = reference.attention(
        query[-1:].cpu(),
        key[row].cpu(),
        value[row].cpu(),
        block_table=torch.arange(len(row))[None],
        seq_lens=torch.tensor([case.seq_len]),
        query_start_loc=torch.tensor([0, 1]),
        scale=case.head_size**-0.5,
    )
    return ((out[-1:].double().cpu() - golden).norm(dim=-1) / golden.norm(dim=-1)).max().item()


def seconds(run: object, replays: int = 21) -> list[float]:
    """Return the time of each replay of the captured function `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in zip(marks[:-1], marks[1:], strict=True)]


def measure(case: Case) -> tuple[float, float, float]:
    """Return the median and the spread (max - min) of one call in seconds, and its error."""
    copies = max(1, -(-CACHE_BYTES // case.bytes_read))
    sets = [inputs(case) for _ in range(copies)]
    outs = [torch.full_like(data[0], float("nan")) for data in sets]

    def run() -> None:
        for (query, key, value, metadata), out in zip(sets, outs, strict=True):
            bounds = {"max_query_len": 1, "max_seq_len": case.seq_len}
            paged_attention(query, key, value, out, **metadata, **bounds, scale=case.head_size**-0.5)

    times = [t / copies for t in seconds(run)]
    return statistics.median(times), max(times) - min(times), error(case, outs[0], sets[0])


def copy_bandwidth() -> float:
    """Return bytes read plus bytes written per second of a 4 GiB copy by a kernel (a captured `copy_` is a memcpy)."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.full_like(source, float("nan"))
    return 2 * 4 * source.numel() / statistics.median(seconds(lambda: torch.neg(source, out=target), 7))


def main() -> int:
    """Print the table; return 1 if a result is wrong."""
    if INTERPRETED or not torch.cuda.is_available():
        print("needs a GPU, and TRITON_INTERPRET unset", file=sys.stderr)  # noqa: T201
        return 5
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()} ({current().name}), copy {copy / 1e9:.0f} GB/s")  # noqa: T201
    wrong = 0
    for case in CASES:
        median, spread, worst = measure(case)
        wrong += not worst <= WORST_ERROR
        rate = case.bytes_read / median
        result = f"{median * 1e6:8.1f} us  spread {spread * 1e6:6.1f}  {rate / 1e9:6.0f} GB/s  {rate / copy:5.0%} of copy"
        name = f"bs {case.num_seqs:3} ctx {case.seq_len:6} block {case.block_size:4} {case.layout:12}"
        print(name, result if worst <= WORST_ERROR else "WRONG", f"error {worst:.1e}")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
