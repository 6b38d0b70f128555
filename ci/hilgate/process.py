"""One child process in its own group: started without a shell, timed, measured, and always ended with all it started.

The only module that starts a step's processes. A `Child` never blocks: the runner polls it, so one thread drives every
step and an interrupt reaches all of them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from hilgate.errors import DeclarationError
from hilgate.rules import TIMED_OUT

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL: long enough for pytest to write its report, short against any step's timeout."""


class Interrupts:
    """Turns SIGINT and SIGTERM into a request to stop while the context lasts; a second one changes nothing."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Of the first signal, e.g. `SIGINT`."""
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


def argument_list(command: str) -> list[str]:
    """Split a declared command; a leading `python` is the interpreter that runs hilgate.

    Raises:
        DeclarationError: The command is empty or its quotes do not close.
    """
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise DeclarationError(
            f"the command cannot be split into words: {error}", where=command, remedy="close the quotes in its area"
        ) from error
    if not arguments:
        raise DeclarationError("the command is empty", remedy="write the command in its area")
    if arguments[0] == "python":
        arguments[0] = sys.executable
    return arguments


class Child:
    """A running command; its output goes to `log` and never to a pipe that a stray grandchild could hold open."""

    def __init__(
        self, arguments: list[str], *, cwd: Path, env: dict[str, str], log: Path, timeout_seconds: float
    ) -> None:
        self.log = log
        self._began = time.monotonic()
        self._deadline = self._began + timeout_seconds
        self._timeout_seconds = timeout_seconds
        self._kill_at: float | None = None
        self._reason = ""
        self._process: subprocess.Popen[bytes] | None = None
        with log.open("ab", buffering=0) as output:
            try:
                self._process = subprocess.Popen(
                    arguments,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
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
            if self._kill_at is None and now >= self._deadline:
                self.stop(f"{TIMED_OUT} after {self._timeout_seconds:g} s")
            elif self._kill_at is not None and now >= self._kill_at:
                self._signal_group(signal.SIGKILL)
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for a reaped process
        self._signal_group(signal.SIGKILL)  # a server that the step left behind would disturb the next one
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
        """The last line with text of what it printed so far, for the live table."""
        return last_line(self.log)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)  # the child leads its session, so its pid names the group


def last_line(log: Path, *, tail_bytes: int = 4096) -> str:
    """The last line with text of a log file; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - tail_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
