# SPDX-License-Identifier: Apache-2.0
"""Artifacts of a build, and a `buildkite-agent` that downloads them: the real one where there is one, and a stand-in.

Both do what buildkite-agent does on Linux with a path that an agent on Windows could have uploaded: a `\\` counts as
`/`, and `..` ends at the folder that is downloaded into.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from support.executor import REAL_AGENT
from support.loopback import Asked, served

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


def _found(uploads: Sequence[Upload], asked: Asked) -> tuple[int, object, dict[str, str]]:
    """The search for artifacts, and their contents."""
    if not asked.path.endswith("/artifacts/search"):
        return 200, uploads[int(asked.path.rpartition("/")[2])].text, {}
    query = {name: values[0] for name, values in asked.query.items()}
    found = [
        {
            "id": str(number),
            "path": one.path,
            "absolute_path": f"/a/{one.path}",
            "glob_path": "**/*",
            "file_size": len(one.text.encode()),
            "sha1sum": hashlib.sha1(one.text.encode()).hexdigest(),
            "sha256sum": hashlib.sha256(one.text.encode()).hexdigest(),
            "url": f"http://{asked.headers['Host']}/file/{number}",
        }
        for number, one in enumerate(uploads)
        if query.get("scope") in (None, one.step) and _matches(one.path, query["query"])
    ]
    return 200, found, {}


@contextmanager
def serving(folder: Path, uploads: Sequence[Upload], agent: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a buildkite-agent (`real` or `stand-in`) that downloads these on the path, while this lasts."""
    program = folder / "agent-bin/buildkite-agent"
    program.parent.mkdir()
    real = f'#!/bin/sh\nexec {REAL_AGENT} "$@"\n'
    program.write_text(real if agent == "real" else STAND_IN)
    program.chmod(0o755)
    with served(partial(_found, uploads)) as address, patch.context() as with_agent:
        with_agent.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        for name, value in (("ENDPOINT", f"{address}/"), ("ACCESS_TOKEN", "of-this-job")):
            with_agent.setenv(f"BUILDKITE_AGENT_{name}", value)
        with_agent.setenv("BUILDKITE_BUILD_ID", "b")
        yield
