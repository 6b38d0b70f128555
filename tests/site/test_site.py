# SPDX-License-Identifier: Apache-2.0
"""The documentation builds strictly, leaves no public name out, and fetches nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEAD = """
def on_page_markdown(markdown, page, **_):
    return markdown + {text!r} if page.url == "tutorial/" else markdown
"""


def build(folder: Path, *, planted: str = "", plugins: bool = True) -> subprocess.CompletedProcess[str]:
    """Build the site into a folder, with a further hook and, to be fast, without plugins."""
    hook, config = folder / "planted.py", folder / "mkdocs.yml"
    hook.write_text(planted, encoding="utf-8")
    said = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(ROOT / "docs"), "site_dir": str(folder / "site")}
    said |= {"hooks": [str(ROOT / "docs/hooks.py"), str(hook)], "watch": []} | ({} if plugins else {"plugins": []})
    config.write_text(yaml.safe_dump(said), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


class Page(HTMLParser):
    """What a page fetches, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.anchors.add(said.get("id") or "")
        if tag in {"script", "img", "iframe"} or (tag == "link" and said.get("rel") in {"stylesheet", "icon"}):
            self.fetched.append(said.get("src") or said.get("href") or "")


def test_nothing_is_fetched_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    fetched = {one for page in pages for one in Page(page.read_text(encoding="utf-8")).fetched}
    assert any(one.endswith(".css") for one in fetched)
    assert [one for one in fetched if "//" in one] == []


def test_a_page_is_rendered_whole(site):
    """Tables and fences that Markdown does not take for such would be printed as they are written."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(code|pre|script)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"^\s*(?:<p>)?(?:\|[ -]*-{3}|```)", text, re.MULTILINE), page.relative_to(site)


def operations() -> list[str]:
    """The operations of the kernels' table, which are stable, with what else is (CONTRIBUTING.md)."""
    page = (ROOT / "kernels/README.md").read_text(encoding="utf-8")
    table = page.split("| operation |", 1)[1].split("\n\n", 1)[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    stable = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("| `pagedkv` |", 1)[1].split("|", 1)[0]
    return names + [name for name in re.findall(r"`(\w+)`", stable) if not name.endswith("_")]


def test_every_public_name_of_the_kernels_has_an_entry(site):
    found = Page((site / "reference/python/index.html").read_text(encoding="utf-8")).anchors
    entries = {name.rpartition(".")[2] for name in found}
    assert len(operations()) >= 15
    assert [name for name in operations() if name not in entries] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n\n[gone](gone.md)\n", "gone.md"),
        ("\n\n[gone](../README.md#gone)\n", "#gone"),
        ("\n\n![gone](gone.png)\n", "gone.png"),
    ],
    ids=["a page", "an anchor", "a picture"],
)
def test_a_dead_link_is_red(tmp_path, text, said):
    done = build(tmp_path, planted=DEAD.format(text=text), plugins=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert "docs/tutorial.md" in done.stderr


def test_a_public_name_without_a_sentence_is_red(tmp_path):
    command = "from hilgate.cli.app import program\n@program.command()\ndef silent() -> None: ...\n"
    done = build(tmp_path, planted=command, plugins=False)
    assert done.returncode == 1
    assert "undocumented: silent has no sentence" in done.stderr + done.stdout


THINGS = {
    "paged_attention": "reference/python/",
    "write_kv_cache": "reference/python/",
    "INCONCLUSIVE": "reference/exit-status/",
    "may_lack": "reference/yaml/",
    "Paged cache layouts": "concepts/cache/",
    "log-sum-exp": "concepts/splits/",
    "quarantine": "reference/glossary/",
    "slot % BLOCK_SIZE": "tutorial/",
    "hilgate explain-kernel": "reference/cli/",
    "batch_invariant": "concepts/splits/",
}
"""Ten things that somebody looks for, and a page that must be among what is found."""


def test_the_index_has_what_people_look_for(site):
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    for thing, page in THINGS.items():
        texts = [re.sub(r"<[^>]+>", "", f"{one['title']} {one['text']}") for one in index if page in one["location"]]
        assert any(thing in text for text in texts), thing


@pytest.mark.needs("program:chromium")
@pytest.mark.timeout(280)
def test_a_browser_shows_every_page_at_both_widths_and_finds_ten_things(site, tmp_path):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("browse.py"), site, json.dumps(THINGS)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["pages"] == 2 * len(list(site.rglob("index.html")))
    assert said["console"] == []
    assert said["wide"] == []
    assert [thing for thing, found in said["found"].items() if THINGS[thing] not in " ".join(found)] == []
