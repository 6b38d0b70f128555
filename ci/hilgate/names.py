# SPDX-License-Identifier: Apache-2.0
"""Names and rules that the stages share with the hosts of agents: files, keys, repositories, what a fork is.

A host has no package of hilgate's, so this needs the standard library of Python 3.10 alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

AGENTS_FILE, PROJECT_FILE = "ci/agents.yaml", "ci/project.yaml"

RECHECK_SUFFIX = ".recheck"
"""What the folder of a rerun elsewhere adds to the planned key."""

RECHECK_KEY_SUFFIX = "-recheck"

APPROVED_KEY_SUFFIX = "-approved"
"""What the key of a step that runs once more, with the files that were approved, adds to the planned key."""

CASELESS_HOSTS = frozenset({"github.com"})
"""Where `Owner/Repo` and `owner/repo` are the same repository; elsewhere they may belong to two people."""

DEFAULT_PORTS = {"https": 443, "http": 80, "ssh": 22, "git": 9418}

READ_AS_DATA = re.compile(
    r"ci/areas/[^/]+\.yaml|ci/quarantine\.yaml|(?:[^/]+/)*[^/]+\.(?:md|png)|LICENSE(?:\.txt)?", re.DOTALL
)
"""What a host reads as data or does not read, in every repository."""

NEVER_INSIDE = sys.stdlib_module_names | {"", "ci", "hilgate", "sitecustomize", "usercustomize"}
"""First part of a path, without what follows a '.', that no `forks_may_change` reaches: hooks, declarations, and what a
Python that starts in the checkout would find before its own library (`json/`, `argparse.py`)."""

_SHARD = re.compile(r"-[0-9]+of[0-9]+$")
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")
_SEGMENT = re.compile(r"[A-Za-z0-9_~][A-Za-z0-9._~-]*")
_URL = re.compile(
    r"(?P<scheme>https?|ssh|git)://(?:[^\s/@?#\\]*@)?(?P<host>[A-Za-z0-9.-]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>/[^:]+)"
)
_SCP = re.compile(r"(?:[A-Za-z0-9._-]+@)?(?P<host>[A-Za-z0-9.-]+):(?P<path>[^:]+)")


NODE = "HILGATE_NODE"
"""Variable of a pod: the machine that it runs on, whose name its own host name does not say."""


def node_name() -> str:
    """The machine that this process runs on: of a pod its node, else the host name."""
    return os.environ.get(NODE) or socket.gethostname()


def whole_key(key: str) -> str:
    """Planned key of the step that a shard is of; that of a whole step as it is."""
    return _SHARD.sub("", key)


def recheck_key(key: str) -> str:
    """Key of the step that reruns the failing checks of a planned step."""
    return _longer_key(key, RECHECK_KEY_SUFFIX)


def approved_key(key: str) -> str:
    """Key of the step that runs a planned step once more, with the files that were approved."""
    return _longer_key(key, APPROVED_KEY_SUFFIX)


def _longer_key(key: str, suffix: str) -> str:
    """A key with a suffix; long keys are shortened and stay distinct."""
    room = 100 - len(suffix)  # Buildkite takes no longer key
    if len(key) > room:
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        key = f"{key[: room - len(digest) - 1]}-{digest}"
    return key + suffix


@dataclass(frozen=True)
class Trust:
    """Whether a build is a fork's, and the one fact that decided it."""

    fork: bool
    why: str


def of_build(env: Mapping[str, str]) -> Trust:
    """The trust in a build, from Buildkite's variables; locally there are none: the checkout is the user's."""
    ours, theirs = env.get("BUILDKITE_REPO", ""), env.get("BUILDKITE_PULL_REQUEST_REPO", "")
    if env.get("HILGATE_FORK", "") not in {"", "0"}:
        return Trust(fork=True, why="HILGATE_FORK is set")
    if not any(name.startswith("BUILDKITE") for name in env):
        return Trust(fork=False, why="not a Buildkite build")
    if theirs:
        known, other = repository(ours), repository(theirs)
        if known is None or other is None:
            unreadable = "BUILDKITE_REPO" if known is None else "BUILDKITE_PULL_REQUEST_REPO"
            return Trust(fork=True, why=f"{unreadable} cannot be read as a repository")
        same = known == other
        return Trust(fork=not same, why=f"a pull request from {known} itself" if same else f"{other} is not {known}")
    # "false" outside of a pull request; a number without the repository that it comes from proves nothing.
    number = env.get("BUILDKITE_PULL_REQUEST", "")
    if number != "false":
        return Trust(fork=True, why=f"pull request {number!r} without BUILDKITE_PULL_REQUEST_REPO")
    return Trust(fork=False, why="not a pull request")


def repository(url: str) -> str | None:
    """`host/owner/repo` of a repository's address; None for one that is not plainly one.

    https, ssh, git and scp-like spellings, a user, the scheme's own port, `.git` and a closing slash mean nothing. All
    else must be plain: no query, no percent sign, no empty or dotted segment, ASCII only.
    """
    match = (_URL if "://" in url else _SCP).fullmatch(url)
    if match is None:
        return None
    found = match.groupdict()
    host = found["host"].lower()
    segments = found["path"].removeprefix("/").removesuffix("/").removesuffix(".git").split("/")
    plain = all(_SEGMENT.fullmatch(segment) and ".." not in segment for segment in segments)
    if not _HOST.fullmatch(host) or ".." in host or len(segments) < 2 or not plain:
        return None
    port = found.get("port") or ""
    own_port = port if port and int(port) != DEFAULT_PORTS[found["scheme"]] else ""
    name = "/".join(segments)
    return f"{host}{':' if own_port else ''}{own_port}/{name.lower() if host in CASELESS_HOSTS else name}"


def stays_inside(path: str, may_change: Iterable[str]) -> bool:
    """Whether a host only copies a file into a container, reads it as data or does not read it; else it executes it.

    `may_change` is the project's `forks_may_change`: folders with a closing slash, and files.
    """
    if READ_AS_DATA.fullmatch(path):
        return True
    if path.partition("/")[0].partition(".")[0] in NEVER_INSIDE:
        return False
    return any(path.startswith(one) and path != one if one.endswith("/") else path == one for one in may_change)
