# SPDX-License-Identifier: Apache-2.0
"""A web server on this machine for as long as a test needs it; what it answers is a function."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: bytes
    headers: dict[str, str]

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")


@contextmanager
def served(answer: Callable[[Asked], tuple[int, Any, dict[str, str]] | None]) -> Iterator[str]:
    """Yield the address, `http://127.0.0.1:PORT`.

    Args:
        answer: Request -> status, body (text, bytes, or anything else as JSON) and headers; None hangs up.
    """

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            url, length = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
            answered = answer(
                Asked(self.command, url.path, parse_qs(url.query), self.rfile.read(length), dict(self.headers))
            )
            if answered is None:
                self.close_connection = True
                return
            status, body, headers = answered
            sent = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            for name, value in ({"Content-Type": "application/json", "Content-Length": len(sent)} | headers).items():
                self.send_header(name, str(value))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(sent)

        do_GET = do_POST = do_PUT = do_PATCH = _answer  # noqa: N815 - names that http.server calls

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    # httpx reads all certificates of the Web for each request, 40 ms; from a folder it takes those that it needs: none.
    no_certificates = mock.patch.dict(os.environ, SSL_CERT_FILE="", SSL_CERT_DIR=os.devnull)
    try:
        with no_certificates:
            yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
