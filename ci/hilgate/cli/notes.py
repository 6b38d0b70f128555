"""What a change does to the values that decide about it, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from hilgate import escape
from hilgate.cli import printing

if TYPE_CHECKING:
    from hilgate.model import Verdict


def print_notes(verdict: Verdict) -> None:
    """Print them; nothing where the change leaves them alone."""
    console = printing.stdout()
    for line in lines(verdict):
        console.print(Text(escape.line(line)), soft_wrap=True)


def lines(verdict: Verdict) -> list[str]:
    """The same as text, readable at 80 columns."""
    return [f"{'looser' if one.looser else 'stricter or new'}: {one.path}: {one.what}" for one in verdict.loosened]
