# SPDX-License-Identifier: Apache-2.0
"""What a person sees while steps run, on stderr: a line per start and end, in Buildkite as log groups."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hilgate import text
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, OverflowMethod

    from hilgate.model.plan import PlannedStep
    from hilgate.plan.estimate import Estimate
    from hilgate.run.process import Child
    from hilgate.run.results import Attempt

HEARTBEAT_SECONDS = 60.0
LOG_TAIL_LINES = 40
COMMAND_CHARACTERS = 200


class Lines:
    """One line per start and per end, and one a minute while nothing else happens."""

    def __init__(self, console: Console, *, buildkite: bool, size: Estimate | None = None) -> None:
        self._console = console
        self._forecast = 60 * size.minutes if size else 0.0
        self._buildkite = buildkite
        self._children: dict[str, Child] = {}
        self._began = self._printed_at = time.monotonic()
        self._meanwhile, self._ended_at = "", 0.0

    def started(self, step: PlannedStep, child: Child) -> None:
        """Say that it began."""
        self._children[step.key] = child
        command = text.line(step.step.command[:COMMAND_CHARACTERS])
        self._print(f"{'--- ' if self._buildkite else ''}{step.key}: started: {command}")

    def finished(self, step: PlannedStep, attempt: Attempt, log: Path) -> None:
        """Say how it ended; in Buildkite an open group with the end of its log when that is not green."""
        self._children.pop(step.key, None)
        record = attempt.record
        green = record.outcome is Outcome.PASS
        group = ("--- " if green else "+++ ") if self._buildkite else ""
        words = f"{text.marked(record.outcome)}, {text.duration(record.seconds)}: {text.line(record.message)}"
        self._print(f"{group}{step.key}: {words}")
        if self._buildkite and not green and log.exists():
            for line in log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]:
                self._print(text.log(line))

    def ended(self, meanwhile: str) -> None:
        """Say from now on what the run does while no step is left."""
        self._meanwhile = meanwhile
        self._ended_at = self._printed_at = time.monotonic()

    def tick(self) -> None:
        """A heartbeat, so that a long silence is not taken for a hang."""
        if time.monotonic() - self._printed_at < HEARTBEAT_SECONDS:
            return
        if self._meanwhile:
            self._print(f"{self._meanwhile}, for {text.duration(time.monotonic() - self._ended_at)} now")
        elif self._children:
            passed = time.monotonic() - self._began
            left = self._forecast - passed
            about = f", about {text.rounded(left)} left by the forecast" if left > 0 else ""
            self._print(text.duration(passed) + about)
            for key, child in self._children.items():
                last_line = text.line(child.last_line())
                self._print(f"{key}: running for {text.duration(child.seconds)}{f': {last_line}' if last_line else ''}")

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        # A terminal shows one line for each; what is cut stands in the step's log. Files and Buildkite keep all of it.
        cut = self._console.file.isatty() and not self._buildkite  # FORCE_COLOR makes rich take a pipe for a terminal
        overflow: OverflowMethod = "ellipsis" if cut else "ignore"
        self._console.print(line, markup=False, highlight=False, no_wrap=True, overflow=overflow, crop=cut)
