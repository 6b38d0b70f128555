# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels are looked for before any test runs: where one has moved, nothing runs and the step did not run."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    from support import vllm_kernels  # not before the suite has chosen how Triton runs

    if arch := config.getoption("amdgcn"):
        vllm_kernels.take_arch(arch)
    try:
        vllm_kernels.check_all()
    except vllm_kernels.MovedKernelError as error:
        raise pytest.UsageError(str(error)) from None
