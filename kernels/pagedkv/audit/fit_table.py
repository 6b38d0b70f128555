# SPDX-License-Identifier: Apache-2.0
"""Page with the attention kernels that fit: LDS, registers and waves on each arch, by head size and block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.arch import ARCHES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .findings import Finding

OPERATIONS = {
    "decode": "decode",
    "prefill": "prefill",
    "extend": "extend",
    "mla-16": "MLA decode, 16 heads",
    "mla-128": "MLA decode, 128 heads",
    "proof": "decode, as before vLLM PR 38502",
}
"""What attends, by the label of a finding; in the order of the table."""
_HEAD = """Compiled with Triton {triton}. A cell has **waves of a SIMD**, registers of a wave, and LDS of a workgroup in
bytes, of the case with the fewest waves: cases of a row differ in layout, dtype, window and sinks.
<span style="color: red">**Red**</span>: no launch succeeds, as the kernel wants more LDS than a workgroup may have.
*n spilled*: it starts, and keeps n registers in memory. Empty: not compiled, as the arch has no such kernel.

"""


def format_table(findings: Iterable[Finding]) -> str:
    """Return the table of an audit in Markdown; empty where no attention kernel was compiled."""
    rows: dict[tuple[int, int, int, str, str], dict[str, Finding]] = {}
    for finding in findings:
        labels = finding.labels
        # Kernels that reduce or plan have no tile.
        if labels.get("operation") not in OPERATIONS or not labels["tile"] or "lds_bytes" not in finding.numbers:
            continue
        if labels["side"] != "both":
            of_arch = rows.setdefault(_row(finding), {})
            of_arch[labels["arch"]] = max(finding, of_arch.get(labels["arch"], finding), key=_badness)
    if not rows:
        return ""
    arches = [arch for arch in ARCHES if any(arch in cells for cells in rows.values())]
    lines = [f"| | head / block | cache | of | {' | '.join(arches)} |", f"|{'---|' * (4 + len(arches))}"]
    for (operation, size, block, cache, kernel), cells in sorted(rows.items()):
        figures = " | ".join(_cell(cells[arch]) if arch in cells else "" for arch in arches)
        lines.append(f"| {[*OPERATIONS.values()][operation]} | {size} / {block} | {cache} | {kernel} | {figures} |")
    triton = next(iter(next(iter(rows.values())).values())).labels["triton"]
    return _HEAD.format(triton=triton) + "\n".join(lines) + "\n"


def _row(finding: Finding) -> tuple[int, int, int, str, str]:
    labels, case = finding.labels, finding.id.split("/")[2]
    bits = "32 bit" if labels["dtype"] == "float32" else "16 bit"
    cache = f"FP8, {bits} query" if "-e4m3" in case or "-e5m2" in case else bits
    owner = "pagedkv" if labels["side"] == "ours" else f"vLLM `{labels['kernel'].removeprefix('kernel_')}`"
    operation = [*OPERATIONS].index(labels["operation"])
    return operation, int(labels["head_size"]), int(labels["block_size"]), cache, owner


def _badness(finding: Finding) -> tuple[bool, float, float, float]:
    numbers = finding.numbers
    starts = numbers["lds_bytes"] <= numbers["lds_limit_bytes"]
    known = (numbers["vgpr_spills"], -numbers["waves_per_simd"], numbers["vgpr"]) if starts else (0.0, 0.0, 0.0)
    return not starts, *known


def _cell(finding: Finding) -> str:
    numbers = finding.numbers
    lds, limit = int(numbers["lds_bytes"]), int(numbers["lds_limit_bytes"])
    if lds > limit:
        return f'<span style="color: red">**{lds} B of {limit}**</span>'
    spilled = f", *{numbers['vgpr_spills']:g} spilled*" if numbers["vgpr_spills"] else ""
    return f"**{numbers['waves_per_simd']:g}**, {numbers['vgpr']:g}, {lds}{spilled}"
