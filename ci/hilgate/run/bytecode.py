# SPDX-License-Identifier: Apache-2.0
"""Remove bytecode that may be of another state of its source.

Python believes a compiled module whose source has the size and the time that it notes. An edit, an unpacked archive or
`rsync -t` can leave both as they were, and then the old code runs under the new name. No program can set the time at
which a file's content or its facts changed last (ctime), so bytecode that is older than that goes.
"""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Iterable


def remove_stale(root: Path, files: Iterable[str]) -> tuple[str, ...]:
    """Remove bytecode below `root` that is not newer than its source, one of `files`; returns the sources' names.

    Raises:
        CannotRunHereError: It cannot be removed, so that nobody knows which code would run.
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
