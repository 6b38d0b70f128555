"""The form of `results.jsonl`: one record per line, appended in groups, and each group sealed by a checksum.

A seal is a line of its own. It covers the lines since the seal before it and that seal itself, so a changed byte, a
lost line, two lines in another order or the same lines twice are all seen. It guards against damage, not against
somebody who can write the file: whoever runs a step can run any other code there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hilgate.errors import RecordsError
from hilgate.model import BuildRecord, Check, CheckRecord, ImageRecord, Plan, RerunRecord, StepRecord, record_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hilgate.model import Health, Record

_SEAL = re.compile(rb'\{"kind":"seal","sha256":"([0-9a-f]{64})"\}\n')
_SEAL_BYTES = len(b'{"kind":"seal","sha256":""}\n') + 64

UNSEALED = "the last lines have no seal: writing them was interrupted, or the end is lost"
TRUNCATED = "the last line is truncated"


@dataclass(frozen=True)
class Attempt:
    """One finished run of a step."""

    record: StepRecord
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Recorded:
    """Everything that a build left.

    Attributes:
        builds: The first run and its continuations, in order; empty only when no job left any.
        attempts: Step key -> its finished runs in order; the last one counts.
        unfinished: Steps with checks and no record of their end.
        reruns: Step key -> its failing checks that were run once more, in order.
        images: Image -> what was built, as the step that provides it recorded it.
        health: Step key, or `<step key>.recheck` -> what the hooks of its job saw, in order.
        damaged: Job folder -> why what it holds cannot be believed.
        salvaged: Step key -> failing checks that could still be read in damaged results: a failure stays one.
        restored: Step key -> files of the merge base that its job put in place of the change's.
    """

    builds: tuple[BuildRecord, ...]
    attempts: dict[str, tuple[Attempt, ...]]
    unfinished: frozenset[str] = frozenset()
    reruns: dict[str, tuple[RerunRecord, ...]] = field(default_factory=dict)
    images: dict[str, ImageRecord] = field(default_factory=dict)
    health: dict[str, tuple[Health, ...]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    salvaged: dict[str, tuple[Check, ...]] = field(default_factory=dict)
    restored: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def last(self, key: str) -> Attempt | None:
        """The attempt that counts, or None when the step did not finish."""
        return self.attempts[key][-1] if key in self.attempts else None


@dataclass(frozen=True)
class Group:
    """Lines that were appended together.

    Attributes:
        first: Number of the first line in the file, from 1.
        seal: The line that seals them; empty at an end without a seal.
        problem: Why the seal does not hold; empty when it does.
    """

    first: int
    lines: tuple[bytes, ...]
    seal: bytes
    problem: str


def append(path: Path, records: list[Record]) -> None:
    """Append records and their seal, and make them durable before returning.

    A step is finished only once its `StepRecord` is on the disk, so one `fsync` after it covers the lines before it.

    Raises:
        RecordsError: The disk is full, or what is there ends without a seal.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        before = _SEAL.fullmatch(os.pread(descriptor, _SEAL_BYTES, max(0, size - _SEAL_BYTES)))
        if size and not before:
            raise RecordsError(UNSEALED, where=str(path), remedy="run `hilgate gate --resume`: it sets the end aside")
        text = sealed([record.model_dump_json().encode() + b"\n" for record in records], before[1] if before else b"")
        if os.write(descriptor, text) != len(text):
            raise RecordsError(
                "the records could not be written whole", where=str(path), remedy="free disk space, then --resume"
            )
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sealed(lines: list[bytes] | tuple[bytes, ...], before: bytes) -> bytes:
    """The lines and their seal.

    Args:
        lines: With their newlines.
        before: The checksum in the seal before them, in hex; empty at the beginning.
    """
    text = b"".join(lines)
    return text + b'{"kind":"seal","sha256":"%s"}\n' % _checksum(before, text)


def groups(text: bytes) -> Iterator[Group]:
    """The groups of a file, in order, each with what is wrong with its seal."""
    before, first = b"", 1
    lines: list[bytes] = []
    for line in text.splitlines(keepends=True):
        seal = _SEAL.fullmatch(line)
        if seal is None:
            lines.append(line)
            continue
        good = seal[1] == _checksum(before, b"".join(lines))
        problem = "" if good else f"lines {first} to {first + len(lines)} are not as they were written"
        yield Group(first, tuple(lines), line, problem)
        first += len(lines) + 1
        before, lines = seal[1], []
    if lines:
        yield Group(first, tuple(lines), b"", UNSEALED)


def _checksum(before: bytes, text: bytes) -> bytes:
    return hashlib.sha256(before + text).hexdigest().encode()


@dataclass
class Reader:
    """Accepts lines in order and remembers what they mean.

    Attributes:
        job: Key of the only step that may have records here; empty accepts every step of the plan.
        rechecks: Whether this is a rerun on another node, which holds rerun records and no others.
        foreign: Whether a line was of another plan, commit or state of the files.
    """

    plan: Plan
    digest: str
    job: str = ""
    rechecks: bool = False
    builds: list[BuildRecord] = field(default_factory=list)
    attempts: dict[str, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    pending: dict[str, list[Check]] = field(default_factory=lambda: defaultdict(list))
    reruns: dict[str, list[RerunRecord]] = field(default_factory=lambda: defaultdict(list))
    images: dict[str, ImageRecord] = field(default_factory=dict)
    foreign: bool = False

    def __post_init__(self) -> None:
        self._provides = {step.key: step.provides for step in self.plan.steps}

    def accept(self, line: bytes) -> str:
        """Take one line; returns what is wrong with it, empty for a sound line."""
        if not line.endswith(b"\n"):
            return TRUNCATED
        try:
            record = record_adapter.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            return f"not a record: {place + ': ' if place else ''}{first['msg']}"
        return self._open(record) if isinstance(record, BuildRecord) else self._add(record)

    def _open(self, build: BuildRecord) -> str:
        problem = ""
        if build.plan_digest != self.digest:
            problem = f"these results answer another plan (digest {build.plan_digest[:12]}, not {self.digest[:12]})"
        elif build.commit != self.plan.commit:
            here = build.commit[:12] or "(none)"
            problem = f"these results are of commit {here}, the plan of {self.plan.commit[:12]}"
        elif self.builds and build.tree != self.builds[0].tree:
            problem = "these results are of two states of the files under test"
        if problem:
            self.foreign = True
            return problem
        self.builds.append(build)
        self.pending.clear()  # what an interrupted run had not finished runs again
        return ""

    def _add(self, record: CheckRecord | StepRecord | RerunRecord | ImageRecord) -> str:
        key = record.key if isinstance(record, StepRecord) else record.step
        problem = self._misplaced(record, key)
        if problem:
            return problem
        if isinstance(record, StepRecord):
            return self._close(record)
        if isinstance(record, RerunRecord):
            self.reruns[key].append(record)
        elif isinstance(record, ImageRecord):
            self.images[record.image] = record
        else:
            self.pending[key].append(record.check)
        return ""

    def _misplaced(self, record: CheckRecord | StepRecord | RerunRecord | ImageRecord, key: str) -> str:
        if not self.builds:
            return "the first record must be the build's"
        if key not in self._provides:
            return f"the step {key!r} is not in the plan"
        if isinstance(record, ImageRecord) and self._provides[key] != record.image:
            return f"the step {key!r} records the image {record.image!r}, which it does not build"
        return self._of_another_job(record, key) if self.job else ""

    def _of_another_job(self, record: CheckRecord | StepRecord | RerunRecord | ImageRecord, key: str) -> str:
        if key != self.job:
            return f"the job of {self.job!r} holds records of {key!r}"
        if isinstance(record, RerunRecord) and record.elsewhere is not self.rechecks:
            return "a rerun on the same node and one on another node are in each other's place"
        if self.rechecks and not isinstance(record, RerunRecord):
            return f"a rerun on another node holds a record of kind {record.kind!r}"
        return ""

    def _close(self, record: StepRecord) -> str:
        checks = self.pending.pop(record.key, [])
        if len(checks) != record.checks:
            return (
                f"the step {record.key!r} announced {record.checks} checks and {len(checks)} are here: lines were lost"
            )
        self.attempts[record.key].append(Attempt(record, tuple(checks)))
        return ""

    def recorded(self) -> Recorded:
        """What was accepted."""
        attempts = {key: tuple(found) for key, found in self.attempts.items()}
        return Recorded(
            tuple(self.builds),
            attempts,
            frozenset(key for key, checks in self.pending.items() if checks),
            reruns={key: tuple(found) for key, found in self.reruns.items()},
            images=dict(self.images),
        )
