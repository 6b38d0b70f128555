"""Narrow loads that are declared, with the compiler that makes them: `narrow.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import triton

from .errors import AuditError

FILE = Path(__file__).with_name("narrow.toml")
_KEYS = {"triton", "row", "pointers", "why"}


class InvalidNarrowError(AuditError):
    """An entry of `narrow.toml` has other keys than it must have."""


@cache
def declared(row_id: str, path: Path = FILE) -> tuple[str, ...]:
    """Return the pointers of a row through which the running Triton is known to load less than 16 bytes.

    Raises:
        InvalidNarrowError: if an entry lacks a key or has another one, or names no pointer.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("narrow", [])
    for entry in entries:
        if set(entry) != _KEYS or not entry["pointers"]:
            raise InvalidNarrowError(
                f"{path.name}: got {entry}; expected {', '.join(sorted(_KEYS))}, with a pointer at least. Say why."
            )
    mine = [e["pointers"] for e in entries if (e["triton"], e["row"]) == (triton.__version__, row_id)]
    return tuple(pointer for pointers in mine for pointer in pointers)
