"""Errors of routing: a request, a file or a layer that no route can be made of, and why kernels were rejected."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import CommandError, Exit


class RequestError(CommandError):
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


class LayoutConflictError(CommandError):
    """A route would write and read one cache by two layouts."""

    def __init__(self, task: str, kernel: str, *, layout: str, takes: str) -> None:
        super().__init__(
            f"{task}: {kernel} takes {takes}, and the cache of this route is {layout}. Writer and readers of a cache "
            "must all serve its one layout."
        )


@dataclass(frozen=True)
class Mismatch:
    """One feature that a kernel does not serve."""

    feature: str
    asked: str
    takes: str
    source: str

    def __str__(self) -> str:
        return f"{self.asked}, takes {self.takes} ({self.source})"


@dataclass(frozen=True)
class Rejection:
    """A kernel that does the task and cannot serve the layer."""

    kernel: str
    mismatches: tuple[Mismatch, ...]

    def __str__(self) -> str:
        more = len(self.mismatches) - 1
        return f"{self.kernel}: {self.mismatches[0]}" + (f"; and {more} more" if more else "")


class NoKernelError(CommandError):
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
            summary = "no provider has one. Add a provider."
        elif self.missing:
            summary = f"none serves {', '.join(self.missing)}. Change that of the layer, or add a provider."
        else:
            summary = "each lacks something else. Change one feature below, or add a provider."
        lines = "".join(f"\n  {rejection}" for rejection in rejected)
        super().__init__(f"{task}: no kernel serves this layer: {summary}{lines}")
