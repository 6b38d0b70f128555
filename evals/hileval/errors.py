# SPDX-License-Identifier: Apache-2.0
"""The error of the tools that work without hilgate: what is wrong, where, and what to do."""

from __future__ import annotations


class RunsError(ValueError):
    """Stored runs, or what is asked of them, cannot be judged; `where` and `remedy` may be empty."""

    exit_status = 3

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where, remedy)

    def __str__(self) -> str:
        what, where, remedy = self.args
        return "\n".join([what, *[f"  where: {where}"] * bool(where), *[f"  to do: {remedy}"] * bool(remedy)])
