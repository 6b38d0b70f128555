"""What a version of the compiler is known to do wrong, as data: `declared.toml`.

Both kinds of entry are checked both ways: what is not declared fails, and so does a declaration that is no longer true.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import InvalidDeclarationError
from .machine import COMPUTE_UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .cases import Case, Configuration

FILE = Path(__file__).with_name("declared.toml")

EVERY = "every"


@dataclass(frozen=True)
class DeclaredCrash:
    """One `[[crash]]`: the compiler fails on configurations of a kernel."""

    kernel: str
    """`Configuration.kernel`."""
    triton: str
    arch: tuple[str, ...]
    configurations: tuple[str, ...]
    """Names, or `EVERY` alone."""
    says: str
    """Regular expression found in what the compiler printed."""
    why: str

    def matches(self, message: str) -> bool:
        """Whether the compiler crashed as declared."""
        return re.search(self.says, message, re.DOTALL) is not None


@dataclass(frozen=True)
class DeclaredNarrow:
    """One `[[narrow]]`: the compiler reads rows of K or V in pieces of less than 16 bytes."""

    triton: str
    row: str
    """`Case.id`."""
    pointers: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Declared:
    """The whole file."""

    crashes: tuple[DeclaredCrash, ...] = ()
    narrow: tuple[DeclaredNarrow, ...] = ()

    def crash(self, configuration: Configuration, arch: str, triton: str) -> DeclaredCrash | None:
        """The declaration that concerns a configuration on an arch and a version of Triton."""
        for each in self.crashes:
            named = each.configurations == (EVERY,) or configuration.name in each.configurations
            if (each.kernel, each.triton) == (configuration.kernel, triton) and arch in each.arch and named:
                return each
        return None

    def narrow_pointers(self, row: str, triton: str) -> tuple[str, ...]:
        """Pointers of a row through which that version of Triton is known to load less than 16 bytes."""
        return tuple(p for each in self.narrow if (each.triton, each.row) == (triton, row) for p in each.pointers)

    def check_names(self, cases: Iterable[Case]) -> None:
        """Refuse a crash that is declared of a kernel or configuration that does not exist.

        Args:
            cases: All that have configurations.

        Raises:
            InvalidDeclarationError: One does not exist.
        """
        known: dict[str, list[str]] = {}
        for configuration in (case.configuration for case in cases if case.configuration):
            known.setdefault(configuration.kernel, []).append(configuration.name)
        for each in self.crashes:
            if each.kernel not in known:
                raise InvalidDeclarationError(
                    f"{FILE.name}: no kernel {each.kernel}; known: {', '.join(sorted(known))}"
                )
            _among(f"{FILE.name}, {each.kernel}: configurations", each.configurations, [*known[each.kernel], EVERY])


def load_declared(path: Path = FILE) -> Declared:
    """Read the declarations.

    Raises:
        InvalidDeclarationError: Not TOML, a key is missing, unknown or empty, an arch does not exist, or a regular
            expression cannot be compiled.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidDeclarationError(f"{path.name} is not TOML: {error}") from error
    if unknown := set(data) - {"crash", "narrow"}:
        raise InvalidDeclarationError(
            f"{path.name} holds [[crash]] and [[narrow]] tables only; got {', '.join(sorted(unknown))}"
        )
    crashes = _entries(f"{path.name}, [[crash]]", data.get("crash", []), DeclaredCrash)
    for number, each in enumerate(crashes, 1):
        where = f"{path.name}, [[crash]] {number}"
        _among(f"{where}: arch", each.arch, COMPUTE_UNITS)
        try:
            re.compile(each.says)
        except re.error as error:
            raise InvalidDeclarationError(f"{where}: says is no regular expression: {error}") from error
    return Declared(crashes, _entries(f"{path.name}, [[narrow]]", data.get("narrow", []), DeclaredNarrow))


Entry = TypeVar("Entry", DeclaredCrash, DeclaredNarrow)


def _entries(where: str, tables: list[dict[str, Any]], kind: type[Entry]) -> tuple[Entry, ...]:
    """One entry a table; every key of `kind` is there, a text or a list of texts as its type says, and not empty."""
    entries = []
    for number, table in enumerate(tables, 1):
        keys = {field.name: str(field.type) for field in fields(kind)}
        if set(table) != set(keys):
            raise InvalidDeclarationError(
                f"{where} {number}: expected exactly {', '.join(sorted(keys))}; got {', '.join(sorted(table))}"
            )
        values = {key: (EVERY,) if (key, value) == ("configurations", EVERY) else value for key, value in table.items()}
        for key, value in values.items():
            listed = keys[key].startswith("tuple")
            texts = value if listed and isinstance(value, list | tuple) else [] if listed else [value]
            if not texts or not all(isinstance(text, str) and text for text in texts):
                expected = "a list of texts" if listed else "a text"
                raise InvalidDeclarationError(
                    f"{where} {number}: {key} is {expected} that says something, got {value!r}"
                )
            values[key] = tuple(texts) if listed else value
        entries.append(kind(**values))
    return tuple(entries)


def _among(where: str, values: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    if unknown := [value for value in values if value not in known]:
        raise InvalidDeclarationError(f"{where} has {', '.join(unknown)}; known: {', '.join(known)}")
