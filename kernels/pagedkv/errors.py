# SPDX-License-Identifier: Apache-2.0
"""The exception of a wrong argument: which argument, what was got, what was expected, what to do."""

from __future__ import annotations

import argparse
import enum
import sys
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal[
    "alias",  # an output shares its memory with an input
    "block table",  # a block id names no block of the cache (checked with debug=True)
    "decay",  # a decay overflows or is NaN (checked with debug=True)
    "device",  # the tensors do not all lie on the device that runs the kernels
    "drafts",  # more drafts than there is room for, or no room at all
    "dtype",
    "head ratio",  # the query heads are not a multiple of the KV heads
    "head size",
    "length",  # a sequence or query length contradicts the bound that the caller gave (checked with debug=True)
    "option",
    "scale",  # the scales or the format of a quantised cache
    "shape",
    "slot",  # a slot names no place in the cache, or two tokens name the same one (checked with debug=True)
    "split",
    "stride",  # the last dimension is not dense
    "tables",  # the tables of MLA decode were allocated for another step
    "window",
]
"""Kinds of faults of an argument."""


class ArgumentError(ValueError):
    """An argument of a kernel launcher is not what the operation takes."""

    def __init__(self, kind: Kind, name: str, *, got: object, expected: object, remedy: str) -> None:
        self.kind = kind
        self.name = name
        super().__init__(f"{name}: got {got}; expected {expected}. {remedy}")


class Exit(enum.IntEnum):
    """Exit status of the commands of this package; the numbers are those of the hilgate command."""

    PASS = 0
    FAIL = 1
    MISUSE = 2
    INVALID_FILE = 3
    NOTHING_COMPILED = 4
    CANNOT_RUN_HERE = 5
    INCONCLUSIVE = 6


class CommandError(ValueError):
    """Why a command of this package stops: what is wrong, where, what to do. Subclasses fix its exit status."""

    exit_status: ClassVar[Exit] = Exit.FAIL

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        lines = (what, f"  where: {where}" if where else "", f"  to do: {remedy}" if remedy else "")
        super().__init__("\n".join(filter(None, lines)))


class MisuseError(CommandError):
    """An option names something that does not exist, or contradicts another one."""

    exit_status = Exit.MISUSE


class NothingSelectedError(CommandError):
    """The selection leaves no case: judging nothing is not a pass."""

    exit_status = Exit.NOTHING_COMPILED


class CannotRunHereError(CommandError):
    """This machine's Triton, vLLM or settings cannot do the work."""

    exit_status = Exit.CANNOT_RUN_HERE


class InvalidFileError(CommandError):
    """A file of data, or a model's config.json, cannot be read, or does not say what it must."""

    exit_status = Exit.INVALID_FILE


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are told as hilgate tells its own: what, where, what to do; without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with the status of misuse."""
        self.exit(Exit.MISUSE, f"error: {message}\n  where: {self.prog}\n  to do: {self.prog} --help\n")


def run_command(run: Callable[[], Exit]) -> int:
    """Return the exit status of a command; what it raises as `CommandError` is a line on standard error."""
    try:
        return int(run())
    except CommandError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_status)
