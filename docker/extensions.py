# SPDX-License-Identifier: Apache-2.0
"""What the compiled extensions hold: kernels of each unit and architecture, their registers, spills and LDS.

The record (extensions.json) has of each unit and architecture the number of kernels, the registers that spilled, and a
digest of all figures. A run leaves the figures themselves beside its findings, a file for each source. They are those
that the audit of the Triton kernels reads, from the same note; a kernel's LDS is what it declares, without what its
launch adds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from codeobjects import code_objects

from pagedkv.audit.code_object import metadata

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = (
    *(".vgpr_count", ".agpr_count", ".sgpr_count", ".vgpr_spill_count", ".sgpr_spill_count"),
    *(".private_segment_fixed_size", ".group_segment_fixed_size"),
)
"""Keys of the note (AMDGPUUsage, code object metadata): VGPR, AGPR, SGPR, both spills, scratch, LDS."""


def measure(lines: list[dict[str, Any]], objects: Path) -> dict[str, Any]:
    """Unit -> its object, what compiling it took, and `figures x count` of its kernels for each architecture."""
    found = {}
    for line in lines:
        archs: dict[str, Counter[str]] = {}
        for arch, blob in code_objects(objects / f"{line['key']}.o"):
            kernels = metadata(blob).get("amdhsa.kernels", []) if blob else []
            archs.setdefault(arch, Counter()).update(" ".join(str(one[key]) for key in FIELDS) for one in kernels)
        facts = {key: line[key] for key in ("sha256", "cpu_seconds", "peak_mib", "flags")}
        found[line["unit"]] = facts | {"archs": {arch: dict(sorted(counts.items())) for arch, counts in archs.items()}}
    return found


def summary(units: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """What the record has of measured units: unit -> architecture -> kernels, spilled registers, digest of figures."""
    return {
        unit: {arch: _of(one["archs"][arch]) for arch in sorted(one["archs"])} for unit, one in sorted(units.items())
    }


def _of(counts: dict[str, int]) -> list[Any]:
    text = json.dumps(counts, sort_keys=True)
    return [sum(counts.values()), spills(Counter(counts)), hashlib.sha256(text.encode()).hexdigest()[:16]]


def written(sources: dict[str, Any]) -> str:
    """The record as text: a line for each unit."""
    text = json.dumps({"sources": sources}, indent=1, sort_keys=True)
    return re.sub(r"\{\s+(\"gfx[^{}]*)\}", _one_line, text) + "\n"


def _one_line(found: re.Match[str]) -> str:
    return "{" + " ".join(found[1].split()).replace("[ ", "[").replace(" ]", "]") + "}"


def complaints(recorded: dict[str, Any], found: dict[str, Any], only: str = "") -> list[str]:
    """What of the record is not in a build: a unit, an architecture, a kernel; a spill that is new; other figures.

    Both are summaries. Of a sample, `only` is the architecture that it was compiled for, and `found` has its units.
    """
    missing = [] if only else sorted(set(recorded) - set(found))
    problems = [f"{unit} is in the record and was not compiled" for unit in missing]
    for unit, one in sorted(found.items()):
        if unit not in recorded:
            problems.append(f"{unit} is not in the record: a unit is new")
            continue
        for arch in [only] if only else sorted({*recorded[unit], *one}):
            problems += _differs(f"{unit} for {arch}", recorded[unit].get(arch), one.get(arch))
    return problems


def _differs(place: str, recorded: list[Any] | None, found: list[Any] | None) -> list[str]:
    if not found or not found[0]:
        return [f"{place} holds no kernel"]
    if not recorded:
        return [f"{place} is not in the record: an architecture is new"]
    (kernels, spilled, figures), (before, spilled_before, figures_before) = found, recorded
    if kernels != before:
        return [f"{place} has {kernels} kernels, recorded are {before}"]
    if spilled > spilled_before:
        return [f"{place} spills {spilled} registers, recorded are {spilled_before}"]
    if figures != figures_before:
        return [f"{place} has kernels of other registers, scratch or LDS ({figures}, recorded is {figures_before})"]
    return []


def spills(counts: Counter[str]) -> int:
    """Registers that did not fit, of all kernels."""
    return sum((int(one.split()[3]) + int(one.split()[4])) * number for one, number in counts.items())
