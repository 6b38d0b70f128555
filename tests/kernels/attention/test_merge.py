# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch
from support.tolerances import ROW_RELATIVE

from pagedkv.attention.merge import reduce_kernel

pytestmark = pytest.mark.device


@pytest.mark.parametrize("splits", [2, 13, 70])
def test_reduce_kernel(splits, device, record_property):
    """Merged by the definition in float64; more partitions than one chunk, empty partitions, and an empty row."""
    torch.manual_seed(splits)
    num_tokens, heads, head_size = 7, 3, 80
    partial = torch.randn(num_tokens, heads, splits, head_size, device=device)
    lse = 8 * torch.randn(num_tokens, heads, splits, device=device)
    lse[:, :, 1::3] = float("-inf")
    lse[3, 1] = float("-inf")
    partial[lse == float("-inf")] = 0.0
    starts = torch.tensor([1, 3, 6], dtype=torch.int32, device=device)
    out = torch.full((num_tokens, heads, head_size), float("nan"), device=device)
    sizes = {
        "NUM_HEADS": heads,
        "HEAD_SIZE": head_size,
        "HEAD_SIZE_PADDED": 128,
        "BLOCK_M": 4,
        "BLOCK_SPLITS": 8,
        "SINGLE_PASS": splits <= 8,
    }
    sums = torch.full((heads, num_tokens), float("nan"), device=device).T
    strides = (out.stride()[:2], sums.stride())
    rows = 6 * heads  # tokens 1 to 5 are of this call, 6 is the padding of a captured graph
    reduce_kernel[(6,)](
        partial[1:], lse[1:], out, sums, starts, 2, rows, splits, *strides, **sizes, WRITE_LSE=True, USE_PDL=False
    )

    weights = torch.exp2(lse.double() - lse.double().amax(-1, keepdim=True)).nan_to_num(0.0)
    total = weights.sum(-1, keepdim=True)
    golden = (weights[..., None] * partial.double()).sum(2) / torch.where(total > 0, total, 1.0)
    assert out[:1].isnan().all(), "rows of another call were written"
    assert out[6:].isnan().all(), "rows after the last sequence were written"
    assert (out[3, 1] == 0).all()
    error = (out - golden).norm(dim=-1)[1:6] / golden.norm(dim=-1)[1:6].clamp(min=1e-30)
    record_property("max_row_relative_err", error.max().item())
    assert error.max() <= ROW_RELATIVE["attention", "float32"]
    golden_sums = torch.logsumexp(lse.double() * math.log(2), dim=-1)
    assert sums[:1].isnan().all()
    assert sums[6:].isnan().all()
    # Numbers up to 30 in fp32, each rounded three times: exponential, sum, logarithm.
    assert torch.allclose(sums[1:6].double(), golden_sums[1:6], rtol=0, atol=3 * 32 * 2.0**-24)
