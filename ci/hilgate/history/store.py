# SPDX-License-Identifier: Apache-2.0
"""The history: a folder of judged builds, each of them a folder that appears by one rename and never changes.

`<began>-<commit>-<digest>/` holds `plan.json` and `verdict.json` as they were judged, and `results.jsonl`: the records
of all attempts, and the checks of the attempt that counts. The names sort by time and name the commit, so the builds
of a commit and the newest builds are found without reading any. Folders of other names are no builds.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.model import PLAN_FILE, VERDICT_FILE, first_problem
from hilgate.model.record import BuildRecord, Check, CheckRecord, Outcome, StepRecord, record_adapter
from hilgate.run.results import RESULTS_FILE, Attempt, Recorded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hilgate.model.plan import Plan
    from hilgate.model.verdict import Verdict

FOLDER: Final = "history"
"""Below `results/`, unless HILGATE_HISTORY or --history names another."""
HISTORY_VARIABLE = "HILGATE_HISTORY"
NO_COMMIT = "nocommit"
REMEDY = "restore that build, or remove its folder from the history"


def folder_of(root: Path) -> Path:
    """Where a command that takes no --history looks for one."""
    named = os.environ.get(HISTORY_VARIABLE)
    return Path(named) if named else root / "results" / FOLDER


def builds(history: Path, commit: str = "") -> tuple[Path, ...]:
    """Folders of the builds of a commit, or of all; the oldest first.

    Raises:
        NothingSelectedError: There is no build of any commit.
    """
    found = tuple(sorted(history.glob("[0-9]*Z-*-*")))
    if not found:
        raise NothingSelectedError(
            "there is no build in this history", where=str(history), remedy="add one: `hilgate history add`"
        )
    return tuple(one for one in found if not commit or one.name.split("-")[1] == commit[:12])


SEARCHED: Final = 200
"""Builds whose images are looked at; each names all that it ran in, so the newest name all that are used."""


def images(history: Path, contents: Iterable[str]) -> dict[str, str]:
    """Contents of an image -> its digest in the newest build that has it; what cannot be read counts as unknown."""
    wanted, found = set(contents), dict[str, str]()
    for build in sorted(history.glob("[0-9]*Z-*-*"), reverse=True)[:SEARCHED]:
        if found.keys() == wanted:
            break
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            planned, judged = (json.loads((build / name).read_bytes())["images"] for name in (PLAN_FILE, VERDICT_FILE))
            of = {planned[name]: digest for name, digest in judged.items() if name in planned}
            found |= {content: of[content] for content in wanted & of.keys() - found.keys()}
    return found


def add(history: Path, plan: Plan, recorded: Recorded, verdict: Verdict, *, branch: str = "") -> tuple[Path, bool]:
    """Add a judged build unless it is there, however often it was judged.

    Returns:
        The folder of the build, and whether it was added.

    Raises:
        RecordsError: Nothing of the build was recorded, or the verdict is of another plan or lacks a step.
        MisuseError: The history cannot be written.
    """
    if not recorded.builds:
        raise RecordsError(
            "no job of this build left a record, so there is nothing to remember",
            remedy="name the folder of their results with --jobs",
        )
    missing = {step.key for step in plan.steps} - {step.key for step in verdict.steps}
    if verdict.commit != plan.commit or missing:
        what = f"has no answer for {min(missing)}" if missing else f"is of commit {verdict.commit[:12]}"
        raise RecordsError(f"the verdict {what}", remedy="run `hilgate judge` on these results first")
    began = min(build.started for build in recorded.builds).astimezone(dt.UTC)
    digest = hashlib.sha256(f"{verdict.plan_digest} {recorded.builds[0].tree} {began.isoformat()}".encode())
    commit = plan.commit[:12] or NO_COMMIT
    target = history / f"{began:%Y%m%dT%H%M%SZ}-{commit}-{digest.hexdigest()[:8]}"
    if target.exists():
        return target, False
    lines = [f'{{"kind":"branch","branch":{json.dumps(branch)}}}', *(one.model_dump_json() for one in recorded.builds)]
    for key, attempts in recorded.attempts.items():
        lines += [CheckRecord(step=key, check=check).model_dump_json() for check in attempts[-1].checks]
        lines += [attempt.record.model_dump_json() for attempt in attempts]
    texts = {PLAN_FILE: plan.model_dump_json(), VERDICT_FILE: verdict.model_dump_json(), RESULTS_FILE: "\n".join(lines)}
    try:
        history.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=history) as beside:
            fresh = Path(beside, target.name)
            fresh.mkdir()
            for name, text in texts.items():
                (fresh / name).write_text(f"{text}\n", encoding="utf-8")
            fresh.rename(target)
    except OSError as error:
        if target.exists():  # another writer added it meanwhile
            return target, False
        raise MisuseError(
            f"the history cannot be written: {error.strerror}", where=str(history), remedy="name another with --history"
        ) from None
    return target, True


def read(build: Path) -> Recorded:
    """What a build of the history recorded: of each step the attempt that counts.

    Raises:
        RecordsError: A line is no record, or the results are not there.
    """
    path = build / RESULTS_FILE
    jobs: list[BuildRecord] = []
    checks: dict[str, list[Check]] = {}
    ends: dict[str, StepRecord] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordsError(f"no results: {error.strerror}", where=str(path), remedy=REMEDY) from None
    for number, line in enumerate(lines[1:], 2):
        try:
            record = record_adapter.validate_json(line)
        except ValidationError as error:
            what = f"not a record: {first_problem(error)}"
            raise RecordsError(what, where=f"{path}:{number}", remedy=REMEDY) from None
        if isinstance(record, BuildRecord):
            jobs.append(record)
        elif isinstance(record, CheckRecord):
            checks.setdefault(record.step, []).append(record.check)
        elif isinstance(record, StepRecord):
            ends[record.key] = record
    return Recorded(tuple(jobs), {key: (Attempt(end, tuple(checks.get(key, ()))),) for key, end in ends.items()})


def failures(build: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str]], set[str]]:
    """(planned key, check id) of what failed in a build, of what of it was flaky, and the keys of the steps it ran.

    Raises:
        RecordsError: A file of it is no JSON, or not there.
    """
    try:
        steps = json.loads((build / VERDICT_FILE).read_bytes())["steps"]
        lines = (build / RESULTS_FILE).read_bytes().splitlines()
        # Most lines are passed checks, which are not parsed.
        bad = [json.loads(line) for line in lines if b'"outcome":"fail"' in line and b'"kind":"check"' in line]
    except (OSError, ValueError, KeyError) as error:
        raise RecordsError(f"a damaged build: {error}", where=str(build), remedy=REMEDY) from None
    failed = {(one["step"], one["check"]["id"]) for one in bad if one["check"]["outcome"] == Outcome.FAIL}
    flaky = {(step["key"], name) for step in steps for name in step["flaky"]}
    return failed | flaky, flaky, {step["key"] for step in steps if step["attempts"]}
