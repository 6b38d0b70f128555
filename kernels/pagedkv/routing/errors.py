"""Mistakes that routing can meet, one class each, and the exit status of the command that meets them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .router import Rejection


class Exit(enum.IntEnum):
    """Exit status of `python -m pagedkv.routing`; the numbers are those of the hilgate command."""

    PASS = 0
    FAIL = 1
    MISUSE = 2
    INVALID_FILE = 3


class RoutingError(ValueError):
    """A reason why there is no route. Subclasses fix the exit status."""

    exit_status: ClassVar[Exit] = Exit.FAIL


class RequestError(RoutingError):
    """A field of a request has a value that no attention layer has, or contradicts another field.

    Attributes:
        field: Its name.
        got: Its value.
        expected: What it may be.
        remedy: What it contradicts, or what to do; may be empty.
    """

    exit_status = Exit.MISUSE

    def __init__(self, field: str, *, got: object, expected: str, remedy: str = "") -> None:
        self.field, self.got, self.expected, self.remedy = field, got, expected, remedy
        super().__init__(f"{field}: got {got!r}; expected {expected}." + (f" {remedy}" if remedy else ""))


class MisuseError(RoutingError):
    """An option of the command contradicts another one or the model."""

    exit_status = Exit.MISUSE


class CandidateError(RoutingError):
    """The data about a kernel lacks a limit or a source, or says something that cannot be read."""

    exit_status = Exit.INVALID_FILE


class ConfigError(RoutingError):
    """A config.json is unreadable, or does not say what its attention layers are."""

    exit_status = Exit.INVALID_FILE


class LayoutConflictError(RoutingError):
    """A route would write and read one cache by two layouts."""

    def __init__(self, task: str, kernel: str, *, layout: str, takes: str) -> None:
        super().__init__(
            f"{task}: {kernel} takes {takes}, and the cache of this route is {layout}. Writer and readers of a cache "
            "must all serve its one layout."
        )


class NoKernelError(RoutingError):
    """No kernel does one of the tasks of a layer.

    Attributes:
        task: `decode`, `prefill`, `write` or `gather`.
        rejected: Every kernel that was looked at, with what it lacks.
        missing: Features that none of them serves, whatever else is asked.
    """

    def __init__(self, task: str, rejected: tuple[Rejection, ...]) -> None:
        self.task, self.rejected = task, rejected
        lacks = [{mismatch.feature for mismatch in rejection.mismatches} for rejection in rejected]
        self.missing = tuple(sorted(set.intersection(*lacks))) if lacks else ()
        if not rejected:
            said = "no provider has one. Add a provider."
        elif self.missing:
            said = f"none serves {', '.join(self.missing)}. Change that of the layer, or add a provider."
        else:
            said = "each lacks something else. Change one feature below, or add a provider."
        lines = "".join(f"\n  {rejection}" for rejection in rejected)
        super().__init__(f"{task}: no kernel serves this layer: {said}{lines}")
