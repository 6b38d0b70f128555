"""What every engine is. One that fails raises `EngineError`: an empty answer would be scored as wrong."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hilgate.errors import CannotRunHereError, Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class EngineError(HilgateError):
    """The engine started or generated with an exception: nothing was measured."""

    exit_status = Exit.NOTHING_RAN


class ModelFilesError(CannotRunHereError):
    """The model folder lacks weights, configuration or tokenizer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine wrote for one prompt."""

    text: str
    finish_reason: str | None
    """`stop` or `length`."""
    n_tokens: int
    """Generated tokens, the end-of-sequence token included."""
    non_finite: int
    """How many of them had a NaN or infinite log-probability."""


class Engine(Protocol):
    """Anything that answers prompts greedily."""

    name: str
    """Name and version, e.g. `vllm 0.32.0`."""

    def answer(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str]) -> list[Answer]:
        """Answer every prompt greedily; the answers are in the order of the prompts."""

    def attention_layers(self) -> list[dict[str, Any]] | None:
        """Who served each attention layer (see `hileval.served`); None where the engine has one attention only."""

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
            remedy="this is no accuracy result; read the engine's log above and repeat the run",
        ) from error
