# SPDX-License-Identifier: Apache-2.0
"""Start a vLLM engine in a process of its own, ask it token by token, and time its steps."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from .models import LONGEST, MOST, ServingCase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm import LLM

WORKER = "benchmarks.serving.worker.Worker"
SMOKE = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "dtype": "float32",
}
FULL = {
    "max_model_len": LONGEST,
    "max_num_seqs": MOST,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 16 << 30,
    "gpu_memory_utilization": 0.4,
    "dtype": "bfloat16",
    # Decode in captured graphs on both sides. Without torch.compile, which would take minutes a model.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]},
}
ON_CPU = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""One thread, and no compiler: 25 s on a cold machine."""


@dataclass(frozen=True)
class Drive:
    """What a case did in one engine."""

    tokens: tuple[tuple[int, ...], ...]
    """Answers, in the order of the prompts."""
    prefill_seconds: float
    """From the first request to the last first token."""
    steps: tuple[float, ...]
    """Seconds between the ends of steps in which all requests got one token each."""


def prompts(case: ServingCase, vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens; the first three of the vocabulary are special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (case.requests, case.prompt), generator=generator).tolist()


def start(folder: Path, *, ours: bool, gpu: bool) -> LLM:
    """Start an engine with drawn weights; the worker says who serves (`pagedkv_report`)."""
    from vllm import LLM

    from pagedkv.vllm_plugin import NAME

    environment = {"VLLM_PLUGINS": "pagedkv" if ours else "", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {} if gpu else ON_CPU | {"TRITON_INTERPRET": "1" if ours else "0", "PAGEDKV_INTERPRETER": "fast"}
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "drawn", "enable_prefix_caching": False}
    if gpu:
        arguments["attention_backend"] = NAME if ours else "TRITON_ATTN"
    with mock.patch.dict(os.environ, environment):
        return LLM(str(folder), worker_extension_cls=WORKER, **arguments, **(FULL if gpu else SMOKE))


def drive(llm: LLM, asked: list[list[int]], answers: int) -> Drive:
    """Ask everything at once and watch the tokens come."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0, max_tokens=answers, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine = llm.llm_engine
    got: list[list[int]] = [[] for _ in asked]
    steps, before = [], 0.0
    began = prefilled = time.perf_counter()
    for index, tokens in enumerate(asked):
        engine.add_request(str(index), {"prompt_token_ids": tokens}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens = got[int(output.request_id)]
            prefilled = prefilled if tokens else now
            tokens.extend(output.outputs[0].token_ids)
        together = len(outputs) == len(asked) and all(len(output.outputs[0].token_ids) == 1 for output in outputs)
        if together and before:
            steps.append(now - before)
        before = now if together else 0.0
    return Drive(tuple(map(tuple, got)), prefilled - began, tuple(steps))


def ranked(llm: LLM, asked: list[list[int]], most: int) -> list[dict[int, float]]:
    """The `most` likeliest next tokens after each prompt, with their log-probabilities."""
    return [rows[0] for _, rows in _answered(llm, asked, 1, most)]


def stepped(llm: LLM, asked: list[list[int]], answers: list[list[int]], most: int) -> list[dict[int, float] | None]:
    """The same after each prompt and its answer, which the engine writes again, token by token.

    Returns:
        One mapping a prompt, None where the engine wrote another answer this time.
    """
    longest = max(map(len, answers)) + 1
    written = _answered(llm, asked, longest, most)
    return [
        rows[len(answer)] if list(tokens[: len(answer)]) == answer else None
        for answer, (tokens, rows) in zip(answers, written, strict=True)
    ]


def _answered(
    llm: LLM, asked: list[list[int]], answers: int, most: int
) -> list[tuple[Sequence[int], list[dict[int, float]]]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=answers, logprobs=most, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in asked], params, use_tqdm=False)
    return [
        (
            output.outputs[0].token_ids,
            [{token: entry.logprob for token, entry in row.items()} for row in output.outputs[0].logprobs],
        )
        for output in outputs
    ]
