# SPDX-License-Identifier: Apache-2.0
"""Interpreted kernels as GPUs launch them too (`--launch`), with NaN (integers: 90) in scratch that was not written.

No test finds calls that another one prepared.
"""

from __future__ import annotations

import dataclasses
import uuid

import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_prepared(monkeypatch):
    from pagedkv import prepared

    monkeypatch.setattr(prepared, "_calls", {})


@pytest.fixture(autouse=True)
def _nan_scratch(monkeypatch):
    real = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        tensor = real(self, *args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x5A)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from pagedkv.device import INTERPRETED  # not before the suite has chosen how Triton runs

    if INTERPRETED and metafunc.definition.get_closest_marker("device"):
        metafunc.parametrize("launched", metafunc.config.getoption("launch") or ["interpreter"], indirect=True)


@pytest.fixture(autouse=True)
def launched(request, monkeypatch) -> str:
    """The arch whose launches the kernels of a test get; that of the device, where there is one.

    Codes are decoded in software: the interpreter has neither a GPU's conversion nor its dependent launches.
    """
    from pagedkv import device as device_module

    if arch := getattr(request, "param", ""):
        limits = dataclasses.replace(device_module.limits(arch), native_fp8="", dependent_launches=False)
        monkeypatch.setattr(device_module, "limits", lambda _: limits)
    return arch


@pytest.fixture
def far_storage(device, tmp_path):
    """far_storage(elements, dtype): a tensor of which little is touched. On the CPU it is a sparse file of zeros."""

    def make(elements: int, dtype: torch.dtype) -> torch.Tensor:
        if device != "cpu":
            return torch.empty(elements, dtype=dtype, device=device)
        return torch.from_file(str(tmp_path / f"storage-{uuid.uuid4()}"), shared=True, size=elements, dtype=dtype)

    return make
