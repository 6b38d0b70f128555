# SPDX-License-Identifier: Apache-2.0
"""Our chunk_scan in the place of vLLM's, in the Mamba-2 prefill of a process (`PAGEDKV_SSD=1`).

On GPUs that one kernel is replaced, and the steps before it stay vLLM's. vLLM's CPU platform has the whole scan as one
operator; there the steps are plain torch.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from pagedkv.ssd import reference
from pagedkv.ssd.scan import chunk_scan
from pagedkv.ssd.steps import steps
from pagedkv.vllm_plugin.errors import VersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

MODULE = "vllm.model_executor.layers.mamba.ops.ssd_combined"

calls = 0
"""Calls of our kernel's launcher in this process."""


def claim() -> Callable[[], None]:
    """Put our function in vLLM's module, if vLLM's takes the arguments that we know. A second call changes nothing.

    Returns:
        A function that puts back what stood there.

    Raises:
        VersionError: It takes others, or is gone. vLLM's own is then left in place.
    """
    module: Any = import_module(MODULE)
    name, ours = (
        ("_mamba_chunk_scan_combined_fwd", combined) if current_platform.is_cpu() else ("_chunk_scan_fwd", scan)
    )
    theirs = getattr(module, name, None)
    if theirs is not ours:
        known = list(inspect.signature(ours).parameters)
        found = [] if theirs is None else list(inspect.signature(theirs).parameters)
        if [parameter for parameter in found if parameter != "kwargs"] != known:
            raise VersionError.of_this_vllm(f"{MODULE}.{name} takes ({', '.join(found)}), not ({', '.join(known)})")
        setattr(module, name, ours)
    return lambda: setattr(module, name, theirs)


@contextmanager
def claimed() -> Iterator[None]:
    """Use our function inside the block and the earlier one behind it; raises as `claim`."""
    put_back = claim()
    try:
        yield
    finally:
        put_back()


def scan(
    cb: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    states: Tensor,
    cu_chunk_seqlens: Tensor,
    out: Tensor,
    seq_idx: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> None:
    """Call `pagedkv.ssd.scan.chunk_scan` with the arguments of vLLM's function."""
    global calls  # noqa: PLW0603 - the workers' report reads it
    chunk_scan(
        cb,
        _dense(x),
        dt,
        dA_cumsum,
        C,
        states,
        out,
        chunk_starts=cu_chunk_seqlens,
        sequences=seq_idx,
        D=D,
        z=_dense(z),
        initial_states=initial_states,
    )
    calls += 1


def _dense(rows: Tensor | None) -> Tensor | None:
    return rows if rows is None or rows.stride(-1) == 1 else rows.contiguous()


def combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_intermediate_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,  # noqa: ARG001 - chunks say it all
    cu_chunk_seqlens: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state_dtype: Any = None,
) -> Tensor:
    """All steps of a prefill on the CPU platform; returns the state behind each sequence, or behind each chunk."""
    assert seq_idx is not None
    assert cu_chunk_seqlens is not None
    step_size = reference.step_size(dt, dt_bias, softplus=dt_softplus, limit=dt_limit).float()
    starts, owners = cu_chunk_seqlens.tolist(), seq_idx.tolist()
    made = steps(
        x,
        step_size,
        A,
        B,
        C,
        chunk_size=chunk_size,
        chunk_starts=starts,
        sequences=owners,
        initial_states=initial_states,
    )
    skip = D if D is None else D.contiguous()
    scan(made.products, x, made.dt, made.sums, C, made.states, cu_chunk_seqlens, out, seq_idx, skip, z, initial_states)
    states = made.states.to(state_dtype or C.dtype)
    return states if return_intermediate_states else states[last_chunk_indices]
