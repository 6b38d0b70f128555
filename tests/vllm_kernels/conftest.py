# SPDX-License-Identifier: Apache-2.0
"""The arch that kernels run as, and the declared faults of compilers on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilgate.conditions import NEEDS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch
    import triton
    from support import machine_code, vllm_kernels  # not before the suite has chosen how Triton runs

    if arch := config.getoption("amdgcn"):
        vllm_kernels.take_arch(arch)
    if triton.knobs.runtime.interpret or arch or not torch.cuda.is_available():
        return
    # A GPU runs the machine code that the executor runs, with the same faults of the compiler.
    arch = str(triton.runtime.driver.active.get_current_target().arch)
    for item in items:
        why = machine_code.declared(arch, triton.__version__, item.nodeid)
        if why and HERE in item.path.parents:
            item.user_properties.append((NEEDS, f"package:triton!={triton.__version__}"))
            item.add_marker(pytest.mark.xfail(reason=f"declared: {why}", raises=AssertionError, strict=True))
