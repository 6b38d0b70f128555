"""The table again, on published checkpoints: their sizes, their blocks, their weights.

    python -m pytest tests/models/families/test_published.py --checkpoint owner/name --checkpoint a/folder

A test waits for its cell, as in test_families.py. Collected only where this file is named.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(10_800)]


def test_cell(published_cell, published, record_property):
    row, behaviour = published_cell
    record_property("checkpoint", row.name)
    record_property("behaviour", behaviour)
    if row.family:
        record_property("family", row.family)
    cell = published.cell(row.name, behaviour)
    record_property("seconds", round(cell.seconds, 2))
    for name, value in {**cell.numbers, **cell.labels}.items():
        record_property(name, value)
    if cell.outcome == "did not run":
        pytest.skip(f"did not run here: {cell.reason}")
    assert cell.outcome == "pass", cell.reason
