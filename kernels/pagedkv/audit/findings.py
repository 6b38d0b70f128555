# SPDX-License-Identifier: Apache-2.0
"""Findings of the audit: lines of `findings.jsonl`, in the shape every hilgate step reports, and a terminal's report.

The report fits 80 columns: a table of kernels for each arch, whatever is not a pass, one line with the verdict.
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
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
_WIDTHS = {"n": 5, "LDS>": 5, "none": 5, "spill": 6, "LDS": 7, "VGPR": 5, "MFMA": 5, "waves": 6}
"""Column of the table -> its width, beside 35 for the kernel."""
_LEGEND = (
    "n: code objects; LDS>: they want more LDS than there is; none: the compiler made no code; spill: VGPR spills or "
    "scratch; LDS, VGPR, MFMA: the most of any; waves: the fewest of a SIMD. findings.jsonl has each code object."
)


def format_report(findings: Sequence[Finding], *, status: Exit, seconds: float) -> str:
    """Everything a person needs to see; the files hold the rest."""
    arches = sorted({finding.labels["arch"] for finding in findings})
    lines = [line for arch in arches for line in _table(arch, [f for f in findings if f.labels["arch"] == arch])]
    if lines:
        lines += ["", *textwrap.wrap(_LEGEND, WIDTH)]
    kernels = [finding for finding in findings if "configurations" in finding.numbers]
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
    """A row for each kernel, with what its code objects take."""
    kernels: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        labels = finding.labels
        if "tile" in labels and labels["side"] != "both" and "configurations" not in finding.numbers:
            kernels[labels.get("package", labels["side"]), labels["kernel"]].append(finding)
    if not kernels:
        return []
    lds, lane, waves = limits(arch).lds_bytes, limits(arch).registers, MACHINES[arch].max_waves
    title = f"{arch}: {lds} B of LDS, {lane} VGPRs a lane, at most {waves} waves a SIMD"
    head = f"{'kernel':<35}" + "".join(f"{name:>{width}}" for name, width in _WIDTHS.items())
    return ["", title, head, *(_row(*kernel, found) for kernel, found in sorted(kernels.items()))]


def _row(owner: str, kernel: str, findings: Sequence[Finding]) -> str:
    made = [finding.numbers for finding in findings if "vgpr" in finding.numbers]
    too_large = sum("lds_bytes" in finding.numbers for finding in findings) - len(made)
    spilling = sum(numbers["vgpr_spills"] > 0 or numbers["scratch_bytes"] > 0 for numbers in made)
    cells = [len(findings), too_large, len(findings) - too_large - len(made), spilling]
    most = [f"{max(numbers[name] for numbers in made):g}" if made else "-" for name in ("lds_bytes", "vgpr", "mfma")]
    fewest = f"{min(numbers['waves_per_simd'] for numbers in made):g}" if made else "-"
    texts = zip([*cells, *most, fewest], _WIDTHS.values(), strict=True)
    name = f"{owner.partition('-')[0]} {kernel.strip('_').removesuffix('_kernel')}"
    return f"{name[:35]:<35}" + "".join(f"{text:>{width}}" for text, width in texts)


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
