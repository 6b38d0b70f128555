"""Poison what the kernels allocate: scratch that a kernel forgot to write is NaN and not a lucky zero."""

from __future__ import annotations

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
def far_pool(device, tmp_path):
    """K and V `[5, 16, 2, 32]` fp16 with a block stride of 2^30 elements and more; block 0 holds NaN.

    4 * stride wraps to an offset in block 0 when it is computed in 32 bits. On the CPU the pool is a sparse file.
    """
    shape, stride, side = (5, 16, 2, 32), 2**30 + 64, 1024
    elements = 4 * stride + 2 * side
    if device == "cpu":
        file = str(tmp_path / "pool")
        storage = torch.from_file(file, shared=True, size=elements, dtype=torch.float16)
    else:
        storage = torch.empty(elements, dtype=torch.float16, device=device)
    for block in (0, 4):
        storage[block * stride : block * stride + 2 * side] = float("nan")
    return tuple(storage.as_strided(shape, (stride, 64, 32, 1), offset) for offset in (0, side))
