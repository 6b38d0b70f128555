"""A fingerprint of the files under test, so that a resumed run cannot mix results of two states of the tree."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from hilgate.changes import tracked_files
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from pathlib import Path


def fingerprint(root: Path) -> str:
    """sha256 over the names and contents of all files that git tracks or would track; empty outside a checkout.

    The commit alone does not do: the usual way to a failing gate is an uncommitted edit.
    """
    try:
        names = tracked_files(root)
    except CannotRunHereError:
        return ""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode(errors="surrogateescape") + b"\0")
        digest.update(hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()
