# SPDX-License-Identifier: Apache-2.0
"""`reshape_and_cache_kernel_flash` and `reshape_and_cache_shuffle_kernel` store K and V, and touch no other byte."""

from __future__ import annotations

import pytest
import torch
from support import vllm_kernels
from support.pools import assert_same_bits, pool

from pagedkv.device import INTERPRETED

pytestmark = pytest.mark.device

LAYOUTS = ("nhd", "hnd", "interleaved", "packed", "native", "native-interleaved", "shuffle", "shuffle-interleaved")
TOKENS = 37


def check(layout: str, shape: tuple[str, int, int, int], device: str, *, quantised: str | None = None) -> None:
    """Write 37 tokens, some of which have no slot, into a pool of 7 blocks; compare all of its bytes.

    Under the interpreter what is quantised are powers of two: it loses the carry where rounding to FP8 reaches the next
    exponent (31.9 becomes 16).
    """
    dtype, block_size, heads, head_size = shape
    gen = torch.Generator().manual_seed(head_size)
    got = pool(layout, (7, block_size, heads, head_size), dtype, device, quantised=quantised)
    expected = got.clone()
    if quantised and INTERPRETED:
        got.quantisation.key_scale.fill_(0.25)
        got.quantisation.value_scale.fill_(0.5)
        expected = got.clone()
        rows = 2.0 ** torch.randint(-2, 4, (TOKENS, 3, heads, head_size), generator=gen)
    else:
        rows = torch.randn(TOKENS, 3, heads, head_size, generator=gen)
    fused = rows.to(device, getattr(torch, dtype))
    key, value = fused[:, 1], fused[:, 2]
    slots = torch.randperm(7 * block_size, generator=gen)[:TOKENS].to(device)
    slots[::5] = -1
    vllm_kernels.write(key, value, got.cache, slots)
    written = slots[slots >= 0]
    where = (written // block_size, written % block_size)
    expected.put("key", *where, key[slots >= 0])
    expected.put("value", *where, value[slots >= 0])
    assert_same_bits(got.storage, expected.storage, "storage of the pool")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", vllm_kernels.CACHE_SHAPES, ids=vllm_kernels.cache_id)
def test_write(layout, shape, device):
    check(layout, shape, device)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("shuffle")])
@pytest.mark.parametrize("shape", vllm_kernels.CACHE_SHAPES[:3], ids=vllm_kernels.cache_id)
def test_write_to_a_quantised_cache(layout, shape, device):
    check(layout, shape, device, quantised=vllm_kernels.fp8_format())
