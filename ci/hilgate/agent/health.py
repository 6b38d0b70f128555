"""What the hooks saw of a node: `health-before.json`, `health-after.json`, which are `hilgate.model.Health`.

An agent's host has a plain Python, so the file is written from a dataclass; a test reads it with the model.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hilgate.agent import fleet, smi

BEFORE = "health-before.json"
AFTER = "health-after.json"

VRAM_LIMIT = "HILGATE_VRAM_LIMIT_MIB"
VRAM_LIMIT_MIB = 512
"""Of one idle GPU: the driver itself keeps 283 to 284 MiB of an MI300X or MI355X (amd-smi metric, ROCm 6.4 and 7.2)."""

VRAM_SLACK_MIB = 64
"""A GPU shows 16 MiB less than its product has (196592 of 196608 MiB on MI300X); a partition of one, half or less."""

TEMPERATURE_LIMIT_C = 90.0
"""Before a job the GPU idles, at 30 to 50 C; an MI300X slows down at 100 C (amd-smi static --limit, hotspot)."""

MIN_DISK = "HILGATE_MIN_DISK_GIB"
MIN_DISK_GIB = 20
"""Free, for the checkout, a build's results and Triton's cache."""

MAX_LINES = 50
"""Of the kernel's log in a record; a GPU that faults writes thousands."""

FOLDER = re.compile(r"results/jobs/([A-Za-z0-9][A-Za-z0-9_.-]*)/\*\*/\*")
"""What the artifact paths of a step's job say, so the files of the hooks arrive with the rest."""

RECHECK = ".recheck"
"""What the folder of a rerun elsewhere adds to the planned key."""


@dataclass
class Health:
    """One look at a node; `problems` make it unfit."""

    step: str
    moment: str
    host: str = field(default_factory=socket.gethostname)
    agent: str = ""
    taken: str = field(default_factory=lambda: dt.datetime.now(dt.timezone.utc).isoformat())  # noqa: UP017 - Python 3.10
    began: float = field(default_factory=time.monotonic)
    problems: list[str] = field(default_factory=list)
    gpus: list[smi.Gpu] = field(default_factory=list)
    dmesg: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The record as JSON."""
        record = {
            "schema_version": 1,
            "step": self.step,
            "moment": self.moment,
            "host": self.host,
            "agent": self.agent,
            "taken": self.taken,
            "seconds": round(time.monotonic() - self.began, 3),
            "healthy": not self.problems,
            "problems": self.problems,
            "gpus": [
                {
                    "index": gpu.index,
                    "bdf": gpu.bdf,
                    "name": gpu.name,
                    "vram_total_mib": gpu.vram_total_mib,
                    "vram_used_mib": gpu.vram_used_mib,
                    "ecc_uncorrectable": gpu.ecc_uncorrectable,
                    "temperature_c": gpu.temperature_c,
                }
                for gpu in self.gpus
            ],
            "dmesg": shortened(self.dmesg),
            "ended": self.ended,
        }
        return json.dumps(record, indent=1) + "\n"

    def write(self, folder: Path) -> Path:
        """Write it into a job's folder, whole or not at all."""
        path = folder / (BEFORE if self.moment == "before" else AFTER)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(self.text(), encoding="utf-8")
        part.replace(path)
        return path


def shortened(lines: Sequence[str]) -> list[str]:
    """At most `MAX_LINES`: the first, which name the cause, and how many there were."""
    if len(lines) <= MAX_LINES:
        return list(lines)
    return [*lines[: MAX_LINES - 1], f"and {len(lines) - MAX_LINES + 1} more lines of GPU trouble"]


def job_folder(env: Mapping[str, str], checkout: Path) -> tuple[Path | None, str]:
    """The folder that a job uploads, and the planned key; None for a job of no planned step."""
    for pattern in env.get("BUILDKITE_ARTIFACT_PATHS", "").split(";"):
        if match := FOLDER.fullmatch(pattern.strip()):
            folder = checkout / "results" / "jobs" / match[1]
            if folder.resolve() != checkout.resolve() / "results" / "jobs" / match[1]:
                raise DeclarationError(
                    "the job's folder is a link", where=str(folder), remedy="take it out of the checkout"
                )
            return folder, match[1].removesuffix(RECHECK)
    return None, env.get("BUILDKITE_STEP_KEY", "")


def count_problems(gpus: Sequence[smi.Gpu], promise: fleet.Promise, bdfs: frozenset[str]) -> list[str]:
    """Whether these are the GPUs that the queue promises. `bdfs`: this agent's alone; empty for the whole machine."""
    absent = sorted(bdfs - {gpu.bdf for gpu in gpus})
    problems = [f"GPU {bdf} of this agent is not among those that amd-smi lists" for bdf in absent]
    own = [gpu for gpu in gpus if gpu.bdf in bdfs or not bdfs]
    if len(own) != promise.gpus:
        problems.append(f"{len(own)} GPUs where {promise.queue} promises {promise.gpus}")
    least = promise.memory_gib * 1024 - VRAM_SLACK_MIB
    for gpu in own:
        if gpu.arch != promise.arch:
            problems.append(f"GPU {gpu.index} ({gpu.bdf}) is {gpu.arch} where {promise.queue} promises {promise.arch}")
        elif gpu.vram_total_mib < least:
            problems.append(
                f"GPU {gpu.index} ({gpu.bdf}) has {gpu.vram_total_mib} MiB where {promise.queue} promises "
                f"{promise.memory_gib} GiB: another product, or partitioned"
            )
    return problems


def wear_problems(gpus: Sequence[smi.Gpu]) -> list[str]:
    """Uncorrectable errors of memory, which stay until the driver is loaded again."""
    return [
        f"GPU {gpu.index} ({gpu.bdf}) has {gpu.ecc_uncorrectable} uncorrectable ECC errors"
        for gpu in gpus
        if gpu.ecc_uncorrectable
    ]


def vram_problems(gpus: Sequence[smi.Gpu], limit_mib: int) -> list[str]:
    """Memory that is in use although nothing should run."""
    return [
        f"GPU {gpu.index} ({gpu.bdf}) has {gpu.vram_used_mib} MiB of VRAM in use; an idle one at most {limit_mib}"
        for gpu in gpus
        if gpu.vram_used_mib > limit_mib
    ]


def heat_problems(gpus: Sequence[smi.Gpu]) -> list[str]:
    """GPUs that are hot although nothing should run."""
    return [
        f"GPU {gpu.index} ({gpu.bdf}) has {gpu.temperature_c:g} C; an idle one at most {TEMPERATURE_LIMIT_C:g}"
        for gpu in gpus
        if gpu.temperature_c > TEMPERATURE_LIMIT_C
    ]


def number(env: Mapping[str, str], name: str, default: int) -> int:
    """A whole number that the agent may set.

    Raises:
        DeclarationError: It sets something else.
    """
    text = env.get(name, str(default))
    if not text.isascii() or not text.isdecimal():
        raise DeclarationError(f"{text!r} is no whole number", where=name, remedy=f"write e.g. {default}")
    return int(text)


def disk_problems(checkout: Path, least_gib: int) -> list[str]:
    """Whether there is room to work."""
    try:
        stat = os.statvfs(checkout)
    except OSError as error:
        return [f"the disk of {checkout} cannot be asked: {error.strerror}"]
    free = stat.f_bavail * stat.f_frsize / 2**30
    return [f"{free:.1f} GiB free on the disk of {checkout}; at least {least_gib}"] if free < least_gib else []
