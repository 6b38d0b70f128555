"""`ci/protected.yaml`: the files that decide whether a change may merge, and how a change to each is read.

What a change makes of its own gate: each threshold, list and file that decides, before and after.

What is known to be stricter is told apart; everything else that changed counts as looser, because nobody has to prove
that it is. `ci/protected.yaml` says what decides and in which direction.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pathspec
from pydantic import Field

from hilgate.declare import yaml
from hilgate.declare.load import InvalidDeclarationsError
from hilgate.declare.values import CODE, name_of, read_values
from hilgate.errors import CannotRunHereError
from hilgate.git import file_at
from hilgate.model import Loosening, Noun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hilgate.model import Plan


PROTECTED_FILE = "ci/protected.yaml"
EVERY = "*"


class Protected(Noun):
    """Files that are read alike. Names are the last parts of dotted paths, `*` is every name."""

    paths: tuple[str, ...] = Field(min_length=1)
    """gitignore-style globs."""
    compare: Literal["values", "text", "presence"]
    """values: YAML, TOML, JSON or Python constants, one by one; text: any change; presence: only that it is there."""
    put_back: bool = False
    """Whether an agent runs with the merge base's file while a change that loosens it is not approved. Not for what is
    already in the plan, nor for code."""
    collections: tuple[str, ...] = ()
    """Dotted paths whose entries stand for themselves, `*` is the top: a new entry leaves all others as they were."""
    higher_is_looser: tuple[str, ...] = ()
    lower_is_looser: tuple[str, ...] = ()
    more_is_stricter: tuple[str, ...] = ()
    """Lists: one more item is stricter, one fewer looser."""
    neutral: tuple[str, ...] = ()
    """Decide nothing."""
    fewer_is_stricter: bool = False
    """Whether taking an entry out is stricter, as in a list of exceptions."""
    new_files_are_stricter: bool = False


class ProtectedList(Noun):
    """The whole file; the first entry that matches a path counts."""

    files: tuple[Protected, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Lists:
    """The protected list of the merge base, and the change's own for what the former does not name."""

    entries: tuple[Protected, ...]

    def of(self, path: str) -> Protected | None:
        """How a file is read; None for a file that decides nothing."""
        return next((one for one in self.entries if _matches(one.paths, path)), None)


def load(root: Path, merge_base: str) -> Lists:
    """Read the list of the merge base and the one of the working tree.

    Raises:
        InvalidDeclarationsError: The merge base's list is invalid, or the only one there is.
        CannotRunHereError: The merge base is not in this checkout.
    """
    before = file_at(root, merge_base, PROTECTED_FILE)
    path = root / PROTECTED_FILE
    entries: tuple[Protected, ...] = ()
    if before is not None:
        with tempfile.TemporaryDirectory(prefix="hilgate-") as folder:
            copy = Path(folder, merge_base[:12], PROTECTED_FILE)
            copy.parent.mkdir(parents=True)
            copy.write_bytes(before)
            entries = _read(copy, Path(folder))
    if path.exists():
        try:
            entries += _read(path, root)
        except InvalidDeclarationsError:
            if not entries:
                raise
    return Lists(entries)


def _read(path: Path, root: Path) -> tuple[Protected, ...]:
    document = yaml.read(path, root, ProtectedList)
    if document.noun is None:
        raise InvalidDeclarationsError(document.mistakes)
    return document.noun.files


def _matches(globs: Iterable[str], path: str) -> bool:
    return pathspec.GitIgnoreSpec.from_lines(f"/{glob}" for glob in globs).match_file(path)


MOST_VALUES = 20
"""Changed values of one file that are told one by one; a baseline has thousands."""

_ABSENT = object()


def loosened(root: Path, merge_base: str, changed_files: Iterable[str]) -> tuple[Loosening, ...]:
    """What a change makes of the files that decide, in the order of their paths.

    Args:
        root: The working tree, in a checkout that has the merge base.
        merge_base: Full sha; empty where nothing is compared, and then nothing is loosened.
        changed_files: Paths below the root, of both names where a file was renamed.

    Raises:
        InvalidDeclarationsError: The protected list is invalid.
        CannotRunHereError: The merge base is not in this checkout.
    """
    if not merge_base:
        return ()
    lists = load(root, merge_base)
    found: list[Loosening] = []
    for path in sorted(set(changed_files)):
        how = lists.of(path)
        if how is not None:
            before = file_at(root, merge_base, path)
            here = root / path
            after = here.read_bytes() if here.is_file() else None
            found += [
                Loosening(path=path, what=what, looser=looser) for what, looser in compare(path, before, after, how)
            ]
    return tuple(found)


def to_put_back(root: Path, plan: Plan) -> tuple[str, ...]:
    """The files of which steps must see the merge base's version while nobody approved what the change loosens.

    Raises:
        CannotRunHereError: The plan names no merge base, or one that is not in this checkout.
        InvalidDeclarationsError: The protected list is invalid.
    """
    paths = sorted({one.path for one in plan.loosened if one.looser})
    if not paths:
        return ()
    if not plan.merge_base:
        raise CannotRunHereError(
            "the plan loosens its own gate and names no merge base to measure it with",
            where=paths[0],
            remedy="plan again with --base",
        )
    lists = load(root, plan.merge_base)
    return tuple(path for path in paths if (how := lists.of(path)) and how.put_back)


def compare(path: str, before: bytes | None, after: bytes | None, how: Protected) -> list[tuple[str, bool]]:
    """(what changed, whether it is looser) of one file; None is a file that is not there. Pure."""
    if before == after:
        return []
    if how.compare != "values" or after is None or (before is None and not how.fewer_is_stricter):
        return _as_a_whole(before, after, how)
    try:
        old, new = read_values(path, before) if before is not None else {}, read_values(path, after)
    except ValueError:
        return [("changed, and cannot be compared value by value", True)]
    told = _told(old, new, how)
    if len(told) > MOST_VALUES:
        rest = told[MOST_VALUES:]
        told = [*told[:MOST_VALUES], (f"and {len(rest)} more values", any(looser for _, looser in rest))]
    return told


def _as_a_whole(before: bytes | None, after: bytes | None, how: Protected) -> list[tuple[str, bool]]:
    """A file that came, went or changed, where its values are not compared."""
    if after is None:
        return [("deleted", not how.fewer_is_stricter)]
    if how.compare == "presence":
        return []
    if before is None:
        harmless = how.new_files_are_stricter or (how.compare == "values" and bool(how.collections))
        return [("new file", not harmless)]
    return [("changed", True)]


def _told(old: dict[str, object], new: dict[str, object], how: Protected) -> list[tuple[str, bool]]:
    """Every value that differs, looser ones first; entries that came or went as a whole are told once."""
    told: dict[str, bool] = {}
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if before == after or _in(how.neutral, path):
            continue
        if before is _ABSENT:
            entry = _entry(path, old, how)
            told[f"added: {entry or f'{path} = {_short(after)}'}"] = not entry and _added(path, how)
        elif after is _ABSENT:
            told[f"removed: {_entry(path, new, how) or path}"] = not how.fewer_is_stricter
        elif path == CODE:
            told["the code around its values changed"] = True
        else:
            told[f"{path}: {_short(before)} -> {_short(after)}"] = _looser(path, before, after, how)
    return sorted(told.items(), key=lambda item: not item[1])


def _in(names: tuple[str, ...], path: str) -> bool:
    return name_of(path) in names or EVERY in names


def _entry(path: str, others: dict[str, object], how: Protected) -> str:
    """The entry of a collection that holds this path and of which the other version has nothing; empty for none."""
    for collection in how.collections:
        start = "" if collection == EVERY else collection
        if not path.startswith(start) or (start and path[len(start) : len(start) + 1] not in {".", "["}):
            continue
        entry = path[: _end(path, len(start) + 1 if start else 0)]
        if not any(other == entry or other.startswith((f"{entry}.", f"{entry}[")) for other in others):
            return entry
    return ""


def _end(path: str, begin: int) -> int:
    """Where the entry that begins at `begin` ends: behind its bracket, or at the next separator."""
    if path[begin - 1 : begin] == "[":
        return path.index("]", begin) + 1
    ends = [path.find(mark, begin) for mark in (".", "[")]
    return min((end for end in ends if end >= 0), default=len(path))


def _added(path: str, how: Protected) -> bool:
    """Whether one more value is looser: not one more item of a list that demands, nor a limit where there was none."""
    return not (_in(how.more_is_stricter, path) or name_of(path) in how.lower_is_looser)


def _looser(path: str, before: object, after: object, how: Protected) -> bool:
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return True
    if isinstance(before, bool) or isinstance(after, bool):
        return True
    if name_of(path) in how.lower_is_looser:
        return after < before
    return after > before if _in(how.higher_is_looser, path) else True


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
