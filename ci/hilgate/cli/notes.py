"""What a verdict says beside outcomes: what each ruling rests on, flakes, the quarantine, and what a change loosens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from hilgate.cli import printing
from hilgate.model import Outcome, Ruling

if TYPE_CHECKING:
    from hilgate.model import Verdict

MOST_LINES = 12
"""Of evidence for one step; verdict.json has all of it."""


def print_notes(verdict: Verdict) -> None:
    """Print what is not said by outcomes; nothing for a plain pass."""
    console = printing.stdout()
    for line in lines(verdict):
        console.print(Text(line), soft_wrap=True)


def lines(verdict: Verdict) -> list[str]:
    """The same as text, readable at 80 columns."""
    told: list[str] = []
    for step in verdict.steps:
        if step.outcome is not Outcome.PASS:
            told += [f"{step.key}: {step.ruling.value}", *(f"  {line}" for line in step.evidence[:MOST_LINES])]
        elif step.ruling is Ruling.QUARANTINED:
            told += [f"{step.key}: failed in quarantine: {name}" for name in step.quarantined]
        told += [f"{step.key}: flaky: {name}" for name in step.flaky]
        told += [f"{step.key}: in quarantine and passed, the entry can go: {name}" for name in step.unexpected_passes]
    for one in verdict.loosened:
        told.append(f"{'looser' if one.looser else 'stricter or new'}: {one.path}: {one.what}")
    if any(one.looser for one in verdict.loosened):
        told.append(f"approved by {verdict.approved_by}" if verdict.approved_by else f"verdict: {verdict.why}")
    return told
