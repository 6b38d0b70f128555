"""Poison what the kernels allocate: scratch that a kernel forgot to write is NaN and not a lucky zero."""

from __future__ import annotations

import uuid

import pytest
import torch
from support.pools import FAR


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


@pytest.fixture
def far_pool(far_storage):
    """K and V `[5, 16, 2, 32]` fp16 with a block stride of FAR elements; blocks 0 and 4 hold NaN."""
    shape, side = (5, 16, 2, 32), 1024
    storage = far_storage(4 * FAR + 2 * side, torch.float16)
    for block in (0, 4):
        storage[block * FAR : block * FAR + 2 * side] = float("nan")
    return tuple(storage.as_strided(shape, (FAR, 64, 32, 1), offset) for offset in (0, side))
