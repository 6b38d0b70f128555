# SPDX-License-Identifier: Apache-2.0
"""What earlier runs and builds left in the tree, and Python would believe: old bytecode, metadata of distributions.

Python believes a compiled module whose source has the size and the time that it notes. An edit, an unpacked archive or
`rsync -t` can leave both as they were, and then the old code runs under the new name. No program can set the time at
which a file's content or its facts changed last (ctime), so bytecode that is older than that goes.

An installation or a build leaves `*.egg-info` beside the sources. Whatever lies there, pytest loads the plugins that it
names, and its version stands before the installed one. The project's own installation says the same as its
pyproject.toml or as what is installed outside of the tree.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Iterable

SCRIPTS = frozenset({"console_scripts", "gui_scripts"})
"""Entry points that no program loads by itself."""


def remove_stale(root: Path, files: Iterable[str]) -> tuple[str, ...]:
    """Remove bytecode below `root` that is not newer than its source, one of `files`; returns the sources' names.

    Raises:
        CannotRunHereError: It cannot be removed, so that it is unknown which code would run.
    """
    compiled: dict[Path, dict[str, list[os.DirEntry[str]]]] = {}
    gone = []
    for name in files:
        if not name.endswith(".py"):
            continue
        source = root / name
        folder = Path(importlib.util.cache_from_source(str(source))).parent
        if folder not in compiled:
            compiled[folder] = _entries(folder)
        for entry in compiled[folder].get(source.stem, ()):
            try:
                if entry.stat().st_mtime_ns > source.lstat().st_ctime_ns:
                    continue
                Path(entry.path).unlink(missing_ok=True)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CannotRunHereError(
                    f"bytecode that may be of other code cannot be removed: {error.strerror}",
                    where=entry.path,
                    remedy="remove it, or give this user the folder",
                ) from error
            gone.append(name)
    return tuple(dict.fromkeys(gone))


def _entries(folder: Path) -> dict[str, list[os.DirEntry[str]]]:
    """Module -> what whoever compiled it left: Python, other versions of it, and pytest."""
    found = defaultdict(list)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".pyc"):
                    found[entry.name.partition(".")[0]].append(entry)
    except OSError:
        return {}
    return found


def strange_metadata(root: Path, folders: Iterable[str]) -> str:
    """Say which metadata of a folder that steps import from is of nothing installed; empty for none."""
    places = list(dict.fromkeys([root, *(root / folder for folder in folders)]))
    infos = [(place, info) for place in places for info in _infos(place)]
    if not infos:
        return ""
    seen = () if git.no_checkout(root) else git.tracked_files(root)
    inside = {os.path.realpath(place) for place in places}
    outside = [entry for entry in sys.path if os.path.realpath(entry) not in inside]
    installed = list(importlib.metadata.distributions(path=outside))
    versions = {_plain(_field(one, "Name")): _field(one, "Version") for one in installed}
    known = {point for one in installed for point in _points(one)}
    for place, info in infos:
        shown = info.relative_to(root).as_posix()
        if any(file == shown or file.startswith(f"{shown}/") for file in seen):
            continue  # part of the tree, or a change that is shown as one
        project, declared = _project(place)
        found = importlib.metadata.Distribution.at(info)
        if strange := sorted(set(_points(found)) - known - declared):
            group, _, value = strange[0]
            return f"{shown} gives {value} as a plugin ({group}), which nothing installed does"
        name = _plain(re.sub(r"(-.*)?\.(egg|dist)-info$", "", info.name))
        version = _field(found, "Version")
        if name != project and name in versions and version not in {"", versions[name]}:
            return f"{shown} says that {name} is {version}, and {versions[name]} is installed"
    return ""


def _infos(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.name.lower().endswith((".egg-info", ".dist-info")))
    except OSError:
        return []


def _field(distribution: importlib.metadata.Distribution, name: str) -> str:
    try:
        return str(distribution.metadata[name] or "")
    except (TypeError, KeyError):  # an installation that was interrupted has no metadata
        return ""


def _points(distribution: importlib.metadata.Distribution) -> Iterable[tuple[str, str, str]]:
    return ((point.group, point.name, point.value) for point in distribution.entry_points if point.group not in SCRIPTS)


def _project(place: Path) -> tuple[str, set[tuple[str, str, str]]]:
    """Name and entry points that the pyproject.toml of a folder declares."""
    try:
        project = tomllib.loads((place / "pyproject.toml").read_text("utf-8"))["project"]
        groups = project.get("entry-points", {})
        return _plain(project["name"]), {(g, name, value) for g in groups for name, value in groups[g].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "", set()


def _plain(name: str) -> str:
    """A name as importlib.metadata compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
