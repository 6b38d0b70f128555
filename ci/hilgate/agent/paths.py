"""Where Linux shows processes, GPUs and devices: one place, so that a test can show others."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")

KFD = Path("/sys/class/kfd/kfd")
"""Of the amdkfd driver: `topology/nodes/<n>` describes the GPUs, `proc/<pid>` is there for as long as the driver keeps
anything of a process (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c)."""

DEV = Path("/dev")
