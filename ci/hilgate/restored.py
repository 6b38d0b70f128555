"""Files of the merge base in place of the change's while steps run, and the note about it beside the results.

A change that loosens a tolerance is still measured with the old one: on an agent the data files that it loosens are
put back to the merge base before its steps start, and come back afterwards. The code of hilgate itself is not: what a
change makes of that, nobody but a person can approve.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hilgate.changes import file_at
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOTE = "restored.json"


def read_restored(folder: Path) -> tuple[tuple[str, ...], str]:
    """The files that a job put back, and what is wrong with its note (empty: nothing, or there is none)."""
    path = folder / NOTE
    if not path.exists():
        return (), ""
    try:
        files = json.loads(path.read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        files = None
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        return (), f"{NOTE}: not a note of restored files"
    return tuple(files), ""


@contextmanager
def put_back(root: Path, merge_base: str, files: tuple[str, ...], folder: Path) -> Iterator[None]:
    """Have `files` as they are at the merge base while the context lasts, and note it in `folder`.

    Raises:
        CannotRunHereError: The merge base is not in this checkout, or a file cannot be written.
    """
    if not files:
        yield
        return
    old = {name: file_at(root, merge_base, name) for name in files}
    new = {name: _content(root / name) for name in files}
    note = json.dumps({"merge_base": merge_base, "files": sorted(files)}, indent=1)
    (folder / NOTE).write_text(note + "\n", encoding="utf-8")
    try:
        for name, content in old.items():
            _set(root, name, content)
        yield
    finally:
        for name, content in new.items():
            _set(root, name, content)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _set(root: Path, name: str, content: bytes | None) -> None:
    path = root / name
    problem = "" if path.parent.resolve().is_relative_to(root.resolve()) else "it leads out of the checkout"
    try:
        if path.is_symlink() and not problem:
            path.unlink()
        if content is None and not problem:
            path.unlink(missing_ok=True)
        elif content is not None and not problem:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        problem = error.strerror or type(error).__name__
    if problem:
        raise CannotRunHereError(
            f"{name} cannot be put back to the merge base: {problem}",
            where=str(root),
            remedy="a change that loosens its own gate is measured with the old values; give it a clean checkout",
        )
