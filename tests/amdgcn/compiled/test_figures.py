# SPDX-License-Identifier: Apache-2.0
"""What the kernels' machine code executes, against the recorded figures: more than `MARGIN` more is red.

`figures.json` is the merge base's, unless a change records anew; then old and new stand in its diff:
HILGATE_WRITE_FIGURES=1 python -m pytest --amdgcn gfx942 tests/amdgcn/compiled/test_figures.py
"""

import json
import os
from pathlib import Path

import pytest
import triton
from support.launches import FIGURES

from amdgcn.figures import GPUS, worse
from amdgcn.launch import amdgcn

RECORDED = Path(__file__).with_name("figures.json")
MARGIN = 0.02
"""Counts are equal on every machine: this leaves room for a schedule that moves a few instructions, and for no more."""
TO_DO = "\n  to do: make it cheaper, or record it: HILGATE_WRITE_FIGURES=1 (the module's first lines)"


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name, request, record_property):
    arch, kernel = request.config.getoption("amdgcn"), name.split(",")[0]
    with amdgcn(arch) as session:
        assert not FIGURES[name][0]()
    now = [launch for launch in session.launches if launch.kernel == kernel][-1]
    numbers = {"wave_instructions": now.wave_instructions} | now.figures
    place = (f"{arch} Triton {triton.__version__}", name)
    recorded = json.loads(RECORDED.read_text())
    if os.environ.get("HILGATE_WRITE_FIGURES"):
        recorded.setdefault(place[0], {})[name] = numbers
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    before = recorded.get(place[0], {}).get(name)
    assert before, f"no figures of {name} on {place[0]} are recorded{TO_DO}"
    record_property("kernel", name)
    for each in ("wave_instructions", "matrix_instructions", "vector_instructions", "lds_instructions", "global_bytes",
                 "lds_conflict_cycles", "mfma_share", f"{GPUS[arch].name}_roofline_us"):  # fmt: skip
        record_property(each, numbers[each])
        record_property(f"{each}_before", before[each])
    found = worse(numbers, before, MARGIN)
    assert not found, f"more than {MARGIN:.0%} worse: {'; '.join(found)}{TO_DO}"


def test_more_work_is_red_and_less_is_not():
    before = {"vector_instructions": 100, "global_bytes": 0, "MI300X_roofline_us": 1.0, "mfma_share": 0.5}
    assert not worse(before | {"vector_instructions": 102, "mfma_share": 0.1, "MI300X_roofline_us": 0.5}, before, 0.02)
    assert worse(before | {"vector_instructions": 103}, before, 0.02) == ["vector_instructions 103, was 100 (+3%)"]
    assert worse(before | {"global_bytes": 4}, before, 0.02) == ["global_bytes 4, was 0"]
