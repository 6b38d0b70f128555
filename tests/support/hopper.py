# SPDX-License-Identifier: Apache-2.0
"""An H200 that is not there, for what Triton compiles and never runs."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget

from pagedkv.audit.compile import OfflineHipDriver
from pagedkv.audit.machine import LDS_GRANULES


class OfflineCudaDriver(OfflineHipDriver):
    """Triton's driver of one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.get_current_device = lambda: len(LDS_GRANULES)  # an index of its own

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
