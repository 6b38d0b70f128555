"""Runs one command that is sure to come back: its own group, a timeout, and no pipe that a child could hold open."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import IO

REAP_SECONDS = 3.0
"""After SIGKILL. A process in state D (a driver that does not answer) may never die, and is left to the kernel."""

MAX_OUTPUT_BYTES = 8 * 2**20
"""Of one stream; amd-smi says about 3 KiB for a GPU, and a whole kernel log is at most a few MiB."""


@dataclass(frozen=True)
class Ran:
    """How a command ended.

    Attributes:
        status: Its exit status, negative for a signal; None when it was ended here or could not start.
        out: Standard output, bytes that are not UTF-8 replaced.
        err: Standard error.
        problem: Why there is no exit status; empty when there is one.
        seconds: Wall time.
    """

    status: int | None
    out: str
    err: str
    problem: str
    seconds: float

    def said(self) -> str:
        """The last line with text of what it wrote, for a message; empty when it wrote nothing."""
        lines = [line.strip() for line in (self.out + "\n" + self.err).splitlines() if line.strip()]
        return plain(lines[-1]) if lines else ""


def plain(text: str) -> str:
    """Text in which no character moves a cursor, hides or colours anything: what is not printable is spelt out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def run(words: Sequence[str], seconds: float, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run a command for at most `seconds`, then kill its group."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(words), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
            )
        except OSError as error:
            return Ran(None, "", "", f"{words[0]} cannot be started: {error.strerror}", 0.0)
        status: int | None = None
        problem = ""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            problem = f"{words[0]} did not answer within {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if problem:
            try:
                process.wait(REAP_SECONDS)
            except subprocess.TimeoutExpired:
                problem += f" and cannot be killed (process {process.pid})"
        texts = [_text(stream) for stream in (out, err)]
    return Ran(status, texts[0], texts[1], problem, time.monotonic() - began)


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(MAX_OUTPUT_BYTES).decode(errors="replace")
