# SPDX-License-Identifier: Apache-2.0
"""Tests that the merge base has and this tree has not: when they are looked for, by whom, and what is said of them.

A job runs its step, whose pytest writes which tests began (`hilgate.pytest_listing`). Then it has pytest collect the
same command over a clone of the merge base: its tests with its own conftest files, settings and product code, so that
neither a hook of the change nor a function that it renames hides or loses an id. Both lists are recorded, and the judge
compares them. It reads them as data: collecting runs code of the change, which must not happen beside a token.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate import pytest_listing
from hilgate.errors import Exit
from hilgate.evidence import LOG_FILE, PYTEST_PLUGIN, kind_of
from hilgate.model.plan import ProtectedChange
from hilgate.model.record import LONGEST_ID, MOST_TESTS, ListingRecord
from hilgate.pytest_listing import ALL_SHARDS, VARIABLE
from hilgate.run.process import LISTING_FILE, OUT_VARIABLE, Child, RunContext, emptied
from hilgate.text import argument_list, count, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hilgate.model.plan import Plan, PlannedStep

FOLDER: Final = "tests-of-merge-base"
"""Folder below a step's output: the list of the merge base's tests, with the log."""

SECONDS: Final = 120.0
"""Least time for listing the merge base's tests, whatever the step has left of its own."""

MOST_BYTES: Final = 16 * 2**20
NAMED: Final = 5
"""Tests of a file that a sentence names; where there are more, all cases of one are named together."""
LONGEST_NAME: Final = 150
MOST_FILES: Final = 20
MOST_RECORDED: Final = 1000
"""Files that are reported one by one, and tests of a file in `verdict.json`."""

_SETTINGS = frozenset(
    {"conftest.py", "pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", ".pytest.ini", "pytest.toml"}
)
"""Files that can make pytest leave tests out, in any folder."""


def named_tests(step: PlannedStep) -> tuple[str, ...]:
    """Files, folders and ids of tests that a step of this Python's pytest declares, else those that its command names.

    In a command, the value of an option that pytest does not know may stand among them.
    """
    named = kind_of(step).tests(step.step.command)
    return tuple(test for test in step.step.tests if named and not test.startswith("!")) or named


def paths_to_list(step: PlannedStep, plan: Plan) -> tuple[str, ...]:
    """The tests of a step, as its command names them, if a change may have taken some away; else nothing.

    That is a change of a test file below these paths, of a setting of pytest, or of any other file below the same top
    folders: what tests import there may hold their parameters. The first shard does it for all.
    """
    paths = named_tests(step)
    if not plan.merge_base or step.arguments or not paths or (step.shard and step.shard.number > 1):
        return ()
    tops = {path.partition("/")[0] for path in paths}
    return paths if any(_matters(file, step, tops) for file in plan.changed_files) else ()


def _matters(file: str, step: PlannedStep, tops: set[str]) -> bool:
    name = file.rpartition("/")[2]
    if name in _SETTINGS:
        return True
    if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")):
        return kind_of(step).reaches(step.step.command, f"{file}::")
    return "." in tops or file.partition("/")[0] in tops


@dataclass(frozen=True)
class BaseListing:
    """Pytest that collects the tests of a step over the merge base.

    `child` is None where it has none of its files, and where only the tests of a shard are asked for.
    """

    step: PlannedStep
    folder: Path
    child: Child | None

    def poll(self) -> ListingRecord | None:
        """Both lists, once pytest has ended; None while it runs.

        Raises:
            ValueError: A list is not one of ids, or has too many; nothing may be recorded then.
        """
        ended = self.child.poll() if self.child else None
        if self.child and ended is None:
            return None
        here, problem = _read(self.folder / LISTING_FILE), ""
        of_all_shards = _read(self.folder / (ALL_SHARDS + LISTING_FILE)) if self.step.shard else ()
        there: tuple[str, ...] = ()
        if self.child and ended:
            if ended.exit_status in {Exit.PASS, kind_of(self.step).no_checks}:
                there = _read(self.folder / FOLDER / LISTING_FILE)
            else:
                why = ended.reason or kind_of(self.step).exit_meaning(ended.exit_status or 0)
                problem = f"{why}; it said: {self.child.said()}"[:LONGEST_ID]
        return ListingRecord(step=self.step.key, here=here, at_base=there, of_all_shards=of_all_shards, problem=problem)


def start(step: PlannedStep, folder: Path, here: Path, base: RunContext, seconds: float) -> BaseListing:
    """Start pytest over the merge base, for a step whose output is in `folder`; `here` is the tree that it ran over."""
    out = emptied(folder / FOLDER)
    command = kind_of(step).over_other_tree(step.step.command, here, base.root)
    if not command:
        return BaseListing(step, folder, None)
    copied = Path(shutil.copyfile(pytest_listing.__file__, out / "listing_of_merge_base.py"))
    env = base.variables(step) | {OUT_VARIABLE: str(out), VARIABLE: str(out / LISTING_FILE)}
    # Copies of compilers that git ignores lie in the working tree alone.
    ignored = [path for path in step.env.get("PYTHONPATH", "").split(os.pathsep) if not (base.root / path).exists()]
    path = [env["PYTHONPATH"], *(str(here.absolute() / one) for one in ignored), str(out)]
    env["PYTHONPATH"] = os.pathsep.join(path)
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", PYTEST_PLUGIN, "-p", copied.stem]
    child = Child([*argument_list(command), *words], base, env=env, log=out / LOG_FILE, timeout_seconds=seconds)
    return BaseListing(step, folder, child)


def _read(path: Path) -> tuple[str, ...]:
    """The ids in a file that code of the change may have written.

    Raises:
        ValueError: There is none, it is too large, or it is no list of ids.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        found = json.loads(text) if len(text) <= MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(found, list) or len(found) > MOST_TESTS:
        raise ValueError(f"{path.name} is no list of at most {MOST_TESTS} ids")
    ids = [one.encode(errors="backslashreplace").decode() for one in found if isinstance(one, str)]
    if len(ids) < len(found) or not all(0 < len(one) <= LONGEST_ID for one in ids):
        raise ValueError(f"{path.name} holds something else than ids of at most {LONGEST_ID} characters")
    return tuple(ids)


def vanished(
    steps: Iterable[PlannedStep], plan: Plan, listings: Mapping[str, ListingRecord]
) -> tuple[ProtectedChange, ...]:
    """Tests of the merge base that these steps no longer run, by file, and steps of which that is unknown."""
    steps = list(steps)
    shards = Counter(step.whole for step in steps if step.shard)
    ran: dict[str, set[str]] = defaultdict(set)
    for step in steps:
        ran[step.whole].update(listings[step.key].here if step.key in listings else ())
    unknown: list[ProtectedChange] = []
    gone: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        paths, listing = paths_to_list(step, plan), listings.get(step.key)
        if not paths or listing is None or (step.shard and shards[step.whole] < step.shard.of):
            continue
        if listing.problem:
            what = f"pytest could not list the merge base's tests of {step.key}: {listing.problem}"
            unknown.append(ProtectedChange(path=" ".join(paths)[:LONGEST_ID], what=what))
        for name in dict.fromkeys(listing.at_base):
            if name not in ran[step.whole]:
                gone[name.partition("::")[0]][name].append(step.key)
    shown = [_gone(file, tests) for file, tests in list(gone.items())[:MOST_FILES]]
    if more := list(gone.values())[MOST_FILES:]:
        what = f"{count(sum(map(len, more)), 'test')} of {count(len(more), 'more file')} are gone"
        shown.append(ProtectedChange(path="(more)", what=what))
    return (*unknown, *shown)


def wrongly_sharded(shards: Sequence[PlannedStep], listings: Mapping[str, ListingRecord]) -> str:
    """Why all shards of a step do not make the whole of it; empty where each test began in exactly one of them."""
    ran: Counter[str] = Counter()
    of_all_shards: frozenset[str] | None = None
    for step in shards:
        if step.key not in listings:
            return f"{step.key} left no list of its tests, so it is unknown whether all of them ran"
        one = listings[step.key]
        if of_all_shards is not None and of_all_shards != frozenset(one.of_all_shards):
            return f"{step.key} found other tests to deal out than {shards[0].key}"
        of_all_shards = frozenset(one.of_all_shards)
        ran.update(frozenset(one.here))
    wrong = sorted((of_all_shards or frozenset()) ^ ran.keys()) or sorted(name for name in ran if ran[name] > 1)
    if not wrong:
        return "" if ran else "its shards ran no test"
    other = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{shorten(wrong[0], LONGEST_NAME)}{other} ran in {count(ran[wrong[0]], 'shard')} of {shards[0].whole}"


def _gone(file: str, tests: Mapping[str, Iterable[str]]) -> ProtectedChange:
    names = [shorten(name.partition("::")[2] or name, LONGEST_NAME) for name in tests]
    cases = Counter(name.partition("[")[0] for name in names)
    few = [f"{name} ({count(number, 'case')})" if number > 1 else name for name, number in cases.items()]
    shown = names if len(names) <= NAMED else few
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    steps = list(dict.fromkeys(key for keys in tests.values() for key in keys))
    others = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
    verb = "is" if len(names) == 1 else "are"
    what = f"{count(len(names), 'test')} {verb} gone: {', '.join(shown[:NAMED])}{more} ({steps[0]}{others})"
    return ProtectedChange(path=file, what=what, tests=tuple(tests)[:MOST_RECORDED])
