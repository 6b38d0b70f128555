# SPDX-License-Identifier: Apache-2.0
"""Cases of the Mamba kernels that serving launches: mamba-ssm's, causal-conv1d's, and vLLM's copies of both.

Nothing is copied: the kernels are imported and launched by their own packages' launchers, in every configuration that
they may be launched with. Three of vLLM's launchers refuse CPU tensors; those kernels are launched directly, with the
arguments that the launchers compute. The layer is Bamba's and Granite 4's: 128 heads of 64 channels, state of 128, one
group, chunks of 256, bfloat16, the state kept in float32.
"""

# ruff: noqa: SLF001 - the launchers and kernels are private names of their packages

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import imports
from .cases import Case, LaunchConfiguration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

Package = Literal["mamba-ssm", "causal-conv1d", "vllm"]

AS_LAUNCHED = "as-launched"
"""Name of the configuration of a kernel whose launcher computes it from the shapes."""

DTYPE = torch.bfloat16
SEQUENCES = 16
SEQUENCE_TOKENS = 512
POOL_BLOCKS = 520
"""Blocks of the state pool: 520 x 128 x 64 x 128 x 4 B pass 2 GiB, from where Triton addresses a tensor otherwise."""


@dataclass(frozen=True)
class Layer:
    """One Mamba2 layer; Mamba1 is a layer of one head and a state of 16."""

    heads: int = 128
    head_size: int = 64
    state: int = 128
    groups: int = 1
    chunk: int = 256
    conv_width: int = 4

    @property
    def tokens(self) -> int:
        """Number of tokens of a prefill step."""
        return SEQUENCES * SEQUENCE_TOKENS

    @property
    def chunks(self) -> int:
        """Number of chunks of a prefill step; no two sequences share one."""
        return self.tokens // self.chunk

    @property
    def conv_channels(self) -> int:
        """Channels that go through the convolution: x, B and C."""
        return self.heads * self.head_size + 2 * self.groups * self.state

    def x(self, *lead: int) -> torch.Tensor:
        """[*lead, heads, head_size]."""
        return torch.empty(*lead, self.heads, self.head_size, dtype=DTYPE)

    def projection(self, *lead: int) -> torch.Tensor:
        """[*lead, groups, state]: B or C."""
        return torch.empty(*lead, self.groups, self.state, dtype=DTYPE)

    def per_head(self, *lead: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[*lead, heads]."""
        return torch.empty(*lead, self.heads, dtype=dtype)

    def chunk_states(self, *lead: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[*lead, heads, head_size, state]."""
        return torch.empty(*lead, self.heads, self.head_size, self.state, dtype=dtype)

    @cached_property
    def query_start_loc(self) -> torch.Tensor:
        """[sequences + 1], int32."""
        return torch.arange(SEQUENCES + 1, dtype=torch.int32) * SEQUENCE_TOKENS

    @cached_property
    def cu_chunk_seqlens(self) -> torch.Tensor:
        """[chunks + 1], int32: where each chunk begins."""
        return torch.arange(self.chunks + 1, dtype=torch.int32) * self.chunk

    @cached_property
    def last_chunks(self) -> torch.Tensor:
        """[sequences], int32: index of each sequence's last chunk."""
        return torch.arange(1, SEQUENCES + 1, dtype=torch.int32) * (SEQUENCE_TOKENS // self.chunk) - 1

    @cached_property
    def slots(self) -> torch.Tensor:
        """[sequences], int32: block of the pool that holds each sequence's state."""
        return torch.arange(1, SEQUENCES + 1, dtype=torch.int32)


MAMBA1 = Layer(heads=1, head_size=8192, state=16)
"""One channel each of Jamba's 8192 has a state of 16; its launcher counts them as one head."""


def cases() -> list[Case]:
    """Those of the packages, then vLLM's own, each kernel in every configuration.

    Left out, because no engine launches them: backward kernels, Mamba3 and vLLM's experimental ReplaySSM.

    Raises:
        CannotRunHereError: A package is missing, or vLLM is too different.
    """
    layer = Layer()
    return [
        *_package_scan(layer),
        *_package_state_update(layer),
        *_package_state_update(MAMBA1, variant="-mamba1"),
        *_package_conv_states(layer),
        *_vllm_scan(layer),
        *_vllm_state_update(layer),
        *_norms(layer),
        *_vllm_conv(layer),
        *_vllm_moves(layer),
    ]


def configured(
    package: Package,
    kernel: str,
    launch: Callable[[], object],
    configurations: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
    *,
    autotuned: bool = False,
    variant: str = "",
) -> list[Case]:
    """One case for each configuration of a kernel.

    Args:
        package: Whose it is.
        kernel: Name of the Triton function; a launch must compile this one and nothing else.
        launch: Its package's launcher on CPU tensors.
        configurations: Name of a configuration -> a context in which the launcher takes it; None where the launcher
            knows one only.
        autotuned: Whether Triton's autotuner chooses.
        variant: Behind the kernel's name, where one kernel is compiled at two shapes.
    """
    configurations = configurations or {AS_LAUNCHED: contextlib.nullcontext}
    labels = {"package": package, "kernel": kernel + variant, "version": _version(package)}
    name = f"{package}/{kernel}{variant}"

    def run(context: Callable[[], AbstractContextManager[object]]) -> None:
        with context(), imports.without_cuda():
            launch()

    return [
        Case(
            source="mamba",
            name=f"{name}/{configuration}",
            kernels=(kernel,),
            launch=partial(run, context),
            labels=labels | {"configuration": configuration},
            configuration=LaunchConfiguration(name, configuration, len(configurations), autotuned, context),
        )
        for configuration, context in configurations.items()
    ]


def autotuned(package: Package, tuner: Any, launch: Callable[[], object], *, variant: str = "") -> list[Case]:
    """A kernel with every configuration among which Triton's autotuner would choose.

    Args:
        package: Whose it is.
        tuner: triton.runtime.Autotuner.
        launch: Its launcher.
        variant: As of `configured`.
    """
    configurations = {configuration_name(config): partial(imports.pinned, tuner, config) for config in tuner.configs}
    return configured(package, tuner.base_fn.__name__, launch, configurations, autotuned=True, variant=variant)


def configuration_name(config: Any) -> str:
    """`M64-N32-K32-stages5-warps2` of a triton.Config."""
    sizes = [f"{name.removeprefix('BLOCK_SIZE').lstrip('_')}{value}" for name, value in config.kwargs.items()]
    return "-".join([*sizes, f"stages{config.num_stages}", f"warps{config.num_warps}"])


def _version(package: str) -> str:
    """Version of the installed distribution; vLLM's CPU build has a name of its own."""
    for name in (package, f"{package}-cpu"):
        for distribution in importlib.metadata.distributions(name=name):
            return distribution.version
    return "unknown"


def _package_scan(layer: Layer) -> list[Case]:
    """The five steps of a chunked scan (Dao and Gu 2024, section 6) and the states of packed sequences."""
    bmm, scan = imports.mamba_ssm("ssd_bmm"), imports.mamba_ssm("ssd_chunk_scan")
    state, passing = imports.mamba_ssm("ssd_chunk_state"), imports.mamba_ssm("ssd_state_passing")
    x, B, C = layer.x(1, layer.tokens), layer.projection(1, layer.tokens), layer.projection(1, layer.tokens)
    raw, bias, A = layer.per_head(1, layer.tokens, dtype=DTYPE), layer.per_head(), layer.per_head()
    dt = torch.empty(1, layer.heads, layer.chunks, layer.chunk)
    states, sums = layer.chunk_states(1, layer.chunks, dtype=DTYPE), layer.chunk_states(1, layer.chunks).flatten(-2)
    products = torch.empty(1, layer.chunks, layer.groups, layer.chunk, layer.chunk)
    seq_idx = torch.empty(1, layer.tokens, dtype=torch.int32)
    cumsum = partial(state._chunk_cumsum_fwd, raw, A, layer.chunk, dt_bias=bias, dt_softplus=True)
    chunk_state = partial(state._chunk_state_fwd, B, x, dt, dt, seq_idx=seq_idx)
    varlen = partial(state.chunk_state_varlen, B[0], x[0], dt[0], dt[0], layer.query_start_loc, states[0])
    state_passing = partial(
        passing._state_passing_fwd,
        sums,
        dt[..., -1],
        initial_states=layer.chunk_states(1).flatten(-2),
        seq_idx=seq_idx,
        chunk_size=layer.chunk,
        out_dtype=DTYPE,
    )
    products_of_chunks = partial(bmm._bmm_chunk_fwd, C, B, layer.chunk, seq_idx=seq_idx, output_dtype=torch.float32)
    chunk_scan = partial(scan._chunk_scan_fwd, products, x, dt, dt, C, states, D=layer.per_head(), seq_idx=seq_idx)
    return [
        *autotuned("mamba-ssm", state._chunk_cumsum_fwd_kernel, cumsum),
        *autotuned("mamba-ssm", state._chunk_state_fwd_kernel, chunk_state),
        *autotuned("mamba-ssm", state._chunk_state_varlen_kernel, varlen),
        *autotuned("mamba-ssm", passing._state_passing_fwd_kernel, state_passing),
        *autotuned("mamba-ssm", bmm._bmm_chunk_fwd_kernel, products_of_chunks),
        *autotuned("mamba-ssm", scan._chunk_scan_fwd_kernel, chunk_scan),
    ]


def _package_conv_states(layer: Layer) -> list[Case]:
    module = imports.causal_conv1d("causal_conv1d_varlen")
    x = torch.empty(layer.tokens, layer.conv_channels, dtype=DTYPE)
    launch = partial(module.causal_conv1d_varlen_states, x, layer.query_start_loc, layer.conv_width)
    return configured("causal-conv1d", "_causal_conv1d_varlen_states", launch)


def _vllm_scan(layer: Layer) -> list[Case]:
    """Cases of vLLM's five kernels of a Mamba-2 prefill."""
    bmm, scan = imports.vllm("ssd_bmm"), imports.vllm("ssd_chunk_scan")
    state, passing = imports.vllm("ssd_chunk_state"), imports.vllm("ssd_state_passing")
    x, B, C = layer.x(layer.tokens), layer.projection(layer.tokens), layer.projection(layer.tokens)
    raw, bias, A = layer.per_head(layer.tokens, dtype=DTYPE), layer.per_head(), layer.per_head()
    dt = torch.empty(layer.heads, layer.chunks, layer.chunk)
    states, initial = layer.chunk_states(layer.chunks), layer.chunk_states(SEQUENCES)
    products = torch.empty(layer.chunks, layer.groups, layer.chunk, layer.chunk)
    starts, seq_idx = layer.cu_chunk_seqlens, torch.empty(layer.chunks, dtype=torch.int32)
    cumsum = partial(state._chunk_cumsum_fwd, raw, A, layer.chunk, starts, dt_bias=bias, dt_softplus=True)
    chunk_state = partial(state._chunk_state_fwd, B, x, dt, dt, starts)
    state_passing = partial(
        passing._state_passing_fwd,
        states.flatten(-2),
        dt,
        layer.last_chunks,
        initial_states=initial.flatten(-2),
        out_dtype=torch.float32,
    )
    products_of_chunks = partial(bmm._bmm_chunk_fwd, C, B, layer.chunk, starts, output_dtype=torch.float32)
    chunk_scan = partial(
        scan._chunk_scan_fwd,
        products,
        x,
        dt,
        dt,
        C,
        states,
        starts,
        torch.empty_like(x),
        seq_idx,
        D=layer.per_head(),
        initial_states=initial,
    )
    return [
        *autotuned("vllm", state._chunk_cumsum_fwd_kernel, cumsum),
        *autotuned("vllm", state._chunk_state_fwd_kernel, chunk_state),
        *autotuned("vllm", passing._state_passing_fwd_kernel, state_passing),
        *autotuned("vllm", bmm._bmm_chunk_fwd_kernel, products_of_chunks),
        *autotuned("vllm", scan._chunk_scan_fwd_kernel, chunk_scan),
    ]


def _package_state_update(layer: Layer, variant: str = "") -> list[Case]:
    update = imports.mamba_ssm("selective_state_update").selective_state_update
    launch = partial(update, **_decode(layer), state_batch_indices=layer.slots)
    return configured("mamba-ssm", "_selective_scan_update_kernel", launch, variant=variant)


def _vllm_state_update(layer: Layer) -> list[Case]:
    """One decode step, in the launches that vLLM's tables hold for AMD products and in its fallback."""
    module, operands = imports.vllm("mamba_ssm"), _decode(layer)
    out = torch.empty_like(operands["x"])
    launch = partial(module.selective_state_update, **operands, state_batch_indices=layer.slots, out=out)
    tables = Path(module._CONFIGS_DIR).glob(f"headdim={layer.head_size},dstate={layer.state},device_name=AMD_*.json")
    rows = [row for table in tables for row in json.loads(table.read_text()).values() if isinstance(row, dict)]
    fallback = module._get_default_ssm_launch_config(layer.state, is_blackwell=False)
    launches = {fallback, *((row["BLOCK_SIZE_M"], row["num_warps"]) for row in rows)}
    configurations: dict[str, Callable[[], AbstractContextManager[object]]] = {
        f"M{rows}-warps{warps}": partial(module.override_ssm_config, (rows, warps)) for rows, warps in sorted(launches)
    }
    return configured("vllm", "_selective_scan_update_kernel", launch, configurations)


def _decode(layer: Layer) -> dict[str, Any]:
    """Operands of one decode step on a pool of states above 2 GiB, by their names in mamba-ssm and vLLM alike."""
    size = (layer.heads, layer.head_size)
    if layer.heads > 1:  # Mamba2: one dt and one A a head, seen by each channel through a stride of 0
        dt = layer.per_head(SEQUENCES, dtype=DTYPE)[..., None].expand(SEQUENCES, *size)
        bias, D = (layer.per_head()[:, None].expand(size) for _ in "bD")
        A = layer.per_head()[:, None, None].expand(*size, layer.state)
    else:
        dt = torch.empty(SEQUENCES, *size, dtype=DTYPE)
        bias, D, A = torch.empty(size), torch.empty(size), torch.empty(*size, layer.state)
    return {
        "state": layer.chunk_states(POOL_BLOCKS * 128 * 64 * 128 // (layer.heads * layer.head_size * layer.state)),
        "x": layer.x(SEQUENCES),
        "dt": dt,
        "A": A,
        "B": layer.projection(SEQUENCES),
        "C": layer.projection(SEQUENCES),
        "D": D,
        "dt_bias": bias,
        "dt_softplus": True,
    }


def _vllm_conv(layer: Layer) -> list[Case]:
    """Prefill and decode of the convolution, on the channels-last pool that vLLM keeps."""
    module = imports.vllm("causal_conv1d")
    channels, history = layer.conv_channels, layer.conv_width - 1
    pool = torch.empty(POOL_BLOCKS, history, channels, dtype=DTYPE).transpose(1, 2)
    weight, bias = torch.empty(channels, layer.conv_width, dtype=DTYPE), torch.empty(channels, dtype=DTYPE)

    x, tokens = (torch.empty(size, channels, dtype=DTYPE) for size in (layer.tokens, SEQUENCES))
    prefill = partial(
        module.causal_conv1d_fn,
        x.transpose(0, 1),
        weight,
        bias,
        pool,
        layer.query_start_loc,
        cache_indices=layer.slots,
        has_initial_state=torch.ones(SEQUENCES, dtype=torch.bool),
    )
    update = partial(module.causal_conv1d_update, tokens, pool, weight, bias, "silu", conv_state_indices=layer.slots)
    return [
        *configured("vllm", "_causal_conv1d_fwd_kernel", prefill),
        *configured("vllm", "_causal_conv1d_update_kernel", update),
    ]


def _vllm_moves(layer: Layer) -> list[Case]:
    """States between the pool and the dense rows that a prefill works on."""
    gather = imports.vllm("gather_initial_states")._gather_initial_states_kernel
    scatter = imports.vllm("scatter_states")._scatter_states_kernel
    pool, rows, known = layer.chunk_states(POOL_BLOCKS), layer.chunk_states(SEQUENCES), torch.ones(SEQUENCES).bool()
    row, block = rows[0].numel(), 1024
    grid, stride = (row // block, SEQUENCES), pool.stride(0)
    sizes = {"row_size": row, "BLOCK_SIZE": block, "num_warps": 8, "launch_pdl": False}
    read = partial(gather[grid], pool, layer.slots, known, rows, stride, 1, 1, **sizes)
    write = partial(scatter[grid], pool, rows, layer.slots, stride, rows.stride(0), 1, **sizes)
    return [
        *configured("vllm", "_gather_initial_states_kernel", read),
        *configured("vllm", "_scatter_states_kernel", write),
    ]


def _norms(layer: Layer) -> list[Case]:
    """The gated RMS norm after a layer, the package's and vLLM's."""
    channels = layer.heads * layer.head_size
    x, weight = torch.empty(layer.tokens, channels, dtype=DTYPE), torch.empty(channels, dtype=DTYPE)
    package, copy = imports.mamba_ssm("layernorm_gated"), imports.vllm("layernorm_gated")

    package_norm = partial(
        package._layer_norm_fwd, x, weight, None, 1e-5, z=x, norm_before_gate=False, is_rms_norm=True
    )
    vllm_norm = partial(copy.rms_norm_gated, x, weight, None, z=x, norm_before_gate=False)
    return [
        *configured("mamba-ssm", "_layer_norm_fwd_1pass_kernel", package_norm),
        *configured("vllm", "_layer_norm_fwd_1pass_kernel", vllm_norm),
    ]
