"""Errors of the audit, and the exit status that each ends with."""

from __future__ import annotations

from pagedkv.errors import CommandError, Exit


class NothingSelectedError(CommandError):
    """The selection leaves no case: an audit of nothing is not a pass."""

    exit_status = Exit.NOTHING_COMPILED


class CannotRunHereError(CommandError):
    """This machine's Triton, vLLM or settings cannot do the work."""

    exit_status = Exit.CANNOT_RUN_HERE


class UnreadableCodeObjectError(CommandError):
    """A code object is not the ELF file, or has not the metadata, that the AMD compiler writes."""


class LdsExceededError(CommandError):
    """A kernel wants more LDS than a workgroup may have; raised before the expensive half of the compilation.

    Args:
        kernel: Name of the Triton function.
        lds_bytes: What it wants.
        limit: What the arch has.
    """

    def __init__(self, kernel: str, lds_bytes: int, limit: int) -> None:
        self.kernel, self.lds_bytes, self.limit = kernel, lds_bytes, limit
        super().__init__(kernel, lds_bytes, limit)  # as they are, because it is pickled on its way out of a child

    def __str__(self) -> str:
        return f"{self.kernel} wants {self.lds_bytes} B of LDS, the arch has {self.limit} B per workgroup"
