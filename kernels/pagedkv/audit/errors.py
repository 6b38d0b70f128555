"""Errors of the audit, and the exit status that each ends with."""

from __future__ import annotations

from pagedkv.errors import CommandError, Exit


class AuditError(CommandError):
    """A reason to stop before or during the audit."""


class NothingSelectedError(AuditError):
    """The selection leaves no case: an audit of nothing is not a pass."""

    exit_status = Exit.NOTHING_COMPILED


class CannotRunHereError(AuditError):
    """This machine's Triton, vLLM or settings cannot do the work."""

    exit_status = Exit.CANNOT_RUN_HERE


class InvalidDataError(AuditError):
    """`budgets.toml` or `declared.toml` cannot be read, or names something that does not exist."""


class UnreadableCodeObjectError(AuditError):
    """A code object is not the ELF file, or has not the metadata, that the AMD compiler writes."""


class LdsExceededError(AuditError):
    """A kernel wants more LDS than a workgroup may have; raised before the expensive half of the compilation.

    Attributes:
        kernel: Name of the Triton function.
        lds_bytes: What it wants.
        limit: What the arch has.
    """

    def __init__(self, kernel: str, lds_bytes: int, limit: int) -> None:
        self.kernel, self.lds_bytes, self.limit = kernel, lds_bytes, limit
        super().__init__(f"{kernel} wants {lds_bytes} B of LDS, the arch has {limit} B per workgroup")

    def __reduce__(self) -> tuple[type[LdsExceededError], tuple[str, int, int]]:
        return type(self), (self.kernel, self.lds_bytes, self.limit)  # it crosses a process boundary
