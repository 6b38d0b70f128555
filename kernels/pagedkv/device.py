# SPDX-License-Identifier: Apache-2.0
"""The one place that asks which device runs the kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
import triton

from pagedkv.arch import Arch, aborts_on_one_wave, copies_past_registers, limits

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether `@triton.jit` made interpreted functions. Triton decides when a kernel is defined, so it is read once."""


def current(tensor: torch.Tensor | None = None) -> Arch:
    """Return the limits of the device that the kernels are compiled for: that of `tensor`, else the current one.

    Raises:
        UnsupportedArchError: if it is of an arch without limits and tuning data.
    """
    if INTERPRETED:
        return limits("interpreter")
    # Not where the audit compiles for a device that is not there.
    if not torch.cuda.is_initialized():
        return _target()
    own = tensor is not None and tensor.is_cuda
    return _installed(tensor.get_device() if own and tensor is not None else torch.cuda.current_device())


@functools.cache
def _installed(index: int) -> Arch:
    """Return the limits of an installed device, with its own count of compute units.

    Devices of one arch differ in it (gfx942: 304 of an MI300X, 228 of an MI300A, 80 of an MI308X).
    """
    with torch.cuda.device(index):
        target = _target()
    return dataclasses.replace(target, compute_units=torch.cuda.get_device_properties(index).multi_processor_count)


def _target() -> Arch:
    target = triton.runtime.driver.active.get_current_target()
    # CUDA targets carry the compute capability as an integer (90), HIP targets the gfx name.
    name = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    copies = copies_past_registers(name, triton.__version__, triton.knobs.amd.use_async_copy)
    arch = dataclasses.replace(limits(name), async_copies=True) if copies else limits(name)
    return dataclasses.replace(arch, least_waves=2) if aborts_on_one_wave(arch, triton.__version__) else arch


def on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which launches go to the device of `tensor`."""
    return torch.cuda.device(tensor.get_device()) if tensor.is_cuda else contextlib.nullcontext()
