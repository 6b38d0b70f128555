"""The audit on a terminal: one table per arch at 80 columns, then whatever is not a pass, then one line."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .errors import Exit
    from .findings import Finding

WIDTH = 80
_HEAD = (
    f"{'kernel head/block/tile':<31}{'LDS':>7}{'VGPR':>5}{'AGPR':>5}{'spill':>7}{'scr':>4}{'wav':>4}{'MFMA':>5}"
    f"{'16/8/4/<4':>12}"
)


def format_report(findings: Sequence[Finding], *, status: Exit, seconds: float) -> str:
    """Everything a person needs to see; the files hold the rest."""
    lines: list[str] = []
    for arch in sorted({finding.labels["arch"] for finding in findings}):
        rows = [finding for finding in findings if finding.labels["arch"] == arch and "vgpr" in finding.numbers]
        shapes = {_shape(row) for row in rows if row.labels["side"] == "vllm"}
        shown = [row for row in rows if _shape(row) in shapes] or rows
        if rows:
            limit = int(rows[0].numbers["lds_limit_bytes"])
            lines += ["", f"{arch}: {limit} B of LDS, 512 VGPRs a lane, at most 8 waves a SIMD", _HEAD]
            lines += [_row(row) for row in sorted(shown, key=_order)]
            lines += _rest([row for row in rows if row not in shown])
    lines += ["", "o ours, v vLLM's; layouts nh(d), hn(d), in(terleaved), pa(cked); bfloat16 and a"]
    lines += ["cache of 2 GiB or more unless said; spill: VGPRs+SGPRs; scr: scratch bytes;"]
    lines += ["wav: waves a SIMD; 16/8/4/<4: loads by bytes per lane"]
    proofs = [each for each in findings if each.labels.get("operation") == "proof" and each.outcome == "pass"]
    if proofs:
        lines += ["", "The defect of vLLM PR 38502, planted again:"]
        lines += [
            f"  {each.labels['arch']}: {int(each.numbers['lds_bytes'])} B of LDS wanted, caught" for each in proofs
        ]
    return "\n".join([*lines, *format_ending(findings, status=status, seconds=seconds)]) + "\n"


def format_ending(findings: Sequence[Finding], *, status: Exit, seconds: float) -> list[str]:
    """Lines with whatever is not a pass, each message once, and with the verdict."""
    lines: list[str] = []
    for outcome in ("fail", "inconclusive", "did not run"):
        said: dict[str, list[str]] = {}
        for finding in (each for each in findings if each.outcome == outcome):
            said.setdefault(finding.message, []).append(finding.id)
        for message, ids in said.items():
            lines += ["", *(f"{outcome}: {each}" for each in ids)]
            lines += textwrap.wrap(message, WIDTH, initial_indent="  ", subsequent_indent="  ")
    passed, failed = (sum(each.outcome == outcome for each in findings) for outcome in ("pass", "fail"))
    neither = len(findings) - passed - failed
    verdict = status.name.lower().replace("_", " ")
    lines += ["", f"{verdict}: {passed} passed, {failed} failed, {neither} neither, in {seconds:.0f} s"]
    return lines


def _shape(finding: Finding) -> tuple[str, ...]:
    return tuple(finding.labels[label] for label in ("operation", "dtype", "head_size", "block_size"))


def _rest(rows: list[Finding]) -> list[str]:
    """One sentence for the configurations at which there is nothing of theirs to show beside ours."""
    if not rows:
        return []
    most = {
        name: max(row.numbers[name] for row in rows) for name in ("vgpr", "lds_bytes", "vgpr_spills", "scratch_bytes")
    }
    fewest = min(row.numbers["waves_per_simd"] for row in rows)
    return [
        f"o {len(rows)} more code objects: at most {most['vgpr']} VGPRs and {most['lds_bytes']} B of LDS,",
        f"  {most['vgpr_spills']} VGPR spills, {most['scratch_bytes']} B of scratch, at least {fewest:g} waves a SIMD",
    ]


def _order(finding: Finding) -> tuple[str, int, int, str, str]:
    labels = finding.labels
    return (labels["operation"], int(labels["head_size"]), int(labels["block_size"]), labels["side"], finding.id)


def _row(finding: Finding) -> str:
    labels, numbers = finding.labels, {name: _short(value) for name, value in finding.numbers.items()}
    shape = "/".join(filter(None, (labels["head_size"], labels["block_size"], labels["tile"])))
    shape += "".join(f" {mark}" for mark in _marks(labels))
    kernel = labels["kernel"].strip("_").removeprefix("kernel_").removesuffix("_kernel")
    name = f"{labels['side'][0]} {kernel[: 28 - len(shape)]} {shape}"
    spills = numbers["vgpr_spills"] + (f"+{numbers['sgpr_spills']}" if numbers["sgpr_spills"] != "0" else "")
    loads = "/".join(numbers[key] for key in ("loads_x4", "loads_x2", "loads_x1", "narrow_loads"))
    return (
        f"{name:<31}{numbers['lds_bytes']:>7}{numbers['vgpr']:>5}{numbers['agpr']:>5} {spills:>6}"
        f"{numbers['scratch_bytes']:>4}{numbers['waves_per_simd']:>4}{numbers['mfma']:>5} {loads:>11}"
    )


def _marks(labels: dict[str, str]) -> list[str]:
    """What tells two kernels of ours with the same shape apart."""
    if labels["side"] != "ours":
        return []
    marks = [labels["layout"][:2]]
    return marks + [mark for mark in (labels["dtype"], labels["cache"]) if mark not in {"bfloat16", "2GiB+"}]


def _short(value: float) -> str:
    return f"{value:g}"
