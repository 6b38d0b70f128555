# SPDX-License-Identifier: Apache-2.0
"""causal-conv1d's one Triton kernel: the history that each packed sequence leaves to its next step."""

from __future__ import annotations

import pytest
import torch
from mamba import oracle
from mamba.data import DTYPES
from support.pools import assert_same_bits

from pagedkv.audit import imports

pytestmark = pytest.mark.device

STARTS = [0, 1, 3, 6, 13, 83]
"""Sequences of 1, 2, 3, 7 and 70 tokens: shorter than the history, as long, longer."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4, 20], ids=lambda width: f"width{width}")
def test_causal_conv1d_varlen_states(dtype, width, device):
    """Bits are moved, so bits are compared; channels are a slice of a projection, NaN follows them."""
    torch.manual_seed(width)
    tokens, channels = STARTS[-1], 300
    rows = torch.full((tokens + 2, channels + 40), float("nan"), dtype=getattr(torch, dtype), device=device)
    x = rows[:tokens, 8 : 8 + channels]
    x.copy_(torch.randn(x.shape))
    module = imports.causal_conv1d("causal_conv1d_varlen")
    starts = torch.tensor(STARTS, dtype=torch.int32, device=device)
    states = module.causal_conv1d_varlen_states(x, starts, width)
    golden = oracle.conv_states(x, STARTS, width)
    assert_same_bits(states.cpu(), golden, "states")
