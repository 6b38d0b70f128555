# SPDX-License-Identifier: Apache-2.0
"""Ask the installed vLLM what it makes of a model's memory: its own configuration, layers and KV cache groups.

Layers are made without weights (`meta`), for one of several ranks: vLLM's group of ranks is told how many there are.
No engine starts, so sizes of published models cost nothing. A process of its own, because vLLM's groups outlive a test.
"""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.network_utils import get_open_port
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from families import mla_prefill, stand_ins
from families.engine import end_with_parent, register

if TYPE_CHECKING:
    from pathlib import Path


def main(spec_file: Path, result_file: Path) -> None:
    """Do what the spec says: `planned` of each entry, or the words of the error that vLLM raised."""
    end_with_parent()
    stand_ins.supply()
    mla_prefill.register()
    load_general_plugins()
    parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
    specs = torch.load(spec_file, weights_only=False)
    results = {}
    for name, spec in specs.items():
        try:
            results[name] = planned(**spec)
        except Exception as error:  # noqa: BLE001 - what vLLM says of a model that it cannot serve
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    torch.save(results, result_file)


def planned(model: Path, architecture: str, tp: int, memory: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What vLLM plans for a model.

    Args:
        model: Folder of its config.
        architecture: vLLM's name of its class.
        tp: Ranks.
        memory: Bytes for the pool, on each rank.
        arguments: Of vLLM's `EngineArgs`.
    """
    register(architecture)
    # A CPU with BF16 units would keep every state in float32, which no GPU does.
    with patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=False):
        config = EngineArgs(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=tp,
            distributed_executor_backend="uni" if tp == 1 else "mp",
            **arguments,
        ).create_engine_config()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
    ranks = patch.object(parallel_state.get_tp_group(), "world_size", tp)
    # A CPU's worker does without streams too.
    with set_current_vllm_config(config), ranks, patch.object(torch.cuda, "Stream", SimpleNamespace):
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        worker = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
        specs = GPUModelRunner.get_kv_cache_spec(worker)
        resolve_kv_cache_layout(config, [WorkerBase.get_supported_kv_cache_layouts(worker)], specs.values())
        (cache,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [memory])
        return {
            "block_size": config.cache_config.block_size,
            "states": [spec.state_content_size_bytes for spec in specs.values() if isinstance(spec, MambaSpec)],
            "attention": sum(not isinstance(spec, MambaSpec) for spec in specs.values()),
            "page_bytes": [spec.page_size_bytes for spec in specs.values()],
            "num_blocks": cache.num_blocks,
            "groups": len(cache.kv_cache_groups),
            "full_sequences": kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cache),
            "hit_unit": kv_cache_utils.resolve_cache_hit_alignment_tokens(
                cache, config, *kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
            ),
            "refusals": {asked: refused(config, cache, asked) for asked in (cache.num_blocks, cache.num_blocks + 1)},
        }


def refused(config: Any, cache: Any, max_num_seqs: int) -> str:
    """What vLLM says to so many sequences where it captures full graphs; empty if nothing."""
    compilation = config.compilation_config
    with patch.object(compilation, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE):
        try:
            compilation.resolve_cudagraph_mode_and_sizes(
                AttentionCGSupport.UNIFORM_BATCH,
                "CUSTOM",
                uniform_decode_query_len=1,
                use_v2_model_runner=False,
                kv_cache_config=cache,
                max_num_reqs=max_num_seqs,
            )
        except ValueError as error:
            return str(error)
    return ""
