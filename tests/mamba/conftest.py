# SPDX-License-Identifier: Apache-2.0
"""Poisoned outputs, launchers that accept the CPU, and one configuration for each autotuned kernel."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from hilgate.conditions import NEEDS

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


class Index(int):
    """What a loop of an interpreted kernel counts with, where the kernel makes 64 bits of it."""

    def to(self, _dtype: object) -> Index:
        return self


TUNED_DELTA = (
    "cumsum",
    "chunk_scaled_dot_kkt",
    "solve_tril",
    "wy_fast",
    "chunk_delta_h",
    "chunk_o",
    "kda",
    "kimi.chunk",
    "kimi.chunk_intra",
    "kimi.chunk_intra_token_parallel",
)


CRASHES = {("gfx90a", "3.6.0"): "kimi_recurrent-3", ("gfx942", "3.6.0"): "kimi_recurrent-3"}
"""(arch, Triton) -> tests that cannot be compiled there; `pagedkv/audit/declared.toml` says why."""


def pytest_collection_modifyitems(config, items):
    import triton

    arch = config.getoption("amdgcn")
    if not arch and torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        arch = triton.runtime.driver.active.get_current_target().arch
    crashes = CRASHES.get((arch, triton.__version__))
    for item in items:
        if crashes and crashes in item.name:
            item.user_properties.append((NEEDS, f"package:triton!={triton.__version__}"))
            item.add_marker(
                pytest.mark.xfail(reason="the compiler crashes: declared.toml", raises=RuntimeError, strict=True)
            )


@contextlib.contextmanager
def _decided(source, modules=TUNED):
    """A function that finds modules of `pagedkv.audit.imports.<source>`, with every autotuned kernel's choice made.

    Those of the delta rules take their first configuration, which has their smallest tiles.
    """
    from triton.runtime import Autotuner

    from pagedkv.audit import imports

    load = getattr(imports, source)
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, kernel in vars(load(module)).items():
                tuner = getattr(kernel, "fn", kernel) if modules is TUNED_DELTA else kernel
                if isinstance(tuner, Autotuner):
                    wanted = SIZES.get(name, OTHERWISE if modules is TUNED else {}).items()
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


@pytest.fixture
def delta_ops(monkeypatch):
    """delta_ops(module): a module of vLLM's delta rules.

    The interpreter replaces what is reached through `tl`, and these modules have names of their own for some of it.
    """
    from triton import language as tl

    from pagedkv.device import INTERPRETED

    def late(name, *args, **options):
        return getattr(tl, name)(*args, **options)

    with _decided("vllm_delta", TUNED_DELTA) as load:
        for module in (*TUNED_DELTA, "fused_recurrent", "kimi.fused_recurrent") if INTERPRETED else ():
            for name, value in list(vars(load(module)).items()):
                if callable(value) and value is getattr(tl, name, None):
                    monkeypatch.setattr(load(module), name, functools.partial(late, name))
            monkeypatch.setattr(load(module), "range", lambda *ends: map(Index, range(*ends)), raising=False)
        yield load
