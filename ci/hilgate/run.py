"""Run a plan on this machine: ready steps fill its cores, and each leaves records in `results.jsonl`.

One thread polls every child, so a timeout, Ctrl-C and SIGTERM are handled in one place. A step starts when all that it
needs has passed; otherwise it is recorded as did not run, with the step that stood in its way.
"""

from __future__ import annotations

import datetime as dt
import graphlib
import os
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hilgate import process, results, rules, schedule
from hilgate.errors import RunInterruptedError
from hilgate.evidence import JUNIT_FILE, collect
from hilgate.hardware import installed
from hilgate.model import BuildRecord, CheckRecord, Environment, Evidence, Outcome, Plan, PlannedStep, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from hilgate.model import Record

SECONDS_PER_MINUTE = 60.0
POLL_SECONDS = 0.05
LOG_FILE = "log.txt"
OUT_VARIABLE = "HILGATE_OUT"
_ENDED = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "was inconclusive", Outcome.DID_NOT_RUN: "did not run"}


class Progress(Protocol):
    """Whoever shows the run to a person."""

    def started(self, step: PlannedStep, child: process.Child) -> None:
        """A step's process began."""

    def finished(self, step: PlannedStep, attempt: results.Attempt, log: Path) -> None:
        """A step ended, or was recorded without having been started."""

    def tick(self) -> None:
        """Called about twenty times a second while anything runs."""


def step_folder(results_folder: Path, key: str) -> Path:
    """Where a step leaves its log and evidence."""
    return results_folder / "steps" / key


def passed_keys(recorded: results.Recorded) -> frozenset[str]:
    """The steps whose last attempt passed."""
    return frozenset(key for key, attempts in recorded.attempts.items() if attempts[-1].record.outcome is Outcome.PASS)


@dataclass
class Runner:
    """One run of the steps of one plan.

    Attributes:
        only: Keys to run; None runs every step. What they need outside of it is taken as met (an agent's job starts
            after the jobs it depends on).
        done: Keys that passed in an earlier run of the same plan and are not repeated.
    """

    plan: Plan
    digest: str
    root: Path
    results_folder: Path
    environment: Environment
    commit: str
    tree: str
    cores: int
    progress: Progress
    only: frozenset[str] | None = None
    done: frozenset[str] = frozenset()
    _running: dict[str, process.Child] = field(default_factory=dict)
    _started: dict[str, dt.datetime] = field(default_factory=dict)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _interrupt: int = 0
    _installed: frozenset[str] = frozenset()

    def run(self) -> None:
        """Run to the end.

        Raises:
            RunInterruptedError: Ctrl-C or SIGTERM; every child was ended, finished results are on disk.
        """
        self._append(
            BuildRecord(
                started=_now(),
                plan_digest=self.digest,
                commit=self.commit,
                tree=self.tree,
                environment=self.environment,
            )
        )
        self._installed = frozenset(installed({name for step in self.plan.steps for name in step.packages}))
        steps = {
            step.key: step
            for step in self.plan.steps
            if (self.only is None or step.key in self.only) and step.key not in self.done
        }
        self._outcomes.update(dict.fromkeys(self.done, Outcome.PASS))
        sorter = graphlib.TopologicalSorter({k: [n for n in s.depends_on if n in steps] for k, s in steps.items()})
        sorter.prepare()
        order = schedule.chain_minutes(tuple(steps.values()))
        waiting: list[str] = []
        with _signals(self):
            try:
                while sorter.is_active() and not self._interrupt:
                    waiting = sorted({*waiting, *sorter.get_ready()}, key=lambda key: (-order[key], key))
                    settled = self._start_ready(steps, waiting)
                    settled += self._reap(steps)
                    for key in settled:
                        sorter.done(key)
                    if not settled:
                        self.progress.tick()
                        time.sleep(POLL_SECONDS)
            finally:
                self._end_all()
        if self._interrupt:
            raise RunInterruptedError(
                f"interrupted by {signal.Signals(self._interrupt).name}; {len(self._outcomes)} finished steps are kept",
                where=str(self.results_folder),
                remedy="continue with --resume",
            )

    def _start_ready(self, steps: dict[str, PlannedStep], waiting: list[str]) -> list[str]:
        """Start what fits, longest chain first; returns the keys that were settled without starting."""
        settled = []
        for key in list(waiting):
            step = steps[key]
            obstacle = self._obstacle(step)
            if obstacle:
                waiting.remove(key)
                self._record(step, process.Ended(None, obstacle, 0.0, None), _now())
                settled.append(key)
            elif schedule.fits(step, [steps[other] for other in self._running], self.cores):
                waiting.remove(key)
                self._start(step)
        return settled

    def _obstacle(self, step: PlannedStep) -> str:
        """Why it must not start: a need that did not pass, or a distribution that is not installed."""
        for need in step.depends_on:
            outcome = self._outcomes.get(need, Outcome.PASS)
            if outcome is not Outcome.PASS:
                return f"needs {need}, which {_ENDED[outcome]}"
        missing = [name for name in step.packages if name not in self._installed]
        return f"needs {', '.join(missing)}, not installed here" if missing else ""

    def _start(self, step: PlannedStep) -> None:
        folder = step_folder(self.results_folder, step.key).absolute()
        shutil.rmtree(folder, ignore_errors=True)  # evidence of an earlier run must never be read as this one's
        folder.mkdir(parents=True)
        arguments = process.argument_list(step.command)
        if step.evidence is Evidence.JUNIT:
            arguments.append(f"--junitxml={folder / JUNIT_FILE}")
        # Threads would otherwise be as many as the machine has cores, in every step at once.
        env = {"OMP_NUM_THREADS": str(min(step.cores, self.cores)), **os.environ, **step.env, OUT_VARIABLE: str(folder)}
        timeout = step.timeout_minutes * SECONDS_PER_MINUTE
        self._started[step.key] = _now()
        child = process.Child(arguments, cwd=self.root, env=env, log=folder / LOG_FILE, timeout_seconds=timeout)
        self._running[step.key] = child
        self.progress.started(step, child)

    def _reap(self, steps: dict[str, PlannedStep]) -> list[str]:
        ended = [(key, end) for key, child in self._running.items() if (end := child.poll()) is not None]
        for key, end in ended:
            del self._running[key]
            self._record(steps[key], end, self._started[key])
        return [key for key, _ in ended]

    def _record(self, step: PlannedStep, end: process.Ended, started: dt.datetime) -> None:
        folder = step_folder(self.results_folder, step.key)
        ran = step.key in self._started
        found = collect(step.evidence, folder, self.root) if ran else None
        checks = found.checks if found else ()
        decision = rules.decide(
            rules.Facts(
                evidence=step.evidence,
                minimum=step.minimum,
                exit_status=end.exit_status,
                checks=checks,
                stopped=end.reason,
                problem=found.problem if found else "",
                last_line=process.last_line(folder / LOG_FILE) if ran else "",
            )
        )
        record = StepRecord(
            key=step.key,
            started=started,
            seconds=end.seconds,
            exit_status=end.exit_status,
            outcome=decision.outcome,
            message=decision.why,
            checks=len(checks),
            command=step.command,
            peak_memory_mib=end.peak_memory_mib,
            environment=self.environment,
        )
        self._append(*[CheckRecord(step=step.key, check=check) for check in checks], record)
        self._outcomes[step.key] = decision.outcome
        self.progress.finished(step, results.Attempt(record, checks), folder / LOG_FILE)

    def _append(self, *records: Record) -> None:
        results.append(self.results_folder / results.RESULTS_FILE, list(records))

    def _end_all(self) -> None:
        """End what still runs; it leaves no record, so it counts as not finished."""
        for child in self._running.values():
            child.stop("interrupted")
        while self._running:
            self._running = {key: child for key, child in self._running.items() if child.poll() is None}
            time.sleep(POLL_SECONDS)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@contextmanager
def _signals(runner: Runner) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a request to stop; a second one changes nothing, the kill follows by itself."""

    def request(number: int, _frame: FrameType | None) -> None:
        runner._interrupt = runner._interrupt or number  # noqa: SLF001 - the handler belongs to the runner

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
