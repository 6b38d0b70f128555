# SPDX-License-Identifier: Apache-2.0
"""Run functions in forked workers that may crash or hang, several at a time.

MLIR and LLVM end the process when one of their own checks fails, after printing the check to stderr. A fork inherits
the imported torch, Triton and vLLM. A worker calls one function after the other, which spares a fork of a large process
for each; one that dies takes nothing with it but the call that killed it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import connection
from typing import IO, TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

Result = TypeVar("Result")

_TAIL = 1500
"""Characters of a child's output that are kept."""

_DIAGNOSTIC = re.compile(r"\b(error|LLVM ERROR|fatal|Assertion)\b.*[:`']")
"""A line on which MLIR or LLVM says what is wrong."""


@dataclass(frozen=True)
class Crash:
    """A worker that died, or was killed, before it could answer."""

    message: str
    """How it ended, and the end of what it printed."""
    timed_out: bool = False

    def __str__(self) -> str:
        return self.message


@dataclass
class _Worker(Generic[Result]):
    process: ForkProcess
    calls: Connection
    """Takes an index into the work, gives the answer; at its end when the worker is dead."""
    output: IO[bytes]
    index: int = -1
    started: float = 0.0

    def start(self, index: int) -> None:
        self.index, self.started = index, time.monotonic()
        self.output.seek(0)  # of the worker's streams too: they are this file
        self.output.truncate()
        with contextlib.suppress(OSError):  # dead while it was idle: then the answer is that it died
            self.calls.send(index)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.calls.close()
        self.output.close()


def run_isolated(
    work: Sequence[Callable[[], Result]], *, jobs: int, timeout: float
) -> Iterator[tuple[int, Result | Exception | Crash, float]]:
    """Run every callable where its death ends no other.

    Args:
        work: What to call; results and exceptions must be picklable.
        jobs: Workers.
        timeout: Seconds after which a call is ended, with its worker.

    An exception carries what its worker printed as a note: MLIR raises a bare "failed" and prints the reason.

    Yields:
        (index into `work`, what it returned or raised or how it died, seconds), as they finish.
    """
    waiting = deque(range(len(work)))
    idle: list[_Worker[Result]] = []
    running: list[_Worker[Result]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(idle.pop() if idle else _fork(work, [*idle, *running]))
                running[-1].start(waiting.popleft())
            deadline = min(worker.started + timeout for worker in running)
            connection.wait([worker.calls for worker in running], timeout=max(0.0, deadline - time.monotonic()))
            for worker in list(running):
                late = time.monotonic() - worker.started > timeout
                if worker.calls.poll() or late:
                    running.remove(worker)
                    answer, seconds = _answer(worker), time.monotonic() - worker.started
                    if isinstance(answer, Crash):
                        worker.end()
                    else:
                        idle.append(worker)
                    yield worker.index, answer, seconds
    finally:
        for worker in (*idle, *running):
            worker.end()


def _fork(work: Sequence[Callable[[], Result]], others: Sequence[_Worker[Result]]) -> _Worker[Result]:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker ends
    inherited = [ours, *(worker.calls for worker in others)]
    process = fork.Process(target=_serve, args=(work, theirs, inherited, output), daemon=True)
    process.start()
    theirs.close()  # so that a dead worker reads as end of file
    return _Worker(process, ours, output)


def _serve(
    work: Sequence[Callable[[], Result]], calls: Connection, inherited: Sequence[Connection], output: IO[bytes]
) -> None:
    for end in inherited:
        end.close()  # so that a dead parent reads as end of file
    gc.freeze()
    gc.set_threshold(100_000)  # a compilation makes many objects and little garbage, and takes a twentieth less so
    faulthandler.disable()  # a Python stack of the fork would push the compiler's words out of the tail
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    with contextlib.suppress(EOFError):
        while True:
            index = calls.recv()
            try:
                result: Result | Exception = work[index]()
            except Exception as error:  # noqa: BLE001 - it is handed to the parent, which judges it
                result = error
            sys.stdout.flush()
            calls.send(result)


def _answer(worker: _Worker[Result]) -> Result | Exception | Crash:
    try:
        if worker.calls.poll():
            answer = worker.calls.recv()
            if isinstance(answer, Exception):
                answer.add_note(_tail(worker.output))
            return answer
        return Crash(f"no answer within the time limit{_tail(worker.output)}", timed_out=True)
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code = worker.process.exitcode or 0
        ending = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return Crash(f"the compiler ended the process with {ending}{_tail(worker.output)}")


def _tail(output: IO[bytes]) -> str:
    """What the compiler had to say: its diagnostics where there are any, else the end of what it printed.

    MLIR prints a reproducer of thousands of lines between the error and the end.
    """
    output.seek(0)
    text = output.read().decode(errors="replace").strip()
    if diagnostics := [line.strip() for line in text.splitlines() if _DIAGNOSTIC.search(line)]:
        text = "\n".join(diagnostics)
    return f"; the compiler printed: {text[-_TAIL:]}" if text else "; the compiler printed nothing"
