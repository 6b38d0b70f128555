"""Engines: prompts in, answers out. vLLM in process (the one under test) and transformers (a second opinion).

An engine that fails raises `EngineError`. It never turns trouble into an empty answer: that would be scored as wrong.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hilgate.errors import CannotRunHereError, Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
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
def _as_engine_error(doing: str, where: str) -> Iterator[None]:
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


class VllmEngine:
    """`vllm.LLM` in this process, with the plugin's report in its workers."""

    OURS = "CUSTOM"
    """The plugin's member of vLLM's AttentionBackendEnum; on the CPU platform it replaces the only one."""
    REPORTER = "pagedkv.vllm_plugin.inspect.WorkerReport"

    def __init__(self, model: Path, attention_backend: str, arguments: Mapping[str, Any]) -> None:
        """Start the engine.

        Args:
            model: Folder of the model.
            attention_backend: `pagedkv` or `vllm`, as gates.yaml declares it.
            arguments: Further arguments of `vllm.LLM`.

        Raises:
            ModelFilesError: see `require_model_files`.
            CannotRunHereError: vLLM is not installed.
            EngineError: vLLM did not start.
        """
        require_model_files(model)
        with _as_engine_error("starting vLLM", str(model)):
            chosen = self._prepare(attention_backend)
            import vllm

            self.name = f"vllm {vllm.__version__}"
            self._where = str(model)
            self._llm = vllm.LLM(
                model=str(model), worker_extension_cls=self.REPORTER, disable_log_stats=True, **chosen, **arguments
            )
            layers = self.attention_layers()
            self._poison = bool(layers) and all(str(layer["impl"]).startswith("pagedkv.") for layer in layers)

    @classmethod
    def _prepare(cls, attention_backend: str) -> dict[str, Any]:
        """Set the environment vLLM reads at import; return the arguments that select the backend."""
        import torch

        accelerated = torch.cuda.is_available()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if attention_backend == "vllm":
            os.environ["VLLM_PLUGINS"] = ""
        if not accelerated:
            torch.set_num_threads(1)
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            if attention_backend == "pagedkv":
                os.environ.setdefault("TRITON_INTERPRET", "1")
            return {}
        return {"attention_backend": cls.OURS} if attention_backend == "pagedkv" else {}

    def answer(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str]) -> list[Answer]:
        """Answer every prompt greedily. If ours serves, the KV pool is NaN before: reading an unwritten slot shows.

        The engine's own attention is spared: it may multiply slots that it masks by zero, which is harmless on zeros.
        """
        with _as_engine_error("generating", self._where):
            from vllm import SamplingParams

            if self._poison:
                self._llm.collective_rpc("pagedkv_poison")
                self._llm.collective_rpc("pagedkv_reset")
                self._poison = False
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=list(stop), logprobs=0)
            outputs = self._llm.generate(list(prompts), params, use_tqdm=False)
            if len(outputs) != len(prompts):
                raise EngineError(f"{len(outputs)} answers to {len(prompts)} prompts", where=self._where)
            return [self._read(output.outputs[0]) for output in outputs]

    @staticmethod
    def _read(completion: Any) -> Answer:
        logprobs = completion.logprobs or []
        if len(logprobs) != len(completion.token_ids):
            raise EngineError(
                f"{len(logprobs)} log-probabilities for {len(completion.token_ids)} tokens",
                remedy="non-finite values cannot be excluded; check the engine's `logprobs` support",
            )
        chosen = [entry[token].logprob for entry, token in zip(logprobs, completion.token_ids, strict=True)]
        return Answer(
            text=completion.text,
            finish_reason=completion.finish_reason,
            n_tokens=len(completion.token_ids),
            non_finite=sum(not math.isfinite(value) for value in chosen),
        )

    def attention_layers(self) -> list[dict[str, Any]]:
        """The report of every worker, one mapping per attention layer."""
        with _as_engine_error("asking who served attention", self._where):
            return [dict(row) for worker in self._llm.collective_rpc("pagedkv_report") for row in worker]


class TransformersEngine:
    """transformers' own generation; prompts of equal length share a batch, so there is no padding."""

    def __init__(self, model: Path, *, batch: int = 64) -> None:
        """Load the model in fp32.

        Raises:
            ModelFilesError: see `require_model_files`.
            EngineError: the files do not load.
        """
        require_model_files(model)
        with _as_engine_error("loading the model", str(model)):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            import torch
            import transformers

            torch.set_num_threads(1)
            self.name = f"transformers {transformers.__version__}"
            self._where, self._batch = str(model), batch
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def attention_layers(self) -> None:
        """None: there is one attention only."""
        return

    def answer(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str]) -> list[Answer]:
        """Answer every prompt greedily."""
        with _as_engine_error("generating", self._where):
            ids = self.tokenizer(list(prompts))["input_ids"]
            answers: dict[int, Answer] = {}
            for length in sorted({len(row) for row in ids}):
                same = [i for i, row in enumerate(ids) if len(row) == length]
                for start in range(0, len(same), self._batch):
                    some = same[start : start + self._batch]
                    answers |= zip(some, self._generate([ids[i] for i in some], max_tokens, stop), strict=True)
            return [answers[i] for i in range(len(prompts))]

    def _generate(self, ids: list[list[int]], max_tokens: int, stop: Sequence[str]) -> list[Answer]:
        import torch

        tokens = torch.tensor(ids)
        with torch.no_grad():
            out = self.model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
        written = out.sequences[:, tokens.shape[1] :]
        scores = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, written[..., None])[..., 0]
        return [self._read(row, score, stop) for row, score in zip(written.tolist(), scores, strict=True)]

    def _read(self, row: list[int], scores: Any, stop: Sequence[str]) -> Answer:
        end = self.tokenizer.eos_token_id
        ended = end in row
        n_tokens = row.index(end) + 1 if ended else len(row)
        text = self.tokenizer.decode(row[:n_tokens], skip_special_tokens=True)
        cut = min((text.index(word) for word in stop if word in text), default=None)
        non_finite = int((~scores[:n_tokens].isfinite()).sum())
        return Answer(text[:cut], "stop" if ended or cut is not None else "length", n_tokens, non_finite)
