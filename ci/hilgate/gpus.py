"""The GPUs of this machine, without starting any.

AMD GPUs are read from the KFD topology in sysfs (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c); NVIDIA GPUs are
asked of nvidia-smi. Which of them a process sees follows the vendors' environment variables.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KFD = Path("/sys/class/kfd/kfd/topology/nodes")

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
class Gpu:
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


def amd_gpus(kfd: Path) -> list[Gpu]:
    """GPUs in a KFD topology, in node order, which is HIP's order. Nodes denied to this container are left out."""
    gpus: list[Gpu] = []
    for node in sorted((n for n in _listed(kfd) if n.name.isdigit()), key=lambda n: int(n.name)):
        facts = _properties(node / "properties")
        version = facts.get("gfx_target_version", 0)
        if version:  # a node of processors has 0
            banks = [_properties(bank / "properties") for bank in _listed(node / "mem_banks")]
            product = AMD_NAMES.get(facts.get("device_id", 0), f"{facts.get('device_id', 0):#06x}")
            gpus.append(
                Gpu(
                    gfx_name(version),
                    f"AMD {product}",
                    sum(bank.get("size_in_bytes", 0) for bank in banks) / 2**30,
                    f"GPU-{facts.get('unique_id', 0):016x}",
                )
            )
    return gpus


def nvidia_gpus(notes: list[str]) -> list[Gpu]:
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


def parse_nvidia(listing: str) -> list[Gpu]:
    """GPUs of `uuid, name, compute capability, <MiB> MiB` lines; none unless every line has that shape.

    Memory is `[N/A]` where the GPU shares the host's, and 0 GiB here.
    """
    lines = [
        re.fullmatch(r"(GPU-[\w-]+), (.+), (\d+)\.(\d+), (?:(\d+) MiB|\[.+\])", line) for line in listing.splitlines()
    ]
    return (
        [Gpu("cuda", f"{m[2]} (sm_{m[3]}{m[4]})", int(m[5] or 0) / 1024, m[1]) for m in lines if m]
        if all(lines)
        else []
    )


def visible(gpus: Sequence[Gpu], env: Mapping[str, str], variables: Sequence[str]) -> list[Gpu]:
    """Apply visibility variables in turn (`A|B`: A, else B): indices or uuids; the first unknown one ends the list.

    That rule is the vendors' own (CUDA programming guide, environment variables; HIP follows it), so `-1` hides all.
    """
    seen = list(gpus)
    for names in variables:
        setting = next((env[name] for name in names.split("|") if name in env), None)
        if setting is None:
            continue
        chosen: list[Gpu] = []
        for word in (word.strip() for word in setting.split(",")):
            if word.isdigit() and int(word) < len(seen):
                chosen.append(seen[int(word)])
            elif word.startswith("GPU-") and (match := next((g for g in seen if g.uuid.startswith(word)), None)):
                chosen.append(match)
            else:
                break
        seen = chosen
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
