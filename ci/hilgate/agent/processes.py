"""The processes of this host as /proc shows them, and which job each belongs to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.agent import bounded

if TYPE_CHECKING:
    from pathlib import Path

MARKS = ("HILGATE_JOB_ID", "BUILDKITE_JOB_ID")
"""Environment variables that name a process's job; the first that it has counts."""

ZOMBIE = "Z"


@dataclass(frozen=True)
class Process:
    """One process at one moment.

    Attributes:
        pid: Its number; with `started` it is this process and no later one of the same number.
        parent: 1, or a subreaper, once its own parent has ended.
        session: The pid of the session's first process.
        state: R, S, D, Z ... (proc(5)).
        started: Clock ticks after boot.
        name: As the kernel has it, at most 15 bytes.
    """

    pid: int
    parent: int
    session: int
    state: str
    started: int
    name: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.name}, state {self.state})"


def read(proc: Path, pid: int) -> Process | None:
    """One process; None once it has ended."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may hold any character, so the other fields are counted from the last ')'.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[3]), fields[0], int(fields[19]), bounded.plain(name))


def snapshot(proc: Path) -> dict[int, Process]:
    """Every process, by pid."""
    pids = [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]
    return {pid: process for pid in pids if (process := read(proc, pid)) is not None}


def job_of(proc: Path, pid: int) -> str:
    """The job that a process was started for; empty when it has no mark, or belongs to another user."""
    try:
        data = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return ""
    found = dict(pair.partition(b"=")[::2] for pair in data.split(b"\0") if b"=" in pair)
    marks = (found.get(name.encode(), b"").decode(errors="replace") for name in MARKS)
    return next((mark for mark in marks if mark), "")


def ancestors(processes: dict[int, Process], pid: int) -> set[int]:
    """A process and all it descends from: for a hook these are the agent's own."""
    line: set[int] = set()
    while pid in processes and pid not in line:
        line.add(pid)
        pid = processes[pid].parent
    return line | {pid}


def own_line(processes: dict[int, Process]) -> set[int]:
    """The processes that a hook must never touch: itself, what it descends from, and the first process."""
    return {0, 1, *ancestors(processes, os.getpid())}
