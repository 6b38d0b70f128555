# SPDX-License-Identifier: Apache-2.0
"""The answers of one engine in a drift gate, as they lie on disk."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hileval.distances import Rows
from hilgate.errors import RecordsError
from hilgate.model import StrictModel
from hilgate.model.record import Check

if TYPE_CHECKING:
    from pathlib import Path

SideName = Literal["ours", "peer", "second"]


class Side(StrictModel):
    """What one engine said."""

    name: str
    """Engine and version."""
    served: Check | None
    read: Rows
    """Distances after each token of each sequence but the first."""
    asked: list[list[int]]
    """Prompts of the sequences: the token ids that each begins with."""
    written: list[list[int]]
    """Token ids that the engine generated after each prompt."""
    wrote: Rows
    """Distributions from which the generated tokens were drawn."""
    read_again: dict[SideName, Rows] = Field(default_factory=dict)
    """Distances of the peer at the places of what each side wrote, itself included, where it is given all tokens at
    once."""
    read_alone: Rows = Field(default_factory=list)
    """`read` of the peer again, with each sequence alone, so that matrix products have another shape."""
    changed: Rows = Field(default_factory=list)
    """`read` of the peer again, after one block of each sequence was replaced."""

    def pack(self, file: Path) -> None:
        """Write the answers of a side, compressed."""
        file.write_bytes(gzip.compress(self.model_dump_json().encode(), mtime=0))

    @classmethod
    def unpack(cls, file: Path) -> Side:
        """Read the answers of a side.

        Raises:
            RecordsError: The file is missing, or is not what `pack` wrote.
        """
        try:
            return cls.model_validate_json(gzip.decompress(file.read_bytes()))
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise RecordsError(
                f"not the answers of a drift gate: {type(error).__name__}",
                where=str(file),
                remedy="name the folder that `gate` wrote",
            ) from error
