# SPDX-License-Identifier: Apache-2.0
"""`pytest --amdgcn ARCH`: the device tests of the kernels, unchanged, on AMD machine code (kernels/amdgcn).

A test that the machine code of some arch and Triton fails is declared in `DECLARED`, and then must fail: when the
compiler is repaired, the declaration is out of date, and the test is red until it goes.
"""

from __future__ import annotations

import re

import pytest

OUTPUTS = {
    "_write_kernel": ("key_cache", "value_cache", "key_scale", "value_scale"),
    "packed_write_kernel": ("key_cache", "value_cache", "key_scale", "value_scale"),
    "_gather_kernel": ("key", "value"),
    "packed_gather_kernel": ("key", "value"),
    "attention_kernel": ("out", "lse"),
    "merge_kernel": ("out", "lse"),
    "reduce_kernel": ("out", "out_lse"),
    "mla_decode_kernel": ("out", "lse", "partial", "partial_lse"),
    "mla_reduce_kernel": ("out", "lse"),
    "mla_schedule_kernel": ("works", "work_indptr", "reduce_indptr"),
    "chunk_scan_kernel": ("out",),
}
"""What each kernel may write; a write to any other argument is a fault."""

_SMALL_K = "Triton 3.6.0 halves the whole accumulator of a dot product with K = 16 in a layout for K = 32"
DECLARED = {
    ("gfx942", "3.6.0", r"mla/test_decode\.py::test_mla_decode_(scale\[(-0\.3|1\.0)\]|beyond_int32)"): _SMALL_K,
}
"""(arch, Triton, regular expression found in a test's id) -> why the machine code is known to be wrong."""


def declared(arch: str, triton: str, test: str) -> str:
    """Why the test is known to fail there; empty if it is not."""
    found = [why for (a, t, pattern), why in DECLARED.items() if (a, t) == (arch, triton) and re.search(pattern, test)]
    return found[0] if found else ""


class MachineCode:
    """Opens the machine for each test.

    Args:
        arch: gfx942 or gfx950.
    """

    def __init__(self, arch: str) -> None:
        from amdgcn.launch import ARCHES

        if arch not in ARCHES:
            raise pytest.UsageError(f"--amdgcn {arch}: expected one of {', '.join(ARCHES)}")
        self.arch = arch

    def pytest_collection_modifyitems(self, items):
        import triton

        for item in items:
            if why := declared(self.arch, triton.__version__, item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=f"declared: {why}", raises=AssertionError, strict=True))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        from amdgcn.launch import amdgcn

        with amdgcn(self.arch, outputs=OUTPUTS) as session:
            try:
                return (yield)
            finally:
                done = sum(launch.wave_instructions for launch in session.launches)
                item.user_properties.append(("wave_instructions", done))
