"""Exit statuses and the errors that carry them: one class per mistake, each saying what, where and what to do."""

from __future__ import annotations

import enum
from typing import ClassVar


class Exit(enum.IntEnum):
    """What a finished `hilgate` command tells its caller (also printed by `hilgate --help`)."""

    PASS = 0
    FAIL = 1
    MISUSE = 2
    INVALID_DECLARATION = 3
    NOTHING_RAN = 4
    CANNOT_RUN_HERE = 5
    INCONCLUSIVE = 6
    BUG = 70
    SICK_NODE = 75
    INTERRUPTED = 130


EXIT_MEANINGS: dict[Exit, str] = {
    Exit.PASS: "pass",
    Exit.FAIL: "fail",
    Exit.MISUSE: "misuse of the command line",
    Exit.INVALID_DECLARATION: "a declaration (areas, agents, gates) or a record is invalid",
    Exit.NOTHING_RAN: "nothing selected, or something required did not run",
    Exit.CANNOT_RUN_HERE: "this environment cannot run it (no GPU, no image, missing package)",
    Exit.INCONCLUSIVE: "inconclusive",
    Exit.BUG: "a bug in hilgate",
    Exit.SICK_NODE: "this node is unfit: another may do (EX_TEMPFAIL of sysexits.h)",
    Exit.INTERRUPTED: "interrupted (finished results are kept; continue with --resume)",
}
"""One line per status, in the words of the design."""


class HilgateError(Exception):
    """A mistake with a place and a remedy. Subclasses fix the exit status and the headline.

    Attributes:
        what: One sentence: what is wrong.
        where: File with line, key, or command; empty when there is no place.
        remedy: One sentence: what to do next.
    """

    exit_status: ClassVar[Exit] = Exit.BUG

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.remedy:
            parts.append(f"  to do: {self.remedy}")
        return "\n".join(parts)


class MisuseError(HilgateError):
    """An option or argument that names something that does not exist or contradicts another."""

    exit_status = Exit.MISUSE


class DeclarationError(HilgateError):
    """A YAML file under ci/ or evals/ is unreadable, has an unknown key or contradicts another."""

    exit_status = Exit.INVALID_DECLARATION


class RecordsError(HilgateError):
    """A plan, a results file or a step's evidence is missing, truncated or not what its schema says."""

    exit_status = Exit.INVALID_DECLARATION


class NothingSelectedError(HilgateError):
    """The selection is empty: a gate over nothing is not a pass."""

    exit_status = Exit.NOTHING_RAN


class CannotRunHereError(HilgateError):
    """This machine lacks what the step needs."""

    exit_status = Exit.CANNOT_RUN_HERE


class RunInterruptedError(HilgateError):
    """Ctrl-C or SIGTERM while steps were running."""

    exit_status = Exit.INTERRUPTED
