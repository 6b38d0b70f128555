# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that answers as Buildkite's REST API documents, and as servers do."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING

from support.loopback import Asked, served

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


class Server:
    """Plays back answers in order, the last one for ever, and remembers what it was asked."""

    address: str

    def __init__(self):
        self.answers, self.asked = [], []
        self.silence = threading.Event()

    def answer(self, status, body="", **headers):
        text = body if isinstance(body, str) else json.dumps(body)
        self.answers.append((status, text, {name.replace("_", "-"): value for name, value in headers.items()}))
        return self

    def play(self, asked: Asked):
        self.asked.append((asked.method, asked.path, asked.query, asked.body.decode(), asked.headers))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer[0] == "silence":
            self.silence.wait(5)
        return None if answer[0] in {"silence", "hang up"} else answer


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    played = Server()
    with served(played.play) as played.address:
        try:
            yield played
        finally:
            played.silence.set()
