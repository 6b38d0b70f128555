# SPDX-License-Identifier: Apache-2.0
"""What the hooks of a job saw of its node, and what of that makes a result worthless. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.model.declaration import CPU
from hilgate.run.results import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import GpuHealth, Health

SHOWN_LINES = 5
"""Kernel log lines that a ruling quotes; the rest stay in the health file."""


def is_demanded(step: PlannedStep, plan: Plan) -> bool:
    """Return whether a result counts only with both health records: on an agent's GPU. A local run has no hooks."""
    return not plan.local and step.queue is not None and step.device != CPU


def missing(health: Sequence[Health]) -> str:
    """Say which of the two health records is not there; empty when both are."""
    moments = {one.moment for one in health}
    return ", ".join(moment for moment in MOMENTS if moment not in moments)


def trouble(health: Sequence[Health], host: str, gpus: int) -> tuple[str, ...]:
    """What the hooks saw that makes a result worthless; empty on a node that was fit throughout.

    `host` is the node that the results name; empty when there are none.
    """
    found: list[str] = []
    for one in health:
        if host and one.host != host:
            found.append(f"the health {one.moment} is of {one.host}, the results are of {host}")
        found += [f"unfit {one.moment}: {problem}" for problem in one.problems]
        if not (one.healthy or one.problems or one.dmesg):
            found.append(f"unfit {one.moment}: the hook does not say why")
        if len(one.gpus) < gpus:
            found.append(f"{len(one.gpus)} of {gpus} GPUs {one.moment}")
    before, after = _by_bdf(health, "before"), _by_bdf(health, "after")
    for bdf, gpu in sorted(before.items()) if not missing(health) else ():
        if bdf not in after:
            found.append(f"GPU {bdf} was gone afterwards")
        elif (new := after[bdf].ecc_uncorrectable - gpu.ecc_uncorrectable) > 0:
            found.append(f"GPU {bdf}: {new} new uncorrectable memory errors")
    # What the kernel said before the step began counts only where the hook found the node unfit for it.
    # mutant ReplaceComparisonOperator_Eq_LtE: the only other moment is `before`
    # mutant ReplaceComparisonOperator_Eq_Is: pydantic gives the text of the literal itself
    log = [line for one in health if one.moment == "after" or not one.healthy for line in one.dmesg]
    return (*found, *(f"kernel log: {line}" for line in log[:SHOWN_LINES]))


def lines(health: Sequence[Health]) -> tuple[str, ...]:
    """Node and GPU memory before and after, a line for each GPU; then what was seen and decides nothing."""
    before, after = _by_bdf(health, "before"), _by_bdf(health, "after")
    shown = []
    for bdf in sorted(before | after):
        used = [
            f"{gpus[bdf].vram_used_mib:,} MiB {when}" if bdf in gpus else f"not there {when}"
            for gpus, when in ((before, "before"), (after, "after"))
        ]
        gpu = (after | before)[bdf]
        name = f"{bdf} {gpu.name}" if gpu.name else bdf
        shown.append(f"GPU {name}: {', '.join(used)}, of {gpu.vram_total_mib:,} MiB")
    ended = [process for one in health for process in one.ended]
    notes = [f"seen {one.moment}, not judged: {note}" for one in health for note in one.notes]
    return (*shown, *(f"left running, and ended: {process}" for process in ended[:SHOWN_LINES]), *notes[:SHOWN_LINES])


def _by_bdf(health: Sequence[Health], moment: str) -> dict[str, GpuHealth]:
    return {gpu.bdf: gpu for one in health if one.moment == moment for gpu in one.gpus}
