# SPDX-License-Identifier: Apache-2.0
"""Match paths against gitignore-style globs, in time that grows with the length of both and no faster.

A change declares globs and brings file names. Where a glob becomes one regular expression, as in pathspec, a glob of
many stars and a name that nearly matches keep it busy for hours; here a `*` is tried within one part of a path, and
takes the first place that fits.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST = 500
"""Characters of a glob."""

DEEP = "**"


@dataclass(frozen=True)
class Glob:
    """One glob: the parts of a path that it describes, one after the other."""

    parts: tuple[re.Pattern[str] | None, ...]
    """None stands for any number of parts, also for none."""
    folder: bool
    """Whether it ends in a slash: what lies below such a folder, and not a file of that name."""
    shallow: bool
    """Whether it ends in `/*`: what lies in a folder, and nothing below that."""
    taken_out: bool
    """Whether it begins with a `!`."""

    def match(self, parts: tuple[str, ...], *, below: bool, modules: bool = False) -> bool:
        """Whether it describes a file, or where `below` or `folder` is set, a folder that the file lies in.

        With `modules`, a folder or file `x.*` also counts as `x.py`, the module of that name.
        """
        states, below = self._from({0}), self.folder or (below and not self.shallow)
        modules = modules and not self.folder and not self.shallow
        for number, part in enumerate(parts):
            name = part.partition(".")[0]
            if modules and name and len(self.parts) in self._following(states, f"{name}.py"):
                return True
            states = self._following(states, part)
            at_end = number == len(parts) - 1
            if len(self.parts) in states and (not self.folder if at_end else below):
                return True
        return False

    def _following(self, states: set[int], part: str) -> set[int]:
        """Where the glob may be after a part of the path, if it was at one of `states` before."""
        return self._from({place for state in states for place in self._after(state, part)})

    def _after(self, state: int, part: str) -> tuple[int, ...]:
        """Where the glob may be after a part of the path, if it was at `state` before."""
        if state == len(self.parts):
            return ()
        pattern = self.parts[state]
        if pattern is None:
            return (state,)
        return (state + 1,) if pattern.match(part) else ()

    def _from(self, states: set[int]) -> set[int]:
        """`states`, and those that are reached without any part of the path."""
        for state in sorted(states):
            place = state
            while place < len(self.parts) and self.parts[place] is None:
                place += 1
                states.add(place)
        return states


def parse(glob: str) -> Glob:
    """Parse a glob: `*`, `?` and `[a-z]` within a part of the path, `**` for any number of parts, `!` before all.

    One with a slash anywhere but at its end begins at the root, any other fits at each depth.

    Raises:
        ValueError: It is none; says why.
    """
    if not glob.strip() or glob.startswith("#"):
        raise ValueError("it is empty, or a comment")
    if "\\" in glob or len(glob) > LONGEST:
        raise ValueError(f"a glob has no backslash and at most {LONGEST} characters")
    body = glob.removeprefix("!")
    names = [name for name in body.split("/") if name]
    if not names:
        raise ValueError("it names nothing")
    if "/" not in body.removesuffix("/"):
        names.insert(0, DEEP)
    folder = body.endswith("/") and names[-1] != DEEP
    if names[-1] == DEEP:
        names.append("*")  # what lies below, and not the folder itself
    once = [name for number, name in enumerate(names) if name != DEEP or names[number - 1 : number] != [DEEP]]
    return Glob(tuple(_part(name) for name in once), folder, not folder and once[-1] == "*", glob.startswith("!"))


def _part(name: str) -> re.Pattern[str] | None:
    # `fnmatch` writes `*` so that it never goes back to another place (atomic groups); stars in a row are one.
    return None if name == DEEP else re.compile(fnmatch.translate(re.sub(r"\*+", "*", name.replace("[^", "[!"))))


@functools.lru_cache(maxsize=1024)
def _parsed(globs: tuple[str, ...]) -> tuple[Glob, ...]:
    return tuple(parse(glob) for glob in globs)


def matches(globs: Iterable[str], path: str, *, below: bool = True, modules: bool = False) -> bool:
    """Whether a path is one that these globs describe; of those that do, the last one counts.

    With `below`, as for git, what lies in a folder that a glob describes is meant too. Without it only the path itself
    is, unless the glob ends in a slash or in `**`. With `modules`, whatever Python may load by the name of a module is
    meant where a glob describes that module: `P/x/...` and `P/x.*` count as `P/x.py`.

    Raises:
        ValueError: One is no glob.
    """
    parts = tuple(path.split("/"))
    counting = next(
        (one for one in reversed(_parsed(tuple(globs))) if one.match(parts, below=below, modules=modules)), None
    )
    return counting is not None and not counting.taken_out
