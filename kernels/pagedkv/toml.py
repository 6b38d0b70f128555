# SPDX-License-Identifier: Apache-2.0
"""Read TOML tables into dataclasses: every key known, every required one there, every value of its type."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pagedkv.errors import InvalidFileError

if TYPE_CHECKING:
    from collections.abc import Iterable

Entry = TypeVar("Entry")


def parse(where: str, text: str, tables: Iterable[str], *, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Read a file that holds some of these tables, every `needed` one among them, and nothing else.

    Raises:
        InvalidFileError: It is not TOML, holds another table, or lacks one.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidFileError(f"{where} is not TOML: {error}") from error
    among(f"{where}: tables", data, tables)
    needed = list(needed)
    if not set(needed) <= set(data):
        raise InvalidFileError(f"{where}: got the tables {', '.join(data)}; expected every one of {', '.join(needed)}")
    return data


def rows(where: str, value: object) -> list[dict[str, Any]]:
    """Return the tables of one name, each of which is headed by `[[name]]`.

    Raises:
        InvalidFileError: The name is another thing.
    """
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise InvalidFileError(f"{where}: got {value!r}; expected tables in double brackets")
    return value


def entry(where: str, table: object, kind: type[Entry], *, least: int = 0) -> Entry:
    """Read one table.

    Args:
        where: File and table, for messages.
        table: Its keys and values.
        kind: A dataclass of texts, lists of texts (tuples), integers and floats.
        least: Least value of a number.

    Raises:
        InvalidFileError: A key is unknown or missing, or a value is empty, too small or of another type.
    """
    every = fields(kind)  # type: ignore[arg-type]  # a dataclass
    types = {field.name: str(field.type) for field in every}
    needed = {field.name for field in every if field.default is field.default_factory is MISSING}
    if not isinstance(table, dict) or not needed <= set(table) <= set(types):
        got = ", ".join(sorted(table)) if isinstance(table, dict) else repr(table)
        raise InvalidFileError(f"{where}: expected the keys {', '.join(sorted(types))}; got {got}")
    return kind(**{key: _value(f"{where}: {key}", value, types[key], least) for key, value in table.items()})


def entries(where: str, tables: object, kind: type[Entry], *, least: int = 0) -> tuple[Entry, ...]:
    """Read a list of tables; arguments and errors are those of `rows` and `entry`."""
    numbered = enumerate(rows(where, tables), 1)
    return tuple(entry(f"{where} {number}", table, kind, least=least) for number, table in numbered)


def among(where: str, values: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that do not exist.

    Raises:
        InvalidFileError: One of `values` is not in `known`.
    """
    known = list(known)
    if unknown := [value for value in values if value not in known]:
        raise InvalidFileError(f"{where}: got {', '.join(unknown)}; known: {', '.join(known)}")


def _value(where: str, value: Any, kind: str, least: int) -> Any:
    if kind in {"int", "float"}:
        number = int if kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, number) or value < least:
            raise InvalidFileError(f"{where}: got {value!r}; expected {kind} of at least {least}")
        return value
    if kind == "str":
        if not (isinstance(value, str) and value):
            raise InvalidFileError(f"{where}: got {value!r}; expected a text, not empty")
        return value
    if not (isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)):
        raise InvalidFileError(f"{where}: got {value!r}; expected a list of texts, not empty")
    return tuple(value)
