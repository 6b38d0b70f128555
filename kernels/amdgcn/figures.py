# SPDX-License-Identifier: Apache-2.0
"""Figures of a launch: instructions by class, bytes by width, LDS bank conflicts, MFMA share, a roofline estimate.

All but the roofline are counts of what was executed, equal on every machine. The roofline is the time below which a
GPU of the arch cannot be, from peak rates of data sheets; caches, latencies and occupancy are not in it, so it compares
two versions of a kernel and predicts neither.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import Array, L
from .wait_states import passes

if TYPE_CHECKING:
    from .text import Program


@dataclass(frozen=True)
class Gpu:
    """Peak rates: data sheets of MI300X and MI355X; banks and LDS bytes a cycle: CDNA3 and CDNA4 ISA."""

    name: str
    compute_units: int
    gigahertz: float
    terabytes_per_second: float
    lds_banks: int
    """Of four bytes; each serves one word a cycle."""


GPUS = {"gfx942": Gpu("MI300X", 304, 2.1, 5.3, 32), "gfx950": Gpu("MI355X", 256, 2.4, 8.0, 64)}
_SIMDS = 4
_PATHS = ("global", "lds")
_CLASSES = (
    ("matrix", re.compile("v_mfma")),
    ("vector", re.compile("v_")),
    ("lds", re.compile("ds_")),
    ("global", re.compile("global_|buffer_|scratch_")),
    ("wait", re.compile("s_(waitcnt|nop|barrier)")),
    ("scalar", re.compile("s_")),
)
_QUARTER_RATE = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)\w*_f(?:16|32)")


def figures(
    program: Program, executed: Counter[int], traffic: Counter[tuple[str, int]], conflicts: int, workgroups: int
) -> dict[str, float]:
    """Figures of one launch, with the unit in the name.

    Args:
        program: Of the kernel.
        executed: Block -> waves that ran it.
        traffic: (global or lds, bytes of an access) -> accesses of lanes.
        conflicts: See `bank_conflicts`.
        workgroups: Of the grid; what is beyond the compute units waits for one.
    """
    gpu, counts, cycles = GPUS[program.arch], Counter[str](), Counter[str]()
    for block, waves in executed.items():
        for one in program.blocks[block].instructions:
            name = next(name for name, pattern in _CLASSES if pattern.match(one.mnemonic))
            counts[name] += waves
            if name == "matrix":
                cycles[name] += waves * 4 * passes(one.mnemonic)[0]
            elif name == "vector":
                cycles[name] += waves * (16 if _QUARTER_RATE.match(one.mnemonic) else 4)
    moved = {what: sum(size * lanes for (kind, size), lanes in traffic.items() if kind == what) for what in _PATHS}
    units = min(workgroups, gpu.compute_units)
    per_microsecond = gpu.gigahertz * 1000 * units
    rooflines = {
        "memory": moved["global"] / (gpu.terabytes_per_second * 1e6),
        "matrix": cycles["matrix"] / (_SIMDS * per_microsecond),
        "vector": cycles["vector"] / (_SIMDS * per_microsecond),
        "lds": (moved["lds"] / (4 * gpu.lds_banks) + conflicts) / per_microsecond,
    }
    found: dict[str, float] = {f"{name}_instructions": counts[name] for name, _ in _CLASSES}
    found |= {f"{what}_bytes_by_{size}": size * lanes for (what, size), lanes in sorted(traffic.items())}
    found |= {f"{what}_bytes": moved[what] for what in _PATHS}
    share = cycles["matrix"] / max(1, cycles["matrix"] + cycles["vector"])
    found |= {"lds_conflict_cycles": conflicts, "mfma_share": round(share, 4)}
    found |= {f"{gpu.name}_{what}_us": round(each, 5) for what, each in rooflines.items()}
    return found | {f"{gpu.name}_roofline_us": round(max(rooflines.values()), 5)}


def bank_conflicts(address: Array, enabled: Array | None, size: int, banks: int) -> int:
    """Cycles of an LDS access beyond the fewest that its words need; lanes that read one word share it.

    As many lanes as fill the banks go together, in their order. Of 16-byte accesses hardware takes other lanes: this
    compares two layouts, and is no count of an MI300's.

    Args:
        address: [waves, 64] bytes.
        enabled: Lanes that are on; None is all.
        size: Bytes of an access.
        banks: Of four bytes.
    """
    words = max(1, size // 4)
    together = banks // {3: 4}.get(words, words)
    word = (address.astype(L) >> 2)[..., None] + np.arange(words)
    if enabled is not None:
        word = np.where(enabled[..., None], word, -1)
    word = np.sort(word.reshape(-1, together * words), 1)
    fresh = word >= 0
    fresh[:, 1:] &= word[:, 1:] != word[:, :-1]
    rows = len(word)
    row = np.broadcast_to(np.arange(rows)[:, None], word.shape)
    busy = np.bincount(row[fresh] * banks + word[fresh] % banks, minlength=rows * banks).reshape(rows, banks)
    return int((busy.max(1) - -(-fresh.sum(1) // banks)).sum())


def worse(now: dict[str, float], before: dict[str, float], margin: float) -> list[str]:
    """What is more than `margin` (a share) worse than before, in words; less work is never worse."""
    names = ("roofline_us", "_instructions", "_bytes", "conflict_cycles")
    return [
        f"{name} {value:g}, was {before[name]:g} (+{value / before[name] - 1:.0%})"
        if before[name]
        else f"{name} {value:g}, was 0"
        for name, value in now.items()
        if name.endswith(names) and name in before and value > before[name] * (1 + margin)
    ]
