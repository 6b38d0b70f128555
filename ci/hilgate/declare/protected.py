# SPDX-License-Identifier: Apache-2.0
"""Protected files: a change to what decides a merge is flagged, with its diff (`ci/protected.yaml` says what does not).

Whether it makes the gate looser is for a person to say: the verdict waits for a named approval, and until then agents
measure with the merge base's version of the data files among them (`put_back`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pathspec
from pydantic import Field

from hilgate import git
from hilgate.declare import yaml
from hilgate.declare.load import InvalidDeclarationsError
from hilgate.errors import CannotRunHereError
from hilgate.model import Loosening, Noun

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hilgate.model import Plan

PROTECTED_FILE = "ci/protected.yaml"
HUNK_LINES = 30
"""Lines of a file's diff that go into the plan; the rest is one `git diff` away."""

HUNK_WIDTH = 200


class Protected(Noun):
    """Files that are protected alike."""

    paths: tuple[str, ...] = Field(min_length=1)
    """gitignore-style globs."""
    flag: Literal["any change", "change or deletion", "deletion", "nothing"] = "any change"
    """What needs an approval. Not a new file where it decides nothing by itself, an edit that reviewers read, or a file
    that no verdict rests on."""
    put_back: bool = False
    """Whether an agent runs with the merge base's file while the change to it is not approved. Not for what is already
    in the plan, nor for code."""


class ProtectedList(Noun):
    """The whole file; the first entry that matches a path counts, and what none matches is protected."""

    files: tuple[Protected, ...] = Field(min_length=1)


def load(root: Path, merge_base: str) -> tuple[Protected, ...]:
    """Entries of the merge base, else of the working tree, and one for all that they do not name; none without a list.

    A list that was written for another version of hilgate is left out where the other one can be read; either way a
    change to the list itself is flagged.

    Raises:
        InvalidDeclarationsError: No list can be read.
        CannotRunHereError: The merge base is not in this checkout.
    """
    before, path = git.file_at(root, merge_base, PROTECTED_FILE), root / PROTECTED_FILE
    documents = [] if before is None else [yaml.parse(before, f"{merge_base[:12]}:{PROTECTED_FILE}", ProtectedList)]
    documents += [yaml.read(path, root, ProtectedList)] if path.exists() else []
    if not documents:
        return ()
    counting = next((document.noun.files for document in documents if document.noun), None)
    if counting is None:
        raise InvalidDeclarationsError(documents[0].mistakes)
    return (Protected(paths=(PROTECTED_FILE,)), *counting, Protected(paths=("**",)))


def entry_for(entries: Iterable[Protected], path: str) -> Protected | None:
    """How a file is protected; None for a file that decides nothing."""
    found = next((entry for entry in entries if _matches(entry, path)), None)
    return None if found is None or found.flag == "nothing" else found


def _matches(entry: Protected, path: str) -> bool:
    return pathspec.GitIgnoreSpec.from_lines(f"/{glob}" for glob in entry.paths).match_file(path)


def loosened(root: Path, merge_base: str, changed_files: Iterable[str], commit: str = "") -> tuple[Loosening, ...]:
    """The protected files that a change touches, in the order of their paths.

    Args:
        root: The working tree, in a checkout that has the merge base.
        merge_base: Full sha; empty where nothing is compared, and then nothing is flagged.
        changed_files: Paths below the root, of both names where a file was renamed.
        commit: Full sha of the change, whose files are read from git; empty where the working tree has more to it.

    Raises:
        InvalidDeclarationsError: The protected list is invalid.
        CannotRunHereError: The merge base is not in this checkout.
    """
    if not merge_base:
        return ()
    entries = load(root, merge_base)
    return tuple(
        found
        for path in sorted(set(changed_files))
        if (entry := entry_for(entries, path)) and (found := _flagged(root, merge_base, path, entry, commit))
    )


def _flagged(root: Path, merge_base: str, path: str, entry: Protected, commit: str) -> Loosening | None:
    before = git.file_at(root, merge_base, path)
    if commit:
        after = git.file_at(root, commit, path)
    else:  # never through a link: what it leads to is this machine's, and would stand in the plan
        plain = (root / path).is_file() and (root / path).resolve() == root.resolve() / path
        after = (root / path).read_bytes() if plain else None
    if before == after:
        return None
    if after is None:
        return Loosening(path=path, what="deleted")
    if entry.flag == "deletion" or (before is None and entry.flag == "change or deletion"):
        return None
    if before is None:
        return Loosening(path=path, what="new file")
    lines = [line[:HUNK_WIDTH] for line in git.diff(root, merge_base, path).splitlines()]
    signs = [line[:1] for line in lines]
    what = f"changed: {signs.count('+')} lines added, {signs.count('-')} removed"
    return Loosening(path=path, what=what, hunk="\n".join(lines[:HUNK_LINES]))


def to_put_back(root: Path, plan: Plan) -> tuple[str, ...]:
    """The files of which steps must see the merge base's version while nobody approved the change to them.

    Raises:
        CannotRunHereError: The plan names no merge base, or one that is not in this checkout.
        InvalidDeclarationsError: The protected list is invalid.
    """
    paths = sorted({one.path for one in plan.loosened})
    if not paths:
        return ()
    if not plan.merge_base:
        raise CannotRunHereError(
            "the plan loosens its own gate and names no merge base to measure it with",
            where=paths[0],
            remedy="plan again with --base",
        )
    entries = load(root, plan.merge_base)
    return tuple(path for path in paths if (entry := entry_for(entries, path)) and entry.put_back)
