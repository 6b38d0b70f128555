# SPDX-License-Identifier: Apache-2.0
"""Buildkite's and GitHub's REST API under their own names: a proxy on this machine, with a certificate for them.

Programs that are started with `Internet.settings` reach it and nothing else. It keeps comments, checks and builds as
the services do, and refuses a token that is not the one it gave.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import ssl
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORGE, BUILDKITE = "forge.invalid", "api.buildkite.com"
BOT, WRITER, STARTER = "rocm-gate[bot]", "ghs_writes", "bkua_starts"
SECRETS = {"HILGATE_GITHUB_WRITER": WRITER, "HILGATE_BUILDS_TOKEN": STARTER}
"""Of a cluster, by the names that steps ask for."""
REPOSITORY = "/api/v3/repos/ours/it"
BUILDS = "/v2/organizations/acme/pipelines/it/builds"


@dataclass
class Internet:
    """What the services hold, and how a program reaches them."""

    settings: dict[str, str]
    commands: str = '{"users": ["alice"], "cooldown_minutes": 10}'
    """`ci/agent/commands.json` of the default branch."""
    comments: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    builds: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, host and path of each request."""
    refuses: bool = False
    """Whether all is answered with status 500."""

    def say(self, login: str, body: str, pull: int = 7) -> None:
        """Write a comment."""
        number = 100 + len(self.comments)
        self.comments.append(
            {
                "id": number,
                "body": body,
                "user": {"login": login},
                "issue_url": f"https://{FORGE}{REPOSITORY}/issues/{pull}",
                "html_url": f"https://{FORGE}/ours/it/pull/{pull}#issuecomment-{number}",
                "created_at": "2026-11-21T12:00:00Z",
                "updated_at": "2026-11-21T12:00:00Z",
            }
        )

    def of(self, login: str) -> list[str]:
        """What somebody's comments say."""
        return [one["body"] for one in self.comments if one["user"]["login"] == login]

    def answer(self, method: str, host: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        """Status and body that a service answers with."""
        self.asked.append((method, host, path))
        if self.refuses:
            return 500, {}
        if token != (WRITER if host == FORGE else STARTER):
            return 401, {"message": "Bad credentials"}
        return self._forge(method, path, body) if host == FORGE else self._buildkite(method, path, body)

    def _forge(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        where = path.removeprefix(REPOSITORY)
        if (method, where) == ("GET", ""):
            return 200, {"default_branch": "main"}
        if (method, where) == ("GET", "/contents/ci/agent/commands.json"):
            return 200, {"encoding": "base64", "content": base64.encodebytes(self.commands.encode()).decode()}
        if (method, where) == ("POST", "/check-runs"):
            self.checks.append(body)
            return 201, {"id": len(self.checks), "html_url": f"https://{FORGE}/check"}
        return self._comments(method, where, body)

    def _comments(self, method: str, where: str, body: Any) -> tuple[int, Any]:
        if found := re.fullmatch(r"/issues/(?:(\d+)/)?comments", where):
            of = [one for one in self.comments if found[1] is None or one["issue_url"].endswith(f"/{found[1]}")]
            if method == "GET":
                return 200, of
            self.say(BOT, body["body"], int(found[1]))
            return 201, self.comments[-1]
        if (found := re.fullmatch(r"/issues/comments/(\d+)", where)) and method == "PATCH":
            (comment,) = [one for one in self.comments if one["id"] == int(found[1])]
            comment["body"] = body["body"]
            return 200, comment
        return 404, {"message": "Not Found"}

    def _buildkite(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if (method, path) == ("GET", BUILDS):
            return 200, self.builds[::-1]
        if (method, path) == ("POST", BUILDS):
            started = {
                **body,
                "number": 40 + len(self.builds),
                "web_url": "https://builds.invalid/x",
                "state": "scheduled",
            }
            pull = {"id": str(body["pull_request_id"]), "base": "main", "repository": body["pull_request_repository"]}
            self.builds.append(started | {"pull_request": pull})
            return 201, self.builds[-1]
        return 404, {"message": "Not found"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self) -> None:
        """Become the service that is asked for."""
        self.send_response(200)
        self.end_headers()
        self.host = self.path.partition(":")[0]
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)  # type: ignore[attr-defined]
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)

    def _play(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        internet: Internet = self.server.internet  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        status, answer = internet.answer(self.command, self.host, path, token, json.loads(text) if text else None)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = _play  # noqa: N815 - names that http.server calls

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def internet(folder: Path) -> Iterator[Internet]:
    """The services, until the block ends; their certificate lies in `folder`."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ",".join(f"DNS:{name}" for name in (FORGE, BUILDKITE))
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    words += ["-subj", "/CN=services of this test", "-addext", f"subjectAltName={names}"]
    words += [
        "-addext",
        "keyUsage=critical,digitalSignature,keyCertSign",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(words, check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # type: ignore[attr-defined]
    server.tls.load_cert_chain(certificate, key)  # type: ignore[attr-defined]
    made = Internet({"HTTPS_PROXY": f"http://127.0.0.1:{server.server_port}", "SSL_CERT_FILE": str(certificate)})
    server.internet = made  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
