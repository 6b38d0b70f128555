# SPDX-License-Identifier: Apache-2.0
"""Engines: prompts in, answers out. vLLM in process, and transformers as a second opinion.

One that fails raises `EngineError`: an empty answer would be scored as wrong.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from hilgate.errors import CannotRunHereError, Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BACKEND = "CUSTOM"
"""Our backend's member of vLLM's AttentionBackendEnum; on the CPU platform it replaces the only one."""
REPORTERS = {"pagedkv": ("pagedkv.vllm_plugin.inspect.WorkerReport", "pagedkv_report")}
"""Extension of vLLM's workers that reports who served attention, and its method; ours counts calls as well."""
REPORTER = ("hileval.engines.worker.EngineWorkerReport", "hileval_report")
"""Report of every other backend: what vLLM itself says, without a package of ours in it."""
SAMPLING_RATE = 16_000
"""Samples of a sound per second."""


class EngineError(HilgateError):
    """The engine started or generated with an exception: nothing was measured."""

    exit_status = Exit.NOTHING_RAN


class ModelFilesError(CannotRunHereError):
    """The model folder lacks weights, configuration or tokenizer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of an encoder-decoder model.

    Attributes:
        text: Beginning of the decoder's text.
        modality: Input of the encoder.
        media: Sound, [samples] float32 at `SAMPLING_RATE`, or a Pillow image.
        repetition_penalty: Factor that the model is published to be used with; 1 is none.
    """

    text: str
    modality: Literal["audio", "image"]
    media: Any
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of an engine to one prompt."""

    text: str
    finish_reason: str | None
    """`stop` or `length`."""
    n_tokens: int
    """Generated tokens, the end-of-sequence token included."""
    non_finite: int
    """Number of them with a NaN or infinite log-probability."""


_LONE: Final = re.compile("[\ud800-\udfff]")
MOST_CHARACTERS: Final = 128
"""Most characters of one token, in the mean of an answer: the longest tokens of a vocabulary are runs of spaces of that
size."""


def bounded(answers: Sequence[Answer], max_tokens: int) -> list[Answer]:
    """The answers, with U+FFFD for what no file can hold (half a surrogate pair): they are flagged as garbage then.

    Raises:
        EngineError: One is longer than was asked for: the expressions that read a number would take hours over it.
    """
    for answer in answers:
        if answer.n_tokens > max_tokens or len(answer.text) > MOST_CHARACTERS * max_tokens:
            raise EngineError(
                f"an answer of {answer.n_tokens} tokens and {len(answer.text):,} characters, where {max_tokens} tokens "
                "were asked for",
                remedy="see the log of the engine: it does not stop where it should",
            )
    return [replace(answer, text=_LONE.sub("\N{REPLACEMENT CHARACTER}", answer.text)) for answer in answers]


class Engine(Protocol):
    """Anything that answers prompts greedily."""

    name: str
    """Name and version, e.g. `vllm 0.32.0`."""

    def answer(
        self, prompts: Sequence[str | list[int] | Prompt], *, max_tokens: int, stop: Sequence[str]
    ) -> list[Answer]:
        """Answer every prompt greedily, in their order; a list of token ids gets no further ones before it."""

    def attention_layers(self) -> list[dict[str, Any]] | None:
        """Who served each attention layer (`hileval.gates.served`); None for an engine with one attention only."""

    def close(self) -> None:
        """Give back what it holds; nothing is asked afterwards."""


def require_model_files(folder: Path) -> None:
    """Check before anything expensive starts.

    Raises:
        ModelFilesError: a file is missing or the weights are empty.
    """
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        file = folder / name
        if not file.is_file() or file.stat().st_size == 0:
            raise ModelFilesError(
                f"{name} is missing or empty",
                where=str(folder),
                remedy="restore the folder from git, or train it: python -m hileval.pocket train",
            )


def require_text(prompts: Sequence[str | list[int] | Prompt]) -> list[str]:
    """The prompts of an engine that is given text alone.

    Raises:
        EngineError: One has sound or an image.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise EngineError("this engine is given text alone", remedy="use engine: vllm for documents")
    return texts


@contextlib.contextmanager
def as_engine_error(doing: str, where: str) -> Iterator[None]:
    """Engines raise whatever they like; callers see one class."""
    try:
        yield
    except HilgateError:
        raise
    except ImportError as error:
        raise CannotRunHereError(f"{doing}: {error}", where=where, remedy="install the missing package") from error
    except Exception as error:
        raise EngineError(
            f"{doing} failed: {type(error).__name__}: {str(error).strip() or 'no message'}",
            where=where,
            remedy="read the engine's log above and repeat the run: this is no accuracy result",
        ) from error
