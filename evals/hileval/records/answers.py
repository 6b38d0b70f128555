# SPDX-License-Identifier: Apache-2.0
"""Files that `hileval.ask` leaves and `hileval.gates.judge` reads: answers, and who gave them."""

from __future__ import annotations

import gzip
import itertools
import zlib
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hileval.distances import Rows
from hileval.records.records import Identity, Run, Sample, Setting
from hilgate.errors import RecordsError
from hilgate.model import Scalar, StrictModel
from hilgate.model.record import Check, Environment, json_lines

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES_FILE = "samples.jsonl"
"""Every answer of the gate's own attention, one a line: run after run, in the order of asking."""
ASKED_FILE = "asked.json"
"""How these answers were got (`Asked`)."""
BESIDE_FILE = "beside.json"
"""The run of another attention that stands for a baseline (`RecordedRun`)."""
SIDE_FILE = "{}.json.gz"
"""What one engine of a drift gate said (`Side`)."""
FLIPS_FILE = "flips.md"
"""Stored and new answers of every question that flipped, in two columns."""
REMEDY = "name the folder that `gate` wrote"

SideName = Literal["ours", "peer", "second"]


class Heading(StrictModel):
    """What was asked of whom: answers under another heading are not these answers."""

    gate: str
    """Name of the gate, and of the run where there are several."""
    identity: Identity
    engine: str
    attention_backend: str | None
    arguments: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments of the engine."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Switches of the engine."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages that an answer depends on."""
    code: str
    """sha256 of the kernels and of this package."""


class RecordedRun(StrictModel):
    """A complete run of a trusted attention: one of the K of a baseline, or the one that stands for it."""

    heading: Heading
    run: Run
    setting: Setting
    environment: Environment


class Asked(StrictModel):
    """How the answers in `samples.jsonl` were got."""

    gate: str
    identity: Identity
    available: int
    """How many questions the task holds."""
    limit: int | None
    """Only so many of the rule's questions were asked."""
    answers: tuple[int, ...]
    """Number of answers in each run."""
    seconds: tuple[float, ...]
    """Wall time of each run."""
    engine: str
    """Name and version; empty where an interrupted run had left every answer, so that none was started."""
    served: Check | None
    """Who served attention; None where nothing is required of it."""
    environment: Environment

    def write(self, folder: Path, samples: list[Sample]) -> None:
        """Write the answers, and then how they were got."""
        lines = [f"{sample.model_dump_json()}\n" for sample in samples]
        (folder / SAMPLES_FILE).write_text("".join(lines), encoding="utf-8")
        (folder / ASKED_FILE).write_text(f"{self.model_dump_json()}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> tuple[Asked, tuple[Run, ...]]:
        """Read what `write` wrote.

        Raises:
            RecordsError: It is missing or damaged, or holds a question twice in a run.
        """
        number, file, samples = 0, folder / ASKED_FILE, []
        try:
            asked = cls.model_validate_json(file.read_bytes())
            file = folder / SAMPLES_FILE
            for number, line in json_lines(file):  # noqa: B007 - the error names it
                samples.append(Sample.model_validate_json(line))
        except (OSError, ValueError) as error:
            raise RecordsError(
                f"not the answers of a gate: {type(error).__name__}: {str(error).splitlines()[0]}",
                where=f"{file}:{number}" if number else str(file),
                remedy=REMEDY,
            ) from error
        if len(samples) != sum(asked.answers) or not all(asked.answers) or not samples:
            what = f"{len(samples)} answers, where {sum(asked.answers)} were given"
            raise RecordsError(what, where=str(file), remedy="run the gate again")
        rest, runs = iter(samples), []
        for answers, seconds in zip(asked.answers, asked.seconds, strict=True):
            run = tuple(itertools.islice(rest, answers))
            runs.append(Run(identity=asked.identity, samples=run, seconds=seconds))
        return asked, tuple(runs)


class Side(StrictModel):
    """What one engine of a drift gate said."""

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
                remedy=REMEDY,
            ) from error
