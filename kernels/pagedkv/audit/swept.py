# SPDX-License-Identifier: Apache-2.0
"""What was swept of the AMD archs: shapes, candidates, and the score of each (`swept.jsonl`).

A shape is what a `[[decode.where]]` or `[[prefill.where]]` of tuning data can tell apart. `behind` says how far what is
launched today is behind the best that was found for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.arch import NEVER, next_power_of_two
from pagedkv.configurations import CONFIGURATIONS
from pagedkv.errors import InvalidFileError
from pagedkv.launch import Where
from pagedkv.layout import packing_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FILE = Path(__file__).with_name("swept.jsonl")
FEWEST_CHANNELS = 64
"""Of a head; smaller ones are as those."""
FEW_ROWS = 32
"""`few_rows` of the AMD archs: fewer are a program of their own and not swept."""


@dataclass(frozen=True)
class Shape:
    """Layers that one rule of tuning data is for, with queries of two bytes."""

    phase: str
    cache_bytes: int
    packing: str
    channels: int
    """Of a head, rounded up to a power of two."""

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))

    def candidates(self) -> list[Candidate]:
        """What is compiled. A wave has at least 16 rows of its own, or it would compute what another does."""
        if self.phase == "decode":
            return [Candidate(16, *each) for each in product((16, 32, 64), (1,), (1, 2), (0, 2))]
        sizes = ((64, 4), (128, 8), (128, 4))
        pipelined = [
            Candidate(rows, tile, waves, 2, eu) for (rows, waves), tile, eu in product(sizes, (32, 64), (0, 2))
        ]
        return pipelined + [Candidate(rows, tile, waves, 1, 0) for (rows, waves), tile in product(sizes, (32, 64))]


@dataclass(frozen=True)
class Candidate:
    """A launch: as in `pagedkv.launch.Where`."""

    rows: int
    tokens: int
    waves: int
    stages: int
    waves_per_eu: int

    def where(self, shape: Shape, because: str) -> Where:
        """The rule that launches it."""
        layer = asdict(shape)
        del layer["phase"]
        return Where(because, **layer, **asdict(self))

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


@dataclass(frozen=True)
class Swept:
    """What was found of one shape on one arch."""

    arch: str
    triton: str
    date: str
    shape: Shape
    cases: tuple[str, ...]
    """Of the audit."""
    scores: Mapping[Candidate, float | None]
    """Useful FLOP of a SIMD in a cycle (`throughput`); None of what does not fit, spills, or is over a
    budget of its loop."""

    @property
    def best(self) -> Candidate | None:
        """The candidate of the highest score; None where nothing fits."""
        good = {candidate: score for candidate, score in self.scores.items() if score is not None}
        return max(good, key=good.__getitem__) if good else None

    def summary(self) -> str:
        """One line for a person."""
        ranked = sorted((s, str(c)) for c, s in self.scores.items() if s is not None)[::-1]
        best = ", ".join(f"{name} {score:g}" for score, name in ranked[:3]) or "nothing fits"
        return f"{self.arch} {self.shape}: {best} ({len(ranked)} of {len(self.scores)})"

    def rule(self) -> str:
        """The best as a rule of tuning data, with its evidence; empty where nothing fits."""
        best = self.best
        if best is None:
            return ""
        following = max((score for one, score in self.scores.items() if score is not None and one != best), default=0)
        because = (
            f"sweep of {self.date}, Triton {self.triton}: {self.scores[best]:g} FLOP a cycle, the next of "
            f"{len(self.scores)} launches {following:g}"
        )
        where = {name: each for name, each in asdict(best.where(self.shape, because)).items() if each not in (0, NEVER)}
        if self.shape.phase == "prefill":
            where["needed_at_least"] = FEW_ROWS + 1
        lines = [f"{name} = {json.dumps(each)}" for name, each in where.items() if name != "block_at_least"]
        return "\n".join((f"[[{self.shape.phase}.where]]", *lines, ""))

    def behind(self, launched: Candidate) -> float:
        """How far a launch is behind the best, as a share; 1 for one that was not swept or must not be launched."""
        score, best = self.scores.get(launched), self.best
        if score is None or best is None:
            return 1.0
        return 1.0 - score / (self.scores[best] or score)


SMALL = {Shape("decode", 2, "rows", 128): ("attention-decode-bfloat16-q32kv8-d128-bs544-nhd-small",)}
"""Cases of a cache below 2 GiB, whose loops are others."""


def shapes() -> dict[Shape, list[str]]:
    """What is swept, and the promised cases of it: plain ones, of each at most two head sizes."""
    found: dict[Shape, dict[int, str]] = {}
    for each in CONFIGURATIONS:
        special = each.window or each.softcap or each.alibi or each.sinks or each.lse or each.splits
        if each.op != "attention" or each.phase == "extend" or each.dtype == "float32" or special or not each.causal:
            continue
        channels = next_power_of_two(each.head_size)
        if channels < FEWEST_CHANNELS or each.batch_invariant or packing_of(each.layout) == "native":
            continue
        shape = Shape(each.phase, 1 if each.quantised else 2, packing_of(each.layout), channels)
        sizes = found.setdefault(shape, {})
        if len(sizes) < 2:
            sizes.setdefault(each.head_size, each.id)
    return {shape: [*sizes.values(), *SMALL.get(shape, ())] for shape, sizes in found.items()}


def read_swept(path: Path = FILE) -> list[Swept]:
    """Read what was found.

    Raises:
        InvalidFileError: A line is not what `write_swept` writes.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        try:
            data = json.loads(line)
            shape, cases = Shape(**data.pop("shape")), tuple(data.pop("cases"))
            scores = {Candidate(*map(int, name.split("-"))): score for name, score in data.pop("scores").items()}
            found.append(Swept(**data, shape=shape, cases=cases, scores=scores))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidFileError(f"{path.name}:{number}: {error}\n  to do: sweep it again, with --record") from error
    return found


def write_swept(found: Iterable[Swept], path: Path = FILE) -> None:
    """Write what was found, a line for each arch and shape."""
    lines = [
        json.dumps(
            {"arch": each.arch, "triton": each.triton, "date": each.date, "shape": asdict(each.shape)}
            | {"cases": each.cases, "scores": {str(one): score for one, score in each.scores.items()}}
        )
        for each in sorted(found, key=lambda each: (each.arch, astuple(each.shape)))
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
