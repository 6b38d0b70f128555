# SPDX-License-Identifier: Apache-2.0
"""Our ssd_prefill in the place of vLLM's five kernels, in the Mamba-2 prefill of a process (`PAGEDKV_SSD=1`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagedkv import prepared
from pagedkv.ssd.prefill import ssd_prefill
from pagedkv.vllm_plugin import check_parameters, replace_functions

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch import Tensor

MODULE = "vllm.model_executor.layers.mamba.ops.ssd_combined"
NAME = "_mamba_chunk_scan_combined_fwd"

calls = 0
"""Calls of our launcher in this process."""


def claim() -> ExitStack:
    """Put our function in vLLM's module, if vLLM's takes the arguments that we know. A second call changes nothing.

    Returns:
        What restores the earlier one: `with claim():` uses ours inside the block.

    Raises:
        VersionError: It takes others, or is gone. vLLM's own is then left in place.
    """
    module: Any = import_module(MODULE)
    # The function of the CPU platform takes more.
    check_parameters(getattr(module, NAME, None), combined, f"{MODULE}.{NAME}", "kwargs")
    return replace_functions([(module, NAME, combined)])


def combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,  # noqa: ARG001 - no result of ours depends on it
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_intermediate_states: bool = False,
    seq_idx: Tensor | None = None,  # noqa: ARG001 - the last chunk of each sequence says it
    cu_seqlens: Tensor | None = None,
    cu_chunk_seqlens: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state_dtype: Any = None,
) -> Tensor:
    """Run a prefill as vLLM's function is called; return the state after each sequence, or after each chunk."""
    global calls  # noqa: PLW0603 - the workers' report reads it
    assert cu_seqlens is not None
    assert cu_chunk_seqlens is not None
    assert last_chunk_indices is not None
    given = {
        "x": _dense(x),
        "dt": _dense(dt),
        "A": A,
        "B": _dense(B),
        "C": _dense(C),
        "out": out,
        "D": None if D is None else _dense(D),
        "z": None if z is None else _dense(z),
        "dt_bias": dt_bias,
        "initial_states": initial_states,
        "dt_softplus": dt_softplus,
        "dt_limit": dt_limit,
    }
    # Either way of asking for states has machine code of its own, and vLLM warms up one of them.
    layer = (x.dtype, x.shape[1:], B.shape[1:], dt.dtype, z is None, D is None, initial_states is None, state_dtype)
    shape = (*x.shape[1:], B.shape[-1])

    def states_at(starts: Tensor, **last: Tensor) -> Tensor:
        states = x.new_empty((len(starts) - 1, *shape), dtype=state_dtype or C.dtype)
        ssd_prefill(**given, states=states, starts=starts, **last)
        return states

    if return_intermediate_states or prepared.first_warm_up("ssd", layer):
        states = states_at(cu_chunk_seqlens, last_pieces=last_chunk_indices)
    if not return_intermediate_states:
        states = states_at(cu_seqlens)
    calls += 1
    return states


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
