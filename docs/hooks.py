# SPDX-License-Identifier: Apache-2.0
"""What MkDocs calls while it builds the site: pages where they lie, and the reference from the code.

A page keeps the links that it has in the repository. One to a file that is no page stands as its name, because the site
has no place for it; one to nothing is left to MkDocs, whose strict build ends with it.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import reference

from hilgate.git import tracked_files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (".md", ".png", ".svg")
LEFT_OUT = (".github/", "tests/ci/agent/recorded/")
"""Folders whose pages are forms, or explain records to those who change them."""

FENCED = re.compile(r"^(?:```.*?^```|    .*?$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put every page and picture of the repository in, at its own path, and the pages that are made from the code."""
    found = Files([])
    for file in files:
        if not str(file.abs_src_path).startswith(str(ROOT / "docs")):  # the theme's
            found.append(file)
    for name in tracked_files(ROOT):
        if name.endswith(SHOWN) and not name.startswith(LEFT_OUT):
            found.append(_placed(File.generated(config, name, abs_src_path=str(ROOT / name))))
    try:
        made = reference.pages()
    except reference.UndocumentedError as error:
        raise PluginError(f"undocumented: {error}") from None
    for name, text in made.items():
        found.append(_placed(File.generated(config, name, content=text)))
    return found


def _placed(file: File) -> File:
    """Without `docs/` in its address."""
    file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Make links to files and folders that the site does not have names, and links to folders ones to their page."""
    here = PurePosixPath(page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        target = found["target"]
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(str(here / target))
        readme = f"{path}/README.md".removeprefix("./")
        if files.get_file_from_path(path) or not (ROOT / path).exists():
            return found[0]
        if files.get_file_from_path(readme):
            return f"[{found['text']}]({os.path.relpath(readme, here)}{found['anchor'] or ''})"
        return found["text"] if "`" in found["text"] else f"{found['text']} (`{path}`)"

    parts, at = [], 0
    for block in FENCED.finditer(markdown):
        parts += [LINK.sub(replaced, markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, LINK.sub(replaced, markdown[at:])])
