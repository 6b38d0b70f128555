# SPDX-License-Identifier: Apache-2.0
"""The table again, on published checkpoints: their sizes, their blocks, their weights.

    python -m pytest tests/families/test_published.py --checkpoint owner/name --checkpoint a/folder

A test waits for its cell, as in test_families.py. Collected only where this file is named.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(10_800)]


def test_cell(published_cell, published, record_property, passes):
    row, behaviour = published_cell
    record_property("checkpoint", row.name)
    record_property("behaviour", behaviour)
    if row.family:
        record_property("family", row.family)
    passes(published.cell(row.name, behaviour))
