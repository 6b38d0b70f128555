# SPDX-License-Identifier: Apache-2.0
"""The waves-per-SIMD model against cases worked out by hand from the ISA documents."""

import pytest

from pagedkv.audit.machine import register_waves, waves_per_simd

HAND = [
    # arch, VGPRs, SGPRs, LDS, waves of a workgroup -> waves per SIMD, and the sum that gives it
    pytest.param(("gfx942", 64, 32, 0, 4, 8), id="64 VGPRs: 512 / 64 = 8, the most there is"),
    pytest.param(("gfx942", 100, 32, 0, 4, 4), id="100 VGPRs are given 104: 512 // 104 = 4"),
    pytest.param(("gfx942", 128, 32, 0, 4, 4), id="128 VGPRs: 4"),
    pytest.param(("gfx942", 129, 32, 0, 4, 3), id="129 VGPRs are given 136: 3"),
    pytest.param(("gfx942", 256, 32, 0, 4, 2), id="256 VGPRs: 2"),
    pytest.param(("gfx942", 257, 32, 0, 4, 1), id="257 VGPRs: 1"),
    pytest.param(("gfx942", 512, 32, 0, 4, 1), id="the whole file: 1"),
    pytest.param(("gfx90a", 32, 102, 0, 4, 7), id="102 SGPRs are given 112: 800 // 112 = 7"),
    pytest.param(("gfx90a", 32, 96, 0, 4, 8), id="96 SGPRs: 800 // 96 = 8"),
    pytest.param(("gfx942", 64, 32, 16384, 4, 4), id="16 KiB of 64: 4 workgroups, one wave each on every SIMD"),
    pytest.param(("gfx942", 64, 32, 16385, 4, 3), id="one byte more is 512 more: 3 workgroups"),
    pytest.param(("gfx950", 64, 32, 16385, 4, 8), id="160 KiB: 163840 // 17920 = 9 workgroups, registers allow 8"),
    pytest.param(("gfx950", 64, 32, 32768, 4, 4), id="gfx950 gives LDS by 1280 B: 33280, 4 workgroups"),
    pytest.param(("gfx942", 64, 32, 65536, 4, 1), id="all LDS: one workgroup"),
    pytest.param(("gfx942", 64, 32, 65536, 2, 0.5), id="one workgroup of two waves on four SIMDs"),
    pytest.param(("gfx942", 64, 32, 65537, 4, 0), id="too much LDS: none"),
    pytest.param(("gfx90a", 64, 32, 65536, 4, 1), id="gfx90a, all LDS: one workgroup"),
    pytest.param(("gfx1201", 64, 106, 65536, 4, 2), id="gfx1201, all LDS of a workgroup: two, one wave each on a SIMD"),
    pytest.param(("gfx1201", 64, 106, 65537, 4, 0), id="gfx1201, a byte more: none"),
    pytest.param(("gfx942", 64, 32, 0, 8, 8), id="8 waves: 4 workgroups, two waves of each on every SIMD"),
    pytest.param(("gfx942", 170, 32, 0, 8, 2), id="176 VGPRs: 2 slots hold one workgroup of 8 waves"),
    pytest.param(("gfx942", 129, 32, 0, 8, 2), id="3 slots hold one workgroup of 8 waves, not one and a half"),
    pytest.param(("gfx942", 24, 32, 0, 2, 8), id="2 waves: 16 workgroups, as many as there are barriers"),
    pytest.param(("gfx942", 24, 32, 0, 1, 8), id="1 wave needs no barrier: 32 workgroups"),
    pytest.param(("gfx1201", 96, 106, 0, 4, 16), id="RDNA, 96 VGPRs: 1536 / 96 = 16, the most there is"),
    pytest.param(("gfx1201", 97, 106, 0, 4, 12), id="97 VGPRs are given 120: 1536 // 120 = 12"),
    pytest.param(("gfx1100", 256, 106, 0, 8, 4), id="256 VGPRs are given 264: 5 slots, 2 workgroups of 8 waves"),
    pytest.param(("gfx1151", 96, 106, 65536, 8, 4), id="all LDS of a workgroup: a workgroup processor has twice that"),
    # As LLVM's own "; Occupancy:" of kernels with so many registers.
    pytest.param(("gfx908", 55, 25, 0, 4, 4), id="gfx908, 55 VGPRs are given 56: 256 // 56 = 4"),
    pytest.param(("gfx1030", 176, 25, 0, 4, 5), id="RDNA2, 176 VGPRs: 1024 // 176 = 5"),
    pytest.param(("gfx1102", 174, 27, 0, 4, 5), id="small RDNA3, 174 VGPRs are given 176: 1024 // 176 = 5"),
    pytest.param(("gfx1200", 217, 26, 0, 4, 6), id="gfx1200, 217 VGPRs are given 240: 1536 // 240 = 6"),
    pytest.param(("gfx1151", 96, 106, 65537, 8, 0), id="a byte more than a workgroup may have: none"),
]


@pytest.mark.parametrize("figures", HAND)
def test_waves_per_simd_as_worked_out_by_hand(figures):
    arch, vgpr, sgpr, lds, waves, expected = figures
    assert waves_per_simd(arch, vgpr=vgpr, sgpr=sgpr, lds_bytes=lds, num_waves=waves) == expected


def test_a_kernel_over_the_register_file_cannot_start():
    assert register_waves("gfx942", vgpr=513, sgpr=16) == 0
