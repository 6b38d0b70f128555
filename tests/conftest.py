"""Where kernels run in a test session: on the GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GPU_NODES = ("/dev/kfd", "/dev/nvidiactl")


def pytest_configure() -> None:
    # Triton decides when a kernel is defined, so this must precede every import of triton. Looking for the driver's
    # device nodes keeps torch out of the sessions that do not need it; the `device` fixture checks what torch says.
    if not any(Path(node).exists() for node in GPU_NODES):
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """The torch device of the kernels under test: "cuda" (CUDA or HIP) or "cpu" (interpreted)."""
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.fail(
            "no usable GPU, and kernels are not interpreted. Set TRITON_INTERPRET=1 to run them on the CPU, or repair "
            "the driver (torch.cuda.is_available() is False)."
        )
    return "cuda"
