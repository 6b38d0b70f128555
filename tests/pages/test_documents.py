# SPDX-License-Identifier: Apache-2.0
"""Pages in Markdown: what they link to and what they name is there."""

import re
from pathlib import Path

import pytest

from hilgate.git import tracked_files

ROOT = Path(__file__).resolve().parents[2]
PAGES = [name for name in tracked_files(ROOT) if name.endswith(".md")]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
NAMED = re.compile(r"`((?:ci|kernels|evals|tests|benchmarks|docker|requirements|\.buildkite)/[\w./-]+)`")
MADE = ("tests/evals/gsm8k", ".buildkite/lm-eval-harness", "tests/test_layout.py", "docker/acme-rocm.Dockerfile")
"""Paths of vLLM's own tree, and of the repository in ci/ADOPTING.md."""


def missing(page: str, text: str) -> list[str]:
    """Relative links and paths in backticks that lead nowhere."""
    text = FENCED.sub("", text)
    here = (ROOT / page).parent
    links = [link for link in LINK.findall(text) if "://" not in link and not (here / link).exists()]
    named = [name for name in NAMED.findall(text) if not name.startswith(MADE)]
    return links + [name for name in named if not (ROOT / name).exists() and not (here / name).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_nothing_that_is_not_there(page):
    assert missing(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_wrong_path_is_noticed():
    text = "[a](none.md) [b](README.md#x) [c](https://example.org) `ci/hilgate/none.py` `ci/hilgate/model.py`"
    assert missing("README.md", text) == ["none.md", "ci/hilgate/none.py"]


def test_every_attack_is_listed_with_what_happens():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \| `(test_\w+\.py)` \|$", page, re.MULTILINE)
    files = sorted((ROOT / "tests/attacks").glob("test_*.py"))
    assert sorted(name for _, _, name in rows) == [path.name for path in files]
    for path in files:
        said = path.read_text(encoding="utf-8").split('"""')[1]
        assert said.startswith("Who: "), path
        assert all(word in said for word in (" What: ", "What must happen: ")), path
