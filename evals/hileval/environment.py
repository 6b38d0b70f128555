"""Where an evaluation ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from hilgate.model import Environment

PACKAGES = ("torch", "triton", "vllm", "transformers", "lm_eval", "amd-aiter")


def environment() -> Environment:
    """Where this process runs, without host names."""
    import torch

    versions = {}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                versions[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Environment(
        host="",
        device=device,
        cores=os.cpu_count() or 1,
        memory_gib=round(memory, 1),
        python=platform.python_version(),
        versions=versions,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
