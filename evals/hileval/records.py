"""What an evaluation leaves behind: answers, the identity of what answered, and the stored baseline."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from hileval.broken import Flag
from hilgate.errors import RecordsError
from hilgate.model import Environment, Key, Noun

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Sha = str
"""64 hex digits."""


class DuplicateQuestionError(RecordsError):
    """A question occurs twice: it would count twice, and pairing would be ambiguous."""


class BaselineError(RecordsError):
    """The baseline is missing, truncated, or not what its schema says."""


class Identity(Noun):
    """What must be equal for two runs to be comparable. Engine, kernels and hardware are not: they are under test."""

    model: str
    """Path or name as declared."""
    weights: Sha
    """sha256 over the weight files and config.json."""
    tokenizer: Sha
    """sha256 over tokenizer.json, tokenizer_config.json and the chat template."""
    task: Sha
    """sha256 of the resolved task configuration without machine paths."""
    num_fewshot: int
    generation: str
    """Canonical JSON of the generation arguments lm-eval passes (until, temperature, max_gen_toks ...)."""
    lm_eval: str
    """Version: prompts and extraction are its."""

    def differences(self, other: Identity) -> list[str]:
        """`field: theirs -> ours` for each field that differs."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [
            f"{field}: {theirs[field]!s:.60} -> {mine[field]!s:.60}" for field in mine if mine[field] != theirs[field]
        ]


class Sample(Noun):
    """One answered question, both filters."""

    doc_id: int = Field(ge=0)
    doc_hash: Sha
    prompt_hash: Sha
    question: str
    target: str
    """The final number of the reference answer."""
    text: str
    """What the model wrote."""
    finish_reason: str | None
    n_tokens: int | None = Field(ge=0)
    non_finite: int = Field(ge=0)
    """Generated tokens whose log-probability was NaN or infinite."""
    strict: str
    """What the strict filter (`#### N`) extracted; `[invalid]` where it found nothing."""
    flexible: str
    """What the flexible filter (last number) extracted."""
    strict_correct: bool
    flexible_correct: bool
    flags: tuple[Flag, ...]


class Run(Noun):
    """One evaluation: who answered, how, and every answer."""

    identity: Identity
    samples: tuple[Sample, ...] = Field(min_length=1)
    seconds: float = Field(ge=0)

    @model_validator(mode="after")
    def _each_question_once(self) -> Run:
        refuse_duplicates([sample.doc_hash for sample in self.samples], "the evaluated task")
        return self

    @property
    def strict_correct(self) -> int:
        """Questions right under the gated filter."""
        return sum(sample.strict_correct for sample in self.samples)


class StoredAnswer(Noun):
    """One question of a baseline: enough to pair, to compare and to see what changed."""

    doc_hash: Sha
    prompt_hash: Sha
    text: str
    finish_reason: str | None
    n_tokens: int | None
    strict_correct: bool
    flexible_correct: bool
    flags: tuple[Flag, ...]


class Baseline(Noun):
    """`evals/baselines/*.json`: per-question outcomes of a trusted run, and what it was a run of."""

    schema_version: Literal[1] = 1
    gate: Key
    recorded: dt.date
    reason: str = Field(min_length=1)
    """Why this baseline was (re)recorded."""
    engine: str
    """e.g. `vllm 0.32.0`."""
    attention_backend: str
    """Which attention served it."""
    environment: Environment
    identity: Identity
    n: int = Field(gt=0)
    answers: tuple[StoredAnswer, ...]

    @model_validator(mode="after")
    def _complete(self) -> Baseline:
        if self.n != len(self.answers):
            raise ValueError(f"says n={self.n} but holds {len(self.answers)} answers: lines were lost")
        refuse_duplicates([answer.doc_hash for answer in self.answers], f"baseline of {self.gate}")
        return self

    def write(self, path: Path) -> None:
        """Write as JSON, one answer per line so that a diff shows which questions changed."""
        head = self.model_dump(mode="json", exclude={"answers"})
        answers = ",\n  ".join(json.dumps(answer.model_dump(mode="json")) for answer in self.answers)
        text = json.dumps(head, indent=1)[:-2] + f',\n "answers": [\n  {answers}\n ]\n}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Read and check a baseline.

        Raises:
            BaselineError: missing, cut short, of another schema, or self-contradictory.
        """
        remedy = "restore it from git, or record it anew: python -m hileval baseline record <gate> --reason ..."
        if not path.is_file():
            raise BaselineError("no baseline", where=str(path), remedy=remedy)
        return _parse(cls, path.read_text(encoding="utf-8"), BaselineError, where=str(path), remedy=remedy)


_Model = TypeVar("_Model", bound=Noun)


def _parse(model: type[_Model], text: str, error: type[RecordsError], *, where: str, remedy: str) -> _Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        more = f" (and {invalid.error_count() - 1} more)" if invalid.error_count() > 1 else ""
        raise error(
            f"{model.__name__.lower()} is not valid: {place + ': ' if place else ''}{first['msg']}{more}",
            where=where,
            remedy=remedy,
        ) from invalid


def refuse_duplicates(hashes: Sequence[str], where: str) -> None:
    """Raise `DuplicateQuestionError` if a question hash occurs twice."""
    if len(set(hashes)) != len(hashes):
        twice = next(value for i, value in enumerate(hashes) if value in hashes[:i])
        raise DuplicateQuestionError(
            f"question {twice[:12]} occurs more than once among {len(hashes)}",
            where=where,
            remedy="remove the duplicate from the data; paired statistics need each question once",
        )
