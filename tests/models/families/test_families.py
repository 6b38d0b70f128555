"""The table: every family under every behaviour, in unmodified vLLM, against transformers.

    python -m pytest tests/models/families/test_families.py --family jamba --behaviour fuzz --seed 7

Everything happens in `drive.py`; a test waits for its cell.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(1500)]


def test_cell(cell_of, fleet, record_property):
    family, behaviour = cell_of
    record_property("family", family)
    record_property("behaviour", behaviour)
    cell = fleet.cells(family)[behaviour]
    record_property("seconds", round(cell.seconds, 2))
    for name, value in {**cell.numbers, **cell.labels}.items():
        record_property(name, value)
    if cell.outcome == "did not run":
        pytest.skip(f"did not run here: {cell.reason}")
    assert cell.outcome == "pass", cell.reason
