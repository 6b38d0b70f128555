# SPDX-License-Identifier: Apache-2.0
"""Poisoned outputs, launchers that accept the CPU, and one configuration for each autotuned kernel."""

from __future__ import annotations

import contextlib

import pytest
import torch

# Nothing here imports triton at once: pytest reads this file before tests/conftest.py has said how kernels run.

SIZES = {
    "_chunk_cumsum_fwd_kernel": {"BLOCK_SIZE_H": 4},
    "_state_passing_fwd_kernel": {"BLOCK_SIZE": 1024},
}
"""Which configuration, by what must be in it: smaller than the shapes of the tests, so that edges and loops are met."""

OTHERWISE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}


@pytest.fixture(autouse=True)
def _nan_outputs(monkeypatch):
    """What a launcher allocates is NaN until its kernel has written it."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)

        def poisoned(*args, real=real, **kwargs):
            tensor = real(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture(autouse=True)
def _without_cuda():
    from pagedkv.audit import imports

    with imports.without_cuda():
        yield


TUNED = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_state_passing")


@contextlib.contextmanager
def _decided(source):
    """A function that finds modules of `pagedkv.audit.imports.<source>`, with every autotuned kernel's choice made."""
    from triton.runtime import Autotuner

    from pagedkv.audit import imports

    load = getattr(imports, source)
    with contextlib.ExitStack() as stack:
        for module in TUNED:
            for name, tuner in vars(load(module)).items():
                if isinstance(tuner, Autotuner):
                    wanted = SIZES.get(name, OTHERWISE).items()
                    chosen = next((config for config in tuner.configs if wanted <= config.kwargs.items()), None)
                    if chosen is not None:
                        stack.enter_context(imports.pinned(tuner, chosen))
        yield load


@pytest.fixture
def package():
    """package(module): a module of mamba_ssm.ops.triton."""
    with _decided("mamba_ssm") as load:
        yield load


@pytest.fixture
def vllm_ops():
    """vllm_ops(module): a module of vLLM's Mamba operations."""
    with _decided("vllm") as load:
        yield load
