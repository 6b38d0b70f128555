# SPDX-License-Identifier: Apache-2.0
"""Write and read results of steps: one file per finished step, written atomically, refused unless it is complete.

`results.jsonl` of a step holds a `BuildRecord`, the `CheckRecord`s of each attempt before its `StepRecord`, the image
that it built, reruns of its failing checks, and in the last line a sha256 of all lines before. It guards against
damage, not against somebody who can write the file: whoever runs a step can run any other code there. Locally each
step has its file in `steps/<key>/`; an agent's job has it in the job's own folder, beside the notes of its hooks
(`health-*.json`) and of files of the merge base that stood in place of the change's (`restored.json`).

A record that is damaged, misplaced or of another plan counts as unfinished: a local run repeats the step, and no job
hides what others found.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.git import files_at
from hilgate.model import first_problem
from hilgate.model.record import (
    BuildRecord,
    Check,
    CheckRecord,
    Health,
    ImageRecord,
    ListingRecord,
    Outcome,
    RerunRecord,
    StepRecord,
    record_adapter,
)
from hilgate.names import RECHECK_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from hilgate.model import Key
    from hilgate.model.plan import Plan
    from hilgate.model.record import Record

RESULTS_FILE = "results.jsonl"
NOTE = "restored.json"
AS_AT_BASE = "it ran with files of the merge base, not with those that were approved (run it with --approved-by)"
MOMENTS = ("before", "after")

MOST_BYTES, MOST_NOTE_BYTES = 64 * 2**20, 2**20
"""Bytes that are read of a step's results or note: code of the change may have written both."""
MOST_ATTEMPTS, MOST_RERUNS = 100, 1000
"""More attempts and reruns of a step than a runner makes."""


@dataclass(frozen=True)
class Attempt:
    """One finished run of a step."""

    record: StepRecord
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class StepFile:
    """What the file of a step holds; of a rerun on another node, reruns alone."""

    build: BuildRecord
    attempts: tuple[Attempt, ...] = ()
    reruns: tuple[RerunRecord, ...] = ()
    image: ImageRecord | None = None
    on_base: tuple[RerunRecord, ...] = ()
    listing: ListingRecord | None = None


@dataclass(frozen=True)
class Recorded:
    """Everything that a build left.

    Attributes:
        builds: Where and over which files each step ran.
        attempts: Step key -> its finished runs in order; the last one counts.
        reruns: Step key -> its failing checks that were run once more, in order.
        images: Image -> what was built, as the step that provides it recorded it.
        health: Step key, or `<step key>.recheck` -> what the hooks of its job saw, in order.
        damaged: Step key, or name of a job's folder -> why what it holds cannot be believed.
        restored: Name of a job's folder -> files of the merge base that its job put in place of the change's.
        on_base: Step key -> its failing checks over the files of the merge base, on the same node; no judge reads them.
        listings: Step key -> its tests here and at the merge base.
        waited: Step key -> minutes after which its job was ended, because no agent took it.
    """

    builds: tuple[BuildRecord, ...]
    attempts: dict[str, tuple[Attempt, ...]]
    reruns: dict[str, tuple[RerunRecord, ...]] = field(default_factory=dict)
    images: dict[str, ImageRecord] = field(default_factory=dict)
    health: dict[str, tuple[Health, ...]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    restored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    on_base: dict[str, tuple[RerunRecord, ...]] = field(default_factory=dict)
    listings: dict[str, ListingRecord] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)

    def last(self, key: str) -> Attempt | None:
        """The attempt that counts, or None when the step did not finish."""
        return self.attempts[key][-1] if key in self.attempts else None

    def records(self, key: str) -> list[Record]:
        """All records of a step, in the order in which its file has them."""
        image = [record for record in self.images.values() if record.step == key]
        attempts = [record for attempt in self.attempts.get(key, ()) for record in records_of(attempt)]
        listing = [self.listings[key]] if key in self.listings else []
        return [*attempts, *image, *self.reruns.get(key, ()), *self.on_base.get(key, ()), *listing]

    @functools.cached_property
    def first_on_base(self) -> dict[tuple[str, str], RerunRecord]:
        """(step, check) -> its first run over the files of the merge base."""
        return {(key, run.check): run for key, runs in self.on_base.items() for run in reversed(runs)}

    def passed(self) -> frozenset[str]:
        """Keys of the steps whose last attempt passed."""
        return frozenset(key for key in self.attempts if self.attempts[key][-1].record.outcome is Outcome.PASS)


def step_folder(results: Path, key: str) -> Path:
    """Where a step leaves its log and evidence, and locally its results."""
    return results / "steps" / key


def records_of(attempt: Attempt) -> list[Record]:
    """The records of an attempt, in the order in which a file has them."""
    return [*(CheckRecord(step=attempt.record.key, check=check) for check in attempt.checks), attempt.record]


def write(folder: Path, build: BuildRecord, records: Sequence[Record]) -> None:
    """Write the file of a step: under another name first, and durable before it is renamed.

    Raises:
        RecordsError: It could not be written, e.g. the disk is full.
    """
    new = folder / f".{RESULTS_FILE}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            file.write(with_digest(b"".join(record.model_dump_json().encode() + b"\n" for record in (build, *records))))
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / RESULTS_FILE)
    except OSError as error:
        raise RecordsError(
            f"the results could not be written: {error.strerror}", where=str(folder), remedy="free disk space"
        ) from error


class StepFiles:
    """The files of a run's steps: each is written anew, whole, whenever its step has more records.

    Args:
        folder: The results folder of the run.
        build: First record of each file.
        job: Key of the only step, where `folder` is the folder of its job.
    """

    def __init__(self, folder: Path, build: BuildRecord, job: str = "") -> None:
        self._folder, self._build, self._job = folder, build, job
        self._records: dict[str, list[Record]] = defaultdict(list)

    def keep(self, earlier: Recorded) -> None:
        """Let the records of an earlier run stand before those that are added."""
        self._records |= {key: earlier.records(key) for key in earlier.attempts}

    def add(self, key: str, *records: Record) -> None:
        """Write the file of a step anew, with these records at its end."""
        self._records[key] += records
        write(self._folder if self._job else step_folder(self._folder, key), self._build, self._records[key])


def with_digest(lines: bytes) -> bytes:
    """The lines, and the last one with their sha256."""
    return lines + b'{"kind":"end","sha256":"%s"}\n' % hashlib.sha256(lines).hexdigest().encode()


def read(path: Path, plan: Plan, digest: str, key: str, *, elsewhere: bool = False) -> StepFile:
    """Read the file of a step whole.

    `key` is the planned step that it should be of; with `elsewhere` it should hold reruns on another node, and nothing
    else.

    Raises:
        RecordsError: Why nothing of it can be believed.
    """
    try:
        return _parsed(_read(path, MOST_BYTES), plan, digest, key, elsewhere=elsewhere)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    except ValidationError as error:
        problem = f"not a record: {first_problem(error)}"
    except _DamagedError as error:
        problem = str(error)
    raise RecordsError(problem, where=str(path), remedy="run the step again (`hilgate gate --resume`)")


class _DamagedError(Exception):
    """Why nothing of a file can be believed."""


def _read(path: Path, most: int) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: It cannot be read.
        _DamagedError: There are more than `most`.
    """
    with path.open("rb") as file:
        text = file.read(most + 1)
        if len(text) > most:
            raise _DamagedError(f"it has {os.fstat(file.fileno()).st_size} bytes, and at most {most} are read")
    return text


def _parsed(text: bytes, plan: Plan, digest: str, key: str, *, elsewhere: bool) -> StepFile:
    if not text:
        raise _DamagedError("the file is empty")
    lines = text.splitlines(keepends=True)
    if text != with_digest(b"".join(lines[:-1])):
        raise _DamagedError("it is not as it was written: truncated or changed")
    records = [record_adapter.validate_json(line) for line in lines[:-1]]
    build = records.pop(0) if records else None
    if not isinstance(build, BuildRecord):
        raise _DamagedError("its first record is not the build's")
    if build.plan_digest != digest:
        raise _DamagedError(f"these results answer another plan (digest {build.plan_digest[:12]}, not {digest[:12]})")
    if build.commit != plan.commit:
        of = build.commit[:12] or "(none)"
        raise _DamagedError(f"these results are of commit {of}, the plan of {plan.commit[:12]}")
    found = _in_order(records, build)
    if problem := _misplaced(found, records, plan, key, elsewhere=elsewhere):
        raise _DamagedError(problem)
    return found


def _in_order(records: Sequence[Record], build: BuildRecord) -> StepFile:
    """Read records in the order in which a job writes them; each step record ends the checks before it."""
    checks: list[Check] = []
    attempts: list[Attempt] = []
    reruns: list[RerunRecord] = []
    on_base: list[RerunRecord] = []
    image = listing = None
    for record in records:
        if isinstance(record, CheckRecord):
            checks.append(record.check)
        elif isinstance(record, StepRecord):
            if len(checks) != record.checks:
                raise _DamagedError(f"it announces {record.checks} checks and {len(checks)} are here")
            attempts.append(Attempt(record, tuple(checks)))
            checks = []
        elif isinstance(record, RerunRecord):
            (on_base if record.on_base else reruns).append(record)
        elif isinstance(record, ImageRecord):
            image = record
        elif isinstance(record, ListingRecord):
            listing = record
        else:
            raise _DamagedError("it is of two builds")
    if checks:
        raise _DamagedError("it does not say how the step ended")
    if len(attempts) > MOST_ATTEMPTS or len(reruns) > MOST_RERUNS:
        most = f"at most {MOST_ATTEMPTS} and {MOST_RERUNS} are read"
        raise _DamagedError(f"it tells of {len(attempts)} attempts and {len(reruns)} reruns, and {most}")
    return StepFile(build, tuple(attempts), tuple(reruns), image, tuple(on_base), listing)


def _misplaced(found: StepFile, records: Sequence[Record], plan: Plan, key: str, *, elsewhere: bool) -> str:
    provides = {step.key: step.step.provides for step in plan.steps}
    keys = {
        record.key if isinstance(record, StepRecord) else record.step
        for record in records
        if not isinstance(record, BuildRecord)
    }
    if keys - {key}:
        return f"the results of {key!r} hold records of {min(keys - {key})!r}"
    if found.image and provides[key] != found.image.image:
        return f"the step {key!r} records the image {found.image.image!r}, which it does not build"
    if any(rerun.elsewhere is not elsewhere for rerun in (*found.reruns, *found.on_base)):
        return "a rerun on the same node and one on another node are in each other's place"
    if elsewhere and (found.attempts or found.image or found.on_base or found.listing):
        return "a rerun on another node holds records of another kind"
    return "" if elsewhere or found.attempts else "it does not say how the step ended"


def read_all(
    results: Path, jobs: Path | None, plan: Plan, digest: str, job: str = "", *, approved: bool = False
) -> Recorded:
    """Read what a build left; `Recorded.damaged` says what cannot be believed, and nothing is raised for it.

    Args:
        results: The results folder of a local run; not read with `jobs`.
        jobs: A folder with one results folder per job of agents.
        plan: The plan that the results should answer.
        digest: `plan_digest(plan)`.
        job: Key of the only step, where `results` is the folder of its job.
        approved: Whether protected changes were approved. What ran over files of the merge base is then damaged: it
            says nothing of the files that would be merged.
    """
    folders = _folders(results, jobs, plan, job)
    hooks = {step.key: step.job_key for step in plan.steps if jobs is not None and step.job}
    found = Recorded((), {})
    read = {name: _read_job(folder, name, plan, digest, found, hooks.get(name)) for name, folder in folders.items()}
    if jobs is None and not job:
        _apply_shared_note(results, folders, found)
    if approved:
        found.damaged.update({name: f"{AS_AT_BASE}: {', '.join(files)}" for name, files in found.restored.items()})
    files = {name: file for name, file in read.items() if file and name not in found.damaged}
    trees = {file.build.tree for name, file in files.items() if not name.endswith(RECHECK_SUFFIX)}
    for name, file in files.items():
        key = name.removesuffix(RECHECK_SUFFIX)
        if trees - {file.build.tree}:
            # It is unknown which of two states of the files is the commit's, so neither is believed.
            found.damaged[name] = "its files differ from those that other jobs of this build ran over"
            continue
        if file.attempts:
            found.attempts[key] = file.attempts
        if file.reruns:
            found.reruns[key] = (*found.reruns.get(key, ()), *file.reruns)
        if file.on_base:
            found.on_base[key] = file.on_base
        if file.listing:
            found.listings[key] = file.listing
        if file.image:
            found.images[file.image.image] = file.image
    builds = tuple(file.build for name, file in files.items() if name not in found.damaged)
    return replace(found, builds=builds)


def _folders(results: Path, jobs: Path | None, plan: Plan, job: str) -> dict[str, Path]:
    """Name of a job -> the folder of what it left; the arguments are those of `read_all`."""
    if job:
        return {job: results}
    if jobs is None:
        return {step.key: step_folder(results, step.key) for step in plan.steps}
    left = {path.name for path in jobs.glob("*") if path.is_dir()}
    left |= {step.key for step in plan.steps if step.job in left}  # what its job saw of the node is in the first folder
    return {name: jobs / name for name in sorted(left)}


def _apply_shared_note(results: Path, names: Iterable[str], found: Recorded) -> None:
    """Several steps of a plan for agents that one command ran here have one note of restored files."""
    shared, problem = read_restored(results)
    for name in names:
        if problem:
            found.damaged.setdefault(name, problem)
        elif shared:
            found.restored[name] = shared


def _read_job(
    folder: Path, name: str, plan: Plan, digest: str, found: Recorded, first: Key | None = None
) -> StepFile | None:
    """The file in one folder; None where there is none or it is damaged, and `found` has the notes and the damage.

    `first` is the first step of a shared job, in whose folder the hooks have left their notes.
    """
    key, elsewhere = name.removesuffix(RECHECK_SUFFIX), name.endswith(RECHECK_SUFFIX)
    if key not in {step.key for step in plan.steps}:
        found.damaged[name] = f"the step {key!r} is not in the plan"
        return None
    health, problem = read_health(folder.parent / first if first else folder, "" if elsewhere else first or key)
    restored, other = read_restored(folder)
    problem = problem or other
    if health:
        found.health[name] = health
    if restored and not problem:
        found.restored[name] = restored
    path = folder / RESULTS_FILE
    file = None
    if path.exists() or path.is_symlink():
        try:
            file = read(path, plan, digest, key, elsewhere=elsewhere)
        except RecordsError as error:
            problem = problem or f"{RESULTS_FILE}: {error.what}"
    if problem:
        found.damaged[name] = problem
    return None if problem else file


def read_restored(folder: Path) -> tuple[tuple[str, ...], str]:
    """The files that a job put back, and what is wrong with its note (empty: nothing, or there is none)."""
    path = folder / NOTE
    if not path.exists():
        return (), ""
    try:
        files = json.loads(_read(path, MOST_NOTE_BYTES))["files"]
    except _DamagedError as error:
        return (), f"{NOTE}: {error}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        files = None
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        return (), f"{NOTE}: not a note of restored files"
    return tuple(files), ""


@contextmanager
def restored_files(root: Path, merge_base: str, files: tuple[str, ...], folder: Path) -> Iterator[None]:
    """Have `files` as they are at the merge base while the context lasts, and note it in `folder`.

    Raises:
        CannotRunHereError: The merge base is not in this checkout, or a file cannot be written.
    """
    if not files:
        yield
        return
    old = files_at(root, merge_base, files)
    new = {name: (root / name).read_bytes() if (root / name).is_file() else None for name in files}
    note = json.dumps({"merge_base": merge_base, "files": sorted(files)}, indent=1)
    (folder / NOTE).write_text(note + "\n", encoding="utf-8")
    try:
        for name, content in old.items():
            _set(root, name, content)
        yield
    finally:
        for name, content in new.items():
            _set(root, name, content)


def _set(root: Path, name: str, content: bytes | None) -> None:
    path = root / name
    try:
        if not path.parent.resolve().is_relative_to(root.resolve()):
            raise PermissionError(errno.EPERM, "it leads out of the checkout")
        if content is None or path.is_symlink():
            path.unlink(missing_ok=True)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise CannotRunHereError(
            f"{name} cannot be put back to the merge base: {error.strerror or type(error).__name__}",
            where=str(root),
            remedy="give it a clean checkout: a change with protected changes is measured with the old values",
        ) from error


def health_file(moment: str) -> str:
    """Name of the file in a job's folder."""
    return f"health-{moment}.json"


def read_health(folder: Path, key: str) -> tuple[tuple[Health, ...], str]:
    """The health files of a job, and what is wrong with them (empty: nothing; a missing file is not wrong here).

    `key` is the planned step they must be of; empty for a rerun, whose job is called otherwise.
    """
    nodes, problems = [], []
    for moment in MOMENTS:
        path = folder / health_file(moment)
        if not path.exists() and not path.is_symlink():
            continue
        try:
            health = Health.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            why = first_problem(error) if isinstance(error, ValidationError) else error.strerror
            problems.append(f"{path.name}: not a health record: {why}")
            continue
        if health.moment == moment and key in {"", health.step}:
            nodes.append(health)
        else:
            problems.append(f"{path.name}: it is of {health.step}, {health.moment} it ran")
    return tuple(nodes), problems[0] if problems else ""
