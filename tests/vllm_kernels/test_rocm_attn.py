# SPDX-License-Identifier: Apache-2.0
"""ROCM_ATTN writes its cache where its attention reads it, and takes a HIP kernel only where blocks are dense.

vLLM's HIP kernels (`reshape_and_cache`, `paged_attention_rocm`) compute the place of a block from its extents. Where
they are not built, a stand-in does what they do: it writes as if the blocks of a side followed each other.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from support import vllm_kernels
from support.attending import HALF, attend, check, expected
from support.pools import assert_same_bits, batch, pool

pytestmark = pytest.mark.device

LAYOUTS = {"native": 0, "native-padded": 24, "native-interleaved": 0}
"""Layout -> elements of padding of a block; `native` alone is dense."""
BLOCKS = (16, 32, 64, 544, 2048)


def layer_cache(pages) -> torch.Tensor:
    """The pool as vLLM binds it to a layer: `[num_blocks, 2, block_size, num_kv_heads * head_size]`."""
    num_blocks, block_size, heads, head_size = pages.plan.shape
    strides = (pages.key.stride(0), pages.plan.value.offset, heads * head_size, 1)
    return pages.storage.as_strided((num_blocks, 2, block_size, heads * head_size), strides)


def write_densely(key, value, key_cache, value_cache, slots, *_) -> None:
    """What `reshape_and_cache` does: block b of a side begins b dense blocks after the first."""
    block_size = value_cache.shape[3]
    dense = [
        side.as_strided(side.shape, torch.empty(side.shape, device="meta").stride())
        for side in (key_cache, value_cache)
    ]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, place = divmod(slot, block_size)
            dense[0][block, :, :, place] = key[token].unflatten(-1, (-1, key_cache.shape[4]))
            dense[1][block, :, :, place] = value[token]


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_writes_where_the_layout_says(layout, block_size, device):
    heads, head_size = 2, 64
    name = layout.removesuffix("-padded")
    got = pool(name, (5, block_size, heads, head_size), "float16", device, padding=LAYOUTS[layout])
    want = got.clone()
    gen = torch.Generator().manual_seed(block_size)
    fused = torch.randn(21, 3, heads, head_size, generator=gen).to(device, torch.float16)
    slots = torch.randperm(5 * block_size, generator=gen)[:21].to(device)
    slots[::5] = -1
    backend = vllm_kernels.module(f"{vllm_kernels.BACKENDS}.rocm_attn")
    impl = object.__new__(vllm_kernels.find(f"{vllm_kernels.BACKENDS}.rocm_attn:RocmAttentionImpl"))
    impl.attn_type, impl.kv_cache_dtype = backend.AttentionType.DECODER, "auto"
    impl.num_kv_heads, impl.head_size = heads, head_size
    impl._use_interleaved_v_cache = False  # vLLM 0.33: an order of V that only a fused write asks for
    one = torch.ones(1, device=device)
    layer = types.SimpleNamespace(_k_scale=one, _v_scale=one)
    own = torch.version.hip is not None
    native = mock.patch.object(backend.PagedAttention, "write_to_paged_cache", write_densely)
    with nullcontext() if own else native, vllm_kernels.on_rocm():
        impl.do_kv_cache_update(layer, fused[:, 1], fused[:, 2], layer_cache(got), slots)
    kept = slots >= 0
    where = (slots[kept] // block_size, slots[kept] % block_size)
    want.put("key", *where, fused[kept, 1])
    want.put("value", *where, fused[kept, 2])
    assert_same_bits(got.storage, want.storage, "storage of the pool")


@pytest.mark.parametrize("block_size", [16, 544])
@pytest.mark.parametrize("layout", ["native", "native-interleaved"])
def test_decode_over_strided_blocks_takes_the_triton_kernel(layout, block_size, device, record_property):
    """The platform offers the HIP kernel for every shape; pools here have padding after each block."""
    data = batch(
        layout_name=layout,
        dtype=HALF,
        device=device,
        num_q_heads=8,
        num_kv_heads=2,
        head_size=64,
        block_size=block_size,
        query_lens=[1] * 3,
        seq_lens=[1, 17, 129],
    )
    ops = vllm_kernels.module(f"{vllm_kernels.OPS}.chunked_prefill_paged_decode").ops
    native = mock.Mock(side_effect=AssertionError("the HIP kernel got blocks that are not dense"))
    with mock.patch.object(ops, "paged_attention_rocm", native, create=True):
        out = attend(data, call=vllm_kernels.paged_attention, offer_native=True)
    check(out, expected(data), record_property)
