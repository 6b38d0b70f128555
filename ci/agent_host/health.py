# SPDX-License-Identifier: Apache-2.0
"""What a queue promises of its nodes, the limits of a fit one, and the record of a look: `hilgate.model.record.Health`.

The record is `health-before.json` or `health-after.json` in a job's folder. An agent's host has a plain Python, so it
is written from a dataclass; a test reads it with the model.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent_host import clone, host
from hilgate.errors import DeclarationError
from hilgate.names import AGENTS_FILE, RECHECK_SUFFIX, node_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent_host.clone import QueuePromise
    from agent_host.gpus import GpuStatus, SmiProblem

QUEUE = "BUILDKITE_AGENT_META_DATA_QUEUE"
"""Set by the agent from its tags, so no change can talk down what its node must have."""

VRAM_LIMIT = "HILGATE_VRAM_LIMIT_MIB"
VRAM_LIMIT_MIB = 512
"""Most memory in use on an idle GPU: the driver itself keeps 283 to 284 MiB of an MI300X or MI355X (amd-smi metric,
ROCm 6.4 and 7.2)."""

VRAM_SLACK_MIB = 64
"""A GPU shows 16 MiB less than its product has (196592 of 196608 MiB on MI300X); a partition of one, half or less."""

TEMPERATURE_LIMIT_C = 90.0
"""Hottest GPU that may take a job. It idles then, at 30 to 50 C; an MI300X slows down at 100 C (amd-smi static --limit,
hotspot)."""

MIN_DISK = "HILGATE_MIN_DISK_GIB"
MIN_DISK_GIB = 20
"""Free, for the checkout, a build's results and Triton's cache."""

DOCKER_ROOT = Path("/var/lib/docker")
"""Where Docker keeps images, unless its `data-root` says another place."""

MIN_ROOM = "HILGATE_MIN_ROOM_MIB"
MIN_ROOM_MIB = 1024
"""Free wherever a job writes before its checkout: its environment, the agent's own hook scripts, what is remembered."""

MAX_LINES = 50
"""Most lines of the kernel's log in a record; a GPU that faults writes thousands."""

_NOT_RECORDED = frozenset({"arch", "ecc_deferred", "compute_units"})
"""Facts of a GPU that are judged here and not recorded."""

_FOLDER = re.compile(r"results/jobs/([A-Za-z0-9][A-Za-z0-9_.-]*)/\*\*/\*")
"""What the artifact paths of a step's job say, so the files of the hooks arrive with the rest."""


def promised(env: Mapping[str, str]) -> QueuePromise:
    """What this agent's queue promises in the `ci/agents.yaml` of the agent's own clone.

    Raises:
        DeclarationError: There is no queue, or nothing is known of it.
    """
    queue, folder = env.get(QUEUE, ""), clone.repository(env)
    promises = clone.queues(clone.read(folder, AGENTS_FILE))
    if queue not in promises:
        raise DeclarationError(
            f"nothing is known of the queue {queue!r}; known are {', '.join(promises) or 'none'}",
            where=f"{QUEUE}, {folder / AGENTS_FILE}",
            remedy=f"correct the agent's queue tag, or bring the clone up to date ({clone.REPOSITORY} names it)",
        )
    return promises[queue]


def whole_number(env: Mapping[str, str], name: str, default: int) -> int:
    """A setting of the agent.

    Raises:
        DeclarationError: It is no whole number.
    """
    text = env.get(name, str(default))
    if not text.isascii() or not text.isdecimal():
        raise DeclarationError(f"{text!r} is no whole number", where=name, remedy=f"write e.g. {default}")
    return int(text)


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat()  # noqa: UP017 - Python 3.10


@dataclass
class HealthRecord:
    """One look at a node; `problems` make it unfit."""

    step: str
    moment: str
    agent: str = ""
    problems: list[str] = field(default_factory=list)
    gpus: list[GpuStatus] = field(default_factory=list)
    dmesg: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was seen and decides nothing."""
    taken: str = field(default_factory=_now)
    began: float = field(default_factory=time.monotonic)

    def write(self, folder: Path) -> Path:
        """Write it into a job's folder as JSON, whole or not at all."""
        record = {
            "schema_version": 1,
            "step": self.step,
            "moment": self.moment,
            "host": node_name(),
            "agent": self.agent,
            "taken": self.taken,
            "seconds": round(time.monotonic() - self.began, 3),
            "healthy": not self.problems,
            "problems": self.problems,
            "gpus": [
                {name: fact for name, fact in vars(gpu).items() if name not in _NOT_RECORDED} for gpu in self.gpus
            ],
            "dmesg": _first(self.dmesg, "lines of GPU trouble"),
            "ended": self.ended,
        }
        if self.notes:  # a judge from before there were any refuses the key
            record["notes"] = _first(self.notes, "notes")
        path = folder / f"health-{self.moment}.json"
        host.write_whole(path, json.dumps(record, indent=1) + "\n")
        return path


def _first(lines: list[str], what: str) -> list[str]:
    """The lines that a record holds: the first ones, which name the cause, and how many more there are."""
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 1], f"and {len(lines) - MAX_LINES + 1} more {what}"]


def own_problems(
    problems: Sequence[SmiProblem], gpus: Sequence[GpuStatus], own: frozenset[str]
) -> tuple[list[str], list[str]]:
    """What amd-smi does not say of this agent's GPUs, and what it does not say of those of others alone.

    `own` (PCI addresses) are this agent's; empty is the whole machine. A GPU without an address is another's only where
    all of its own have been read.
    """
    unread = own - {gpu.bdf for gpu in gpus}
    ours = [problem for problem in problems if not own or problem.bdf in own or (not problem.bdf and unread)]
    return [problem.text for problem in ours], [problem.text for problem in problems if problem not in ours]


def job_folder(env: Mapping[str, str], checkout: Path) -> tuple[Path | None, str]:
    """The folder that a job uploads, and the planned key, which a recheck's folder adds to; None for another job.

    Raises:
        DeclarationError: The folder is a link.
    """
    for pattern in env.get("BUILDKITE_ARTIFACT_PATHS", "").split(";"):
        if match := _FOLDER.fullmatch(pattern.strip()):
            inner = f"results/jobs/{match[1]}"
            if (checkout / inner).resolve() != checkout.resolve() / inner:
                raise DeclarationError(
                    "the job's folder is a link", where=str(checkout / inner), remedy="take it out of the checkout"
                )
            return checkout / inner, match[1].removesuffix(RECHECK_SUFFIX)
    return None, env.get("BUILDKITE_STEP_KEY", "")


def lasting_problems(gpus: Sequence[GpuStatus], promise: QueuePromise, own: frozenset[str]) -> list[str]:
    """What does not pass: other GPUs than the queue promises, and uncorrectable errors of their memory.

    Of all GPUs that amd-smi lists, `own` (PCI addresses) are this agent's; empty is the whole machine.
    """
    problems = [
        f"GPU {bdf} of this agent is not among those that amd-smi lists" for bdf in sorted(own - {g.bdf for g in gpus})
    ]
    gpus = [gpu for gpu in gpus if gpu.bdf in own or not own]
    if len(gpus) != promise.gpus:
        problems.append(f"{len(gpus)} GPUs where {promise.queue} promises {promise.gpus}")
    for gpu in gpus:
        name = f"GPU {gpu.index} ({gpu.bdf})"
        if gpu.arch != promise.arch:
            problems.append(f"{name} is {gpu.arch} where {promise.queue} promises {promise.arch}")
        elif gpu.vram_total_mib < promise.memory_gib * 1024 - VRAM_SLACK_MIB:
            problems.append(
                f"{name} has {gpu.vram_total_mib} MiB where {promise.queue} promises "
                f"{promise.memory_gib} GiB: another product, or partitioned"
            )
        elif promise.compute_units and gpu.compute_units != promise.compute_units:
            problems.append(
                f"{name} ({gpu.name}) has {gpu.compute_units or 'an unknown number of'} compute units where "
                f"{promise.queue} promises {promise.compute_units}: another product, or partitioned"
            )
        if gpu.ecc_deferred:
            problems.append(f"{name} has {gpu.ecc_deferred} deferred ECC errors")
        if gpu.ecc_uncorrectable:  # stays until the driver is loaded again
            problems.append(f"{name} has {gpu.ecc_uncorrectable} uncorrectable ECC errors")
    return problems


def passing_problems(gpus: Sequence[GpuStatus], vram_limit_mib: int, *, idle: bool) -> list[str]:
    """What may be gone in a few seconds: memory in use although nothing should run, and heat where it was idle."""
    problems = []
    for gpu in gpus:
        name = f"GPU {gpu.index} ({gpu.bdf})"
        if gpu.vram_used_mib > vram_limit_mib:
            used = f"{gpu.vram_used_mib} MiB of VRAM in use"
            problems.append(f"{name} has {used}; an idle one at most {vram_limit_mib}")
        if idle and gpu.temperature_c > TEMPERATURE_LIMIT_C:
            problems.append(f"{name} has {gpu.temperature_c:g} C; an idle one at most {TEMPERATURE_LIMIT_C:g}")
    return problems


def disk_problems(checkout: Path, least_gib: int) -> list[str]:
    """Whether there is room to work."""
    try:
        stat = os.statvfs(checkout)
    except OSError as error:
        return [f"the disk of {checkout} cannot be asked: {error.strerror}"]
    free = stat.f_bavail * stat.f_frsize / 2**30
    return [f"{free:.1f} GiB free on the disk of {checkout}; at least {least_gib}"] if free < least_gib else []


def room_problems(folders: Mapping[str, Path], least_mib: int) -> list[str]:
    """Whether a job's files can be written in each folder, by what it is for; a file is written to try."""
    problems = []
    for what, folder in folders.items():
        try:
            state = os.statvfs(folder)
            free = state.f_bavail * state.f_frsize // 2**20
            if free < least_mib:
                problems.append(f"{free} MiB free for {what} in {folder}; at least {least_mib}")
                continue
            probe = folder / f".hilgate-probe-{os.getpid()}"
            probe.write_bytes(b"x" * 4096)
            probe.unlink()
        except OSError as error:
            problems.append(f"{what} cannot be written in {folder}: {error.strerror}")
    return problems
