# SPDX-License-Identifier: Apache-2.0
"""Protected files: a change to what decides a merge is flagged, with its diff (`ci/protected.yaml` says what does not).

Whether it makes the gate looser is for a person to say: the verdict waits for a named approval, and until then agents
measure with the merge base's version of the data files among them (`restore`).
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from pydantic import AliasChoices, Field, field_validator

from hilgate import git
from hilgate.declare import globs, yaml
from hilgate.declare.load import InvalidDeclarationsError
from hilgate.errors import CannotRunHereError
from hilgate.model import StrictModel, refused
from hilgate.model.plan import ProtectedChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from hilgate.declare.imports import Imports
    from hilgate.model.plan import Plan

PROTECTED_FILE = "ci/protected.yaml"
HUNK_LINES = 30
"""Lines of a file's diff that go into the plan; the rest is one `git diff` away."""

HUNK_WIDTH = 200

UNREADABLE_CODE = (
    *("**/__pycache__/**", "**/*.pyc", "**/*.pyo"),
    *("**/*.so", "**/*.so.[0-9]*", "**/*.pyd", "**/*.dll", "**/*.dylib"),
    *("**/*.egg", "**/*.whl", "**/*.zip", "**/*.pyz", "**/*.pyzw", "**/*.pex"),
)
"""Globs of files that Python loads and nobody can read in a diff: bytecode, binaries, and archives, which may stand on
the import path. Upper and lower case are alike."""

SOURCES = (".py", ".pyi")
"""How files end that hold a module as text; type checkers prefer the second."""


class Protected(StrictModel):
    """Files that are protected alike."""

    paths: tuple[str, ...] = Field(min_length=1)
    """gitignore-style globs from the root. Where `flag` is any change, what lies in a folder that one names belongs to
    it, and what Python finds by the name of a module (`x/` and `x.*` for `x.py`); else the glob says so itself
    (`docs/**`)."""
    flag: Literal["any change", "change or deletion", "deletion", "nothing"] = "any change"
    """What needs an approval. New files that decide nothing by themselves, edits that reviewers read, and files that no
    verdict depends on need none."""
    restore: bool = Field(default=False, validation_alias=AliasChoices("restore", "put_back"))  # older bases
    """Whether an agent runs with the merge base's file while the change to it is not approved. Not meant for code, or
    for what the plan holds already."""

    @field_validator("paths")
    @classmethod
    def _are_globs(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            try:
                globs.parse(f"/{path}")
            except ValueError as error:
                raise refused(f"{path!r} is not a glob: {error}", "write it as in .gitignore") from None
        return paths


class ProtectedList(StrictModel):
    """The whole file; the last rule that matches a path counts, as in areas, and what none matches is protected."""

    rules: tuple[Protected, ...] = Field(min_length=1)
    """What needs an approval and what does not."""
    tested: tuple[str, ...] = ()
    """gitignore-style globs of what is tested: what a protected module may import although it is not protected itself.
    """

    @property
    def entries(self) -> tuple[Protected, ...]:
        """The rules, after one for all that they do not name and before one for the list itself."""
        return (Protected(paths=("**",)), *self.rules, Protected(paths=(PROTECTED_FILE,)))


def load(root: Path, merge_base: str) -> tuple[Protected, ...]:
    """Rules of the merge base, else of the working tree, after one for all that they do not name; none without a list.

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
    counting = next((document.value for document in documents if document.value), None)
    if counting is None:
        raise InvalidDeclarationsError(documents[0].mistakes)
    return counting.entries


def entry_for(entries: Sequence[Protected], path: str) -> Protected | None:
    """How a file is protected; None for a file that decides nothing."""
    entry_matched = next((entry for entry in reversed(entries) if _matches(entry, path)), None)
    return None if entry_matched is None or entry_matched.flag == "nothing" else entry_matched


def _entries_of(entries: Sequence[Protected], paths: Iterable[str]) -> dict[str, Protected]:
    """How those of these files are protected that are."""
    pairs = ((path, entry_for(entries, path)) for path in paths)
    return {path: entry for path, entry in pairs if entry}


def _matches(entry: Protected, path: str) -> bool:
    """Whether an entry is about a path.

    Where it protects that most, it is also about what lies in a folder of that name, about all that Python finds by the
    name of a module (`P/x/...` and `P/x.*` for `P/x.py`), and about names in other case. An entry that takes files out,
    or asks for less, is about the files that it names: `*.md` is no folder.
    """
    paths = [f"/{glob}" for glob in entry.paths]
    if entry.flag != "any change":
        return globs.matches(paths, path, below=False)
    return any(globs.matches(paths, name, modules=True) for name in {path, path.casefold()})


def unprotected_imports(listed: ProtectedList, imports: Imports, files: Iterable[str]) -> dict[str, str]:
    """Modules that decide although anybody may change them: path -> a protected module that imports it.

    What a protected module runs decides with it. It may import other protected modules and what is tested.
    """
    names = {path: imports.packages.any_module(PurePosixPath(path)) for path in files}
    path_of = {module: path for path, module in names.items() if module in imports.graph.modules}
    tested = [f"/{glob}" for glob in listed.tested]
    entries = listed.entries

    def protects(path: str) -> bool:
        entry = entry_for(entries, path)
        return entry is not None and entry.flag != "deletion"

    free = {module: path for module, path in path_of.items() if not protects(path) and not globs.matches(tested, path)}
    unprotected = {}
    for module, path in sorted(free.items()):
        importers = imports.graph.find_modules_that_directly_import(module) & path_of.keys() - free.keys()
        if deciding := sorted(path_of[importer] for importer in importers if protects(path_of[importer])):
            unprotected[path] = deciding[0]
    return unprotected


def is_unreadable_code(path: str) -> bool:
    """Whether Python loads a file of this name and nobody can read it."""
    return globs.matches(UNREADABLE_CODE, path.casefold())


def namesakes(paths: Iterable[str]) -> dict[str, str]:
    """Modules beside a folder of their name, and the code in that folder: path -> what lies beside it.

    Python loads a package in place of a module beside it, and a module in place of other folders, whichever of them a
    reader or an entry of the protected list looks at. A folder without code, as of a test's data, is no namesake.
    """
    code = [path for path in paths if path.endswith(SOURCES) or is_unreadable_code(path)]
    modules = {str(PurePosixPath(path).with_suffix("")).casefold(): path for path in code if path.endswith(SOURCES)}
    shadowing: dict[str, str] = {}
    for path in code:
        for folder in PurePosixPath(path).parents:
            if module := modules.get(str(folder).casefold()):
                shadowing |= {path: module, module: f"{folder}/"}
    return shadowing


def unread_code(changed_files: Iterable[str], tree: Iterable[str]) -> dict[str, str]:
    """Files of a change through which code runs that a reader does not see: path -> why, in a few words.

    `tree` holds all files after the change; what the change deletes is not among them.
    """
    paths = set(tree)
    beside = namesakes(paths)
    unread = {}
    for path in sorted(paths.intersection(changed_files)):
        if is_unreadable_code(path):
            unread[path] = "Python loads it, and nobody can read it"
        elif path in beside:
            unread[path] = f"beside {beside[path]}: Python loads only one of a module and a folder of the same name"
    return unread


def protected_changes(
    root: Path, merge_base: str, changed_files: Iterable[str], commit: str = ""
) -> tuple[ProtectedChange, ...]:
    """The protected files that a change touches, in the order of their paths.

    Args:
        root: The working tree, in a checkout that has the merge base.
        merge_base: Full sha; empty where nothing is compared, and then nothing is flagged.
        changed_files: Paths below the root, of both names where a file was renamed.
        commit: Full sha of the change, whose files are read from git; empty where the working tree is compared instead.

    Raises:
        InvalidDeclarationsError: The protected list is invalid.
        CannotRunHereError: The merge base is not in this checkout.
    """
    if not merge_base:
        return ()
    entries = load(root, merge_base)
    touched = _entries_of(entries, sorted(set(changed_files)))
    before = git.tree(root, merge_base)
    after = git.tree(root, commit) if commit else _working_tree(root, touched, before)
    changes = ((path, _what(entry, before.get(path), after.get(path))) for path, entry in touched.items())
    flagged = {path: what for path, what in changes if what}
    hunks = git.hunks(root, merge_base, commit, [path for path, what in flagged.items() if what == CHANGED])
    return tuple(_shown(path, what, hunks.get(path, "")) for path, what in flagged.items())


CHANGED = "changed"
UNREADABLE = "a link, or a name that is not UTF-8: nobody can be shown what it is"


def _working_tree(root: Path, paths: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """Files of the working tree in the words of `git.tree`; none through a link, which leads to this machine's own."""
    blobs = {}
    for path in paths:
        place = root / path
        if place.is_file() and place.resolve() == root.resolve() / path:
            same_mode = before.get(path, "").partition(" ")[0] or "100644"
            blobs[path] = f"{same_mode} {git.blob_name(place.read_bytes(), before.values())}"
    return blobs


def _what(entry: Protected, before: str | None, after: str | None) -> str:
    """What is reported of a file, in a few words; empty for nothing."""
    if before is None and after is None:  # it is among the changed files, and on no side
        return UNREADABLE
    if before == after:
        return ""
    if after is None:
        return "deleted"
    if entry.flag == "deletion" or (before is None and entry.flag == "change or deletion"):
        return ""
    return "new file" if before is None else CHANGED


def _shown(path: str, what: str, hunk: str) -> ProtectedChange:
    if what != CHANGED:
        return ProtectedChange(path=path, what=what)
    lines = [line[:HUNK_WIDTH] for line in hunk.splitlines()]
    signs = [line[:1] for line in lines]
    what = f"changed: {signs.count('+')} lines added, {signs.count('-')} removed"
    if not lines:
        what = "changed, though git shows no line of it (its mode, or bytes that a setting of this clone hides)"
    return ProtectedChange(path=path, what=what, hunk="\n".join(lines[:HUNK_LINES]))


def files_to_restore(root: Path, plan: Plan) -> tuple[str, ...]:
    """Changed protected files that must be reset to the merge base until someone approves the change.

    Raises:
        CannotRunHereError: The plan names no merge base, or one that is not in this checkout.
        InvalidDeclarationsError: The protected list is invalid.
    """
    paths = sorted({change.path for change in plan.protected_changes})
    if not paths:
        return ()
    if not plan.merge_base:
        raise CannotRunHereError(
            "the plan has protected changes and names no merge base to measure it with",
            where=paths[0],
            remedy="plan again with --base",
        )
    entries = load(root, plan.merge_base)
    return tuple(path for path, entry in _entries_of(entries, paths).items() if entry.restore)
