"""`findings.jsonl`: one line for each thing that was checked, in the shape every hilgate step reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from pagedkv.errors import Exit

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
