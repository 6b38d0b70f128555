# SPDX-License-Identifier: Apache-2.0
"""Run functions in forked children that may crash or hang, several at a time.

MLIR and LLVM end the process when one of their own checks fails, after printing the check to stderr. A fork inherits
the imported torch, Triton and vLLM, so a child starts in milliseconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
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
    """A child that died, or was killed, before it could answer."""

    message: str
    """How it ended, and the end of what it printed."""
    timed_out: bool = False

    def __str__(self) -> str:
        return self.message


@dataclass
class _Child(Generic[Result]):
    index: int
    process: ForkProcess
    answer: Connection
    output: IO[bytes]
    started: float


def run_isolated(
    work: Sequence[Callable[[], Result]], *, jobs: int, timeout: float
) -> Iterator[tuple[int, Result | Exception | Crash, float]]:
    """Run every callable in a child of its own.

    Args:
        work: What to call; results and exceptions must be picklable.
        jobs: Children at a time.
        timeout: Seconds after which a child is killed.

    An exception carries what its child printed as a note: MLIR raises a bare "failed" and prints the reason.

    Yields:
        (index into `work`, what it returned or raised or how it died, seconds), as they finish.
    """
    waiting = deque(enumerate(work))
    running: list[_Child[Result]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(*waiting.popleft()))
            deadline = min(child.started + timeout for child in running)
            connection.wait([child.answer for child in running], timeout=max(0.0, deadline - time.monotonic()))
            for child in list(running):
                late = time.monotonic() - child.started > timeout
                if child.answer.poll() or late:
                    running.remove(child)
                    yield child.index, _finish(child), time.monotonic() - child.started
    finally:
        for child in running:
            child.process.kill()
            child.process.join()


def _start(index: int, call: Callable[[], Result]) -> _Child[Result]:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child has been read
    process = fork.Process(target=_child, args=(call, theirs, output))
    process.start()
    theirs.close()  # so that a dead child reads as end of file
    return _Child(index, process, ours, output, time.monotonic())


def _child(call: Callable[[], Result], answer: Connection, output: IO[bytes]) -> None:
    faulthandler.disable()  # a Python stack of the fork would push the compiler's words out of the tail
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    try:
        result: Result | Exception = call()
    except Exception as error:  # noqa: BLE001 - it is handed to the parent, which judges it
        result = error
    answer.send(result)


def _finish(child: _Child[Result]) -> Result | Exception | Crash:
    try:
        if child.answer.poll():
            answer = child.answer.recv()
            if isinstance(answer, Exception):
                answer.add_note(_tail(child.output))
            return answer
        child.process.kill()
        return Crash(f"no answer within the time limit{_tail(child.output)}", timed_out=True)
    except EOFError:
        child.process.join()
        code = child.process.exitcode or 0
        ending = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return Crash(f"the compiler ended the process with {ending}{_tail(child.output)}")
    finally:
        child.process.join()
        child.answer.close()
        child.output.close()


def _tail(output: IO[bytes]) -> str:
    """What the compiler had to say: its diagnostics where there are any, else the end of what it printed.

    MLIR prints a reproducer of thousands of lines between the error and the end.
    """
    output.seek(0)
    text = output.read().decode(errors="replace").strip()
    if diagnostics := [line.strip() for line in text.splitlines() if _DIAGNOSTIC.search(line)]:
        text = "\n".join(diagnostics)
    return f"; the compiler printed: {text[-_TAIL:]}" if text else "; the compiler printed nothing"
