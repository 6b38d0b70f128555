# SPDX-License-Identifier: Apache-2.0
"""`_fwd_grouped_kernel_stage1` and `_fwd_kernel_stage2`: decode over padded rows of a latent cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import vllm_kernels
from support.attending import HALF, check, lse_error
from support.mla_steps import step
from support.tolerances import LSE_ABSOLUTE, UNIT_ROUNDOFF

from pagedkv.attention import reference

pytestmark = pytest.mark.device

SEQ_LENS = [1, 17, 33, 150]


def verify(data, cache, result, record_property, lse_bound: float = LSE_ABSOLUTE) -> None:
    rows = cache.unsqueeze(2)
    golden = reference.attention(data.query, rows, rows[..., : data.latent], **data.metadata, scale=data.scale)
    check(result[0], golden[0], record_property, "mla")
    assert lse_error(result[1], golden[1]) <= lse_bound


@pytest.mark.parametrize("dtype", vllm_kernels.DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("heads", [16, 5, 40])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_mla_decode(block_size, heads, splits, dtype, device, record_property):
    data = step(device, heads, SEQ_LENS, block_size=block_size, rope=64, dtype=dtype)
    verify(data, data.cache, vllm_kernels.mla_decode(data, splits=splits), record_property)


def test_mla_decode_of_16_rope_channels(device, record_property):
    data = step(device, 16, SEQ_LENS, dtype=HALF)
    verify(data, data.cache, vllm_kernels.mla_decode(data, splits=4), record_property)


@pytest.mark.parametrize("block_size", [16, 2048])
def test_mla_decode_of_deepseek(block_size, device, record_property):
    """Latent rows of 512 and 64 channels."""
    data = step(device, 16, [1, 65], block_size=block_size, latent=512, rope=64, dtype=HALF)
    verify(data, data.cache, vllm_kernels.mla_decode(data, splits=4), record_property)


@pytest.mark.parametrize("splits", [1, 4])
def test_mla_decode_of_a_quantised_cache(splits, device, record_property):
    data = step(device, 16, SEQ_LENS, rope=64, dtype=HALF)
    scale = torch.tensor(0.031, device=device)
    kind = getattr(torch, f"float8_{vllm_kernels.fp8_format()}")
    codes = torch.full_like(data.cache, float("nan"), dtype=torch.float32)
    codes.copy_(data.cache.float() / scale)
    data = dataclasses.replace(data, cache=codes.to(kind))
    # vLLM rounds each scaled key to the dtype: u/sqrt(3) rms of a score whatever its channels, times 2.5.
    bound = LSE_ABSOLUTE + 1.5 * UNIT_ROUNDOFF[HALF]
    result = vllm_kernels.mla_decode(data, splits=splits, cache_scale=scale)
    verify(data, data.cache.double() * scale.double(), result, record_property, bound)
