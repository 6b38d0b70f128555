# SPDX-License-Identifier: Apache-2.0
"""Triton's own launchers, in C, pass a kernel the same arguments in a prepared call as in the first one.

They are compiled and called as on a GPU; a library that keeps what it is given stands in for the driver's. Kernels take
strides as tuples, which a launcher takes apart by a format string that no compiler checks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.hopper import OfflineCudaDriver
from triton.backends.amd.driver import HIPLauncher
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks import operations
from benchmarks.cases import CASES
from pagedkv import prepared
from pagedkv.arch import limits
from pagedkv.audit.compile import OfflineHipDriver

BYTES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8}
"""Bytes of an argument, by its type in a signature; pointers have 8."""

NAMES = (
    "decode bs8 8k",
    "decode bs8 8k fp8 shuffle",
    "prefill 16 x 512",
    "mla 16 heads bs8 8k",
    "scan 1 x 8192 16 heads d64 n128",
    "write 262k random slots",
)
TURNS = 3
SOURCE = str(Path(__file__).parents[1] / "support/no_gpu.c")


def leaves(kind: str | tuple) -> list[str]:
    """The types of what a launcher passes for one argument; constants are in the machine code."""
    if isinstance(kind, tuple):
        return [each for part in kind for each in leaves(part)]
    return [] if kind == "constexpr" else [kind]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library, as both names."""
    folder = tmp_path_factory.mktemp("driver")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))  # Triton wants one of them too
    for name in ("libcuda.so.1", "libamdhip64.so"):
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name},-Bsymbolic", "-o", str(folder / name), SOURCE]
        subprocess.run(command, check=True, capture_output=True)
    return folder


class Watched:
    """A launcher of Triton's that tells the library what it is about to pass, and keeps what arrived."""

    def __init__(self, real: type, there: ctypes.CDLL, seen: list) -> None:
        self._real, self._there, self._seen = real, there, seen

    def __call__(self, src, metadata):
        launch, there = self._real(src, metadata), self._there
        kinds = [each for kind in src.signature.values() for each in leaves(kind)]
        sizes = [BYTES.get(kind, 8) for kind in kinds]

        def watched(*arguments):
            ctypes.c_int.in_dll(there, "count").value = len(kinds)
            (ctypes.c_int * 256).in_dll(there, "sizes")[: len(sizes)] = sizes
            before = ctypes.c_int.in_dll(there, "launches").value
            launch(*arguments)
            assert ctypes.c_int.in_dll(there, "launches").value == before + 1
            values = (ctypes.c_uint64 * 256).in_dll(there, "values")[: len(kinds)]
            given = list(zip(kinds, values, strict=True))
            numbers = tuple(value for kind, value in given if kind[0] != "*")
            self._seen.append((metadata.name, numbers, all(value for kind, value in given if kind[0] == "*")))

        return watched


@pytest.fixture(params=["gfx942", "sm_90"])
def launches(request, library, monkeypatch):
    """What every launch of this test passes: kernel, numbers, whether each pointer is one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(library / "cache"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(library))
    monkeypatch.setenv("TRITON_LIBHIP_PATH", str(library / "libamdhip64.so"))
    seen: list = []
    of_nvidia = request.param == "sm_90"
    there = ctypes.CDLL(str(library / ("libcuda.so.1" if of_nvidia else "libamdhip64.so")), mode=ctypes.RTLD_GLOBAL)
    offline = (OfflineCudaDriver if of_nvidia else OfflineHipDriver)(limits(request.param))
    get = offline.utils.get_device_properties
    offline.utils = SimpleNamespace(load_binary=lambda *_: (1, 1, 100, 0, 1024), get_device_properties=get)
    offline.launcher_cls = Watched(CudaLauncher if of_nvidia else HIPLauncher, there, seen)
    with mock.patch.object(driver, "_active", offline):
        prepared.clear()
        yield seen
    prepared.clear()


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_call_passes_what_the_first_did(name, launches):
    case = {each.name: each for each in CASES}[name]
    length = 2048 if case.op == "scan" else 512  # which two kernels share, in segments
    case = dataclasses.replace(case, num_seqs=2, seq_len=length, query_len=min(case.query_len, length))
    work = operations.prepare(case, "cpu", torch.bfloat16, 1)
    launches.clear()
    turns = []
    for turn in range(TURNS):
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as jit:
            work.ours.run()
        assert bool(jit.call_count) == (turn == 0), "only the first call goes through the JIT"
        turns.append(list(launches))
        launches.clear()
    assert turns == [turns[0]] * TURNS
    assert turns[0], "nothing was launched"
    assert all(numbers and pointers for _, numbers, pointers in turns[0])
