# SPDX-License-Identifier: Apache-2.0
"""Run a few lines of AMDGCN text on registers of random bits and edges: for oracles of single instructions."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from amdgcn.lds import Lds
from amdgcn.machine import Machine
from amdgcn.memory import Memory
from amdgcn.targets import EXEC, TARGETS
from amdgcn.text import Program, parse
from amdgcn.translate import translate

if TYPE_CHECKING:
    from amdgcn.waves import Waves

# fmt: off
INTEGERS = (
    0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000,
    0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFF0, 0xFFFF8000, 0xFFFFFFFF,
)
FLOATS = (
    0x3F800000, 0xBF800000, 0x3FC00000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x00000001, 0x007FFFFF,
    0x7F7FFFFF, 0x4B000000, 0x3C003C00, 0xC000BC00, 0x7C00FC00, 0x7E000001, 0x4F000000, 0x4F7FFFFF, 0x4F800000,
    0xCF000000, 0x40490FDB,
)
# fmt: on
EDGES = (*INTEGERS, *FLOATS)
"""Sizes and signs of integers; ones, infinities, NaN, subnormals and the ends of int32 as fp32 and as pairs of fp16."""

WAVES = 4


def data(seed):
    """[WAVES, 64] uint32: edges and random bits."""
    gen = random.Random(seed)
    numbers = [gen.choice(EDGES) if gen.random() < 0.5 else gen.getrandbits(32) for _ in range(WAVES * 64)]
    return np.array(numbers, np.uint32).reshape(WAVES, 64)


_TEXT = """\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
\t.file 1 "here" "kernel.py"
kernel:
{lines}
\ts_endpgm
\t.amdhsa_kernel kernel
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_tg_split {split}
\t\t.amdhsa_wavefront_size32 {narrow}
\t.end_amdhsa_kernel
"""


def program(lines: str, arch: str = "gfx942", *, split: bool = False) -> Program:
    """A kernel of these lines, each of its own Python line where it has no `.loc`."""
    text = "\n".join(
        f"\t.loc 1 {k} 0\n\t{line.strip()}" if not line.strip().endswith(":") else line.strip()
        for k, line in enumerate(lines.strip().splitlines(), start=1)
    )
    narrow = int(TARGETS[arch].lanes == 32)
    return parse(_TEXT.format(arch=arch, lines=text, split=int(split), narrow=narrow))


def machine(
    lines: str, *, arch="gfx942", memory=None, lds_bytes=65536, twins=1, races=True, junk=None, split=False
) -> Machine:
    translated = translate(program(lines, arch, split=split))
    return Machine(translated, memory or Memory(), lds_bytes, twins=twins, races=races, junk=junk)


def run(
    lines: str, vector=None, scalar=None, *, arch="gfx942", waves=None, off=None, scc=None, memory=None, lds_bytes=4096
) -> Waves:
    """Run one block for waves of one workgroup each.

    Args:
        lines: The instructions; vector registers 0..15 and those of `vector`, scalar ones 0..31 exist.
        vector: Vector registers, [waves, lanes] uint32.
        scalar: Scalar registers, [waves] uint32.
        arch: One of `targets.TARGETS`.
        waves: How many, if not as the registers say.
        off: [waves, lanes], lanes that are off.
        scc: [waves].
        memory: Of the launch.
        lds_bytes: Of a workgroup.
    """
    vector, scalar = vector or {}, scalar or {}
    count = waves or len(next(iter([*vector.values(), *scalar.values()])))
    one = machine(lines, arch=arch, memory=memory, lds_bytes=lds_bytes)
    uses = one.translated
    uses.vectors, uses.scalars = [True] * 512, [True] * 128
    one.lds = Lds(count, lds_bytes, uses.lds_element, 1, one.junk)
    group = one._start(np.array([[k, 0, 0] for k in range(count)]), 1, 0)
    for number, value in vector.items():
        group.V[number] = np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.uint32), (count, group.lanes)))
    for number, value in scalar.items():
        group.S[number] = np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.uint32), count))
    if scc is not None:
        group.scc = np.asarray(scc, bool)
    if off is not None:
        group.set_mask(EXEC, ~np.asarray(off, bool), None)
        group.E = ~np.asarray(off, bool)
    block = 0
    with np.errstate(all="ignore"):
        while block is not None:
            block = one.translated.run(block, group)
            assert block is None or isinstance(block, int), "a branch on data"
    return group
