"""House rules about files that no linter knows. Pure: names and texts in, findings out."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOMS = ("kernels", "ci", "evals", "tests", "docker")
"""Folders that are no packages: `kernels/__init__.py` would shadow the `kernels` package that transformers imports."""

MAX_LINES = 250
MAX_KERNEL_LINES = 300
"""For a file with a jitted kernel: kernel and launcher belong on one page."""

_JIT = re.compile(r"^@triton\.(jit|heuristics|autotune)", re.MULTILINE)
_MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|Users|work)/\w[\w./-]*")
_PACKAGE_INDEX = re.compile(
    r"https?://[^\s/\"']*(?:pypi|artifactory|jfrog|nexus|devpi)[^\s\"']*|--(?:extra-)?index-url[= ]\S+", re.IGNORECASE
)


def file_lengths(texts: Mapping[str, str]) -> list[str]:
    """Python files longer than one concept should need."""
    found = []
    for name, text in texts.items():
        limit = MAX_KERNEL_LINES if _JIT.search(text) else MAX_LINES
        lines = len(text.splitlines())
        if name.endswith(".py") and lines > limit:
            found.append(f"{name}: {lines} lines, at most {limit}: it holds more than one concept")
    return found


def room_packages(texts: Mapping[str, str]) -> list[str]:
    """`__init__.py` directly in a room, or anywhere under tests/."""
    found = []
    for name in texts:
        path = PurePosixPath(name)
        if path.name == "__init__.py" and (str(path.parent) in ROOMS or path.parts[0] == "tests"):
            found.append(f"{name}: makes a package of a room; delete it")
    return found


def machine_paths(texts: Mapping[str, str]) -> list[str]:
    """Paths of somebody's machine."""
    return _matches(texts, _MACHINE_PATH, "is a path of one machine; make it relative to the repository")


def package_indexes(texts: Mapping[str, str]) -> list[str]:
    """Addresses of a package index, which belong to the machine's own pip configuration."""
    return _matches(texts, _PACKAGE_INDEX, "names a package index; leave that to pip's configuration")


RULES = {
    "file-length": file_lengths,
    "no-room-package": room_packages,
    "no-machine-path": machine_paths,
    "no-package-index": package_indexes,
}
"""Check id -> rule."""


def _matches(texts: Mapping[str, str], pattern: re.Pattern[str], why: str) -> list[str]:
    return [
        f"{name}:{number}: {match[0]} {why}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for match in [pattern.search(line)]
        if match
    ]
