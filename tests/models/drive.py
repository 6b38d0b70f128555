# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: start the engines of a spec one after the other, write what they answered.

A process of its own, because the environment decides whether Triton interprets, which plugins vLLM loads and how pages
are packed, and because whatever an engine leaves behind ends with its process group.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm import envs
from vllm.platforms import current_platform

from families import mla_prefill, stand_ins
from families.engine import COMMON, answer_of, as_vllm, clean, end_with_parent, register, sampling, shut_down, start
from families.probe import EngineProbe
from pagedkv.vllm_plugin.errors import CompiledLateError, NotServedError
from pagedkv.vllm_plugin.inspect import require_served, require_warm, served_layers

if TYPE_CHECKING:
    from pathlib import Path

    from vllm import LLM

    from families.schedule import FamilyAnswer, Schedule


WORKERS = "vllm.v1.executor.multiproc_executor.get_mp_context"


def main(spec_file: Path, result_file: Path) -> None:
    """Do what the spec says; the result is written once, at the end, so that half a run is no result."""
    end_with_parent()
    stand_ins.supply()
    mla_prefill.register()
    engines = torch.load(spec_file, weights_only=False)
    torch.save({name: serve(**spec) for name, spec in engines.items()}, result_file)


def serve(
    model: Path,
    batches: dict[str, Schedule],
    *,
    ours: bool,
    rows: bool,
    prompt_rows: bool,
    layout: str | None,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Start one engine, answer its batches, end it."""
    envs.disable_envs_cache()  # an engine before this one has frozen what vLLM reads from the environment
    os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
    if layout is not None:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = layout
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    if in_process:
        register(json.loads((model / "config.json").read_text())["architectures"][0])
    # On the CPU vLLM's workers would each import everything anew; what a fork of this process has loaded is the same.
    forks = patch(WORKERS, lambda: multiprocessing.get_context("fork")) if current_platform.is_cpu() else nullcontext()
    with forks:
        llm = start(model, ours=ours, **COMMON | arguments)
    result: dict[str, Any] = {"batches": {}, "refusal": "", "late": ""}
    config = llm.llm_engine.vllm_config
    if ours and not config.cache_config.enable_prefix_caching:
        result["poisoned_bytes"] = llm.collective_rpc("pagedkv_poison")
    probe = EngineProbe(llm) if in_process and "speculative_config" in arguments else None
    llm.collective_rpc("pagedkv_watch_compiler")
    for name, schedule in batches.items():
        if config.model_config.enforce_eager:  # the replay of a graph counts no calls
            llm.collective_rpc("pagedkv_reset")
        result["batches"][name] = {
            "answers": answers(llm, schedule, rows=rows, prompt_rows=prompt_rows),
            "layers": served_layers(llm),
            "scans": llm.collective_rpc("pagedkv_scans"),
        }
    result["block_size"] = config.cache_config.block_size
    result["drafted"] = probe.counts.drafted if probe else None
    try:
        require_served(served_layers(llm))
        require_warm(llm)
    except NotServedError as error:
        result["refusal"] = str(error)
    except CompiledLateError as error:
        result["late"] = str(error)
    shut_down(llm)
    del llm
    clean()
    return result


def answers(llm: LLM, schedule: Schedule, *, rows: bool, prompt_rows: bool) -> list[FamilyAnswer]:
    """Greedy answers to requests that come together, with the distributions of answers and, if wanted, of prompts."""
    params = [sampling(request, rows=rows, prompt_rows=prompt_rows and request.speech is None) for request in schedule]
    outputs = llm.generate([as_vllm(request) for request in schedule], params, use_tqdm=False)
    return [answer_of(output, rows=rows, best=None) for output in outputs]
