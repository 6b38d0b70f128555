# SPDX-License-Identifier: Apache-2.0
"""Time captured graphs and the host, and measure the rates of this machine that they are held against."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .cases import Yardstick

REPLAYS = 21
CALLS = 16
"""Calls that the host replays at once: far fewer than a stream takes before a launch waits for the device."""
CACHE_BYTES = 512 << 20
"""More than any last-level cache of the arches we know (256 MiB on an MI300X): what one replay reads exceeds it."""
_BUFFER_BYTES = 4 << 30
_CHUNK = 8192  # fp32 elements that one program of the read kernel sums


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run once on a side stream (which compiles), then capture the same call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def alternate(graphs: Sequence[torch.cuda.CUDAGraph], replays: int = REPLAYS) -> list[list[float]]:
    """Return the seconds of each replay of each graph; the graphs take turns: a drift of the clock hits all."""
    for graph in graphs:
        graph.replay()
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays * len(graphs) + 1)]
    marks[0].record()
    for mark, graph in zip(marks[1:], itertools.cycle(graphs), strict=False):
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks)]
    return [times[i :: len(graphs)] for i in range(len(graphs))]


def host(runs: Sequence[Callable[[], None]], replays: int = REPLAYS) -> list[list[float]]:
    """Return the seconds of the host for a call of each run, once a replay; the device is idle before each."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(replays + 2):
        for run, found in zip(runs, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                run()
            found.append((time.perf_counter() - begin) / CALLS)
    torch.cuda.synchronize()
    return [found[2:] for found in times]


@triton.jit
def _empty_kernel():
    pass


@triton.jit
def _sum_kernel(source, sums, CHUNK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.load(source + program * CHUNK + tl.arange(0, CHUNK))
    tl.store(sums + program, tl.sum(chunk, 0))


def _rate(work: float, run: Callable[[], None]) -> float:
    return work / statistics.median(alternate([capture(run)], 11)[0])


def yardsticks() -> dict[Yardstick, float]:
    """Measure this machine: read and copy (read plus written) in bytes/s over 4 GiB, bf16 matmul (8192^3) in FLOP/s.

    And launches/s of a Triton kernel without arguments, as the host makes them. The copy is a kernel's: a captured
    `copy_` would be a memcpy node. The read kernel's sums are checked, so that it cannot be fast by not reading.
    """
    source = torch.randn(_BUFFER_BYTES // 4, device="cuda")
    target = torch.full_like(source, float("nan"))
    sums = torch.full((source.numel() // _CHUNK,), float("nan"), device="cuda")
    copy = _rate(2 * _BUFFER_BYTES, lambda: torch.neg(source, out=target))
    read = _rate(_BUFFER_BYTES, lambda: _sum_kernel[(sums.numel(),)](source, sums, CHUNK=_CHUNK, num_warps=8))
    expected = source.view(-1, _CHUNK).sum(1, dtype=torch.float64)
    if not torch.allclose(sums.double(), expected, atol=1e-2):
        raise RuntimeError("the read-bandwidth kernel summed wrongly: no yardstick to report against")
    if not torch.equal(target, -source):
        raise RuntimeError("the copy kernel copied wrongly: no yardstick to report against")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.full_like(a, float("nan"))
    matmul = _rate(2 * 8192**3, lambda: torch.matmul(a, b, out=c))
    launch = 1 / statistics.median(host([_empty_kernel[(1,)]])[0])
    return {"read": read, "copy": copy, "matmul": matmul, "launch": launch}
