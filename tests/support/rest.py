# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that answers as Buildkite's REST API documents, and as servers do."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "bkua_0123456789abcdef"


def build(number, pull="7", **changes):
    """A build as the API shows it, with fields that nobody here reads."""
    values = {
        "id": f"0190-{number}",
        "number": number,
        "web_url": f"https://buildkite.example.invalid/acme/rocm/builds/{number}",
        "state": "failed",
        "commit": "c" * 40,
        "branch": "feature",
        "env": {},
        "meta_data": {},
        "source": "webhook",
        "pull_request": {"id": pull, "base": "main", "repository": "https://example.invalid/acme/rocm.git"},
    }
    return values | changes


class Server(ThreadingHTTPServer):
    """Plays back answers in order, the last one for ever, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked = [], []
        self.silence = threading.Event()

    def answer(self, status, body="", **headers):
        text = body if isinstance(body, str) else json.dumps(body)
        self.answers.append((status, text, {name.replace("_", "-"): value for name, value in headers.items()}))
        return self


class Handler(BaseHTTPRequestHandler):
    def _play(self):
        length = int(self.headers.get("Content-Length") or 0)
        url = urlsplit(self.path)
        self.server.asked.append(
            (self.command, url.path, parse_qs(url.query), self.rfile.read(length).decode(), dict(self.headers))
        )
        answers = self.server.answers
        status, text, headers = answers.pop(0) if len(answers) > 1 else answers[0]
        if status == "silence":
            self.server.silence.wait(5)
            return
        if status == "hang up":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_PUT = do_PATCH = _play  # noqa: N815 - names that http.server calls

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    played = Server()
    thread = threading.Thread(target=played.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield played
    finally:
        played.silence.set()
        played.shutdown()
        thread.join()
        played.server_close()
