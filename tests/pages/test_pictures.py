# SPDX-License-Identifier: Apache-2.0
"""The pictures of what people look at are not older than what draws it."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("docs_screenshots", ROOT / "docs/screenshots.py")
assert _spec
assert _spec.loader
screenshots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(screenshots)


@pytest.fixture
def tree(tmp_path):
    """A copy of the pictures and of what draws them."""
    made = str(screenshots.MADE.relative_to(ROOT))
    for name in {made, *screenshots.PICTURES, *(file for files in screenshots.PICTURES.values() for file in files)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_pictures_are_as_this_tree_draws_them():
    assert screenshots.stale() == []


def drawers():
    return sorted({(file, picture) for picture, files in screenshots.PICTURES.items() for file in files})


@pytest.mark.parametrize(("file", "picture"), drawers())
def test_an_older_picture_is_red(file, picture, tree):
    assert screenshots.stale(tree) == []
    with (tree / file).open("a", encoding="utf-8") as open_file:
        open_file.write("\n")
    assert any(one.startswith(f"{picture} is older than one of") and file in one for one in screenshots.stale(tree))


@pytest.mark.parametrize("picture", screenshots.PICTURES)
def test_a_picture_that_nobody_made_is_red(picture, tree):
    (tree / picture).write_bytes(b"drawn by hand")
    assert screenshots.stale(tree) == [f"{picture} is not the one that was made: make pictures"]


def test_a_picture_that_is_not_listed_is_red(tree):
    (tree / screenshots.MADE.relative_to(ROOT)).write_text("{}", encoding="utf-8")
    assert [one.split(":")[0] for one in screenshots.stale(tree)] == ["made.json"]


def test_the_terminal_fetches_no_font_and_has_80_columns():
    text = (ROOT / "docs/pictures/terminal.svg").read_text(encoding="utf-8")
    assert "regression" in text
    assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", text)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/tutorial.md", "docs/how-to/read-a-verdict.md", "docs/how-to/look-back.md"]
)
def test_the_pages_show_them(page):
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    files = {str((ROOT / page).parent.joinpath(one).resolve().relative_to(ROOT)) for one in shown}
    assert files & screenshots.PICTURES.keys()
