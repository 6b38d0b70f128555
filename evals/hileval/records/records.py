# SPDX-License-Identifier: Apache-2.0
"""Records of an evaluation: answers, signs of broken output in them, and the identity of what answered.

Broken output is counted apart from wrong answers: gross cases need no statistics, and it names the cause. A wrong
stride, a NaN or a stale block seldom makes a model reason worse; it makes it repeat, stop or babble. Real cases that
looked like accuracy loss: vllm#51011 (74 % instead of 97 %, with 285 of 1319 answers degenerate), vllm#39192 (0.4 %),
vllm#14848 (0 %).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from hilgate.errors import RecordsError
from hilgate.model import Scalar, StrictModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.statistics import Outcomes

Sha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""64 hex digits."""
COMMIT = r"^([0-9a-f]{40})?$"
"""A revision of a hub model, or none: a branch or a tag would be another model tomorrow."""
Filter = Literal["strict", "flexible"]
"""Which of the two scores of an answer."""


INVALID = "[invalid]"
"""What a filter gives where it finds nothing."""


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
    """What the comparison is about: it may differ, and the report says how."""

    engine: str
    """Name and version, e.g. `vllm 0.32.0`."""
    attention_backend: str
    """Who served attention, as the workers say."""
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
    """What can be wrong with one answer before its number is looked at."""

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
    found = {
        Flag.EMPTY: not stripped,
        Flag.REPEAT: bool(stripped) and _repeats(stripped),
        Flag.GARBAGE: bool(stripped) and _garbage(stripped),
        Flag.NO_NUMBER: bool(stripped) and not re.search(r"\d", stripped),
        Flag.TRUNCATED: finish_reason == "length",
        Flag.NON_FINITE: non_finite > 0,
    }
    return tuple(flag for flag in Flag if found[flag])


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
    """What the model wrote."""
    finish_reason: str | None
    n_tokens: int | None = Field(ge=0)
    non_finite: int = Field(ge=0)
    """Generated tokens whose log-probability was NaN or infinite."""
    strict: str
    """What the strict filter (`#### N`) extracted; `[invalid]` where it found nothing. Of a document its lines."""
    flexible: str
    """What the flexible filter (last number) extracted. Of a document the drawn line (`hileval.ask.documents`)."""
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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was asked and answered.

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
