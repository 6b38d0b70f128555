"""Exclusive use of a results folder: two runs in one folder would mix their records."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Self

from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

LOCK_FILE = ".lock"


class Folder:
    """A results folder that this process alone writes to, while the context lasts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            MisuseError: Another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise MisuseError(
                "another hilgate run is writing its results here",
                where=str(self.path),
                remedy="wait for it, or name another folder with --results",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)  # closing releases the lock; the empty file stays, so no race to create it
