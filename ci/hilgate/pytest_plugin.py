# SPDX-License-Identifier: Apache-2.0
"""What pytest tells hilgate beside its results: what a test needs, and how many tests were collected.

hilgate loads it into every step that begins with `python -m pytest`; a conftest.py registers it for runs by hand:

    @pytest.mark.needs("program:buildah")     skipped where buildah is missing, and recorded either way
    lacks("gpus:2", "two ranks")              a fixture, for what a test has found out by itself: records it and skips

The JUnit report then has the property `needs` (hilgate.conditions) of each such test, the property `collected` of the
whole, and `subtest_reports` of each test with subtests: pytest counts those as tests and writes no case for them. A
test that is skipped without `needs` has no excuse, and its step did not run; nor has a whole module, of which no report
names the tests (`pytest.importorskip`): what a module imports its step declares as `packages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.junitxml import xml_key

from hilgate.conditions import NEEDS, Where, holds, problem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

COLLECTED = "collected"
"""Property of a JUnit suite: how many tests pytest collected and did not deselect."""

SUBTESTS = "subtest_reports"
"""Property of a JUnit case: how many subtests (fixture `subtests`, `unittest.TestCase.subTest`) pytest counted."""

DESELECTED = "deselected"
"""Property of a JUnit suite: how many of the tests that pytest found an option or a hook has taken out."""

_RECORDED = pytest.StashKey[frozenset[str]]()
"""Which of these properties the report has already: each worker of pytest-xdist tells the numbers."""

_FOUND = pytest.StashKey[int]()
"""How many tests there were before anything was deselected."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and count subtests in the process that writes the report."""
    config.addinivalue_line("markers", "needs(condition): skipped where the machine lacks it (hilgate.conditions)")
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist sends its reports to that process
        config.pluginmanager.register(_Subtests())


class _Subtests:
    """Counts the reports of each test's subtests."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)  # before pytest writes the case, which it does at the test's teardown
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a subtest, and give the test's last report their number."""
        # By its name: before pytest 9 the class is of the plugin pytest-subtests.
        if type(report).__name__.lower() == "subtestreport":
            self.seen[report.nodeid] = self.seen.get(report.nodeid, 0) + 1
        elif report.when == "teardown" and report.nodeid in self.seen:
            report.user_properties.append((SUBTESTS, self.seen.pop(report.nodeid)))


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # around those that deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Count the tests before any is deselected, and refuse a marker that names no condition."""
    config.stash[_FOUND] = len(items)
    _refuse_unknown_conditions(items)
    yield


def _refuse_unknown_conditions(items: list[pytest.Item]) -> None:
    for item in items:
        for condition in _needs(item):
            if problem := problem_of(condition) or _unknown_here(condition):
                raise pytest.UsageError(f"{item.nodeid}: {problem}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record what a test needs, and skip it where that is missing."""
    if conditions := _needs(item):
        item.user_properties.append((NEEDS, " ".join(conditions)))
        if missing := [condition for condition in conditions if not holds(condition, Where())]:
            pytest.skip(f"needs {missing[0]}")


@pytest.fixture
def lacks(record_property: Callable[[str, object], None]) -> Callable[[str, str], NoReturn]:
    """Skip this test, because the machine lacks a condition and something needs it: `lacks(condition, something)`."""

    def skip(condition: str, what: str) -> NoReturn:
        if problem := problem_of(condition):
            raise pytest.UsageError(problem)
        record_property(NEEDS, condition)
        pytest.skip(f"{what} needs {condition}")

    return skip


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record how many tests were collected, and how many of them deselected."""
    config, number = session.config, len(session.items)
    _record(config, COLLECTED, number)
    deselected = max(0, config.stash.get(_FOUND, number) - number)
    _record(config, DESELECTED, deselected)
    if hasattr(config, "workeroutput"):
        config.workeroutput[DESELECTED] = deselected


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Record it under pytest-xdist (`-n`), where the reporting process collects nothing and each worker everything."""
    _record(node.config, COLLECTED, len(ids))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Record what a worker has deselected."""
    _record(node.config, DESELECTED, getattr(node, "workeroutput", {}).get(DESELECTED, 0))


def _record(config: pytest.Config, name: str, number: int) -> None:
    report = config.stash.get(xml_key, None)  # a worker has none; pytest's own fixture for it does not work under xdist
    recorded = config.stash.get(_RECORDED, frozenset[str]())
    if report is not None and name not in recorded:
        report.add_global_property(name, number)
        config.stash[_RECORDED] = recorded | {name}


def _needs(item: pytest.Item) -> list[str]:
    return list(dict.fromkeys(str(arg) for mark in item.iter_markers(NEEDS) for arg in mark.args))


def _unknown_here(condition: str) -> str:
    """Why a marker cannot ask for it: pytest knows neither the step's device nor its GPUs."""
    asked_of_hilgate = condition.startswith(("device:", "gpus:"))
    return f"a marker cannot ask for {condition}; use the fixture `lacks`" if asked_of_hilgate else ""
