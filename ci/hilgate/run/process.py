# SPDX-License-Identifier: Apache-2.0
"""Child processes of steps: each in its own group, without a shell, timed, measured, and ended with all it started.

A `Child` never blocks: the runner polls it, so one thread drives every step and an interrupt reaches all of them.

Buildkite counts a job's timeout from its start, checkout and image pull included, and what it ends leaves no artifacts.
So a step ends at its own timeout or a minute before the job's, whichever comes first. Locally there is no job.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from hilgate.errors import CannotRunHereError
from hilgate.evidence import LOG_FILE, kind_of
from hilgate.model.declaration import CPU
from hilgate.plan.machine import CPU_BUILD, foreign_entries, installed, own_entries, place
from hilgate.pytest_listing import VARIABLE
from hilgate.pytest_recorder import recorders
from hilgate.run.outcome import TIMED_OUT, said
from hilgate.run.reads import record
from hilgate.run.results import RESULTS_FILE
from hilgate.text import argument_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import FrameType

    from hilgate.model.plan import Plan, PlannedStep


GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL: long enough for pytest to write its report, short against any step's timeout."""

LISTING_FILE = "tests.json"
"""File in the output folder of a pytest step: ids of the tests that began."""
DURATIONS_FILE = "durations.json"
"""File in the output folder of a shard: seconds of its step's tests, for pytest-split."""
OUT_VARIABLE = "HILGATE_OUT"
PROFILE_VARIABLE = "HILGATE_PROFILE"
"""What the plan is for, given to every step: gates are stricter before a release."""

UPLOAD_SECONDS = 60.0
"""Kept for the records, the hooks after the command and the upload of what the step left."""

STARTED = "HILGATE_JOB_STARTED"
"""Epoch seconds at which the job began; set by the agent's `environment` hook, before the checkout."""

TIMEOUT = "BUILDKITE_TIMEOUT"
"""The job's timeout in minutes, or `false` where it has none; set by Buildkite."""

SECONDS_PER_MINUTE = 60.0

HIDE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Set to -1 where the environment has the CPU builds: torch's CUDA build would see the GPU that vLLM's CPU build does
not, and tests would not interpret kernels."""


_DECIDES = re.compile(
    r"(?:BASH|HYPOTHESIS_|MYPY|PAGEDKV_|PYTEST|PYTHON|TORCH|TRITON_|VLLM_).*|LD_AUDIT|LD_PRELOAD|SHELLOPTS|"
    r"GIT_(?:ALTERNATE|ATTR_|COMMON_|DIR|EXTERNAL_|GRAFT_|INDEX_|NAMESPACE|OBJECT_|PREFIX|REPLACE_|SHALLOW_|WORK_).*"
)
"""Variables by which the programs of steps do something else, run other code or ask another repository."""

_PLACES = re.compile(r"PYTHONHOME|\w+_(?:CACHE|CACHE_DIR|CACHE_ROOT|HOME)")
"""Those of them that only say where this machine keeps its caches and its interpreter."""


_DOTS = re.compile(r"(?:^|(?<=\s))[.FEsxX]{2,}(?=\s|$)\s*|^\.$")
"""What pytest prints for tests that ended."""


class Interrupts:
    """Turns SIGINT and SIGTERM into a request to stop while the context lasts; a second one changes nothing."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Name of the first signal, e.g. `SIGINT`."""
        return signal.Signals(self.number).name

    def __enter__(self) -> Self:
        """Take both signals."""
        self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        exit_status: As `subprocess` reports it (negative: the signal); None when we ended it or could not start it.
        reason: Why there is no exit status; empty when there is one.
        seconds: Wall time.
        peak_memory_mib: Largest resident size of any one process of the child's tree (`wait4(2)`: ru_maxrss of the
            child and of the descendants it waited for). Never below the size of hilgate itself, which Linux carries
            over at exec. None when nothing was started.
    """

    exit_status: int | None
    reason: str
    seconds: float
    peak_memory_mib: float | None


_KILL = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Watchdog:
    """A process that kills what runs when hilgate itself is killed (SIGKILL, out of memory) and can do it no more.

    It reads from a pipe which groups run; the pipe ends with hilgate. Until it has killed them it holds the lock of the
    results folder, the only inheritable descriptor, so that no second run meets the children of the first.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # In a step that starts hilgate it must be seen to do nothing else.
            [sys.executable, *(("-P", "-s") if recorders() else ("-I", "-S")), "-c", _KILL],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(recorders())},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            close_fds=False,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, sign: Literal["+", "-"], group: int) -> None:
        """A process group has begun (`+`), or is gone (`-`), so that its number may become another's."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed from outside: nothing else depends on it
            self._process.stdin.write(f"{sign}{group}\n".encode())


class Child:
    """A running command; its output goes to `log` and never to a pipe that a stray grandchild could hold open."""

    def __init__(
        self, arguments: list[str], context: RunContext, *, env: dict[str, str], log: Path, timeout_seconds: float
    ) -> None:
        self.log, self.env = log, env
        self._watchdog = context.watchdog
        self.started = dt.datetime.now(dt.UTC)
        self.timeout_seconds = timeout_seconds
        self._began = time.monotonic()
        self._kill_at: float | None = None
        self._reason = ""
        self._process: subprocess.Popen[bytes] | None = None
        with log.open("ab", buffering=0) as output:
            try:
                self._process = subprocess.Popen(
                    arguments,
                    cwd=context.root,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._watchdog.tell("+", self._process.pid)
            except OSError as error:
                self._reason = f"could not be started: {error.strerror}: {arguments[0]}"
                output.write(f"{self._reason}\n".encode())

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self._began

    def poll(self) -> Ended | None:
        """What became of it, or None while it runs. Sends SIGTERM at the timeout and SIGKILL after the grace."""
        if self._process is None:
            return Ended(None, self._reason, self.seconds, None)
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        now = time.monotonic()
        if pid == 0:
            if self._kill_at is None and now >= self._began + self.timeout_seconds:
                self.stop(f"{TIMED_OUT} after {self.timeout_seconds:g} s")
            elif self._kill_at is not None and now >= self._kill_at:
                self._signal_group(signal.SIGKILL)
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for a reaped process
        self._signal_group(signal.SIGKILL)  # a server that the step left behind would disturb the next one
        self._watchdog.tell("-", self._process.pid)
        exit_status = None if self._reason else self._process.returncode
        return Ended(exit_status, self._reason, self.seconds, usage.ru_maxrss / 1024)

    def stop(self, reason: str) -> None:
        """Ask the whole group to end; `poll` kills what has not ended after `GRACE_SECONDS`."""
        if self._process is None or self._kill_at is not None:
            return
        self._reason = reason
        self._kill_at = time.monotonic() + GRACE_SECONDS
        self._signal_group(signal.SIGTERM)

    def last_line(self) -> str:
        """The last line with words of what it printed so far, without pytest's dots; empty when there is none."""
        return next((line for line in reversed(self._lines(4096)) if line), "")

    def said(self) -> str:
        """The line in which it says what went wrong, for one that failed; empty when it printed nothing."""
        return said(self._lines(1 << 16))

    def _lines(self, size: int) -> list[str]:
        """The lines of the last `size` bytes of its log, without pytest's dots."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - size))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [_DOTS.sub("", line).strip() for line in lines]

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)  # the child leads its session, so its pid names the group


def variables(step: PlannedStep, plan: Plan, root: Path) -> dict[str, str]:
    """The environment of a step: the tree's own packages come first, whatever else this Python has installed.

    What decides how a test runs it has from its declaration alone, never from the shell that started hilgate.
    """
    shell = {name: value for name, value in os.environ.items() if not _decides(name)}
    # Threads would otherwise be as many as the machine has cores, in every step at once.
    env = {"OMP_NUM_THREADS": "1", **shell, **step.env}
    if plan.local and step.device == CPU and installed([CPU_BUILD]):
        env |= dict.fromkeys(HIDE_GPUS, "-1")
    own = [*plan.python_path, *filter(None, step.env.get("PYTHONPATH", "").split(os.pathsep))]
    # A step that starts hilgate reads what the steps of that one read.
    path = [*recorders(), *(str(root.absolute() / folder) for folder in own), *own_entries(os.environ)]
    return env | {"PYTHONPATH": os.pathsep.join(path), PROFILE_VARIABLE: plan.profile}


def _decides(name: str) -> bool:
    return bool(_DECIDES.fullmatch(name)) and not _PLACES.fullmatch(name)


def not_passed_on(steps: Iterable[PlannedStep], plan: Plan, root: Path) -> tuple[str, ...]:
    """Variables of this shell, sorted, that a step does not get and does not declare: it runs as if they were unset."""
    declared = set.intersection(*({*step.env} for step in steps), {*os.environ})
    names = {name for name, value in os.environ.items() if value and _decides(name)} - declared - {"PYTHONPATH"}
    own = {os.path.realpath(root / folder) for folder in plan.python_path}
    if any(os.path.realpath(entry) not in own for entry in foreign_entries(os.environ)):
        names.add("PYTHONPATH")
    return tuple(sorted(names))


@dataclass(frozen=True)
class RunContext:
    """Where steps run: the repository, the plan, and what ends them if hilgate is killed."""

    root: Path
    plan: Plan
    watchdog: Watchdog

    def variables(self, step: PlannedStep) -> dict[str, str]:
        """The environment of a step."""
        return variables(step, self.plan, self.root)

    def imported(self, step: PlannedStep) -> dict[str, str]:
        """Where a Python in the environment of a step finds each package of the plan; empty when it does not say."""
        if not self.plan.packages:
            return {}
        command = [sys.executable, "-c", _FIND, *self.plan.packages]
        try:
            asked = subprocess.run(
                command, cwd=self.root, env=self.variables(step), capture_output=True, timeout=60, check=True
            )
            found = json.loads(asked.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return {}
        return {name: place(self.root / folder, self.root) for name, folder in found.items()}


_FIND = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
places = {name: (spec.submodule_search_locations or [spec.origin])[0] for name, spec in specs.items() if spec}
print(json.dumps(places))
"""


def emptied(folder: Path) -> Path:
    """A folder of a step, made where it is missing, without evidence of an earlier run; its absolute path."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale)
        elif stale.name != RESULTS_FILE:  # replaced whole once this run has ended, so that no failure gets lost
            stale.unlink()
    return folder


def start(
    step: PlannedStep, command: str, folder: Path, context: RunContext, seconds: float, *, recorded: bool = False
) -> Child:
    """Start a command of a step.

    `folder` is emptied but for results of an earlier run, then `$HILGATE_OUT` and the place of the log. With `recorded`
    the processes note there what they read (`run.reads`).
    """
    folder = emptied(folder)
    arguments = argument_list(command) + kind_of(step).arguments(command, folder)
    if recorded and step.shard:  # what runs once more, or over the merge base, is no shard
        durations = folder / DURATIONS_FILE
        durations.write_text(json.dumps(context.plan.test_seconds.get(step.whole, {})), encoding="utf-8")
        arguments += [f"--splits={step.shard.of}", f"--group={step.shard.number}", f"--durations-path={durations}"]
        # The other algorithm can leave a group without a test.
        arguments += ["-p", "pytest-split", "--splitting-algorithm=least_duration"]
    env = context.variables(step) | {OUT_VARIABLE: str(folder), VARIABLE: str(folder / LISTING_FILE)}
    if recorded:
        env["PYTHONPATH"] = os.pathsep.join([record(folder, context.root), env["PYTHONPATH"]])
    return Child(arguments, context, env=env, log=folder / LOG_FILE, timeout_seconds=seconds)


def inner_timeout(step_seconds: float, environment: Mapping[str, str], now: float) -> float:
    """Seconds that a step may take from now on; 0 when the job has no time left for it.

    `environment` is the job's, `now` in epoch seconds.

    Raises:
        CannotRunHereError: The job has a timeout, and when it started is not known or not a number.
    """
    minutes = environment.get(TIMEOUT, "")
    if minutes in {"", "false"}:
        return step_seconds
    started = min(_number(STARTED, environment.get(STARTED, "")), now)  # a clock that is ahead gives no extra time
    deadline = started + _number(TIMEOUT, minutes) * SECONDS_PER_MINUTE - UPLOAD_SECONDS
    return max(0.0, min(step_seconds, deadline - now))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise CannotRunHereError(
            f"{name} is {text!r}, and a job with a timeout must know when it began",
            where="the job's environment",
            remedy="install the agent's environment hook (ci/hooks); pass both variables to the container",
        )
    return value
