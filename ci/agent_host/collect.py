# SPDX-License-Identifier: Apache-2.0
"""Take what a step left out of its folder: plain files with plain names, within a budget; and remove all of the rest.

The folder is written by the code of a change, so its names, numbers, sizes and depths are chosen by whoever wrote that.
What does not come along is named, and is never an error: it must not decide how the job ends.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import stat
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from agent_host import host

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS_FILE = "results.jsonl"
"""What a job is judged by; it is taken before anything else, so that no other file can use up the budget."""

HOOKS_OWN = frozenset({"health-before.json", "health-after.json"})
"""Written by the agent's hooks beside the results; a step that leaves anything of these names is not believed."""

MOST_BYTES = 2**30
"""Most bytes of all files of a job. A sparse file counts with its nominal size, because it is uploaded in full."""

MOST_FILES = 10_000
"""Files and folders that are looked at."""

MOST_DEPTH = 10
NAME_BYTES = 200
"""Most bytes of one part of a path; below the 255 that file systems take, because copies have a name of their own
first."""

SAID = 20
"""Refusals that are printed; the rest is counted."""

CHUNK_BYTES = 2**20


@dataclass
class _Budget:
    """What may still be taken, and what was left behind."""

    files: int
    bytes: int
    refused: list[str] = field(default_factory=list)

    def refuse(self, name: object, why: str) -> None:
        self.refused.append(host.printable(f"{name}: {why}"))


def collect(
    source: Path, target: Path, *, reserved: frozenset[str] = HOOKS_OWN, most_files: int = MOST_FILES
) -> list[str]:
    """Copy plain files of a finished job from `source` into `target`; returns what was left behind, and why.

    In a pod the container of the step still lives and may write to `source`: nothing in it is reached through a link.
    `reserved` are names at the top that are left behind whatever they are. The texts are printable.
    """
    budget = _Budget(most_files, MOST_BYTES)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return [host.printable(f"everything: {target} cannot be made ({error.strerror})")]
    first = PurePosixPath(RESULTS_FILE)
    if os.path.lexists(source / first):
        budget.files -= 1
        _take(source, target, first, budget)
    waiting = collections.deque([PurePosixPath()])
    while waiting:
        for inner in _below(source, waiting.popleft(), budget):
            if str(inner) in reserved:
                budget.refuse(inner, "a name of the agent's hooks")
            elif why := _misnamed(inner.name):
                budget.refuse(inner, why)
            elif _mode(source, inner) == stat.S_IFLNK:
                budget.refuse(inner, "a link")
            elif _mode(source, inner) != stat.S_IFDIR:
                _take(source, target, inner, budget)
            elif len(inner.parts) > MOST_DEPTH:
                budget.refuse(inner, f"a folder in more than {MOST_DEPTH} others")
            else:
                waiting.append(inner)
    return budget.refused


def take_one(source: Path, target: Path, name: str) -> None:
    """Copy one plain file by its name, if it is there, and say in the log why it was not copied."""
    budget = _Budget(1, MOST_BYTES)
    _take(source, target, PurePosixPath(name), budget)
    sys.stderr.write("".join(f"left behind: {line}\n" for line in budget.refused))


def leave(source: Path, target: Path) -> None:
    """Collect, and say in the log what was left behind."""
    refused = collect(source, target)
    for line in refused[:SAID]:
        sys.stderr.write(f"left behind: {line}\n")
    if len(refused) > SAID:
        sys.stderr.write(f"left behind: {len(refused) - SAID} more\n")


def _misnamed(name: str) -> str:
    r"""Why no file is taken under this name; empty where it may be.

    buildkite-agent reads a `\\` as `/` when it downloads, and what no terminal shows as it is could be another name.
    """
    if "\\" in name or not name.isprintable():
        return "a name with a backslash, a control character or bytes that are not UTF-8"
    return f"a name of more than {NAME_BYTES} bytes" if len(os.fsencode(name)) > NAME_BYTES else ""


@contextlib.contextmanager
def _opened(source: Path, folder: PurePosixPath) -> Iterator[int]:
    """A folder inside `source`, opened part by part and never through a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(source, flags)
    try:
        for part in folder.parts:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _mode(source: Path, inner: PurePosixPath) -> int:
    """The kind of what has this name, itself and not what it leads to; 0 where it is gone."""
    try:
        with _opened(source, inner.parent) as parent:
            return stat.S_IFMT(os.stat(inner.name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return 0


def _below(source: Path, folder: PurePosixPath, budget: _Budget) -> Iterator[PurePosixPath]:
    """What lies directly in a folder, in the order of its names, as long as the budget of files lasts."""
    try:
        with _opened(source, folder) as opened, os.scandir(opened) as entries:
            # Two more than may be taken: the results, which were taken first, and one to see that there are more.
            names = sorted(itertools.islice((entry.name for entry in entries), budget.files + 2))
    except FileNotFoundError:
        return
    except OSError as error:
        budget.refuse(folder, f"cannot be read ({error.strerror})")
        return
    for name in names:
        if folder / name == PurePosixPath(RESULTS_FILE):
            continue
        if budget.files <= 0:
            budget.refuse(folder, f"the rest of it: a job leaves at most {MOST_FILES} files")
            return
        budget.files -= 1
        yield folder / name


def _take(source: Path, target: Path, inner: PurePosixPath, budget: _Budget) -> None:
    """Copy one file, or say why it was not."""
    fresh, flags = target / inner.parent / f".{uuid.uuid4().hex}.new", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with _opened(source, inner.parent) as parent:
            descriptor = os.open(inner.name, flags | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        link = _mode(source, inner) == stat.S_IFLNK
        budget.refuse(inner, "a link" if link else f"cannot be read ({error.strerror})")
        return
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            budget.refuse(inner, "no plain file")
        elif state.st_nlink != 1:
            budget.refuse(inner, "a second name of another file")
        elif state.st_size > budget.bytes:
            budget.refuse(inner, f"{state.st_size} bytes, and a job leaves at most {MOST_BYTES}")
        else:
            budget.bytes -= state.st_size
            try:
                fresh.parent.mkdir(parents=True, exist_ok=True)
                with fresh.open("wb") as out:
                    left = state.st_size
                    while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                        left -= out.write(chunk)
                fresh.replace(target / inner)
            except OSError as error:
                budget.refuse(inner, f"cannot be copied ({error.strerror})")
                with contextlib.suppress(OSError):
                    fresh.unlink()


def discard(folder: Path) -> None:
    """Remove a folder that a step wrote to; what cannot be removed is said in the log, and stays."""
    failure = host.remove(folder) if folder.is_dir() and not folder.is_symlink() else ""
    if failure:
        sys.stderr.write(f"not removed from this host: {folder}: {failure}\n")
