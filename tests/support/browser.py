# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium without a window, spoken to by its remote protocol."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import httpx
from websockets.sync.client import ClientConnection, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
)


class Tab:
    """A tab; `said` is what the console said of errors."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.numbers, self.said = socket, itertools.count(1), list[str]()
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: object) -> Any:
        """Send a command; its result. What the console says meanwhile is kept."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return self._until(lambda message: message.get("id") == number)["result"]

    def size(self, width: int, height: int) -> None:
        """Make the window so wide and high, in pixels."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

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


@contextlib.contextmanager
def chromium() -> Iterator[Tab]:
    """A tab of a browser that ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = ["chromium", *WORDS, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as browser:
            try:
                assert browser.stderr is not None
                listening = map(re.compile(r"127\.0\.0\.1:(\d+)/").search, browser.stderr)
                port = next(filter(None, listening))[1]
                threading.Thread(target=browser.stderr.read, daemon=True).start()
                page = httpx.put(f"http://127.0.0.1:{port}/json/new?about:blank", trust_env=False).json()
                with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
                    yield Tab(socket)
            finally:
                browser.terminate()
                browser.wait(timeout=30)
