"""Did-you-mean, in one place so that every mistake about a name reads the same."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LISTED = 12
"""Names listed in full when none is close; more would bury the message."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown `name`: the closest known names, or what there is to choose from."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(one) for one in close) + "?"
    if not names:
        return "nothing of this kind is declared"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return "known: " + ", ".join(names[:LISTED]) + more
