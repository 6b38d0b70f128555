"""`ci/reads.json`: which files of the repository each step was seen to read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from hilgate.model import Key

READS_FILE: Final = "ci/reads.json"


def text_of(reads: Mapping[Key, Iterable[str]]) -> str:
    """The recorded reads as `ci/reads.json` has them."""
    return json.dumps({key: list(reads[key]) for key in sorted(reads)}, indent=1) + "\n"


def read(path: Path) -> dict[Key, tuple[str, ...]]:
    """Step -> the files it was seen to read.

    Raises:
        RecordsError: The file is missing, or is not what `text_of` writes.
    """
    remedy = "record it with `python -m hilgate.reads`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordsError(f"the recorded reads cannot be read: {error}", where=str(path), remedy=remedy) from error
    if not isinstance(data, dict) or not all(
        isinstance(files, list) and all(isinstance(name, str) for name in files) for files in data.values()
    ):
        raise RecordsError("not a mapping of steps to files", where=str(path), remedy=remedy)
    return {key: tuple(files) for key, files in data.items()}
