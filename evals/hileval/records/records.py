"""What an evaluation leaves behind: answers, and the identity of what answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from hileval.gates.judge import Flag
from hilgate.errors import RecordsError
from hilgate.model import Noun, Scalar

if TYPE_CHECKING:
    from collections.abc import Sequence

Sha = str
"""64 hex digits."""


class DuplicateQuestionError(RecordsError):
    """A question occurs twice: it would count twice, and pairing would be ambiguous."""


class Identity(Noun):
    """What must be equal for two runs to be comparable. Engine, kernels and hardware are not: they are under test."""

    model: str
    """Path or name as declared."""
    revision: str = ""
    """Commit of a hub model; empty where the weights are in this repository."""
    weights: Sha
    """sha256 over the weight files and config.json (their format and quantization included)."""
    tokenizer: Sha
    """sha256 over tokenizer.json and tokenizer_config.json."""
    chat_template: Sha
    """sha256 of the chat template, or of its absence."""
    protocol: Literal["completions", "chat"] = "completions"
    """The same model answers 97 % in one and 91 to 93 % in the other (vllm#57134)."""
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


class Setting(Noun):
    """What the comparison is about: it may differ, and the report says how."""

    engine: str
    """Name and version, e.g. `vllm 0.32.0`."""
    attention_backend: str
    """Who served attention, as the workers say."""
    arguments: dict[str, Scalar] = Field(default_factory=dict)
    """Of the engine: dtype, kv_cache_dtype, layout flags, tensor_parallel_size, max_num_seqs, graphs ..."""

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


class Sample(Noun):
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

    def correct(self, which: Literal["strict", "flexible"]) -> bool:
        """Whether it is right under a filter."""
        return self.strict_correct if which == "strict" else self.flexible_correct


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


def refuse_duplicates(hashes: Sequence[str], where: str) -> None:
    """Raise `DuplicateQuestionError` if a question hash occurs twice."""
    if len(set(hashes)) != len(hashes):
        twice = next(value for i, value in enumerate(hashes) if value in hashes[:i])
        raise DuplicateQuestionError(
            f"question {twice[:12]} occurs more than once among {len(hashes)}",
            where=where,
            remedy="remove the duplicate from the data; paired statistics need each question once",
        )
