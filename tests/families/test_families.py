# SPDX-License-Identifier: Apache-2.0
"""The table: every family under every behaviour, in unmodified vLLM, against transformers.

    python -m pytest tests/families/test_families.py --family jamba --behaviour fuzz --seed 7
    python -m pytest tests/families/test_families.py --backend ROCM_ATTN

Everything happens in `drive.py`; a test waits for its cell.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(1500)]


def test_cell(cell_of, drivers, record_property, passes, pytestconfig):
    family, behaviour = cell_of
    record_property("family", family)
    record_property("behaviour", behaviour)
    record_property("attention_backend", pytestconfig.getoption("backend"))
    passes(drivers.cells(family)[behaviour])
