# SPDX-License-Identifier: Apache-2.0
"""What the router says of our kernels' speed is what the recorded run says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.cases import UNIFIED
from benchmarks.record import read

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cases import BenchmarkCase

ROOT = Path(__file__).parents[2]
ROWS = [row for row in read(ROOT / "benchmarks/results/h200.jsonl") if not row.case.host and row.record.ratio]
ROUTING = ROOT / "kernels/pagedkv/routing"
KINDS: dict[str, Callable[[BenchmarkCase], bool]] = {
    "decode": lambda case: case.op == "decode" and case.plain and case.peer == UNIFIED,
    "prefill": lambda case: case.name.startswith("prefill") and case.plain,
    "extend": lambda case: case.name.startswith("extend") and case.plain,
    "gather": lambda case: case.op == "gather",
    "scan": lambda case: case.op == "scan",
}


def faster(kind: str, digits: int = 1) -> str:
    """By how much ours is faster in the cases of a kind."""
    ratios = [row.record.ratio for row in ROWS if KINDS[kind](row.case)]
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("preference.toml", f"{faster('decode')} times as fast as vLLM's Triton kernels"),
        ("preference.toml", f"Prefill {faster('prefill')} and extend {faster('extend')} times as fast"),
        ("preference.toml", f"{faster('gather')} times as fast as vLLM's on an H200"),
        ("explain.py", f"{faster('scan', 2)} times as fast as vLLM's on an H200"),
    ],
)
def test_the_router_quotes_the_record(file, said):
    assert said in (ROUTING / file).read_text()
