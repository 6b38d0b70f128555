"""How outcomes and times are worded wherever a person reads them: each outcome has a mark and a word."""

from __future__ import annotations

from hilgate.model import Outcome

MARKS: dict[Outcome, str] = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✗",
    Outcome.INCONCLUSIVE: "?",
    Outcome.DID_NOT_RUN: "○",
}

STYLES: dict[Outcome, str] = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.DID_NOT_RUN: "magenta",
}
"""Styles of rich; did not run is not dimmed, because it is not green."""


def marked(outcome: Outcome) -> str:
    """`✗ fail`."""
    return f"{MARKS[outcome]} {outcome.value}"


def duration(seconds: float | None) -> str:
    """`0.4 s`, `59 s`, `12 min 03 s`, `1 h 04 min`; a dash when nothing was timed."""
    if seconds is None:
        return "–"  # noqa: RUF001 - a dash, not a minus
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
