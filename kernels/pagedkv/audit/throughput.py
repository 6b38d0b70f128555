# SPDX-License-Identifier: Apache-2.0
"""A model of what a SIMD computes in a cycle in a loop over tiles: FLOP the products need, by the code and occupancy.

A turn of the loop occupies three pipes of a SIMD: matrix, vector, and its share of the LDS. One wave goes through all
of them in order, and so takes their sum; other waves of the SIMD use the pipes meanwhile. W waves of a SIMD therefore
take at least what the busiest pipe takes for each of them, and at least a W-th of the time of one. A barrier starts the
waves of a workgroup together: the second then waits for the first at the busiest pipe, and only waves of another
workgroup fill the gap (the makespan of a flow shop).

Not in the model: HBM and caches, bank conflicts, dependences within a wave. `WAIT` and `MEMORY` are orders of
magnitude. It ranks launches of one kernel and says nothing of seconds: what only a GPU decides stands in
docs/how-to/first-hour.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.arch import limits

from .machine import SIMDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .compile import Figures

MATRIX_FLOP = {"gfx90a": 256, "gfx942": 512, "gfx950": 1024, "gfx1100": 256, "gfx1151": 256, "gfx1201": 512}
"""Operations of a SIMD in a cycle with operands of 16 bits: peak rates of MI250X, MI300X, MI355X, RX 7900 XTX, Ryzen AI
Max+ 395 and RX 9070 XT (data sheets) over their units and clocks."""


@dataclass(frozen=True)
class Pipes:
    """Rates of a SIMD beside its matrix instructions."""

    issue: int
    """Cycles of a vector instruction."""
    transcendental: int
    lds_bytes: float
    """Bytes in a cycle, where all SIMDs of the unit read."""


PIPES = {
    # 64 lanes on 16 (CDNA3 ISA); 32 lanes on 32, and two LDS of a workgroup processor (RDNA3 ISA).
    "mfma": Pipes(issue=4, transcendental=16, lds_bytes=128 / SIMDS),
    "wmma": Pipes(issue=1, transcendental=4, lds_bytes=256 / SIMDS),
}
WAIT = 64
"""Cycles of a wait for LDS or at a barrier: about the latency of an LDS read."""
MEMORY = 500
"""Cycles that a loop without a stage ahead waits for its loads: about the latency of L2 (120 ns) to HBM (350 ns)."""


def cycles_of_a_turn(figures: Figures, stages: int) -> float:
    """Return the cycles that a turn of the first loop with products takes for each wave of a full SIMD."""
    loop, arch = figures.text.loops[0], limits(figures.arch)
    pipes = PIPES[arch.matrix]
    matrix = loop.flop / MATRIX_FLOP[figures.arch]
    vector = pipes.issue * loop.vector + (pipes.transcendental - pipes.issue) * loop.transcendental
    lds = loop.lds_bytes * arch.lanes / pipes.lds_bytes
    others = pipes.issue * (loop.instructions - loop.vector - loop.mfma)
    waits = WAIT * (loop.lds_waits + loop.barriers) + MEMORY * (stages == 1)
    alone = matrix + vector + lds + others + waits
    busiest = max(matrix, vector, lds)
    starting_together = max(1.0, figures.num_waves / SIMDS) if loop.barriers else 1.0  # waves of a workgroup on a SIMD
    return max(busiest, (alone + (starting_together - 1) * busiest) / max(figures.waves_per_simd, 1.0))


def useful_flop_per_cycle(figures: Figures, numbers: Mapping[str, float], stages: int) -> float:
    """Return what a SIMD computes of what the products need in a cycle.

    Args:
        figures: A kernel with a loop over tiles.
        numbers: `Budgets.loop_numbers` of it.
        stages: Of its pipeline.
    """
    needed = numbers["flop_per_instruction"] * numbers["loop_instructions"]
    # A SIMD that has less than one wave stands still for the rest of the time.
    return needed / cycles_of_a_turn(figures, stages) * min(1.0, figures.waves_per_simd)
