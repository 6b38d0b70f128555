# SPDX-License-Identifier: Apache-2.0
"""The tutorial from its first line to its last, with the steps that take minutes."""

from __future__ import annotations

import pytest
from support import shown
from support.shown import ROOT


@pytest.mark.timeout(1500)
def test_the_tutorial_shows_what_happens(checkout):
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    assert any(one.mark == shown.SLOW for one in shown.commands(page))
    assert shown.run(page, checkout, slow=True) == []
