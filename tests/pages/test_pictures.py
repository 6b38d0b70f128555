# SPDX-License-Identifier: Apache-2.0
"""The pictures of what people look at: pages show them, and none fetches anything."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("docs_screenshots", ROOT / "docs/screenshots.py")
assert _spec
assert _spec.loader
screenshots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(screenshots)


def test_the_terminal_fetches_no_font_and_has_80_columns():
    text = (ROOT / "docs/pictures/terminal.svg").read_text(encoding="utf-8")
    assert "regression" in text
    assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", text)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "docs/how-to/read-a-verdict.md"])
def test_the_pages_show_them(page):
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    files = {str((ROOT / page).parent.joinpath(one).resolve().relative_to(ROOT)) for one in shown}
    assert files & set(screenshots.PICTURES)
