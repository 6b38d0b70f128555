# SPDX-License-Identifier: Apache-2.0
"""Run the first tests of a step and then one that fails behind them, to find which of them spoils it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import CannotRunHereError, MisuseError
from hilgate.evidence import kind_of
from hilgate.model.record import Outcome
from hilgate.run import process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hilgate.model.plan import PlannedStep
    from hilgate.run.results import Attempt

POLL_SECONDS = 0.05
LISTING = "order.txt"
"""The tests of a run, one a line: as words of a command they could be too many."""


@dataclass(frozen=True)
class InOrder:
    """A test that failed, and those that ran before it in its step.

    Attributes:
        folder: Where each run leaves its log and evidence.
    """

    step: PlannedStep
    before: tuple[str, ...]
    test: str
    context: process.RunContext
    folder: Path

    def fails(self, tests: Sequence[str]) -> bool:
        """Whether the test fails behind these tests.

        Raises:
            CannotRunHereError: The run did not say: it hung, crashed or left no evidence.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        listing = self.folder / LISTING
        listing.write_text("".join(f"{name}\n" for name in (*tests, self.test)), encoding="utf-8")
        command = kind_of(self.step).listed(self.step.step.command, listing, self.context.root)
        if not command:
            raise MisuseError(
                f"{self.step.key} is no step of pytest, or names no path of tests",
                where=self.step.step.command,
                remedy="only tests of pytest can be run in another order",
            )
        seconds = self.step.step.timeout_minutes * process.SECONDS_PER_MINUTE
        child = process.start(self.step, command, self.folder / "run", self.context, seconds)
        while (end := child.poll()) is None:
            time.sleep(POLL_SECONDS)
        checks = kind_of(self.step).collect(self.folder / "run", self.context.root).checks
        outcome = next((check.outcome for check in checks if check.id == self.test), None)
        if outcome not in {Outcome.PASS, Outcome.FAIL}:
            why = end.reason or kind_of(self.step).exit_meaning(end.exit_status or 0)
            raise CannotRunHereError(
                f"a run of {len(tests) + 1} tests does not say whether {self.test} fails: {why}",
                where=str(child.log),
                remedy="read its log",
            )
        return outcome is Outcome.FAIL


def before(attempt: Attempt, test: str) -> tuple[str, ...]:
    """Ids of the tests that ran before one that failed, in their order.

    Raises:
        MisuseError: It did not fail there, or was the first.
    """
    ids = [check.id for check in attempt.checks if check.outcome is not Outcome.DID_NOT_RUN]
    failed = {check.id for check in attempt.checks if check.outcome is Outcome.FAIL}
    if test not in failed or ids[0] == test:
        what = f"{test} was the first test" if test in failed else f"{test} did not fail in the last run"
        raise MisuseError(what, where=attempt.record.key, remedy="run the step whole first: `hilgate run STEP`")
    return tuple(ids[: ids.index(test)])
