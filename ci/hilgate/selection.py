"""Which areas a change selects, and why. Pure: file names in, reasons out.

Selection only ever adds: one more changed file can select more areas and never fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pathspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hilgate.model import Area, Key


@dataclass(frozen=True)
class Selection:
    """Areas to run, each with the reason a reader sees."""

    reasons: Mapping[Key, str]
    """Area -> reason; an area that is not here is not affected."""
    unclaimed: tuple[str, ...]
    """Changed files that no area claims; they select everything."""


def select(areas: Sequence[Area], changed: Iterable[str] | None) -> Selection:
    """Select areas for the changed files (paths relative to the root, `/` between parts); None selects all.

    The reason names the most telling cause: a changed file of the area, else an unclaimed file, else `always`.
    """
    if changed is None:
        return Selection({area.area: "everything runs (no --base)" for area in areas}, ())
    files = sorted(set(changed))
    reasons: dict[Key, str] = {}
    claimed: set[str] = set()
    for area in areas:
        mine = claimed_by(area, files)
        claimed.update(mine)
        if mine:
            reasons[area.area] = _changed(mine)
    unclaimed = tuple(name for name in files if name not in claimed)
    for area in areas:
        if area.area not in reasons and unclaimed:
            reasons[area.area] = f"{_changed(unclaimed)} and no area claims it, so everything runs"
        elif area.area not in reasons and area.always:
            reasons[area.area] = "runs on every change"
    return Selection(reasons, unclaimed)


def claimed_by(area: Area, files: Iterable[str]) -> list[str]:
    """The files that match the area's globs, in the given order."""
    spec = pathspec.PathSpec.from_lines("gitignore", area.paths)
    return [name for name in files if spec.match_file(name)]


def _changed(files: Sequence[str]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more} changed"
