# SPDX-License-Identifier: Apache-2.0
"""Run a plan on this machine: ready steps fill its cores, and each leaves its results in a file of its own.

One thread polls every child, so a timeout, Ctrl-C and SIGTERM are handled in one place. A step starts when all that it
needs has passed; otherwise it is recorded as did not run, with the step that stood in its way.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import graphlib
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hilgate import git
from hilgate.conditions import Where, holds
from hilgate.errors import CannotRunHereError, HilgateError, MisuseError, NothingSelectedError, RunInterruptedError
from hilgate.evidence import LOG_FILE, Collected, collect_image, kind_of
from hilgate.model.declaration import CPU
from hilgate.model.plan import plan_digest
from hilgate.model.record import BuildRecord, ListingRecord, Outcome, StepRecord
from hilgate.names import whole_key
from hilgate.plan import machine
from hilgate.plan.machine import detect, installed, require_own_hilgate
from hilgate.run import listing, process, recheck, results
from hilgate.run.leftovers import strange_metadata
from hilgate.run.outcome import NOT_STARTED, TIMED_OUT, other_packages
from hilgate.run.process import SECONDS_PER_MINUTE, inner_timeout
from hilgate.run.progress import Lines
from hilgate.run.reads import Selecting, collect
from hilgate.run.results import Recorded, step_folder
from hilgate.run.rules import StepFacts, decide
from hilgate.run.schedule import fits, in_order
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Check


POLL_SECONDS = 0.05
LOCK_FILE = ".lock"
_ENDED = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "was inconclusive", Outcome.DID_NOT_RUN: "did not run"}


@dataclass(frozen=True)
class Options:
    """Which steps of a plan are run, and how.

    Attributes:
        cores: Number of cores that the steps fill; None for all of the machine.
        only: Keys to run; None runs every step. What they need outside of it is taken as met (an agent's job starts
            after the jobs it depends on).
        job: The one key of `only`, where the results folder is the folder of its job.
        only_ids: Failing tests of `job` that failed on another node; they alone are run, and recorded as reruns.
        fail_fast: Whether no other step starts once one has run and has not passed.
        ended: Called where all steps have ended and failing tests still run, with what the run does meanwhile.
    """

    cores: int | None = None
    only: frozenset[str] | None = None
    job: str = ""
    only_ids: tuple[str, ...] = ()
    fail_fast: bool = False
    ended: Callable[[str], None] | None = None

    def chosen(self, plan: Plan) -> list[PlannedStep]:
        """The steps of a plan that they name."""
        return [step for step in plan.steps if self.only is None or step.key in self.only]


@dataclass(frozen=True)
class Reruns:
    """How failing tests are run once more, in what is left of their step's time.

    Attributes:
        base: The merge base, over whose files they run too (`recheck.start_on_base`); empty for none.
        known: Keys of the steps whose tests need no run there: history says how they ended.
    """

    base: str = ""
    known: frozenset[str] = frozenset()


class _Machine:
    """What the steps of a plan need of this machine, and what it lacks."""

    def __init__(self, context: process.RunContext) -> None:
        self.context, plan = context, context.plan
        self.leftover = strange_metadata(context.root, plan.python_path)
        self.installed = frozenset(installed({name for step in plan.steps for name in step.step.packages}))
        wanted = any(step.step.checkout for step in plan.steps)
        self.no_checkout = git.no_checkout(context.root) if wanted else ""
        self._imports: dict[frozenset[tuple[str, str]], dict[str, str]] = {}

    def obstacle(self, step: PlannedStep) -> str:
        """Why a step must not start here: something is missing, or it would import another tree's code."""
        if step.step.checkout and self.no_checkout:
            return f"needs a git checkout, and {self.no_checkout}: {git.TO_MAKE_ONE}"
        missing = [name for name in step.step.packages if name not in self.installed]
        if missing:
            return f"needs {', '.join(missing)}, not installed here"
        if self.leftover:
            return f"{self.leftover}: remove that, or install the project it belongs to"
        return other_packages(self.context.plan, self.imported(step))

    def imported(self, step: PlannedStep) -> dict[str, str]:
        """Where a step finds the packages of the plan; a Python is asked once for each environment that steps have."""
        env = frozenset(step.env.items())
        if env not in self._imports:
            self._imports[env] = self.context.imported(step)
        return self._imports[env]

    def lacked(self, step: PlannedStep, env: Mapping[str, str]) -> tuple[str, ...]:
        """Which of the conditions that a step may lack this machine and the step's environment lack."""
        gpus = detect().gpus if step.step.may_lack and step.device != CPU else 0
        here = Where(step.device, gpus, env)
        return tuple(condition for condition in step.step.may_lack if not holds(condition, here))


@dataclass
class _Processes:
    """What runs for the steps now: the steps themselves by key, their failing tests once more, lists of their tests."""

    steps: dict[str, process.Child] = field(default_factory=dict)
    reruns: list[recheck.Rerun] = field(default_factory=list)
    listings: list[listing.BaseListing] = field(default_factory=list)

    def after_their_step(self) -> list[PlannedStep]:
        """The ended steps for which something still runs."""
        return [*(rerun.step for rerun in self.reruns), *(listed.step for listed in self.listings)]

    def end_all(self) -> None:
        """End what still runs; it leaves no record, so it counts as not finished."""
        children = [
            *self.steps.values(),
            *(rerun.child for rerun in self.reruns),
            *(listed.child for listed in self.listings if listed.child),
        ]
        for child in children:
            child.stop("interrupted")
        while children:
            children = [child for child in children if child.poll() is None]
            time.sleep(POLL_SECONDS)


@dataclass
class _Seen:
    """What is known of the steps so far.

    Attributes:
        outcomes: How each step ended, by key.
        failed: The checks and seconds of each failed step whose failing tests are run again, by key.
        red: The first step that ended without a pass and counts.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    failed: dict[str, tuple[tuple[Check, ...], float]] = field(default_factory=dict)
    red: str = ""


class Runner:
    """One run of the steps of one plan.

    Args:
        plan: What to run.
        root: The repository.
        results_folder: Where each step leaves its records, log and evidence.
        build: First record of each file of results.
        progress: Shows what starts and ends.
        options: Which steps are run, and how.
        earlier: What an earlier run of the same plan over the same files left; what passed there is not repeated.
        reruns: How failing tests are run once more; None runs none again.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        results_folder: Path,
        build: BuildRecord,
        progress: Lines,
        options: Options,
        *,
        earlier: Recorded | None = None,
        reruns: Reruns | None = None,
    ) -> None:
        self.plan, self.root, self.results_folder, self.build = plan, root, results_folder, build
        self.progress, self.options, self.earlier = progress, options, earlier or Recorded((), {})
        self.reruns = reruns
        self._processes, self._seen, self._interrupts = _Processes(), _Seen(), process.Interrupts()
        self._files = results.StepFiles(results_folder, build, options.job)
        self._cores = options.cores or build.environment.cores
        self._base_tree: tempfile.TemporaryDirectory[str] | None = None
        self._context: process.RunContext
        self._machine: _Machine
        self._selecting: Selecting

    def run(self) -> None:
        """Run to the end.

        Raises:
            RunInterruptedError: Ctrl-C or SIGTERM; every child was ended, finished results are on disk.
            NothingSelectedError: The command of the step cannot be narrowed to `only_ids`.
            CannotRunHereError: The repository has another hilgate of its own.
        """
        require_own_hilgate(self.root, self.plan.packages)
        self._selecting = Selecting(self.root)
        self._files.keep(self.earlier)
        self._seen.outcomes |= dict.fromkeys(self.earlier.passed(), Outcome.PASS)
        steps = {step.key: step for step in self.options.chosen(self.plan) if step.key not in self._seen.outcomes}
        with process.Watchdog() as watchdog, self._interrupts:
            self._context = process.RunContext(self.root, self.plan, watchdog)
            self._machine = _Machine(self._context)
            try:
                if self.options.only_ids:
                    self._start_only_ids(steps.popitem()[1])
                for step in self.plan.steps:  # the earlier run may have been interrupted before it had listed them
                    if step.key in self._seen.outcomes and step.key not in self.earlier.listings:
                        self._list_tests(step, 0.0)
                self._run(steps)
            finally:
                self._processes.end_all()
                if self._base_tree:
                    self._base_tree.cleanup()
        if self._interrupts.number:
            raise RunInterruptedError(
                f"interrupted by {self._interrupts.name}; {count(len(self._seen.outcomes), 'finished step')} kept",
                where=str(self.results_folder),
                remedy="go on with `hilgate gate --resume`; give any other command again",
            )

    def _start_only_ids(self, step: PlannedStep) -> None:
        """Start the tests that failed on another node, instead of their step."""
        why = self._obstacle(step)
        if why:
            raise CannotRunHereError(why, where=step.key, remedy="run it on another node")
        if not self._run_again(step, self.options.only_ids):
            raise NothingSelectedError(
                f"the command of {step.key} cannot be narrowed to single tests",
                where=step.step.command,
                remedy="run the whole step again",
            )

    def _run(self, steps: dict[str, PlannedStep]) -> None:
        """Start steps as their needs and the cores allow, until all have ended or somebody interrupts."""
        sorter = graphlib.TopologicalSorter({k: [n for n in s.depends_on if n in steps] for k, s in steps.items()})
        sorter.prepare()
        order = in_order(tuple(steps.values()))
        waiting: list[str] = []
        pause = POLL_SECONDS / 16
        announced = False
        while (sorter.is_active() or self._processes.after_their_step()) and not self._interrupts.number:
            if self.options.ended and not announced and not (sorter.is_active() or self._processes.listings):
                announced = True
                meanwhile = self._meanwhile()
                self.progress.ended(meanwhile)
                self.options.ended(meanwhile)
            waiting = sorted({*waiting, *sorter.get_ready()}, key=order.index)
            settled = self._start_ready(steps, waiting)
            settled += self._reap(steps)
            if not self._processes.listings:  # a verdict needs them; the merge base is asked after the causes are said
                self._reap_reruns()
            self._reap_listings()
            for key in settled:
                sorter.done(key)
            if settled:
                pause = POLL_SECONDS / 16  # what follows may end at once
            else:
                self.progress.tick()
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)

    def _start_ready(self, steps: dict[str, PlannedStep], waiting: list[str]) -> list[str]:
        """Start what fits, in the order of `in_order`; returns the keys that were settled without running."""
        settled = []
        for key in list(waiting):
            step = steps[key]
            obstacle = self._obstacle(step)
            if obstacle:
                waiting.remove(key)
                self._record(step, process.Ended(None, obstacle, 0.0, None))
                settled.append(key)
                continue
            running = [*(steps[other] for other in self._processes.steps), *self._processes.after_their_step()]
            if fits(step, running, self._cores):
                waiting.remove(key)
                self._start(step)
        return settled

    def _obstacle(self, step: PlannedStep) -> str:
        """Why a step must not start: an earlier failure, a need that did not pass, or something of this machine."""
        if self.options.fail_fast and self._seen.red:
            ended = _ENDED[self._seen.outcomes[self._seen.red]]
            return f"{NOT_STARTED}: {self._seen.red} {ended} before it (--fail-fast)"
        for need in step.depends_on:
            outcome = self._seen.outcomes.get(need, Outcome.PASS)
            if outcome is not Outcome.PASS:
                return f"{NOT_STARTED}: it needs {need}, which {_ENDED[outcome]}"
        return self._machine.obstacle(step)

    def _start(self, step: PlannedStep) -> None:
        folder = step_folder(self.results_folder, step.key)
        seconds = self._seconds_left(step)
        child = process.start(step, step.step.command, folder, self._context, seconds, recorded=True)
        self._processes.steps[step.key] = child
        self.progress.started(step, child)

    def _seconds_left(self, step: PlannedStep, used: float = 0.0) -> float:
        """What is left of a step's time after `used` seconds, or less where a job of Buildkite ends before that."""
        return inner_timeout(self._timeout(step) - used, os.environ, time.time())

    def _timeout(self, step: PlannedStep) -> float:
        """Seconds that a step may take."""
        return step.step.timeout_minutes * SECONDS_PER_MINUTE

    def _reap(self, steps: dict[str, PlannedStep]) -> list[str]:
        polled = [(key, child, child.poll()) for key, child in self._processes.steps.items()]
        ended = [(key, child, end) for key, child, end in polled if end is not None]
        for key, *_ in ended:  # all of them, for recording one may raise, and nobody may wait for the others again
            del self._processes.steps[key]
        for key, child, how in ended:
            step, end = steps[key], how
            seconds = self._timeout(step)
            if child.timeout_seconds < seconds and end.reason.startswith(TIMED_OUT):
                # Its job left it less than its own time: that is no hang of the step.
                why = f"its job had {child.timeout_seconds:g} s left for it, and its own time is {seconds:g} s"
                end = replace(end, reason=why)
            checks = self._record(step, end, child)
            counts = self._seen.outcomes[key] is not Outcome.PASS and not step.report_only
            self._seen.red = self._seen.red or (key if counts else "")
            self._list_tests(step, end.seconds)
            if self.reruns and self._seen.outcomes[key] is Outcome.FAIL:
                self._seen.failed[key] = checks, end.seconds
                if not self._run_again(step, kind_of(step).failing_ids(checks), used=end.seconds):
                    self._run_on_base(step)
        return [key for key, *_ in ended]

    def _list_tests(self, step: PlannedStep, used: float) -> None:
        """Have pytest list the tests of the merge base, where the change may have taken some of a step away."""
        folder = step_folder(self.results_folder, step.key)
        listed = listing.paths_to_list(step, self.plan)
        if not (listed or step.shard) or not (folder / process.LISTING_FILE).exists():
            return  # without a list of its own a step has not come to its end, and is red
        if not listed:
            self._processes.listings.append(listing.BaseListing(step, folder, None))
            return
        try:
            base = replace(self._context, root=self._tree_of_base(self.plan.merge_base))
        except HilgateError as error:
            self._files.add(step.key, ListingRecord(step=step.key, here=(), at_base=(), problem=error.what))
            return
        left = max(self._timeout(step) - used, listing.SECONDS)
        seconds = inner_timeout(left, os.environ, time.time())
        self._processes.listings.append(listing.start(step, folder, self.root, base, seconds))

    def _tree_of_base(self, commit: str) -> Path:
        """A clone of the merge base, for all of this run.

        Raises:
            HilgateError: There is none to be had.
        """
        if self._base_tree is None:
            folder = tempfile.TemporaryDirectory(prefix="hilgate-base-")
            git.clone_at(self.root, commit, Path(folder.name) / "tree")
            self._base_tree = folder
        return Path(self._base_tree.name) / "tree"

    def _run_again(self, step: PlannedStep, ids: tuple[str, ...], used: float = 0.0) -> bool:
        """Start failing tests of a step once more; returns whether there is a way to run them."""
        folder = step_folder(self.results_folder, step.key) / recheck.FOLDER
        rerun = recheck.start(step, ids, folder, self._context, self._seconds_left(step, used))
        self._processes.reruns += [rerun] if rerun else []
        return rerun is not None

    def _reap_reruns(self) -> None:
        for rerun in list(self._processes.reruns):
            records = rerun.poll(self.build.environment.host, elsewhere=bool(self.options.only_ids))
            if records is None:
                continue
            self._processes.reruns.remove(rerun)
            self._files.add(rerun.step.key, *records)
            failed = (
                any(record.outcome is not Outcome.PASS for record in records) and rerun.step.key in self._seen.failed
            )
            if failed and not rerun.on_base:
                self._run_on_base(rerun.step, rerun.child.seconds)

    def _asks_base(self, key: str) -> bool:
        """Whether the failing tests of a step run over the merge base's files."""
        _, seconds = self._seen.failed[key]
        asked = self.reruns and self.reruns.base and whole_key(key) not in self.reruns.known
        return bool(asked) and seconds <= recheck.MOST_BASE_SECONDS

    def _meanwhile(self) -> str:
        """What is done after all steps have ended."""
        if any(rerun.on_base or self._asks_base(rerun.step.key) for rerun in self._processes.reruns):
            return "asking the merge base"
        return "running the failing tests once more"

    def _reap_listings(self) -> None:
        for listed in list(self._processes.listings):
            try:
                record = listed.poll()
            except ValueError:  # then there is no record, and the judge misses it
                self._processes.listings.remove(listed)
                continue
            if record is not None:
                self._processes.listings.remove(listed)
                self._files.add(listed.step.key, record)

    def _run_on_base(self, step: PlannedStep, rerun_seconds: float = 0.0) -> None:
        """Start the failing tests of a short step over the merge base's files, if nothing says how they end there."""
        if not self.reruns or not self._asks_base(step.key):
            return
        checks, seconds = self._seen.failed[step.key]
        left = self._seconds_left(step, seconds + rerun_seconds)
        try:
            context = replace(self._context, root=self._tree_of_base(self.reruns.base))
        except HilgateError:
            self.reruns = Reruns()  # no other step asks; the report then says that nothing is known of the merge base
            return
        folder = step_folder(self.results_folder, step.key) / recheck.BASE_FOLDER
        rerun = recheck.start_on_base(step, checks, folder, context, left)
        self._processes.reruns += [rerun] if rerun else []

    def _record(self, step: PlannedStep, end: process.Ended, child: process.Child | None = None) -> tuple[Check, ...]:
        """Write what a step left, or that it was not started; returns its checks."""
        folder = step_folder(self.results_folder, step.key)
        lacked = self._machine.lacked(step, child.env) if child else ()
        kind, found = kind_of(step), Collected(())
        if child:
            found = kind.collect(folder, self.root, step.step.command).with_problem_as_failure()
        image, problem = collect_image(step, self.plan, folder)
        notes = collect(folder, self._selecting.tracked) if child else None
        reads = self._selecting.problem(step, notes) if notes else ""
        held = bool(reads) and self._selecting.is_held(step)
        decision = decide(
            StepFacts(
                evidence=kind,
                minimum=step.step.minimum,
                exit_status=end.exit_status,
                checks=found.checks,
                stopped=end.reason,
                problem=found.problem,
                said=child.said() if child else "",
                may_lack=step.step.may_lack,
                lacked=frozenset(lacked),
                deselected=found.deselected,
                reads=reads if held else "",
                remark="" if held else reads,
                unbuilt=problem,
            )
        )
        record = StepRecord(
            key=step.key,
            started=child.started if child else dt.datetime.now(dt.UTC),
            seconds=end.seconds,
            exit_status=end.exit_status,
            outcome=decision.outcome,
            message=decision.why,
            checks=len(found.checks),
            command=step.step.command,
            imported=self._machine.imported(step),
            peak_memory_mib=end.peak_memory_mib,
            environment=self.build.environment,
            lacked=lacked,
            kernels=notes.kernels if notes else None,
        )
        attempt = results.Attempt(record, found.checks)
        built = [image] if image and decision.outcome is Outcome.PASS else []
        self._files.add(step.key, *results.records_of(attempt), *built)
        self._seen.outcomes[step.key] = decision.outcome
        self.progress.finished(step, attempt, folder / LOG_FILE)
        return found.checks


def keep_untracked(folder: Path) -> None:
    """Make a folder for results that git ignores: they are no change of the repository that they lie in."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ".gitignore").exists():
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have a results folder for this process alone: two runs in one folder would mix their results.

    Raises:
        MisuseError: Another process has it.
    """
    keep_untracked(folder)
    with (folder / LOCK_FILE).open("a") as file:  # the file stays: no race to create it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.set_inheritable(file.fileno(), True)  # the watchdog holds the lock for as long as children run
        except BlockingIOError:
            raise MisuseError(
                "another hilgate run is writing its results here",
                where=str(folder),
                remedy="wait for it, or name another folder with --results",
            ) from None
        yield


def run_plan(plan: Plan, root: Path, folder: Path) -> Recorded:
    """Run every step of a plan over `root`, outside of any gate, and return what it left in `folder`."""
    build = new_build(plan)
    Runner(plan, root, folder, build, Lines(Console(stderr=True), buildkite=False), Options()).run()
    return results.read_all(folder, None, plan, build.plan_digest)


def new_build(plan: Plan, tree: str = "", surroundings: str = "") -> BuildRecord:
    """The record of a run of a plan that begins now on this machine."""
    return BuildRecord(
        started=dt.datetime.now(dt.UTC),
        plan_digest=plan_digest(plan),
        commit=plan.commit,
        tree=tree,
        surroundings=surroundings,
        environment=machine.environment(detect()),
    )
