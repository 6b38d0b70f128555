"""Reads what a build left: one `results.jsonl` at a desk, a folder for each job on agents.

The order is the meaning. A `BuildRecord` opens the file and every continuation of it; the `CheckRecord`s of a step
come before its `StepRecord`; checks without one belong to a step that did not finish. A step that ran again (after
`--resume`) has several attempts: the last one counts and the earlier ones stay readable.

At a desk a damaged file is refused and `--resume` mends it. On agents nobody can mend it any more, and one bad job must
not hide what the others found: it is marked as damaged, and the judge does not let it pass.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import RecordsError
from hilgate.health_files import read_health
from hilgate.model import Check, Outcome
from hilgate.records import Attempt, Group, Reader, Recorded, append, groups, sealed
from hilgate.restored import read_restored

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import BuildRecord, Health, Plan

__all__ = ["DAMAGED_FILE", "RECHECK_SUFFIX", "RESULTS_FILE", "Attempt", "Recorded", "append", "read", "read_all",
           "repair"]  # fmt: skip

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
