"""The audit on a terminal: one table per arch at 80 columns, then whatever is not a pass, then one line."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .errors import Exit
    from .findings import Finding

_WIDTH = 80
_HEAD = f"{'kernel  head/block/tile':<34}{'LDS':>7}{'VGPR':>5}{'AGPR':>5}{'spill':>6}{'scr':>5}{'wav':>4}{'MFMA':>5}"
_LOADS = "16/8/4/<4"


def print_report(findings: Sequence[Finding], *, status: Exit, seconds: float) -> None:
    """Print everything a person needs to see; the files hold the rest."""
    for arch in sorted({finding.labels.get("arch", "") for finding in findings}):
        rows = [finding for finding in findings if finding.labels.get("arch") == arch and "vgpr" in finding.numbers]
        if rows:
            limit = int(rows[0].numbers["lds_limit_bytes"])
            print(f"\n{arch}: {limit} B of LDS, 512 VGPRs a lane, 8 waves a SIMD at most")
            print(_HEAD + f"{_LOADS:>9}")
            for row in sorted(rows, key=_order):
                print(_row(row))
    for outcome in ("fail", "inconclusive", "did not run"):
        for finding in (each for each in findings if each.outcome == outcome):
            print(f"\n{outcome}: {finding.id}")
            print(textwrap.fill(finding.message, _WIDTH, initial_indent="  ", subsequent_indent="  "))
    for finding in findings:
        if finding.labels.get("operation") == "proof" and finding.outcome == "pass":
            print(textwrap.fill(f"{finding.id}: {finding.message}", _WIDTH, subsequent_indent="  "))
    counts = {outcome: sum(each.outcome == outcome for each in findings) for outcome in ("pass", "fail")}
    other = len(findings) - sum(counts.values())
    print(
        f"\n{status.name.lower().replace('_', ' ')}: {counts['pass']} passed, {counts['fail']} failed, "
        f"{other} neither, in {seconds:.0f} s"
    )


def _order(finding: Finding) -> tuple[str, int, int, str, str]:
    labels = finding.labels
    return (labels["operation"], int(labels["head_size"]), int(labels["block_size"]), labels["side"], finding.id)


def _row(finding: Finding) -> str:
    labels, numbers = finding.labels, {name: _short(value) for name, value in finding.numbers.items()}
    shape = "/".join(filter(None, (labels["head_size"], labels["block_size"], labels["tile"])))
    kernel = labels["kernel"].removeprefix("kernel_").removesuffix("_kernel")
    name = f"{labels['side'][0]} {kernel[: 31 - len(shape)]} {shape}"
    spills = numbers["vgpr_spills"] + (f"+{numbers['sgpr_spills']}" if numbers["sgpr_spills"] != "0" else "")
    loads = "/".join(numbers[key] for key in ("loads_x4", "loads_x2", "loads_x1", "narrow_loads"))
    return (
        f"{name:<34}{numbers['lds_bytes']:>7}{numbers['vgpr']:>5}{numbers['agpr']:>5}{spills:>6}"
        f"{numbers['scratch_bytes']:>5}{numbers['waves_per_simd']:>4}{numbers['mfma']:>5} {loads:>8}"
    )


def _short(value: float) -> str:
    return f"{value:g}"
