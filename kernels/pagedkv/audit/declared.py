"""Known defects of a compiler as data (`declared.toml`): expected crashes and narrow loads.

Both kinds of entry are checked both ways: what is not declared fails, and so does a declaration that is no longer true.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv import toml
from pagedkv.errors import InvalidFileError

from .machine import LDS_GRANULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .cases import Case, LaunchConfiguration

FILE = Path(__file__).with_name("declared.toml")

EVERY = "every"


@dataclass(frozen=True)
class DeclaredCrash:
    """One `[[crash]]`: the compiler fails on configurations of a kernel."""

    kernel: str
    """`LaunchConfiguration.kernel`."""
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

    def crash(self, configuration: LaunchConfiguration, arch: str, triton: str) -> DeclaredCrash | None:
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
            InvalidFileError: One does not exist.
        """
        known: dict[str, list[str]] = {}
        for configuration in (case.configuration for case in cases if case.configuration):
            known.setdefault(configuration.kernel, [EVERY]).append(configuration.name)
        for each in self.crashes:
            toml.among(f"{FILE.name}: kernel", [each.kernel], sorted(known))
            toml.among(f"{FILE.name}, {each.kernel}: configurations", each.configurations, known[each.kernel])


def load_declared(path: Path = FILE) -> Declared:
    """Read the declarations.

    Raises:
        InvalidFileError: Not TOML, a key is missing, unknown or empty, an arch does not exist, or a regular expression
            cannot be compiled.
    """
    data = toml.parse(path.name, path.read_text(encoding="utf-8"), ("crash", "narrow"))
    crashes = toml.entries(f"{path.name}: crash", data.get("crash", []), DeclaredCrash)
    for each in crashes:
        toml.among(f"{path.name}, {each.kernel}: arch", each.arch, LDS_GRANULES)
        try:
            re.compile(each.says)
        except re.error as error:
            raise InvalidFileError(f"{path.name}, {each.kernel}: says is no regular expression: {error}") from error
    return Declared(crashes, toml.entries(f"{path.name}: narrow", data.get("narrow", []), DeclaredNarrow))
