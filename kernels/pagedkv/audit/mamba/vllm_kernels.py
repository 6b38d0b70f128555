"""vLLM's own Mamba kernels: what a hybrid model on a ROCm image really launches. Imported, not copied.

Three of its launchers refuse CPU tensors; those kernels are launched directly, with the arguments that the launchers
compute.
"""

# ruff: noqa: SLF001 - the launchers and kernels are private names of their packages

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import imports
from .kernel import Kernel, autotuned
from .shapes import DTYPE, POOL_BLOCKS, SEQUENCES, Layer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def vllm_kernels() -> list[Kernel]:
    """All of them but the experimental ReplaySSM ones.

    Raises:
        CannotRunHereError: vLLM is missing or too different.
    """
    layer = Layer()
    return [*_scan(layer), _state_update(layer), _norm(layer), *_conv(layer), *_moves(layer)]


def _scan(layer: Layer) -> list[Kernel]:
    bmm, scan = imports.vllm("ssd_bmm"), imports.vllm("ssd_chunk_scan")
    state, passing = imports.vllm("ssd_chunk_state"), imports.vllm("ssd_state_passing")
    x, B, C = layer.x(layer.tokens), layer.projection(layer.tokens), layer.projection(layer.tokens)
    dt = torch.empty(layer.heads, layer.chunks, layer.chunk)
    starts = layer.cu_chunk_seqlens
    initial = layer.chunk_states(SEQUENCES)

    def cumsum() -> object:
        raw, bias = layer.per_head(layer.tokens, dtype=DTYPE), layer.per_head()
        return state._chunk_cumsum_fwd(raw, layer.per_head(), layer.chunk, starts, dt_bias=bias, dt_softplus=True)

    def chunk_state() -> object:
        return state._chunk_state_fwd(B, x, dt, dt, starts)

    def state_passing() -> object:
        states = layer.chunk_states(layer.chunks).flatten(-2)
        return passing._state_passing_fwd(
            states, dt, layer.last_chunks, initial_states=initial.flatten(-2), out_dtype=torch.float32
        )

    def bmm_chunk() -> object:
        return bmm._bmm_chunk_fwd(C, B, layer.chunk, starts, output_dtype=torch.float32)

    def chunk_scan() -> object:
        products = torch.empty(layer.chunks, layer.groups, layer.chunk, layer.chunk)
        states = layer.chunk_states(layer.chunks)
        seq_idx = torch.empty(layer.chunks, dtype=torch.int32)
        return scan._chunk_scan_fwd(
            products, x, dt, dt, C, states, starts, torch.empty_like(x), seq_idx, D=layer.per_head(),
            initial_states=initial,
        )  # fmt: skip

    return [
        autotuned("vllm", state._chunk_cumsum_fwd_kernel, cumsum),
        autotuned("vllm", state._chunk_state_fwd_kernel, chunk_state),
        autotuned("vllm", passing._state_passing_fwd_kernel, state_passing),
        autotuned("vllm", bmm._bmm_chunk_fwd_kernel, bmm_chunk),
        autotuned("vllm", scan._chunk_scan_fwd_kernel, chunk_scan),
    ]


def _state_update(layer: Layer) -> Kernel:
    """One decode step, in the launches that vLLM's tables hold for AMD products and in its fallback."""
    module = imports.vllm("mamba_ssm")
    pool = layer.chunk_states(POOL_BLOCKS)
    x, B, C = layer.x(SEQUENCES), layer.projection(SEQUENCES), layer.projection(SEQUENCES)
    size = (layer.heads, layer.head_size)
    dt = layer.per_head(SEQUENCES, dtype=DTYPE)[..., None].expand(SEQUENCES, *size)
    bias, D = (layer.per_head()[:, None].expand(size) for _ in "bD")
    A = layer.per_head()[:, None, None].expand(*size, layer.state)

    def launch() -> object:
        return module.selective_state_update(
            pool, x, dt, A, B, C, D, bias, dt_softplus=True, state_batch_indices=layer.slots, out=torch.empty_like(x)
        )

    tables = Path(module._CONFIGS_DIR).glob(f"headdim={layer.head_size},dstate={layer.state},device_name=AMD_*.json")
    rows = [row for table in tables for row in json.loads(table.read_text()).values() if isinstance(row, dict)]
    fallback = module._get_default_ssm_launch_config(layer.state, is_blackwell=False)
    launches = {fallback, *((row["BLOCK_SIZE_M"], row["num_warps"]) for row in rows)}
    configurations: dict[str, Callable[[], AbstractContextManager[object]]] = {
        f"M{rows}-warps{warps}": partial(module.override_ssm_config, (rows, warps)) for rows, warps in sorted(launches)
    }
    return Kernel("vllm", "_selective_scan_update_kernel", launch, configurations)


def _norm(layer: Layer) -> Kernel:
    module = imports.vllm("layernorm_gated")
    channels = layer.heads * layer.head_size
    x, weight = torch.empty(layer.tokens, channels, dtype=DTYPE), torch.empty(channels, dtype=DTYPE)

    def launch() -> object:
        return module.rms_norm_gated(x, weight, None, z=x, norm_before_gate=False)

    return Kernel("vllm", "_layer_norm_fwd_1pass_kernel", launch)


def _conv(layer: Layer) -> list[Kernel]:
    """Prefill and decode of the convolution, on the channels-last pool that vLLM keeps."""
    module = imports.vllm("causal_conv1d")
    channels, history = layer.conv_channels, layer.conv_width - 1
    pool = torch.empty(POOL_BLOCKS, history, channels, dtype=DTYPE).transpose(1, 2)
    weight, bias = torch.empty(channels, layer.conv_width, dtype=DTYPE), torch.empty(channels, dtype=DTYPE)

    def prefill() -> object:
        x = torch.empty(layer.tokens, channels, dtype=DTYPE).transpose(0, 1)
        return module.causal_conv1d_fn(
            x, weight, bias, pool, layer.query_start_loc, cache_indices=layer.slots,
            has_initial_state=torch.ones(SEQUENCES, dtype=torch.bool),
        )  # fmt: skip

    def update() -> object:
        x = torch.empty(SEQUENCES, channels, dtype=DTYPE)
        return module.causal_conv1d_update(x, pool, weight, bias, "silu", conv_state_indices=layer.slots)

    return [
        Kernel("vllm", "_causal_conv1d_fwd_kernel", prefill),
        Kernel("vllm", "_causal_conv1d_update_kernel", update),
    ]


def _moves(layer: Layer) -> list[Kernel]:
    """States between the pool and the dense rows that a prefill works on."""
    gather, scatter = imports.vllm("gather_initial_states"), imports.vllm("scatter_states")
    pool, rows = layer.chunk_states(POOL_BLOCKS), layer.chunk_states(SEQUENCES)
    row, block = rows[0].numel(), 1024
    grid = (row // block, SEQUENCES)
    sizes = {"row_size": row, "BLOCK_SIZE": block, "num_warps": 8, "launch_pdl": False}

    def read() -> object:
        known = torch.ones(SEQUENCES, dtype=torch.bool)
        kernel = gather._gather_initial_states_kernel
        return kernel[grid](pool, layer.slots, known, rows, pool.stride(0), 1, 1, **sizes)

    def write() -> object:
        kernel = scatter._scatter_states_kernel
        return kernel[grid](pool, rows, layer.slots, pool.stride(0), rows.stride(0), 1, **sizes)

    return [
        Kernel("vllm", "_gather_initial_states_kernel", read),
        Kernel("vllm", "_scatter_states_kernel", write),
    ]
