"""The form of `results.jsonl`: one record per line, appended in groups, and each group sealed by a checksum.

A seal is a line of its own. It covers the lines since the seal before it and that seal itself, so a changed byte, a
lost line, two lines in another order or the same lines twice are all seen. It guards against damage, not against
somebody who can write the file: whoever runs a step can run any other code there.

Reads what a build left: one `results.jsonl` at a desk, a folder for each job on agents.

The order is the meaning. A `BuildRecord` opens the file and every continuation of it; the `CheckRecord`s of a step
come before its `StepRecord`; checks without one belong to a step that did not finish. A step that ran again (after
`--resume`) has several attempts: the last one counts and the earlier ones stay readable.

At a desk a damaged file is refused and `--resume` mends it. On agents nobody can mend it any more, and one bad job must
not hide what the others found: it is marked as damaged, and the judge does not let it pass.

Files of the merge base in place of the change's while steps run, and the note about it beside the results.

A change that loosens a tolerance is still measured with the old one: on an agent the data files that it loosens are
put back to the merge base before its steps start, and come back afterwards. The code of hilgate itself is not: what a
change makes of that, nobody but a person can approve.

The health files that the hooks of a job left.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.git import file_at
from hilgate.model import (
    BuildRecord,
    Check,
    CheckRecord,
    Health,
    ImageRecord,
    Outcome,
    Plan,
    RerunRecord,
    StepRecord,
    record_adapter,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hilgate.model import Plan, Record


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
        self._provides = {step.key: step.step.provides for step in self.plan.steps}

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


RESULTS_FILE = "results.jsonl"
DAMAGED_FILE = "results.jsonl.damaged"
RECHECK_SUFFIX = ".recheck"
"""Of the folder of a rerun on another node."""

_REMEDY = "run `hilgate gate --resume`: it sets the damage aside and repeats the steps it belonged to"
_EMPTY = "the file is empty"


def read(path: Path, plan: Plan, digest: str) -> Recorded:
    """Read and check every line.

    Args:
        path: A `results.jsonl`.
        plan: The plan it should answer.
        digest: `plan_digest(plan)`.

    Raises:
        RecordsError: The file is missing, empty, truncated or changed since it was written, holds a line that is no
            record, a step that is not in the plan, another number of checks than a step announced, or answers another
            plan or commit.
    """
    reader = Reader(plan, digest)
    for group in groups(_bytes(path)):
        problem, number = _accept(reader, group)
        if problem:
            raise RecordsError(problem, where=f"{path}:{number}", remedy=_REMEDY)
    if not reader.builds:
        raise RecordsError(_EMPTY, where=f"{path}:1", remedy=_REMEDY)
    return reader.recorded()


def read_all(results: Path, jobs: Path | None, plan: Plan, digest: str) -> Recorded:
    """Read `results.jsonl` of this folder, or of each folder in `jobs` where agents ran one step each.

    With `jobs` nothing is raised for what a job left or did not leave: `Recorded.damaged` says what cannot be believed,
    and a job without results has no record, so its step did not run.

    Raises:
        RecordsError: Without `jobs`: the file is not sound (see `read`).
    """
    if jobs is None:
        return read(results / RESULTS_FILE, plan, digest)
    folders = sorted(path for path in jobs.glob("*") if path.is_dir())
    found = [_read_job(folder, plan, digest) for folder in folders]
    return _together(found, _tree_of_most(found))


def passed_keys(recorded: Recorded) -> frozenset[str]:
    """The steps whose last attempt passed."""
    return frozenset(key for key, attempts in recorded.attempts.items() if attempts[-1].record.outcome is Outcome.PASS)


def repair(path: Path, plan: Plan, digest: str) -> Recorded | None:
    """Keep the groups of lines that are sound, move every other byte to `results.jsonl.damaged`, say what is left.

    The only place where a results file is rewritten: into a new file that replaces it, after the damage is on disk.

    Returns:
        What is left, or None when not even the opening record is sound and everything must run again.

    Raises:
        RecordsError: The file is sound and answers another plan or commit: resuming would mix two builds.
    """
    if not path.exists():
        return None
    kept, damaged, before = b"", b"", b""
    reader = Reader(plan, digest)
    for group in groups(_bytes(path)):
        problem, _ = ("", 0) if group.problem else _accept(reader, group)
        if reader.foreign:
            raise RecordsError(
                problem, where=str(path), remedy="start afresh without --resume; the old results go to previous/"
            )
        if group.problem or problem:
            damaged += b"".join((*group.lines, group.seal))
            continue
        text = sealed(group.lines, before)
        kept += text
        before = text.rsplit(b'"', 2)[1]
    if damaged:
        _write(path.with_name(DAMAGED_FILE), damaged if damaged.endswith(b"\n") else damaged + b"\n", "ab")
        fresh = path.with_name(RESULTS_FILE + ".new")
        _write(fresh, kept, "wb")
        fresh.replace(path)
    return reader.recorded() if reader.builds else None


def _accept(reader: Reader, group: Group) -> tuple[str, int]:
    """The first thing wrong with a group and the number of its line; an empty text when it is sound."""
    for number, line in enumerate(group.lines, start=group.first):
        problem = reader.accept(line)
        if problem:
            return problem, number
    return group.problem, group.first + len(group.lines)


def _write(path: Path, text: bytes, mode: str) -> None:
    with path.open(mode) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RecordsError("no results", where=str(path), remedy="run `hilgate gate` first") from None
    except OSError as error:
        raise RecordsError(f"the results cannot be read: {error.strerror}", where=str(path), remedy=_REMEDY) from None


@dataclass(frozen=True)
class _Job:
    """What one folder holds; `tree` is empty where it holds no build record."""

    folder: str
    recorded: Recorded
    problem: str
    health: tuple[Health, ...]
    salvaged: tuple[Check, ...] = ()
    restored: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.folder.removesuffix(RECHECK_SUFFIX)

    @property
    def tree(self) -> str | None:
        return self.recorded.builds[0].tree if self.recorded.builds else None


def _read_job(folder: Path, plan: Plan, digest: str) -> _Job:
    key, rechecks = folder.name.removesuffix(RECHECK_SUFFIX), folder.name.endswith(RECHECK_SUFFIX)
    if key not in {step.key for step in plan.steps}:
        return _Job(folder.name, Recorded((), {}), f"the step {key!r} is not in the plan", ())
    health, problem = read_health(folder, "" if rechecks else key)
    restored, other = read_restored(folder)
    problem = problem or other
    reader = Reader(plan, digest, key, rechecks)
    path = folder / RESULTS_FILE
    if path.exists() or path.is_symlink():
        try:
            text = _bytes(path)
        except RecordsError as error:
            problem = problem or error.what
            text = b""
        else:
            problem = problem or ("" if text else _EMPTY)
        for group in groups(text):
            wrong, line = _accept_all(reader, group)
            problem = problem or (f"{RESULTS_FILE}:{line}: {wrong}" if wrong else "")
        problem = problem or ("" if reader.builds else "there is no record of the build")
    salvaged = () if reader.foreign or not problem else _failing(reader, key)
    return _Job(folder.name, reader.recorded(), problem, health, salvaged, restored)


def _accept_all(reader: Reader, group: Group) -> tuple[str, int]:
    """As `_accept`, but every line is looked at: a failing check behind damage is still a failure."""
    first = ("", 0)
    for number, line in enumerate(group.lines, start=group.first):
        problem = reader.accept(line)
        first = first if first[0] or not problem else (problem, number)
    return first if first[0] else (group.problem, group.first + len(group.lines))


def _failing(reader: Reader, key: str) -> tuple[Check, ...]:
    attempts = reader.attempts.get(key, [])
    checks = [*(attempts[-1].checks if attempts else ()), *reader.pending.get(key, [])]
    return tuple(check for check in checks if check.outcome is Outcome.FAIL)


def _tree_of_most(jobs: list[_Job]) -> str | None:
    """The state of the files that more than half of the sound jobs ran over; None when there is no such state.

    A damaged job has no vote: one flipped bit in it would otherwise set a sound job aside, and its failures with it.
    """
    trees = Counter(job.tree for job in jobs if job.tree is not None and not job.problem)
    tree, count = trees.most_common(1)[0] if trees else (None, 0)
    return tree if 2 * count > trees.total() else None


def _together(jobs: list[_Job], tree: str | None) -> Recorded:
    whole = Recorded((), {})
    builds: list[BuildRecord] = []
    unfinished: frozenset[str] = frozenset()
    for job in jobs:
        problem, salvaged = job.problem, job.salvaged
        if not problem and job.tree is not None and job.tree != tree:
            problem, salvaged = "its files differ from those that other jobs of this build ran over", ()
        if job.health:
            whole.health[job.folder] = job.health
        if problem:
            whole.damaged[job.folder] = problem
            if salvaged:
                whole.salvaged[job.key] = salvaged
            continue
        found = job.recorded
        builds += found.builds
        unfinished |= found.unfinished
        whole.attempts.update(found.attempts)
        whole.images.update(found.images)
        if job.restored:
            whole.restored[job.key] = job.restored
        for key, reruns in found.reruns.items():
            whole.reruns[key] = (*whole.reruns.get(key, ()), *reruns)
    return Recorded(
        tuple(builds), whole.attempts, unfinished, whole.reruns, whole.images, whole.health, whole.damaged,
        whole.salvaged, whole.restored,
    )  # fmt: skip


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


MOMENTS = ("before", "after")


def health_file(moment: str) -> str:
    """Name of the file in a job's folder."""
    return f"health-{moment}.json"


def read_health(folder: Path, key: str) -> tuple[tuple[Health, ...], str]:
    """The health files of a job, and what is wrong with them (empty: nothing; a missing file is not wrong here).

    Args:
        folder: The job's folder.
        key: The planned step they must be of; empty for a rerun, whose job is called otherwise.
    """
    found: list[Health] = []
    problem = ""
    for moment in MOMENTS:
        path = folder / health_file(moment)
        if not path.exists() and not path.is_symlink():
            continue
        try:
            health = Health.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
            problem = problem or f"{path.name}: not a health record: {why}"
            continue
        if health.moment != moment or (key and health.step != key):
            problem = problem or f"{path.name}: it is of {health.step}, {health.moment} it ran"
            continue
        found.append(health)
    return tuple(found), problem
