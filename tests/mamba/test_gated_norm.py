# SPDX-License-Identifier: Apache-2.0
"""mamba-ssm's gated RMS norm, as Mamba2 layers end with it."""

from __future__ import annotations

import pytest
import torch
from mamba import oracle
from mamba.data import DTYPES, check

pytestmark = pytest.mark.device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [80, 320], ids=["groups-of-80", "one-group"])
@pytest.mark.parametrize("gate", ["before", "after", "none"])
def test_rmsnorm_fn(dtype, group_size, gate, device, package, record_property):
    """The gate multiplies what is normed, or the result, or is missing; rows lie apart, with NaN between them."""
    torch.manual_seed(group_size)
    channels, rows = 320, 7
    both = torch.full((rows, 2, channels + 24), float("nan"), dtype=getattr(torch, dtype), device=device)
    both[..., :channels] = torch.randn(rows, 2, channels).to(both)
    x, z = both[:, 0, :channels], None if gate == "none" else both[:, 1, :channels]
    weight = torch.randn(channels).to(device, x.dtype)
    options = {"eps": 1e-5, "group_size": group_size, "norm_before_gate": gate == "after"}
    out = package("layernorm_gated").rmsnorm_fn(x, weight, None, z=z, **options)
    golden = oracle.gated_rms_norm(x, weight, z, **options)
    check(out, golden, "gated_norm", dtype, record_property)
