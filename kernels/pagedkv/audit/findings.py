# SPDX-License-Identifier: Apache-2.0
"""Findings of the audit: lines of `findings.jsonl`, in the shape every hilgate step reports, and a terminal's report.

The report fits 80 columns: tables by arch, whatever is not a pass, one line with the verdict.
"""

from __future__ import annotations

import json
import operator
import textwrap
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from pagedkv.arch import limits
from pagedkv.errors import Exit

from .machine import MACHINES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Outcome = Literal["pass", "fail", "inconclusive", "did not run"]


@dataclass(frozen=True)
class Finding:
    """One checked thing; a line of `findings.jsonl`."""

    id: str
    """Stable; any part of it can be given to `--only`."""
    outcome: Outcome
    seconds: float = 0.0
    message: str = ""
    """Why it is not a pass; for a pass, evidence or nothing."""
    labels: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.message or self.outcome == "pass", f"{self.id} is {self.outcome!r} and does not say why"


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write JSON lines, replacing what was there; a run that dies half-way leaves no file that looks whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(asdict(finding), allow_nan=False) + "\n" for finding in findings))
    part.replace(path)


def exit_status(findings: Sequence[Finding], *, compiled: int) -> Exit:
    """What the run amounts to.

    Args:
        findings: All of them.
        compiled: Code objects read; with none, nothing was audited, whatever the findings say.
    """
    outcomes = {finding.outcome for finding in findings}
    if "fail" in outcomes:
        return Exit.FAIL
    if not compiled or not findings:
        return Exit.NOTHING_COMPILED
    return Exit.PASS if outcomes == {"pass"} else Exit.INCONCLUSIVE


WIDTH = 80
_HEAD = (
    f"{'kernel head/block/tile':<31}{'LDS':>7}{'VGPR':>5}{'AGPR':>5}{'spill':>7}{'scr':>4}{'wav':>4}{'MFMA':>5}"
    f"{'16/8/4/<4':>12}"
)


_KERNEL_COLUMNS = {
    "configurations": ("conf", 5),
    "usable": ("ok", 4),
    "oversize": ("LDS>", 5),
    "crashed": ("crash", 6),
    "spilling": ("spill", 6),
    "lds_bytes": ("LDS", 7),
    "vgpr": ("VGPR", 5),
    "mfma": ("MFMA", 5),
}
"""Number of a finding about a kernel -> its head and width in the table."""
_KERNEL_LEGEND = (
    "conf: configurations; ok: they compile and fit; LDS>: they want more LDS than there is; crash: the compiler "
    "fails; spill: VGPR spills or scratch; LDS, VGPR, MFMA: the most of any that compiles"
)
_LEGEND = (
    "o ours, v vLLM's; layouts nh(d), hn(d), in(terleaved), pa(cked); bfloat16 and a cache of 2 GiB or more unless "
    "said; spill: VGPRs+SGPRs; scr: scratch bytes; wav: waves a SIMD; 16/8/4/<4: loads by bytes per lane"
)


def format_report(findings: Sequence[Finding], *, status: Exit, seconds: float) -> str:
    """Everything a person needs to see; the files hold the rest."""
    arches = sorted({finding.labels["arch"] for finding in findings})
    lines = [line for arch in arches for line in _table(arch, [f for f in findings if f.labels["arch"] == arch])]
    if any(finding.labels.get("side") in {"ours", "vllm"} for finding in findings):
        lines += ["", *textwrap.wrap(_LEGEND, WIDTH)]
    kernels = [finding for finding in findings if "configurations" in finding.numbers]
    if kernels:
        lines += ["", *textwrap.wrap(_KERNEL_LEGEND, WIDTH)]
    proofs = [each for each in findings if each.labels.get("operation") == "proof" and each.outcome == "pass"]
    if proofs:
        lines += ["", "The defect of vLLM PR 38502, planted again:"]
        wanted = ((each.labels["arch"], int(each.numbers["lds_bytes"])) for each in proofs)
        lines += [f"  {arch}: {lds} B of LDS wanted, caught" for arch, lds in wanted]
    lines += _by_message("declared", [each for each in kernels if each.outcome == "pass" and each.message])
    for outcome in ("fail", "inconclusive", "did not run"):
        lines += _by_message(outcome, [each for each in findings if each.outcome == outcome])
    passed, failed = (sum(each.outcome == outcome for each in findings) for outcome in ("pass", "fail"))
    verdict = status.name.lower().replace("_", " ")
    neither = len(findings) - passed - failed
    lines += ["", f"{verdict}: {passed} passed, {failed} failed, {neither} neither, in {seconds:.0f} s"]
    return "\n".join(lines) + "\n"


def _table(arch: str, findings: Sequence[Finding]) -> list[str]:
    """Code objects of ours beside vLLM's, then the kernels that are judged by their configurations."""
    lines: list[str] = []
    rows = [each for each in findings if "vgpr" in each.numbers and each.labels["side"] in {"ours", "vllm"}]
    if rows:
        shape = operator.itemgetter("operation", "dtype", "head_size", "block_size")
        shapes = {shape(row.labels) for row in rows if row.labels["side"] == "vllm"}
        shown = [row for row in rows if shape(row.labels) in shapes] or rows
        limit = int(rows[0].numbers["lds_limit_bytes"])
        lane, waves = limits(arch).registers, MACHINES[arch].max_waves
        lines += ["", f"{arch}: {limit} B of LDS, {lane} VGPRs a lane, at most {waves} waves a SIMD", _HEAD]
        lines += [_row(row) for row in sorted(shown, key=_order)]
        lines += _rest([row for row in rows if row not in shown])
    kernels = [_kernel_row(each) for each in findings if "configurations" in each.numbers]
    if kernels:
        lines += ["", arch, f"{'kernel':<37}" + "".join(f"{head:>{width}}" for head, width in _KERNEL_COLUMNS.values())]
    return lines + kernels


def _by_message(title: str, findings: Sequence[Finding]) -> list[str]:
    """Each message once, below the ids of all that it is true of."""
    ids: dict[str, list[str]] = {}
    for finding in findings:
        ids.setdefault(finding.message, []).append(finding.id)
    lines: list[str] = []
    for message, named in ids.items():
        lines += ["", *(f"{title}: {each}" for each in named)]
        lines += textwrap.wrap(message, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return lines


def _kernel_row(finding: Finding) -> str:
    name = f"{finding.labels['package'].partition('-')[0]} {finding.labels['kernel'].strip('_').replace('_kernel', '')}"
    cells = [f"{finding.numbers.get(key, '-'):>{width}}" for key, (_, width) in _KERNEL_COLUMNS.items()]
    return f"{name[:37]:<37}" + "".join(cells)


def _rest(rows: list[Finding]) -> list[str]:
    """One sentence for the configurations at which there is nothing of theirs to show beside ours."""
    if not rows:
        return []
    figures = ("vgpr", "lds_bytes", "vgpr_spills", "scratch_bytes")
    vgpr, lds, spills, scratch = (max(row.numbers[name] for row in rows) for name in figures)
    fewest = min(row.numbers["waves_per_simd"] for row in rows)
    return [
        f"o {len(rows)} more code objects: at most {vgpr} VGPRs and {lds} B of LDS,",
        f"  {spills} VGPR spills, {scratch} B of scratch, at least {fewest:g} waves a SIMD",
    ]


def _order(finding: Finding) -> tuple[str, int, int, str, str]:
    labels = finding.labels
    return (labels["operation"], int(labels["head_size"]), int(labels["block_size"]), labels["side"], finding.id)


def _row(finding: Finding) -> str:
    labels, numbers = finding.labels, {name: f"{value:g}" for name, value in finding.numbers.items()}
    shape = "/".join(filter(None, (labels["head_size"], labels["block_size"], labels["tile"])))
    if labels["side"] == "ours":  # what tells two kernels of ours with the same shape apart
        usual = {"bfloat16", "2GiB+"}
        shape += "".join(
            f" {mark}" for mark in (labels["layout"][:2], labels["dtype"], labels["cache"]) if mark not in usual
        )
    kernel = labels["kernel"].strip("_").removeprefix("kernel_").removesuffix("_kernel")
    name = f"{labels['side'][0]} {kernel[: 28 - len(shape)]} {shape}"
    spills = numbers["vgpr_spills"] + (f"+{numbers['sgpr_spills']}" if numbers["sgpr_spills"] != "0" else "")
    loads = "/".join(numbers[key] for key in ("loads_x4", "loads_x2", "loads_x1", "narrow_loads"))
    return (
        f"{name:<31}{numbers['lds_bytes']:>7}{numbers['vgpr']:>5}{numbers['agpr']:>5} {spills:>6}"
        f"{numbers['scratch_bytes']:>4}{numbers['waves_per_simd']:>4}{numbers['mfma']:>5} {loads:>11}"
    )
