# SPDX-License-Identifier: Apache-2.0
"""What the architectures differ in, apart from their instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Counter = Literal["", "vm", "ds", "sm", "st"]
"""Counter of outstanding operations: vector memory, LDS, scalar memory (which has no order), stores (gfx12 only).

On CDNA a store counts as vector memory, and `lgkmcnt` counts both LDS and scalar memory."""

VCC, EXEC = 106, 126
_CDNA_NAMES = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (124, 1)}
_CDNA_NAMES |= {"exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1)}
_GFX12_NAMES = _CDNA_NAMES | {"m0": (125, 1)} | {f"ttmp{k}": (108 + k, 1) for k in range(16)}


@dataclass(frozen=True, eq=False)
class Target:
    """One architecture: one object each, so that caches can have it in their keys."""

    name: str
    lds_bytes: int
    """LDS of a workgroup."""
    compute_units: int
    """Multiprocessors that HIP reports: compute units on CDNA, pairs of them on RDNA."""
    junk: tuple[int, int]
    """What is undefined holds the first in one twin and the second in the other.

    A NaN and a large negative number differ in arithmetic; the largest number and 0 differ in a maximum, a mask, beside
    a bound and where something is compared with 0. Each arch has a pair: what one compiles the others do too."""
    lanes: int = 64
    gfx12: bool = False
    """Whether its text is gfx12's (gfx12.py), and a result of 16 bits keeps the upper half of its register."""
    holds: Mapping[str, int] = field(default_factory=lambda: {"vm": 63, "ds": 15})
    """Counter -> how many operations it counts (6 and 4 bits); the next one is not issued before one of them is done.
    So a load with as many newer ones has arrived, and LLVM writes no wait for it."""
    stores: Counter = "vm"
    """Which counter a store raises."""
    buffer_flags: int = 0x27000
    """Flags of a descriptor of plain bytes, as Triton writes them (CDNA3 ISA, 9.1.8; RDNA4 ISA, 9.1.5)."""
    fnuz: bool = False
    """Whether its 8-bit floats have no negative zero."""
    names: Mapping[str, tuple[int, int]] = field(default_factory=lambda: _CDNA_NAMES)
    """Scalar registers with a name: number and how many (ISA documents, table of scalar source operands)."""

    @property
    def words(self) -> int:
        """Scalar registers of a mask."""
        return self.lanes // 32


TARGETS = {
    each.name: each
    for each in (
        Target("gfx942", 65_536, 304, (0x7FB1A5ED, 0xDB3C0F17), fnuz=True),
        Target("gfx950", 163_840, 256, (0x7F7FFFFF, 0)),
        Target(
            "gfx1201",
            65_536,
            32,
            (0x7FB1A5ED, 0xDB3C0F17),
            lanes=32,
            gfx12=True,
            holds={"vm": 63, "st": 63, "ds": 63},
            stores="st",
            buffer_flags=0x31027000,
            names=_GFX12_NAMES,
        ),
    )
}
