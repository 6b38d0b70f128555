"""Append-only files that survive two writers and an interrupted one.

A build is written as checks, then steps, then its own line, each file made durable before the next: a build whose line
is there is there whole. What an interrupted write left (half a line, lines of a build without a line of its own) can
only be at the end of a file; the next writer moves it to `<file>.damaged` and says so. Writers exclude each other and
readers with a kernel lock, which is gone with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.history.lines import BuildLine, CheckLine, StepLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hilgate.history.lines import Line

BUILDS, STEPS, CHECKS = "builds.jsonl", "steps.jsonl", "checks.jsonl"
FOLDER: Final = "history"
"""Below `results/`, unless HILGATE_HISTORY or --history names another."""
HISTORY_VARIABLE = "HILGATE_HISTORY"
LOCK_FILE = ".lock"
LOCK_SECONDS = 60.0
"""Adding takes well below a second: whoever holds the lock for a minute is stuck."""


@dataclass(frozen=True)
class Entry:
    """One build with its steps and checks."""

    build: BuildLine
    steps: tuple[StepLine, ...]
    checks: tuple[CheckLine, ...]


@dataclass(frozen=True)
class History:
    """Every whole build, and what is wrong with the ends of the files (empty: nothing)."""

    builds: tuple[BuildLine, ...]
    steps: tuple[StepLine, ...]
    checks: tuple[CheckLine, ...]
    notes: tuple[str, ...]


def append(folder: Path, entry: Entry) -> tuple[bool, tuple[str, ...]]:
    """Add a build unless it is there.

    Returns:
        Whether it was added, and a note for each damaged end that was set aside.

    Raises:
        RecordsError: A line in the middle of a file is not sound and nothing was written, or the disk is full.
        MisuseError: Another process kept the history locked, or the folder cannot be written.
    """
    with locked(folder, fcntl.LOCK_EX):
        before = _read(folder)
        notes = tuple(_set_aside(folder / name, cut) for name, cut in before.cuts.items() if cut is not None)
        if entry.build.build in before.known:
            return False, notes
        for name, lines in ((CHECKS, entry.checks), (STEPS, entry.steps), (BUILDS, (entry.build,))):
            try:
                _write(folder / name, lines)
            except OSError as error:
                raise RecordsError(
                    f"the build could not be added whole: {error.strerror}",
                    where=str(folder / name),
                    remedy="free disk space and add it again; what was written of it will be set aside",
                ) from None
        return True, notes


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[History]:
    """The history, unchanged by others while the context lasts.

    Raises:
        NothingSelectedError: There is no build in it.
        RecordsError: A line in the middle of a file is not sound.
    """
    if not (folder / BUILDS).exists():
        raise _empty(folder)
    with locked(folder, fcntl.LOCK_SH):
        found = _read(folder)
        if not found.builds:
            raise _empty(folder)
        notes = tuple(
            f"{folder / name}: its end was not written whole and is left out; `hilgate history add` sets it aside"
            for name, cut in found.cuts.items()
            if cut is not None
        )
        yield History(tuple(found.builds), tuple(found.steps), tuple(found.checks), notes)


@contextlib.contextmanager
def locked(folder: Path, kind: int) -> Iterator[None]:
    """Hold the history's lock, shared or exclusive.

    Raises:
        MisuseError: It was held by another for `LOCK_SECONDS`, or the folder cannot be written.
    """
    descriptor = _lock_file(folder, kind)
    if descriptor is None:
        yield
        return
    try:
        _take(descriptor, kind, folder)
        yield
    finally:
        os.close(descriptor)


def _lock_file(folder: Path, kind: int) -> int | None:
    try:
        if kind == fcntl.LOCK_EX:
            folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if kind == fcntl.LOCK_SH:
            return None  # a copy on a medium that nobody writes to needs no lock
        raise MisuseError(
            f"the history cannot be written: {error.strerror}", where=str(folder), remedy="name another with --history"
        ) from None


def _take(descriptor: int, kind: int, folder: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise MisuseError(
                    f"another process has held this history for {LOCK_SECONDS:g} seconds",
                    where=str(folder),
                    remedy="end it, or wait and try again",
                ) from None
            time.sleep(0.05)
        else:
            return


@dataclass
class _Found:
    builds: list[BuildLine]
    steps: list[StepLine]
    checks: list[CheckLine]
    known: frozenset[str]
    cuts: dict[str, int | None]
    """File name -> byte from which its end is not part of a whole build; None when all of it is."""


def _read(folder: Path) -> _Found:
    builds, cut = _sound(folder / BUILDS, BuildLine)
    known = frozenset(line.build for _, line in builds)
    if len(known) < len(builds):
        raise RecordsError(
            "a build is there twice", where=str(folder / BUILDS), remedy="remove the second of its lines in each file"
        )
    cuts = {BUILDS: cut}
    kept: dict[str, list[Line]] = {}
    for name, model in ((STEPS, StepLine), (CHECKS, CheckLine)):
        lines, cut = _sound(folder / name, model)
        orphan = next((number for number, (_, line) in enumerate(lines) if line.build not in known), None)
        if orphan is not None:
            behind = next((line for _, line in lines[orphan:] if line.build in known), None)
            if behind is not None:
                raise RecordsError(
                    f"a line of build {lines[orphan][1].build}, which is not in {BUILDS}, stands before whole builds",
                    where=f"{folder / name}:{orphan + 1}",
                    remedy="restore the history, or remove that build's lines",
                )
            cut, lines = lines[orphan][0], lines[:orphan]
        cuts[name], kept[name] = cut, [line for _, line in lines]
    return _Found(
        [line for _, line in builds if isinstance(line, BuildLine)],
        [line for line in kept[STEPS] if isinstance(line, StepLine)],
        [line for line in kept[CHECKS] if isinstance(line, CheckLine)],
        known,
        cuts,
    )


def _sound(path: Path, model: type[Line]) -> tuple[list[tuple[int, Line]], int | None]:
    """(byte where it begins, line) of each whole line, and where a last line without an end begins."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], None
    found: list[tuple[int, Line]] = []
    begin = 0
    *whole, rest = content.split(b"\n")
    for number, line in enumerate(whole, start=1):
        try:
            found.append((begin, model.model_validate_json(line)))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            at = ".".join(str(part) for part in first["loc"])
            raise RecordsError(
                f"not a line of a history: {at + ': ' if at else ''}{first['msg']}",
                where=f"{path}:{number}",
                remedy="restore the file, or move that line away; nothing was changed",
            ) from None
        begin += len(line) + 1
    return found, begin if rest else None


def _write(path: Path, lines: Sequence[Line]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(line.model_dump_json().encode() + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def _set_aside(path: Path, cut: int) -> str:
    """Move what stands from byte `cut` on to `<file>.damaged`; the copy is on disk before the end is cut off."""
    content = path.read_bytes()
    damage = path.with_name(path.name + ".damaged")
    with damage.open("ab") as file:
        file.write(content[cut:] + (b"" if content.endswith(b"\n") else b"\n"))
        file.flush()
        os.fsync(file.fileno())
    os.truncate(path, cut)
    return f"{path}: its end was not written whole; {len(content) - cut} bytes moved to {damage.name}"


def _empty(folder: Path) -> NothingSelectedError:
    return NothingSelectedError(
        "there is no build in this history",
        where=str(folder),
        remedy="add one: `hilgate history add`",
    )


def folder_of(root: Path) -> Path:
    """Where a command that takes no --history looks for one."""
    named = os.environ.get(HISTORY_VARIABLE)
    return Path(named) if named else root / "results" / FOLDER
