"""Cycles in a graph of keys, by name."""

from __future__ import annotations

import graphlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def find_cycle(needs: Mapping[str, Iterable[str]]) -> list[str]:
    """A cycle of `needs` as `[a, b, a]` (a needs b needs a); empty when there is none."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        # graphlib lists each node before the one that needs it.
        return list(reversed(error.args[1]))
    return []
