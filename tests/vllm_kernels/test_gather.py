# SPDX-License-Identifier: Apache-2.0
"""`cp_mha_gather_cache_kernel` copies K and V out of a paged cache, bit by bit, whatever the strides of its blocks."""

from __future__ import annotations

import pytest
import torch
from support import vllm_kernels
from support.pools import assert_same_bits, batch

from pagedkv.cache import reference

pytestmark = pytest.mark.device

LAYOUTS = ("nhd", "hnd", "interleaved", "packed", "shuffle", "shuffle-interleaved")


def arguments(starts: list[int], counts: list[int], device: str) -> dict[str, torch.Tensor]:
    made = {
        "cu_seq_lens": torch.tensor([0, *counts]).cumsum(0),
        "token_to_seq": torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        "seq_starts": torch.tensor(starts),
    }
    return {name: tensor.int().to(device) for name, tensor in made.items()}


def check(data, device: str, starts: list[int], counts: list[int]) -> None:
    """Gather into NaN; rows of nobody stay NaN."""
    total, like = sum(counts), data.query
    outs = [like.new_full((total + 3, *data.pool.rows("key").shape[2:]), float("nan")) for _ in range(4)]
    (key, value), (want_key, want_value) = outs[:2], outs[2:]
    asked = arguments(starts, counts, device)
    vllm_kernels.gather(data.pool.cache, key, value, data.block_table, **asked)
    sides = [data.pool.rows(side) for side in ("key", "value")]
    if data.pool.quantisation is not None:  # code times scale is exact in float64, and rounded to fp32 first
        sides = [side.float() for side in sides]
    reference.gather(*sides, want_key, want_value, data.block_table, **asked)
    assert_same_bits(key, want_key, "key")
    assert_same_bits(value, want_value, "value")
    assert want_key[:total].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", vllm_kernels.CACHE_SHAPES, ids=vllm_kernels.cache_id)
def test_gather(layout, shape, device):
    dtype, block_size, heads, head_size = shape
    starts, counts = [0, 5, block_size - 1, 3], [17, 1, 18, 0]
    data = batch(
        layout_name=layout,
        dtype=dtype,
        device=device,
        num_q_heads=heads,
        num_kv_heads=heads,
        head_size=head_size,
        block_size=block_size,
        query_lens=[1] * 4,
        seq_lens=[start + count for start, count in zip(starts, counts, strict=True)],
    )
    check(data, device, starts, counts)
