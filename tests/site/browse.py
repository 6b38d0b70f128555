# SPDX-License-Identifier: Apache-2.0
"""Open each page of a built site in Debian's Chromium at 400 and 1,280 pixels, and search: browse.py SITE THINGS.

Prints JSON: how many pages were opened, what the console said, which pages are wider than the window, what was found.
"""

from __future__ import annotations

import functools
import http.server
import json
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote

from support.browser import Tab, chromium

WIDTHS = (400, 1280)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main(site: Path, things: dict[str, str]) -> None:
    """Browse, and print what was seen."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with chromium() as tab:
        sys.stdout.write(json.dumps(browse(tab, f"http://127.0.0.1:{server.server_port}/", site, things)))


def browse(tab: Tab, base: str, site: Path, things: dict[str, str]) -> dict[str, object]:
    """What every page and every search shows."""
    pages, wide, found = 0, [], dict[str, list[str]]()
    for width in WIDTHS:
        tab.size(width, 900)
        for page in sorted(site.rglob("index.html")):
            name = f"{page.parent.relative_to(site)}/".removeprefix("./")
            tab.open(base + quote(name))
            pages += 1
            if tab.value("document.documentElement.scrollWidth") > width:
                wide.append(f"{name} at {width}")
    for thing in things:
        tab.open(f"{base}?q={quote(thing)}")
        for _ in range(60):
            links = tab.value("[...document.querySelectorAll('.md-search-result__link')].map(one => one.href)")
            if links:
                break
            time.sleep(0.25)
        found[thing] = links or []
    return {"pages": pages, "console": tab.said, "wide": wide, "found": found}


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
