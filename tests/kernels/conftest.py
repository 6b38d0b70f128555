# SPDX-License-Identifier: Apache-2.0
"""Poison what the kernels allocate: scratch that a kernel forgot to write is NaN and not a lucky zero."""

from __future__ import annotations

import uuid

import pytest
import torch


@pytest.fixture(autouse=True)
def _nan_scratch(monkeypatch):
    real = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        tensor = real(self, *args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.fixture
def far_storage(device, tmp_path):
    """far_storage(elements, dtype): a tensor of which little is touched. On the CPU it is a sparse file of zeros."""

    def make(elements: int, dtype: torch.dtype) -> torch.Tensor:
        if device != "cpu":
            return torch.empty(elements, dtype=dtype, device=device)
        return torch.from_file(str(tmp_path / f"storage-{uuid.uuid4()}"), shared=True, size=elements, dtype=dtype)

    return make
