# SPDX-License-Identifier: Apache-2.0
"""An H200 that is not there, for what Triton compiles and never runs."""

from __future__ import annotations

import dataclasses
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks import operations
from benchmarks.cases import CASES
from pagedkv import prepared
from pagedkv.arch import limits
from pagedkv.audit.compile import OfflineHipDriver
from pagedkv.audit.machine import MACHINES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class OfflineCudaDriver(OfflineHipDriver):
    """Triton's driver of one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.get_current_device = lambda: len(MACHINES)  # an index of its own

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class CompiledKernel(NamedTuple):
    """What an H200 would load."""

    cubin: bytes
    warps: int


def compiled_by(launch: Callable[[], object]) -> dict[str, CompiledKernel]:
    """What `launch` compiles, by the names of its kernels; of several variants of one the last."""
    warps: dict[str, int] = {}
    found: dict[str, CompiledKernel] = {}

    def launcher(_, metadata):
        warps[metadata.name] = metadata.num_warps
        return lambda *_: None

    def loaded(name, binary, *_):
        found[name] = CompiledKernel(binary, warps[name])
        return None, None, 1, 0, 1024

    offline = OfflineCudaDriver(limits("sm_90"))
    offline.utils = SimpleNamespace(load_binary=loaded, get_device_properties=offline.utils.get_device_properties)
    offline.launcher_cls = launcher
    with mock.patch.object(driver, "_active", offline):
        launch()
    return found


def compiled(case: str) -> dict[str, CompiledKernel]:
    """What a case of the benchmarks launches, with fewer sequences, in bfloat16."""
    whole = {each.name: each for each in CASES}[case]
    # Of one sequence a scan launches all its kernels; attention takes another launch, and of four that of all.
    small = dataclasses.replace(whole, num_seqs=1 if whole.op == "scan" else min(4, whole.num_seqs))

    def launch() -> None:
        prepared.clear()
        operations.prepare(small, "cpu", torch.bfloat16, 1).ours.run()

    try:
        return compiled_by(launch)
    finally:
        prepared.clear()


def printed_of(cubin: bytes, folder: Path, *command: str) -> str:
    """What a program of CUDA prints of a compiled kernel, which is written into `folder` for it."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([*command, str(file)], capture_output=True, text=True, check=True).stdout
