"""A HIP driver for machines without a GPU: launches compile, and then end in a callback instead of on a device.

With it active, a real Python launcher runs on CPU tensors. Triton specialises on the real arguments (divisibility by
16, pointer range, strides equal to 1), compiles for the wanted gfx arch, and hands us the code object where it would
have started a grid. Nothing is executed, so outputs keep whatever they held.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import compiler as triton_compiler
from triton.runtime import driver as active_driver

from pagedkv.arch import Arch, limits

from .machine import LDS_GRANULES, MAX_WORKGROUP, VGPRS

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class OfflineHipDriver(DriverBase):
    """Driver of one gfx arch that is not there.

    Every arch has its own device index, because Triton caches targets, compiled kernels and the LDS limit per device:
    with one index for all, the second arch would be answered with the first one's code.
    """

    arch: Arch

    def __post_init__(self) -> None:
        super().__init__()
        properties = {
            "max_shared_mem": self.arch.lds_bytes,
            "arch": self.arch.name,
            "warpSize": self.arch.lanes,
            "multiprocessor_count": self.arch.compute_units,
            "max_num_regs": VGPRS,
        }
        self.utils = SimpleNamespace(
            get_device_properties=lambda _device: properties,
            # (module, function, registers, spills, largest workgroup): the first two are opaque to Triton
            load_binary=lambda name, _code, _shared, _device: (name, name, 0, 0, MAX_WORKGROUP),
            unload_module=lambda _module: None,  # Triton >= 3.8 unloads what it loaded
        )
        self.launcher_cls = lambda _src, _metadata: lambda *_args, **_kwargs: None  # Triton's compiles a C launcher
        self.get_current_device = lambda: list(LDS_GRANULES).index(self.arch.name)
        self.set_current_device = lambda _device: None
        self.get_current_stream = lambda _device: 0
        self.get_device_interface = lambda: torch.cpu

    @classmethod
    def is_active(cls) -> bool:
        """Never picked by itself, only by `offline`."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only a real launcher needs C types."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        return GPUTarget("hip", self.arch.name, self.arch.lanes)

    def get_active_torch_device(self) -> torch.device:
        """Where launchers make their tensors."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Refuses: nothing runs."""
        raise NotImplementedError("nothing runs on this driver, so nothing can be timed: autotuning needs a GPU")


@contextlib.contextmanager
def offline(arch: str) -> Iterator[None]:
    """Make `arch`, one of `LDS_GRANULES`, the active device for the duration of the block."""
    triton_compiler.max_shared_mem.cache_clear()
    try:
        # Triton offers a setter of the active driver, and no getter that does not probe GPUs.
        with mock.patch.object(active_driver, "_active", OfflineHipDriver(limits(arch))):
            yield
    finally:
        triton_compiler.max_shared_mem.cache_clear()
