"""The audit of the Mamba kernels on a terminal: one table per arch at 80 columns, and what is not a pass."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pagedkv.audit.report import WIDTH, format_ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.audit.errors import Exit
    from pagedkv.audit.findings import Finding

_COLUMNS = ("configurations", "usable", "oversize", "crashed", "spilling", "lds_bytes", "vgpr", "mfma")
_HEAD = f"{'kernel':<37}{'conf':>5}{'ok':>4}{'LDS>':>5}{'crash':>6}{'spill':>6}{'LDS':>7}{'VGPR':>5}{'MFMA':>5}"
_LEGEND = (
    "conf: configurations; ok: they compile and fit; LDS>: they want more LDS than there is; crash: the compiler "
    "fails; spill: VGPR spills or scratch; LDS, VGPR, MFMA: the most of any that compiles"
)


def format_report(findings: Sequence[Finding], *, status: Exit, seconds: float) -> str:
    """Everything a person needs to see; the files hold the rest."""
    lines: list[str] = []
    kernels = [finding for finding in findings if "configurations" in finding.numbers]
    for arch in sorted({finding.labels["arch"] for finding in findings}):
        rows = [_row(finding) for finding in kernels if finding.labels["arch"] == arch]
        lines += ["", arch, _HEAD, *rows] if rows else []
    if kernels:
        lines += ["", *textwrap.wrap(_LEGEND, WIDTH)]
    declared = [finding for finding in kernels if finding.outcome == "pass" and finding.message]
    for message in dict.fromkeys(finding.message for finding in declared):
        lines += ["", *(f"declared: {finding.id}" for finding in declared if finding.message == message)]
        lines += textwrap.wrap(message, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([*lines, *format_ending(findings, status=status, seconds=seconds)]) + "\n"


def _row(finding: Finding) -> str:
    name = f"{finding.labels['package'].partition('-')[0]} {finding.labels['kernel'].strip('_').replace('_kernel', '')}"
    cells = [str(finding.numbers.get(column, "-")) for column in _COLUMNS]
    widths = (5, 4, 5, 6, 6, 7, 5, 5)
    return f"{name[:37]:<37}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
