"""`evals/gates.yaml`: what is gated, with which model, task, engine and limits."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from hilgate.errors import DeclarationError, MisuseError
from hilgate.model import Key, Noun, Scalar

EVALS = Path(__file__).resolve().parents[1]
"""The `evals/` folder: paths in gates.yaml are relative to it."""


class UnknownGateError(MisuseError):
    """A gate name that gates.yaml does not declare."""


class BrokenLimits(Noun):
    """When broken output (`hileval.broken`) is a failure, whatever the accuracy says."""

    max_rate: float = Field(gt=0, lt=1)
    """Fail above this share of broken answers, or above twice the baseline's share if that is more."""
    alpha: float = Field(gt=0, lt=1)
    """Fail if the count is this improbable under the baseline's share plus one question."""
    min_count: int = Field(ge=1)
    """Fewest broken answers for the second rule."""


class Gate(Noun):
    """One accuracy gate."""

    title: str
    model: str
    """Folder with weights, config and tokenizer, relative to evals/."""
    task: str
    """lm-eval task file, relative to evals/."""
    num_fewshot: int = Field(ge=0)
    questions: int = Field(ge=1)
    """How many of the task's questions, from the first (the test file is in random order)."""
    max_gen_toks: int = Field(ge=1)
    """Token limit of an answer; reaching it sets the flag `truncated`."""
    engine: Literal["vllm", "transformers"]
    attention_backend: Literal["pagedkv", "vllm"] | None
    """Who must serve every attention layer: `pagedkv` (ours) or `vllm` (the engine's own); None where the engine has no
    backends to choose from."""
    engine_args: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments of `vllm.LLM`, chosen so that the run meets what the gate is about (block_size, batch, cut prompts)."""
    alpha: float = Field(gt=0, lt=0.5)
    """Level of the paired test: how often an unchanged model may fail."""
    margin: float = Field(gt=0, lt=1)
    """A drop of exact match that must be excluded (at level alpha) before the gate passes."""
    floor: float = Field(gt=0, lt=1)
    """Exact match below which the model is not the model any more, baseline or not."""
    broken: BrokenLimits
    baseline: str
    """Stored per-question outcomes, relative to evals/."""

    @model_validator(mode="after")
    def _engine_and_backend_agree(self) -> Gate:
        if (self.engine == "vllm") != (self.attention_backend is not None):
            raise ValueError("attention_backend is required with engine vllm and meaningless with any other")
        return self

    def path(self, relative: str) -> Path:
        """An absolute path for a path of the declaration."""
        return EVALS / relative


class Gates(Noun):
    """The file."""

    gates: dict[Key, Gate] = Field(min_length=1)


def load_gates(path: Path = EVALS / "gates.yaml") -> dict[str, Gate]:
    """Read gates.yaml.

    Raises:
        DeclarationError: missing, not YAML, an unknown or missing key, a value out of range.
    """
    remedy = "compare with the attribute docstrings in hileval/declare.py"
    try:
        declared = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError("cannot read the gates", where=str(path), remedy="restore it from git") from error
    except yaml.YAMLError as error:
        raise DeclarationError(f"not YAML: {str(error).splitlines()[0]}", where=str(path), remedy=remedy) from error
    try:
        return dict(Gates.model_validate(declared).gates)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DeclarationError(f"{place}: {first['msg']}", where=str(path), remedy=remedy) from error


def find_gate(name: str, gates: dict[str, Gate]) -> Gate:
    """The gate of that name.

    Raises:
        UnknownGateError: no such gate; the message offers the nearest name.
    """
    if name in gates:
        return gates[name]
    near = difflib.get_close_matches(name, gates, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"declared gates: {', '.join(sorted(gates))}"
    raise UnknownGateError(f"no gate {name!r}", where="evals/gates.yaml", remedy=hint)
