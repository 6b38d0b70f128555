# SPDX-License-Identifier: Apache-2.0
"""Open each page of a built site in Debian's Chromium at 400 and 1,280 pixels, and search: browse.py SITE THINGS.

Prints JSON: how many pages were opened, what the console said, which pages are wider than the window, what was found.
"""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from websockets.sync.client import ClientConnection, connect

WIDTHS = (400, 1280)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Tab:
    """A tab of Chromium, spoken to by its remote protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.numbers, self.said = socket, itertools.count(1), list[str]()
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: object) -> Any:
        """Send a command; its result. What the console says meanwhile is kept."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return self._until(lambda message: message.get("id") == number)["result"]

    def open(self, address: str) -> None:
        """Open a page and wait until it is loaded."""
        self.ask("Page.navigate", url=address)
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What JavaScript computes in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _until(self, wanted: Any) -> dict[str, Any]:
        while True:
            message = json.loads(self.socket.recv(timeout=30))
            method, parameters = message.get("method"), message.get("params", {})
            if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.said.append(f"{parameters['entry'].get('url', '')}: {parameters['entry']['text']}")
            if method == "Runtime.exceptionThrown" or (
                method == "Runtime.consoleAPICalled" and parameters["type"] == "error"
            ):
                self.said.append(json.dumps(parameters)[:400])
            if wanted(message):
                return message


def main(site: Path, things: dict[str, str]) -> None:
    """Browse, and print what was seen."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/"
    with tempfile.TemporaryDirectory() as profile:
        words = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
        ]
        words += ["--remote-allow-origins=*", "--no-first-run", f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(["chromium", *words], stderr=subprocess.PIPE, text=True) as browser:
            try:
                assert browser.stderr is not None
                port = next(found[1] for line in browser.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)/", line)))
                threading.Thread(target=browser.stderr.read, daemon=True).start()
                sys.stdout.write(json.dumps(browse(port, base, site, things)))
            finally:
                browser.terminate()
                browser.wait(timeout=30)


def browse(port: str, base: str, site: Path, things: dict[str, str]) -> dict[str, object]:
    """What every page and every search shows."""
    import httpx

    address = httpx.put(f"http://127.0.0.1:{port}/json/new?about:blank").json()["webSocketDebuggerUrl"]
    pages, wide, found = 0, [], dict[str, list[str]]()
    with connect(address, max_size=None) as socket:
        tab = Tab(socket)
        for width in WIDTHS:
            tab.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
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
