"""`results.jsonl`: append-only, one record per line, locked by its writer and believed only when every line is sound.

The order is the meaning. A `BuildRecord` opens the file and every continuation of it; the `CheckRecord`s of a step
come before its `StepRecord`; checks without one belong to a step that did not finish. A step that ran again (after
`--resume`) has several attempts: the last one counts and the earlier ones stay readable.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hilgate.errors import RecordsError
from hilgate.model import BuildRecord, Check, CheckRecord, ImageRecord, Plan, RerunRecord, StepRecord, record_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Health, Record

RESULTS_FILE = "results.jsonl"
DAMAGED_FILE = "results.jsonl.damaged"

_REMEDY = "run `hilgate gate --resume`: it sets the damage aside and repeats the steps it belonged to"


@dataclass(frozen=True)
class Attempt:
    """One finished run of a step."""

    record: StepRecord
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Recorded:
    """Everything that a results file says.

    Attributes:
        builds: The first run and its continuations, in order; empty only when no job left any.
        attempts: Step key -> its finished runs in order; the last one counts.
        unfinished: Steps with checks and no record of their end.
        reruns: Step key -> its failing checks that were run once more, in order.
        images: Image -> what was built.
        health: Step key -> what the hooks of its jobs saw, in order.
        damaged: Step key -> why what its job left cannot be believed.
    """

    builds: tuple[BuildRecord, ...]
    attempts: dict[str, tuple[Attempt, ...]]
    unfinished: frozenset[str] = frozenset()
    reruns: dict[str, tuple[RerunRecord, ...]] = field(default_factory=dict)
    images: dict[str, ImageRecord] = field(default_factory=dict)
    health: dict[str, tuple[Health, ...]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)

    def last(self, key: str) -> Attempt | None:
        """The attempt that counts, or None when the step did not finish."""
        return self.attempts[key][-1] if key in self.attempts else None


def append(path: Path, records: list[Record]) -> None:
    """Append records, one `write(2)` per line, and make them durable before returning.

    A step is finished only once its `StepRecord` is on the disk, so one `fsync` after it covers the lines before it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for record in records:
            line = record.model_dump_json().encode() + b"\n"
            written = os.write(descriptor, line)
            if written != len(line):
                raise RecordsError(
                    "a record could not be written whole", where=str(path), remedy="free disk space, then --resume"
                )
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, plan: Plan, digest: str) -> Recorded:
    """Read and check every line.

    Args:
        path: A `results.jsonl`.
        plan: The plan it should answer.
        digest: `plan_digest(plan)`.

    Raises:
        RecordsError: The file is missing, empty, truncated, holds a line that is no record, a step that is not in the
            plan, another number of checks than a step announced, or answers another plan or commit.
    """
    reader = _Reader(plan, digest)
    lines = _lines(path)
    for number, line in enumerate(lines, start=1):
        problem = reader.accept(line)
        if problem:
            raise RecordsError(problem, where=f"{path}:{number}", remedy=_REMEDY)
    if not reader.builds:
        raise RecordsError("the file is empty", where=f"{path}:1", remedy=_REMEDY)
    return reader.recorded()


def read_all(results: Path, jobs: Path | None, plan: Plan, digest: str) -> Recorded:
    """Read `results.jsonl` of this folder, or of each folder in `jobs` where agents ran one step each.

    Raises:
        RecordsError: One of the files is not sound (see `read`), or there is none where one was expected. With `jobs`,
            a job that left nothing is no error here: its step has no record, so it did not run.
    """
    if jobs is None:
        return read(results / RESULTS_FILE, plan, digest)
    parts = [read(path, plan, digest) for path in sorted(jobs.glob(f"*/{RESULTS_FILE}"))]
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    for part in parts:
        for key, found in part.attempts.items():
            attempts[key].extend(found)
    return Recorded(
        builds=tuple(build for part in parts for build in part.builds),
        attempts={key: tuple(sorted(found, key=lambda a: a.record.started)) for key, found in attempts.items()},
        unfinished=frozenset().union(*(part.unfinished for part in parts)),
    )


def repair(path: Path, plan: Plan, digest: str) -> Recorded | None:
    """Keep what is sound, move every other byte to `results.jsonl.damaged`, and say what is left.

    The only place where a results file is rewritten: into a new file that replaces it, after the damage is on disk.

    Returns:
        What is left, or None when not even the opening record is sound and everything must run again.

    Raises:
        RecordsError: The file is sound and answers another plan or commit: resuming would mix two builds.
    """
    if not path.exists():
        return None
    kept: list[bytes] = []
    damaged: list[bytes] = []
    reader = _Reader(plan, digest)
    for line in _lines(path):
        problem = reader.accept(line)
        if reader.foreign:
            raise RecordsError(
                problem, where=str(path), remedy="start afresh without --resume; the old results go to previous/"
            )
        (damaged if problem else kept).append(line)
    if damaged:
        damage = path.with_name(DAMAGED_FILE)
        with damage.open("ab") as file:
            file.write(b"".join(line if line.endswith(b"\n") else line + b"\n" for line in damaged))
            file.flush()
            os.fsync(file.fileno())
        fresh = path.with_name(RESULTS_FILE + ".new")
        with fresh.open("wb") as file:
            file.write(b"".join(kept))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    return reader.recorded() if reader.builds else None


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise RecordsError("no results", where=str(path), remedy="run `hilgate gate` first") from None


@dataclass
class _Reader:
    """Accepts lines in order and remembers what they mean."""

    plan: Plan
    digest: str
    builds: list[BuildRecord] = field(default_factory=list)
    attempts: dict[str, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    pending: dict[str, list[Check]] = field(default_factory=lambda: defaultdict(list))
    reruns: dict[str, list[RerunRecord]] = field(default_factory=lambda: defaultdict(list))
    images: dict[str, ImageRecord] = field(default_factory=dict)
    foreign: bool = False

    def __post_init__(self) -> None:
        self._keys = {step.key for step in self.plan.steps}

    def accept(self, line: bytes) -> str:
        """Take one line; returns what is wrong with it, empty for a sound line."""
        if not line.endswith(b"\n"):
            return "the last line is truncated"
        try:
            record = record_adapter.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            return f"not a record: {place + ': ' if place else ''}{first['msg']}"
        return self._open(record) if isinstance(record, BuildRecord) else self._add(record)

    def _open(self, build: BuildRecord) -> str:
        if build.plan_digest != self.digest:
            self.foreign = True
            return f"these results answer another plan (digest {build.plan_digest[:12]}, not {self.digest[:12]})"
        if build.commit != self.plan.commit:
            self.foreign = True
            return f"these results are of commit {build.commit[:12] or '(none)'}, the plan of {self.plan.commit[:12]}"
        if self.builds and build.tree != self.builds[0].tree:
            self.foreign = True
            return "these results are of two states of the files under test"
        self.builds.append(build)
        self.pending.clear()  # what an interrupted run had not finished runs again
        return ""

    def _add(self, record: CheckRecord | StepRecord | RerunRecord | ImageRecord) -> str:
        key = record.key if isinstance(record, StepRecord) else record.step
        if not self.builds:
            return "the first record must be the build's"
        if key not in self._keys:
            return f"the step {key!r} is not in the plan"
        if isinstance(record, StepRecord):
            return self._close(record)
        if isinstance(record, RerunRecord):
            self.reruns[key].append(record)
            return ""
        if isinstance(record, ImageRecord):
            self.images[record.image] = record
            return ""
        self.pending[key].append(record.check)
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
        attempts = {key: tuple(found) for key, found in self.attempts.items()}
        return Recorded(
            tuple(self.builds),
            attempts,
            frozenset(key for key, checks in self.pending.items() if checks),
            reruns={key: tuple(found) for key, found in self.reruns.items()},
            images=dict(self.images),
        )
