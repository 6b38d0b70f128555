# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process: the engine under test."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hileval.distances import ASKED, Rows
from hileval.engines import (
    BACKEND,
    REPORTER,
    REPORTERS,
    SAMPLING_RATE,
    Answer,
    EngineError,
    Prompt,
    as_engine_error,
    require_model_files,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class VllmEngine:
    """`vllm.LLM` in this process, with the plugin's report in its workers."""

    def __init__(self, model: Path | str, attention_backend: str, arguments: Mapping[str, Any]) -> None:
        """Start the engine.

        Args:
            model: Folder of the model in this repository, or of one of a hub as text.
            attention_backend: `pagedkv`, `vllm` or vLLM's name of a backend, as gates.yaml declares it.
            arguments: Further arguments of `vllm.LLM`.

        Raises:
            ModelFilesError: see `require_model_files`.
            CannotRunHereError: vLLM is not installed.
            EngineError: vLLM did not start.
        """
        if isinstance(model, Path):
            require_model_files(model)
        arguments = {name: structured(value) for name, value in arguments.items()}
        if attention_backend == "pagedkv":
            arguments = {"enable_prefix_caching": False} | arguments  # with one the pool must not be poisoned
        with as_engine_error("starting vLLM", str(model)):
            chosen = self._prepare(attention_backend)
            import vllm

            self.name = f"vllm {vllm.__version__}"
            self._where = str(model)
            reporter, self._report = REPORTERS.get(attention_backend, REPORTER)
            self._llm = vllm.LLM(
                model=str(model), worker_extension_cls=reporter, disable_log_stats=True, **chosen, **arguments
            )
            layers = self.attention_layers()
            self._poison = bool(layers) and all(str(layer["impl"]).startswith("pagedkv.") for layer in layers)

    @staticmethod
    def _prepare(attention_backend: str) -> dict[str, Any]:
        """Set the environment vLLM reads at import; return the arguments that select the backend."""
        import torch

        accelerated = torch.cuda.is_available()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if attention_backend != "pagedkv":
            os.environ["VLLM_PLUGINS"] = ""
        if not accelerated:
            torch.set_num_threads(1)
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            if attention_backend == "pagedkv":
                os.environ.setdefault("TRITON_INTERPRET", "1")
                os.environ.setdefault("PAGEDKV_INTERPRETER", "fast")
            # vLLM-CPU's C++ rotary embedding turns a query [tokens, heads, channels] (MLA's) wrongly: Python's does it.
            return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} | _named(attention_backend)
        return {"attention_backend": BACKEND} if attention_backend == "pagedkv" else _named(attention_backend)

    def answer(
        self, prompts: Sequence[str | list[int] | Prompt], *, max_tokens: int, stop: Sequence[str]
    ) -> list[Answer]:
        """Answer every prompt greedily. If ours serves, the KV pool is NaN before: reading an unwritten slot shows.

        The engine's own attention is spared: it may multiply slots that it masks by zero, which is harmless on zeros.
        """
        with as_engine_error("generating", self._where):
            from vllm import SamplingParams

            if self._poison:
                self._llm.collective_rpc("pagedkv_poison")
                self._llm.collective_rpc("pagedkv_reset")
                self._poison = False
            params = [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=max_tokens,
                    stop=list(stop),
                    logprobs=0,
                    repetition_penalty=prompt.repetition_penalty if isinstance(prompt, Prompt) else 1.0,
                )
                for prompt in prompts
            ]
            outputs = self._llm.generate([_as_vllm(prompt) for prompt in prompts], params, use_tqdm=False)
            if len(outputs) != len(prompts):
                what = f"{len(outputs)} answers to {len(prompts)} prompts"
                raise EngineError(what, where=self._where, remedy="run it again; a second time is a bug of the engine")
            return [self._read(output.outputs[0]) for output in outputs]

    @staticmethod
    def _read(completion: Any) -> Answer:
        logprobs = completion.logprobs or []
        if len(logprobs) != len(completion.token_ids):
            raise EngineError(
                f"{len(logprobs)} log-probabilities for {len(completion.token_ids)} tokens",
                remedy="check that the engine supports `logprobs`: without them a non-finite value would not be seen",
            )
        chosen = [entry[token].logprob for entry, token in zip(logprobs, completion.token_ids, strict=True)]
        return Answer(
            text=completion.text,
            finish_reason=completion.finish_reason,
            n_tokens=len(completion.token_ids),
            non_finite=sum(not math.isfinite(value) for value in chosen),
        )

    def read(self, sequences: Sequence[Sequence[int]]) -> Rows:
        """The ASKED likeliest tokens before each token but the first, with log-probabilities; all tokens are given.

        vLLM adds the token that the prompt has there, however unlikely: a row may hold one more.
        """
        with as_engine_error("reading", self._where):
            from vllm import SamplingParams

            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=ASKED, detokenize=False)
            outputs = self._llm.generate([_as_vllm(list(tokens)) for tokens in sequences], params, use_tqdm=False)
            return [_rows(output.prompt_logprobs[1:]) for output in outputs]

    def write(self, asked: Sequence[Sequence[int]], tokens: int) -> tuple[list[list[int]], Rows]:
        """Write that many tokens after each beginning, greedily; returns them and the distributions they came from."""
        with as_engine_error("writing", self._where):
            from vllm import SamplingParams

            params = SamplingParams(
                temperature=0.0, max_tokens=tokens, logprobs=ASKED, ignore_eos=True, detokenize=False
            )
            outputs = self._llm.generate([_as_vllm(list(prompt)) for prompt in asked], params, use_tqdm=False)
            answers = [output.outputs[0] for output in outputs]
            return [list(answer.token_ids) for answer in answers], [_rows(answer.logprobs) for answer in answers]

    def attention_layers(self) -> list[dict[str, Any]]:
        """The report of every worker, one mapping per attention layer."""
        with as_engine_error("asking who served attention", self._where):
            return [dict(row) for worker in self._llm.collective_rpc(self._report) for row in worker]

    def close(self) -> None:
        """End the engine, so that another one may start in this process."""
        with as_engine_error("closing vLLM", self._where):
            self._llm.llm_engine.engine_core.shutdown()


def _named(attention_backend: str) -> dict[str, Any]:
    """The argument that demands a backend of vLLM by name; none where vLLM chooses."""
    return {} if attention_backend in {"pagedkv", "vllm"} else {"attention_backend": attention_backend}


def _rows(places: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in place.items()} for place in places]


def structured(value: Any) -> Any:
    """An argument as `vllm.LLM` takes it: a JSON object in a declaration is one, not its text."""
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def _as_vllm(prompt: str | list[int] | Prompt) -> Any:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    media = (prompt.media, SAMPLING_RATE) if prompt.modality == "audio" else prompt.media
    shown = {"prompt": "", "multi_modal_data": {prompt.modality: media}}
    return {"encoder_prompt": shown, "decoder_prompt": {"prompt": prompt.text}}
