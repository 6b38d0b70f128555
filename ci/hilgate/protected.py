"""`ci/protected.yaml`: the files that decide whether a change may merge, and how a change to each is read."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pathspec
from pydantic import Field

from hilgate import strictyaml
from hilgate.changes import file_at
from hilgate.declare import InvalidDeclarationsError
from hilgate.model import Noun

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    document = strictyaml.read(path, root, ProtectedList)
    if document.noun is None:
        raise InvalidDeclarationsError(document.mistakes)
    return document.noun.files


def _matches(globs: Iterable[str], path: str) -> bool:
    return pathspec.GitIgnoreSpec.from_lines(f"/{glob}" for glob in globs).match_file(path)
