# SPDX-License-Identifier: Apache-2.0
"""What pytest tells hilgate beside its results: what a test needs, and how many tests were collected.

hilgate loads it into every step that begins with `python -m pytest`; a conftest.py registers it for runs by hand:

    @pytest.mark.needs("program:buildah")     skipped where buildah is missing, and recorded either way
    lacks("gpus:2", "two ranks")              a fixture, for what a test has found out by itself: records it and skips

The JUnit report then has the property `needs` (hilgate.conditions) of each such test, and the property `collected` of
the whole. A test that is skipped without `needs` has no excuse, and its step did not run; nor has a whole module, of
which no report names the tests (`pytest.importorskip`): what a module imports its step declares as `packages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from hilgate.conditions import NEEDS, Where, holds, problem_of

if TYPE_CHECKING:
    from collections.abc import Callable

COLLECTED = "collected"
"""Property of a JUnit suite: how many tests pytest collected and did not deselect."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "needs(condition): skipped where the machine lacks it (hilgate.conditions)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a marker that names no condition, before any test runs."""
    for item in items:
        for condition in _needs(item):
            if problem := problem_of(condition) or _unknown_here(condition):
                raise pytest.UsageError(f"{item.nodeid}: {problem}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record what a test needs, and skip it where that is missing."""
    if conditions := _needs(item):
        item.user_properties.append((NEEDS, " ".join(conditions)))
        if missing := [one for one in conditions if not holds(one, Where())]:
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


@pytest.fixture(scope="session", autouse=True)
def _tell_the_number(request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]) -> None:
    record_testsuite_property(COLLECTED, len(request.session.items))


def _needs(item: pytest.Item) -> list[str]:
    return list(dict.fromkeys(str(one) for mark in item.iter_markers(NEEDS) for one in mark.args))


def _unknown_here(condition: str) -> str:
    """Why a marker cannot ask for it: pytest knows neither the step's device nor its GPUs."""
    asked_of_hilgate = condition.startswith(("device:", "gpus:"))
    return f"a marker cannot ask for {condition}; use the fixture `lacks`" if asked_of_hilgate else ""
