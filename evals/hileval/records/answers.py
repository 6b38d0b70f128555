# SPDX-License-Identifier: Apache-2.0
"""Records of an evaluation: answers, signs of broken output in them, who answered, and the files that hold all this.

Broken output is counted apart from wrong answers: gross cases need no statistics, and it names the cause. A wrong
stride, a NaN or a stale block seldom makes a model reason worse; it makes it repeat, stop or babble. Real cases that
looked like accuracy loss: vllm#51011 (74 % instead of 97 %, with 285 of 1319 answers degenerate), vllm#39192 (0.4 %),
vllm#14848 (0 %).

`hileval.ask` writes the files into the output folder of a gate, and `hileval.gates.judge` reads them.
"""

from __future__ import annotations

import enum
import gzip
import itertools
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from hileval.distances import Rows
from hilgate.errors import RecordsError
from hilgate.model import Scalar, StrictModel
from hilgate.model.record import Check, Environment, json_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hileval.statistics import Outcomes

SAMPLES_FILE = "samples.jsonl"
"""Every answer of the gate's own attention, one a line: run after run, in the order of asking."""
ASKED_FILE = "asked.json"
"""Source of these answers (`Asked`)."""
BESIDE_FILE = "beside.json"
"""The run of another attention that stands for a baseline (`RecordedRun`)."""
SIDE_FILE = "{}.json.gz"
"""Answers of one engine of a drift gate (`Side`)."""
FLIPS_FILE = "flips.md"
"""Stored and new answers of every question that flipped, in two columns."""
REMEDY = "name the folder that `gate` wrote"

SideName = Literal["ours", "peer", "second"]
Sha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""64 hex digits."""
COMMIT = r"^([0-9a-f]{40})?$"
"""A revision of a hub model, or none: a branch or a tag would be another model tomorrow."""
Filter = Literal["strict", "flexible"]
"""Name of one of the two scores of an answer."""


INVALID = "[invalid]"
"""Result of a filter that finds nothing."""


class ScoreError(RecordsError):
    """A result lacks a filter, a question or an answer, or holds a score that is neither 0 nor 1."""


class DuplicateQuestionError(RecordsError):
    """A question occurs twice: it would count twice, and pairing would be ambiguous."""


class Identity(StrictModel):
    """What must be equal for two runs to be comparable. Engine, kernels and hardware are not: they are under test."""

    model: str
    """Path or name as declared."""
    revision: str = Field(default="", pattern=COMMIT)
    """Commit of a hub model; empty where the weights are in this repository."""
    weights: Sha
    """sha256 over the weight files and config.json (their format and quantization included)."""
    tokenizer: Sha
    """sha256 over tokenizer.json, tokenizer_config.json, generation_config.json and whatever else the model brings."""
    chat_template: Sha
    """sha256 of the chat template, or of its absence."""
    protocol: Literal["completions", "chat"] = "completions"
    """How questions are asked. One model answers 97 % in one and 91 to 93 % in the other (vllm#57134)."""
    task: Sha
    """sha256 of the resolved task configuration without machine paths."""
    num_fewshot: int
    fewshot: str = "first_n"
    """How examples are chosen; a sampler that walks a random stream gives a subset other prompts than the whole."""
    generation: str
    """Canonical JSON of the generation arguments lm-eval passes (until, temperature, max_gen_toks ...)."""
    lm_eval: str
    """Version: prompts and extraction are its."""

    def differences(self, other: Identity) -> list[str]:
        """`field: theirs -> ours` for each field that differs."""
        return _differences(self.model_dump(), other.model_dump())


class Setting(StrictModel):
    """Engine and attention of a run. They may differ between compared runs, and the report says how."""

    engine: str
    """Name and version, e.g. `vllm 0.32.0`."""
    attention_backend: str
    """Backend that served attention, as the workers report it."""
    arguments: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments of the engine: dtype, kv_cache_dtype, layout flags, tensor_parallel_size, max_num_seqs, graphs ..."""

    def differences(self, other: Setting) -> list[str]:
        """`field: theirs -> ours` for each field that differs; arguments one by one."""
        mine, theirs = self.model_dump(), other.model_dump()
        flat = [fields | fields.pop("arguments") for fields in (mine, theirs)]
        return _differences(*flat)


def _differences(mine: dict[str, Scalar], theirs: dict[str, Scalar]) -> list[str]:
    names = dict.fromkeys([*theirs, *mine])
    return [
        f"{name}: {theirs.get(name, 'unset')!s:.60} -> {mine.get(name, 'unset')!s:.60}"
        for name in names
        if mine.get(name) != theirs.get(name)
    ]


class Flag(enum.StrEnum):
    """Sign that an answer is broken, whatever its number."""

    EMPTY = "empty"
    REPEAT = "repeat"
    """At most 3 distinct characters in 12 or more (`!!!!` is the argmax over NaN logits where token 0 is `!`), or fewer
    than half of the 4-grams distinct in 24 or more words."""
    GARBAGE = "garbage"
    """U+FFFD, or under 80 % printable ASCII (English tasks only)."""
    NO_NUMBER = "no number"
    TRUNCATED = "truncated"
    """The engine stopped at the token limit, not at the end of the answer."""
    NON_FINITE = "non-finite"
    """A log-probability of a generated token was NaN or infinite."""


def flags_of(text: str, *, finish_reason: str | None, non_finite: int = 0) -> tuple[Flag, ...]:
    """Every flag that applies to one answer, in the order of `Flag`.

    Args:
        text: What the model wrote.
        finish_reason: `stop` or `length` as the engine reports it; None where an engine does not say.
        non_finite: How many generated tokens had a non-finite log-probability.
    """
    stripped = text.strip()
    applies = {
        Flag.EMPTY: not stripped,
        Flag.REPEAT: bool(stripped) and _repeats(stripped),
        Flag.GARBAGE: bool(stripped) and _garbage(stripped),
        Flag.NO_NUMBER: bool(stripped) and not re.search(r"\d", stripped),
        Flag.TRUNCATED: finish_reason == "length",
        Flag.NON_FINITE: non_finite > 0,
    }
    return tuple(flag for flag in Flag if applies[flag])


def _repeats(text: str) -> bool:
    if len(text) >= 12 and len(set(text)) <= 3:
        return True
    words = text.split()
    if len(words) < 24:
        return False
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(grams)) / len(grams) < 0.5


def _garbage(text: str) -> bool:
    if "\N{REPLACEMENT CHARACTER}" in text:
        return True
    printable = sum(" " <= character <= "~" or character in "\n\t" for character in text)
    return printable / len(text) < 0.8


class Sample(StrictModel):
    """One answered question, both filters."""

    doc_id: int = Field(ge=0)
    doc_hash: Sha
    prompt_hash: Sha
    question: str
    target: str
    """The final number of the reference answer; of a document its lines."""
    text: str
    """Text of the model."""
    finish_reason: str | None
    n_tokens: int | None = Field(ge=0)
    non_finite: int = Field(ge=0)
    """Generated tokens whose log-probability was NaN or infinite."""
    strict: str
    """Extract of the strict filter (`#### N`); `[invalid]` where it found nothing; the lines of a document."""
    flexible: str
    """Extract of the flexible filter (last number); the drawn line of a document (`hileval.ask.documents`)."""
    strict_correct: bool
    flexible_correct: bool
    lines: int = Field(default=0, ge=0)
    """Lines of a document; 0 where the question is no document."""
    lines_right: int = Field(default=0, ge=0)
    flags: tuple[Flag, ...]
    target_hash: str = ""
    """lm-eval's, of the whole reference answer; empty for a document."""
    generation: str = ""
    """JSON of the generation arguments that lm-eval passed; empty for a document."""

    def correct(self, which: Filter) -> bool:
        """Whether it is right under a filter."""
        return self.strict_correct if which == "strict" else self.flexible_correct


class Run(StrictModel):
    """One evaluation: who answered, how, and every answer."""

    identity: Identity
    samples: tuple[Sample, ...] = Field(min_length=1)
    seconds: float = Field(ge=0)

    @model_validator(mode="after")
    def _each_question_once(self) -> Run:
        refuse_duplicates([sample.doc_hash for sample in self.samples], "the evaluated task")
        refuse_duplicates([f"doc_id {sample.doc_id}" for sample in self.samples], "the evaluated task")
        return self

    def correct(self, which: Filter) -> int:
        """Questions right under a filter."""
        return sum(sample.correct(which) for sample in self.samples)


def refuse_duplicates(hashes: Sequence[str], where: str) -> None:
    """Raise `DuplicateQuestionError` if a question hash occurs twice."""
    if len(set(hashes)) != len(hashes):
        twice = next(value for i, value in enumerate(hashes) if value in hashes[:i])
        raise DuplicateQuestionError(
            f"question {twice[:12]} occurs more than once among {len(hashes)}",
            where=where,
            remedy="remove the duplicate from the data; paired statistics need each question once",
        )


class Heading(StrictModel):
    """Identifies answers: those under another heading were asked otherwise, or of something else."""

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
    """Source of the answers in `samples.jsonl`."""

    gate: str
    identity: Identity
    available: int
    """Number of questions in the task."""
    limit: int | None
    """Most questions that were to be asked; None for all of the rule's."""
    answers: tuple[int, ...]
    """Number of answers in each run."""
    seconds: tuple[float, ...]
    """Wall time of each run."""
    engine: str
    """Name and version."""
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
    """Answers of one engine of a drift gate."""

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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The answers of a gate, paired with its baseline.

    Attributes:
        ids: Questions of the plan, in the order of asking; each run holds answers to the first of them.
        runs: All but the last are complete.
        base: Stored outcomes [K, questions] of `ids`; None without a baseline.
    """

    ids: tuple[int, ...]
    runs: tuple[Run, ...]
    base: Outcomes | None

    @property
    def samples(self) -> list[Sample]:
        """Every answer."""
        return [sample for run in self.runs for sample in run.samples]

    @property
    def seconds(self) -> float:
        """Wall time of all runs."""
        return sum(run.seconds for run in self.runs)
