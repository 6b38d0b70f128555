# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that answers as GitHub's REST API documents for the rules of one repository."""

from __future__ import annotations

import copy
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.nodes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILDKITE, MERGE_QUEUE = 4711, 4712
"""Ids of apps; which they are on GitHub is for whoever sets the rulesets up."""


def declared(name: str) -> dict[str, Any]:
    """A ruleset of this repository, with the ids filled in."""
    text = (ROOT / f"ci/agent/github/{name}.json").read_text()
    text = text.replace('"integration_id": 0', f'"integration_id": {BUILDKITE}')
    return json.loads(text.replace('"actor_id": 0', f'"actor_id": {MERGE_QUEUE}'))


class GitHub(ThreadingHTTPServer):
    """One repository, `acme/rocm`: its rulesets by number, and which of them hold for a branch."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rulesets = {1: copy.deepcopy(declared("main")), 2: copy.deepcopy(declared("queue"))}
        self.token = ""
        """Without it the repository is not there; who may bypass a ruleset is shown only to `admin`."""
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def rules(self, branch: str) -> list[dict[str, Any]]:
        number = 1 if branch == "main" else 2 if branch.startswith("gh-readonly-queue/") else 0
        ruleset = self.rulesets.get(number, {"rules": [], "enforcement": "active"})
        known = {"ruleset_source_type": "Repository", "ruleset_source": "acme/rocm", "ruleset_id": number}
        return [{**rule, **known} for rule in ruleset["rules"]] if ruleset["enforcement"] == "active" else []

    def ruleset(self, number: int, token: str) -> dict[str, Any]:
        shown = {"id": number, "source_type": "Repository", "source": "acme/rocm", **self.rulesets[number]}
        return shown if token == "admin" else {name: value for name, value in shown.items() if name != "bypass_actors"}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: GitHub = self.server  # type: ignore[assignment]
        url, token = urlsplit(self.path), (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        server.asked.append(self.path)
        where, page = url.path.removeprefix("/repos/acme/rocm/"), int(parse_qs(url.query).get("page", ["1"])[0])
        answer: object = {"message": "Not Found"}
        status = 404 if token != server.token or where == url.path else 200
        if status == 200 and where.startswith("rules/branches/"):
            answer = server.rules(unquote(where.removeprefix("rules/branches/")))[(page - 1) * 100 : page * 100]
        elif status == 200:
            answer = server.ruleset(int(where.removeprefix("rulesets/")), token)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def serving() -> Iterator[GitHub]:
    server = GitHub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
