# SPDX-License-Identifier: Apache-2.0
"""What the compiled extensions hold: kernels of each unit and architecture, their registers, spills and LDS.

    extensions.py measure UNITS OBJECTS   the units of a build, measured, as JSON
    extensions.py compare [ARCH]          what differs between two of these, a record and a build, on standard input
    extensions.py table RECORD            a record for people to read

UNITS has a line of docker/hip/hipcc for each unit, OBJECTS the objects by key. With an ARCH the build is a sample: its
units for this architecture. The figures are those that the audit of the Triton kernels reads, from the same note; a
kernel's LDS is what it declares, without what its launch adds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from codeobjects import UnreadableError, code_objects

from pagedkv.audit.code_object import UnreadableCodeObjectError, metadata

FIGURES = ("vgpr", "agpr", "sgpr", "vgpr_spills", "sgpr_spills", "scratch", "lds")
FIELDS = (
    *(".vgpr_count", ".agpr_count", ".sgpr_count", ".vgpr_spill_count", ".sgpr_spill_count"),
    *(".private_segment_fixed_size", ".group_segment_fixed_size"),
)
"""Keys of the note (AMDGPUUsage, code object metadata), in the order of FIGURES."""


def main(command: str, *words: str) -> int:
    """Run one of the commands of the module's docstring."""
    if command == "measure":
        lines = [json.loads(line) for line in Path(words[0]).read_text().splitlines()]
        sys.stdout.write(json.dumps(measure(lines, Path(words[1]))) + "\n")
        return 0
    if command == "table":
        sys.stdout.writelines(f"{row}\n" for row in table(json.loads(Path(words[0]).read_text())["sources"]))
        return 0
    problems = complaints(*json.load(sys.stdin), *words)
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


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


def complaints(recorded: dict[str, Any], found: dict[str, Any], only: str = "") -> list[str]:
    """What of the record is not in a build: a unit, an architecture, a kernel; a spill that is new; other figures.

    Of a sample, `only` is the architecture that it was compiled for, and `found` has its units.
    """
    missing = [] if only else sorted(set(recorded) - set(found))
    problems = [f"{unit} is in the record and was not compiled" for unit in missing]
    for unit, one in sorted(found.items()):
        if unit not in recorded:
            problems.append(f"{unit} is not in the record: a unit is new")
            continue
        wanted: dict[str, dict[str, int]] = recorded[unit]["archs"]
        for arch in [only] if only else sorted({*wanted, *one["archs"]}):
            before, after = Counter(wanted.get(arch, {})), Counter(one["archs"].get(arch, {}))
            if not after:
                problems.append(f"{unit} holds no kernel for {arch}")
            elif after.total() != before.total():
                problems.append(f"{unit} has {after.total()} kernels for {arch}, recorded are {before.total()}")
            elif spills(after) > spills(before):
                problems.append(f"{unit} for {arch} spills {spills(after)} registers, recorded are {spills(before)}")
            elif after != before:
                lost, new = (" and ".join(sorted(part)[:2]) for part in (before - after, after - before))
                problems.append(f"{unit} for {arch} has kernels of {new}, recorded were {lost} ({' '.join(FIGURES)})")
    return problems


def table(sources: dict[str, Any]) -> list[str]:
    """A row of each unit: its kernels of each architecture, how many spill, and the most that one of all has."""
    head = ("unit", "kernels", "spill VGPRs", "spill SGPRs", "VGPRs", "AGPRs", "scratch, B", "LDS, B", "a core, s")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for unit, one in sorted(unit for made in sources.values() for unit in made["units"].items()):
        kernels = [Counter(one["archs"][arch]).elements() for arch in sorted(one["archs"])]
        figures = [zip(*(map(int, kernel.split()) for kernel in each), strict=True) for each in kernels]
        of = dict(zip(FIGURES, zip(*figures, strict=True), strict=True))
        cells = [unit, ", ".join(str(len(each)) for each in of["vgpr"])]
        cells += [", ".join(str(sum(map(bool, each))) for each in of[name]) for name in ("vgpr_spills", "sgpr_spills")]
        cells += [f"{max(map(max, of[name])):,}" for name in ("vgpr", "agpr", "scratch", "lds")]
        rows.append(f"| {' | '.join([*cells, format(one['cpu_seconds'], '.0f')])} |")
    return rows


def spills(counts: Counter[str]) -> int:
    """Registers that did not fit, of all kernels."""
    return sum((int(one.split()[3]) + int(one.split()[4])) * number for one, number in counts.items())


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (UnreadableError, UnreadableCodeObjectError, OSError, ValueError, KeyError) as error:
        sys.exit(f"extensions.py: {type(error).__name__}: {error}")
