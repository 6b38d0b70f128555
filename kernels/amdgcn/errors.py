# SPDX-License-Identifier: Apache-2.0
"""What this package raises: text that it cannot read, instructions that it does not know, faults of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class UnreadableTextError(ValueError):
    """A line of AMDGCN text that the reader does not understand; nothing is skipped."""

    def __init__(self, number: int, line: str, why: str) -> None:
        super().__init__(f"line {number}: {why}: {line.strip()!r}\n  to do: teach it to kernels/amdgcn/text.py")


class UnknownInstructionError(NotImplementedError):
    """An instruction, or a modifier of one, whose meaning is not written down here."""

    def __init__(self, text: str, why: str = "no meaning is known") -> None:
        super().__init__(f"{text}: {why}\n  to do: write its meaning and an oracle for it (docs/reference/executor.md)")


class LaunchError(ValueError):
    """A launch, or a kernel's descriptor, asks for what the machine does not have."""


class ProgramFault(Exception):  # noqa: N818 - the program is at fault, not this package
    """A program did what no right program does: out of bounds, a race, a use of something undefined.

    Attributes:
        where: kernel, buffer, workgroup, wave, lane, instruction and line, as far as they are known.
    """

    def __init__(self, what: str, where: Mapping[str, object] | None = None) -> None:
        super().__init__(what)
        self.where = {name: value for name, value in (where or {}).items() if value not in {None, ""}}
