# SPDX-License-Identifier: Apache-2.0
"""Artifacts of a build, and a `buildkite-agent` that downloads them: the real one where there is one, and a stand-in.

Both do what buildkite-agent does on Linux with a path that an agent on Windows could have uploaded: a `\\` counts as
`/`, and `..` ends at the folder that is downloaded into.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlparse

from support.executor import REAL_AGENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pytest


class Upload(NamedTuple):
    """One file, as the step that uploaded it named it."""

    step: str
    path: str
    text: str


LAND = '''
def land(path):
    """Where buildkite-agent writes an artifact of this path, below the folder that it downloads into."""
    parts = []
    for part in path.replace("\\\\", "/").split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)
'''
"""Source of a function, for programs that stand in for the agent."""

STAND_IN = f"""#!{sys.executable} -I
import json, os, pathlib, sys, urllib.parse, urllib.request
{LAND}
words = sys.argv[1:]
assert words[:2] == ["artifact", "download"], words
asked = {{"query": words[2]}}
if "--step" in words:
    asked["scope"] = words[words.index("--step") + 1]
address = os.environ["BUILDKITE_AGENT_ENDPOINT"]
url = address + "builds/b/artifacts/search?" + urllib.parse.urlencode(asked)
found = json.load(urllib.request.urlopen(url))
if not found:
    sys.exit("fatal: Failed to download artifacts: No artifacts found for downloading")
for one in found:
    target = pathlib.Path(words[3]) / land(one["path"])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(urllib.request.urlopen(one["url"]).read())
"""


def _matches(path: str, query: str) -> bool:
    """Whether Buildkite finds a path by a glob: by a name, or by all that is below a folder."""
    folder = query.removesuffix("/**/*")
    return path == query if folder == query else path.startswith(f"{folder}/")


class _Api(http.server.BaseHTTPRequestHandler):
    """The search for artifacts, and their contents."""

    def do_GET(self) -> None:
        uploads: Sequence[Upload] = self.server.uploads  # type: ignore[attr-defined]
        asked, where = urlparse(self.path), f"http://{self.headers['Host']}"
        if asked.path.endswith("/artifacts/search"):
            query = {name: values[0] for name, values in parse_qs(asked.query).items()}
            body = json.dumps(
                [
                    {
                        "id": str(number),
                        "path": one.path,
                        "absolute_path": f"/a/{one.path}",
                        "glob_path": "**/*",
                        "file_size": len(one.text.encode()),
                        "sha1sum": hashlib.sha1(one.text.encode()).hexdigest(),
                        "sha256sum": hashlib.sha256(one.text.encode()).hexdigest(),
                        "url": f"{where}/file/{number}",
                    }
                    for number, one in enumerate(uploads)
                    if query.get("scope") in (None, one.step) and _matches(one.path, query["query"])
                ]
            ).encode()
        else:
            body = uploads[int(asked.path.rpartition("/")[2])].text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def serving(folder: Path, uploads: Sequence[Upload], agent: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a buildkite-agent (`real` or `stand-in`) that downloads these on the path, while this lasts."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    server.uploads = uploads  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = folder / "agent-bin/buildkite-agent"
    program.parent.mkdir()
    real = f'#!/bin/sh\nexec {REAL_AGENT} "$@"\n'
    program.write_text(real if agent == "real" else STAND_IN)
    program.chmod(0o755)
    with patch.context() as with_agent:
        with_agent.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        for name, value in (("ENDPOINT", f"http://127.0.0.1:{server.server_port}/"), ("ACCESS_TOKEN", "of-this-job")):
            with_agent.setenv(f"BUILDKITE_AGENT_{name}", value)
        with_agent.setenv("BUILDKITE_BUILD_ID", "b")
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
