"""Compiler crashes that are expected, as data."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.audit.errors import AuditError
from pagedkv.audit.machine import ARCHES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .judge import Compilation
    from .kernel import Kernel

FILE = Path(__file__).with_name("declared.toml")

EVERY = "every"


class InvalidDeclarationError(AuditError):
    """`declared.toml` is not TOML, lacks a key, or names something that does not exist."""


@dataclass(frozen=True)
class Declared:
    """One `[[crash]]`."""

    kernel: str
    """`Kernel.id`."""
    triton: str
    arch: tuple[str, ...]
    configurations: tuple[str, ...]
    """Names, or `EVERY` alone."""
    says: str
    """Regular expression."""
    why: str

    def concerns(self, done: Compilation, triton: str) -> bool:
        """Whether this is the declaration of that compilation by that version of Triton."""
        return (
            self.kernel == done.kernel.id
            and self.triton == triton
            and done.arch in self.arch
            and (self.configurations == (EVERY,) or done.configuration in self.configurations)
        )

    def matches(self, words: str) -> bool:
        """Whether the compiler crashed as declared."""
        return re.search(self.says, words, re.DOTALL) is not None


def load_declared(kernels: Iterable[Kernel], path: Path = FILE) -> tuple[Declared, ...]:
    """Read the declarations.

    Args:
        kernels: All that exist, so that a declaration of none of them is noticed.
        path: The file.

    Raises:
        InvalidDeclarationError: See the class.
    """
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InvalidDeclarationError(f"{path.name} is not TOML: {error}") from error
    if set(data) - {"crash"}:
        raise InvalidDeclarationError(f"{path.name} holds [[crash]] tables only; got {', '.join(sorted(data))}")
    known = {kernel.id: kernel for kernel in kernels}
    return tuple(
        _crash(f"{path.name}, [[crash]] {n}", table, known) for n, table in enumerate(data.get("crash", []), 1)
    )


def _crash(where: str, table: dict[str, Any], known: dict[str, Kernel]) -> Declared:
    keys = {field.name for field in fields(Declared)}
    if set(table) != keys:
        raise InvalidDeclarationError(
            f"{where}: expected exactly {', '.join(sorted(keys))}; got {', '.join(sorted(table))}"
        )
    configurations = table["configurations"]
    configurations = (EVERY,) if configurations == EVERY else configurations
    if not all(isinstance(table[key], str) and table[key] for key in ("kernel", "triton", "says", "why")):
        raise InvalidDeclarationError(f"{where}: kernel, triton, says and why are texts that say something")
    if table["kernel"] not in known:
        raise InvalidDeclarationError(f"{where}: no kernel {table['kernel']}; known: {', '.join(sorted(known))}")
    named = (*known[table["kernel"]].configurations, EVERY)
    for key, values, exist in (("arch", table["arch"], tuple(ARCHES)), ("configurations", configurations, named)):
        if isinstance(values, str) or not values or (unknown := [value for value in values if value not in exist]):
            got = values if isinstance(values, str) or not values else unknown
            raise InvalidDeclarationError(f"{where}: {key} has {got!r}; known: {', '.join(exist)}")
    try:
        re.compile(table["says"])
    except re.error as error:
        raise InvalidDeclarationError(f"{where}: says is no regular expression: {error}") from error
    return Declared(**(table | {"arch": tuple(table["arch"]), "configurations": tuple(configurations)}))
