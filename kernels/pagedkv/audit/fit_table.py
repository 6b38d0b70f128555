# SPDX-License-Identifier: Apache-2.0
"""Page with the attention kernels that fit: LDS, registers and waves on each arch, by head size and block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.arch import ARCHES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .findings import Finding

_HEAD = """Compiled with Triton {triton}. A cell has bytes of LDS of a workgroup, registers of a wave, waves of a SIMD.
<span style="color: red">**Red**</span>: every launch fails, as the kernel wants more LDS than a workgroup may have.
*n spill*: it starts, and keeps n registers in memory.

"""


def format_table(findings: Iterable[Finding]) -> str:
    """Return the table of an audit in Markdown; empty where no attention kernel was compiled."""
    rows: dict[tuple[str, int, int, str, str, str], dict[str, str]] = {}
    triton = ""
    for finding in findings:
        labels = finding.labels
        attends = labels.get("operation", "").partition("-")[0] in {"decode", "extend", "prefill", "mla", "proof"}
        # Kernels that reduce or plan have no tile.
        if not attends or not labels["tile"] or "lds_bytes" not in finding.numbers or labels["side"] == "both":
            continue
        triton = labels["triton"]
        size, block = int(labels["head_size"]), int(labels["block_size"])
        case, owner = finding.id.split("/")[2], "pagedkv" if labels["side"] == "ours" else "vLLM"
        row = rows.setdefault((labels["operation"], size, block, owner, labels["kernel"], case), {})
        row[labels["arch"]] = _cell(finding)
    if not rows:
        return ""
    arches = [arch for arch in ARCHES if any(arch in cells for cells in rows.values())]
    lines = [f"| head size | block | of | kernel | case | {' | '.join(arches)} |", f"|{'---|' * (5 + len(arches))}"]
    for (_, size, block, owner, kernel, case), cells in sorted(rows.items()):
        figures = " | ".join(cells.get(arch, "") for arch in arches)
        lines.append(f"| {size} | {block} | {owner} | `{kernel}` | {case} | {figures} |")
    return _HEAD.format(triton=triton) + "\n".join(lines) + "\n"


def _cell(finding: Finding) -> str:
    numbers = finding.numbers
    lds, limit = int(numbers["lds_bytes"]), int(numbers["lds_limit_bytes"])
    if lds > limit:
        return f'<span style="color: red">**{lds} B of {limit}**</span>'
    spills = f", *{numbers['vgpr_spills']:g} spill*" if numbers["vgpr_spills"] else ""
    return f"{lds} B, {numbers['vgpr']:g}, {numbers['waves_per_simd']:g}{spills}"
