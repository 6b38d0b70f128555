"""Read TOML tables into dataclasses: every key known, every required one there, every value of its type."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import InvalidDataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Entry = TypeVar("Entry")


def read(path: Path, tables: Iterable[str]) -> dict[str, Any]:
    """Read a file that holds some of these tables and nothing else.

    Raises:
        InvalidDataError: It is not TOML, or holds another table.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidDataError(f"{path.name} is not TOML: {error}") from error
    among(f"{path.name}: tables", data, tables)
    return data


def entry(where: str, table: dict[str, Any], kind: type[Entry]) -> Entry:
    """Read one table.

    Args:
        where: File and table, for messages.
        table: Its keys and values.
        kind: A dataclass of texts, lists of texts (tuples), integers and floats of at least 0.

    Raises:
        InvalidDataError: A key is unknown or missing, or a value is empty or of another type.
    """
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    needed = {field.name for field in fields(kind) if field.default is MISSING}  # type: ignore[arg-type]
    if not needed <= set(table) <= set(types):
        expected, got = ", ".join(sorted(types)), ", ".join(sorted(table))
        raise InvalidDataError(f"{where}: expected the keys {expected}; got {got}")
    return kind(**{key: _value(f"{where}: {key}", value, types[key]) for key, value in table.items()})


def entries(where: str, tables: Iterable[dict[str, Any]], kind: type[Entry]) -> tuple[Entry, ...]:
    """Read a list of tables; raises as `entry`."""
    return tuple(entry(f"{where} {number}", table, kind) for number, table in enumerate(tables, 1))


def among(where: str, values: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that do not exist.

    Raises:
        InvalidDataError: One of `values` is not in `known`.
    """
    known = list(known)
    if unknown := [value for value in values if value not in known]:
        raise InvalidDataError(f"{where}: got {', '.join(unknown)}; known: {', '.join(known)}")


def _value(where: str, value: Any, kind: str) -> Any:
    if kind in {"int", "float"}:
        number = int if kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, number) or value < 0:
            raise InvalidDataError(f"{where}: got {value!r}; expected {kind} of at least 0")
        return value
    if kind == "str":
        if not (isinstance(value, str) and value):
            raise InvalidDataError(f"{where}: got {value!r}; expected a text, not empty")
        return value
    if not (isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)):
        raise InvalidDataError(f"{where}: got {value!r}; expected a list of texts, not empty")
    return tuple(value)
