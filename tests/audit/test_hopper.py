# SPDX-License-Identifier: Apache-2.0
"""How many programs of a kernel an H200's multiprocessor holds, from the registers that ptxas gives a thread.

ptxas comes with Triton, so no GPU is needed. Ten registers more once left two programs of the scan where there had been
three, and it took 39 % longer (Mamba-2, 64 heads of 64 channels, state 64): no result and no other count showed it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from support.hopper import compiled, printed_of
from triton import knobs

if TYPE_CHECKING:
    from pathlib import Path

REGISTERS = 65536
"""Registers of a multiprocessor; a warp gets them in units of 256 (CUDA C++ programming guide, compute capability
9.0)."""

PROGRAMS = {
    "scan 16 x 512 64 heads d64 n64": {"ssd_prefill_kernel": 4, "ssd_carry_kernel": 6},
    "scan 16 x 512 128 heads d64 n128": {"ssd_prefill_kernel": 2, "ssd_carry_kernel": 3},
    "scan 16 x 512 24 heads d128 n256": {"ssd_prefill_kernel": 1, "ssd_carry_kernel": 1},
    "prefill 16 x 512": {"attention_kernel": 2},
    "gdn 1 x 8192 2 k 8 v heads": {
        "gdn_chunks_kernel": 4,
        "gdn_carry_kernel": 2,
        "gdn_join_kernel": 2,
        "gdn_prefill_kernel": 2,
    },
}
"""By case of the benchmarks, with fewer sequences, and by kernel that it launches. Fewer are slower; more may be
better, and are written here once they have been timed."""


def registers(cubin: bytes, folder: Path) -> int:
    """Registers of a thread, by cuobjdump, which comes with Triton too."""
    (found,) = re.findall(
        r" REG:(\d+) ", printed_of(cubin, folder, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    )
    return int(found)


def programs(case: str, folder: Path) -> dict[str, int]:
    """How many fit a multiprocessor, by kernel that the case launches."""
    return {
        name: REGISTERS // (kernel.warps * -(-32 * registers(kernel.cubin, folder) // 256) * 256)
        for name, kernel in compiled(case).items()
    }


@pytest.mark.parametrize(("case", "expected"), PROGRAMS.items(), ids=PROGRAMS)
def test_as_many_programs_fit_as_when_the_launch_was_timed(case, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert programs(case, tmp_path) == expected
