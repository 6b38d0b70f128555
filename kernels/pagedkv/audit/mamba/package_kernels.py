"""The forward kernels of mamba-ssm and causal-conv1d that serving launches, through their own launchers."""

# ruff: noqa: SLF001 - the launchers and kernels are private names of their packages

from __future__ import annotations

import torch

from . import imports
from .kernel import Kernel, autotuned
from .shapes import DTYPE, POOL_BLOCKS, SEQUENCES, Layer

MAMBA1 = Layer(heads=1, head_size=8192, state=16)
"""One channel each of Jamba's 8192 has a state of 16; its launcher counts them as one head."""


def package_kernels() -> list[Kernel]:
    """All of them. Training's (backward) and Mamba3's are left out: no engine launches them.

    Raises:
        CannotRunHereError: A package is missing.
    """
    layer = Layer()
    return [*_scan(layer), _state_update(layer, ""), _state_update(MAMBA1, "mamba1"), _norm(layer), _conv_states(layer)]


def _scan(layer: Layer) -> list[Kernel]:
    """The five steps of a chunked scan (Dao and Gu 2024, section 6) and the states of packed sequences."""
    bmm, scan = imports.mamba_ssm("ssd_bmm"), imports.mamba_ssm("ssd_chunk_scan")
    state, passing = imports.mamba_ssm("ssd_chunk_state"), imports.mamba_ssm("ssd_state_passing")
    x, B, C = layer.x(1, layer.tokens), layer.projection(1, layer.tokens), layer.projection(1, layer.tokens)
    dt = torch.empty(1, layer.heads, layer.chunks, layer.chunk)
    seq_idx = torch.empty(1, layer.tokens, dtype=torch.int32)
    flat = layer.chunk_states(1, layer.chunks).flatten(-2)
    products = torch.empty(1, layer.chunks, layer.groups, layer.chunk, layer.chunk)

    def cumsum() -> object:
        raw = layer.per_head(1, layer.tokens, dtype=DTYPE)
        bias = layer.per_head()
        return state._chunk_cumsum_fwd(raw, layer.per_head(), layer.chunk, dt_bias=bias, dt_softplus=True)

    def chunk_state() -> object:
        return state._chunk_state_fwd(B, x, dt, dt, seq_idx=seq_idx)

    def varlen() -> object:
        chunk_states = layer.chunk_states(layer.chunks, dtype=DTYPE)
        return state.chunk_state_varlen(B[0], x[0], dt[0], dt[0], layer.query_start_loc, chunk_states)

    def state_passing() -> object:
        initial = layer.chunk_states(1).flatten(-2)
        return passing._state_passing_fwd(
            flat, dt[..., -1], initial_states=initial, seq_idx=seq_idx, chunk_size=layer.chunk, out_dtype=DTYPE
        )

    def bmm_chunk() -> object:
        return bmm._bmm_chunk_fwd(C, B, layer.chunk, seq_idx=seq_idx, output_dtype=torch.float32)

    def chunk_scan() -> object:
        states = layer.chunk_states(1, layer.chunks, dtype=DTYPE)
        return scan._chunk_scan_fwd(products, x, dt, dt, C, states, D=layer.per_head(), seq_idx=seq_idx)

    return [
        autotuned("mamba-ssm", state._chunk_cumsum_fwd_kernel, cumsum),
        autotuned("mamba-ssm", state._chunk_state_fwd_kernel, chunk_state),
        autotuned("mamba-ssm", state._chunk_state_varlen_kernel, varlen),
        autotuned("mamba-ssm", passing._state_passing_fwd_kernel, state_passing),
        autotuned("mamba-ssm", bmm._bmm_chunk_fwd_kernel, bmm_chunk),
        autotuned("mamba-ssm", scan._chunk_scan_fwd_kernel, chunk_scan),
    ]


def _state_update(layer: Layer, variant: str) -> Kernel:
    """One decode step on a pool of states above 2 GiB."""
    module = imports.mamba_ssm("selective_state_update")
    pool = layer.chunk_states(POOL_BLOCKS * 128 * 64 * 128 // (layer.heads * layer.head_size * layer.state))
    x, B, C = layer.x(SEQUENCES), layer.projection(SEQUENCES), layer.projection(SEQUENCES)
    size = (layer.heads, layer.head_size)
    if layer.heads > 1:  # Mamba2: one dt and one A a head, seen by each channel through a stride of 0
        dt = layer.per_head(SEQUENCES, dtype=DTYPE)[..., None].expand(SEQUENCES, *size)
        bias, D = (layer.per_head()[:, None].expand(size) for _ in "bD")
        A = layer.per_head()[:, None, None].expand(*size, layer.state)
    else:
        dt = torch.empty(SEQUENCES, *size, dtype=DTYPE)
        bias, D, A = torch.empty(size), torch.empty(size), torch.empty(*size, layer.state)

    def launch() -> object:
        return module.selective_state_update(
            pool, x, dt, A, B, C, D=D, dt_bias=bias, dt_softplus=True, state_batch_indices=layer.slots
        )

    return Kernel("mamba-ssm", "_selective_scan_update_kernel", launch, variant=variant)


def _norm(layer: Layer) -> Kernel:
    module = imports.mamba_ssm("layernorm_gated")
    channels = layer.heads * layer.head_size
    x, weight = torch.empty(layer.tokens, channels, dtype=DTYPE), torch.empty(channels, dtype=DTYPE)

    def launch() -> object:
        return module._layer_norm_fwd(x, weight, None, 1e-5, z=x, norm_before_gate=False, is_rms_norm=True)

    return Kernel("mamba-ssm", "_layer_norm_fwd_1pass_kernel", launch)


def _conv_states(layer: Layer) -> Kernel:
    module = imports.causal_conv1d("causal_conv1d_varlen")
    x = torch.empty(layer.tokens, layer.conv_channels, dtype=DTYPE)

    def launch() -> object:
        return module.causal_conv1d_varlen_states(x, layer.query_start_loc, layer.conv_width)

    return Kernel("causal-conv1d", "_causal_conv1d_varlen_states", launch)
