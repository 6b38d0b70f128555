"""The write into packed caches, where tokens are neighbours in memory: a program takes TOKENS tokens of a few channels.

A token's channels lie far apart there, and slots in no order make 2-byte pieces of every store. What keeps that from
being a read and a write of HBM each is the L2: all tokens of one head and SLICE channels are written before the next
ones, so that pieces of a cache line meet there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .addressing import key_channels, value_channels, value_tokens
from .scales import stored
from .strides import multiple


@triton.jit
def packed_write_kernel(
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    key_cache,  # axes of PACKING
    value_cache,
    slot_mapping,  # [num_slots] int64
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    num_slots,
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    stride_kc_block: tl.int64,
    stride_kc_token: tl.int64,
    stride_kc_head: tl.int64,
    stride_kc_group: tl.int64,
    stride_vc_block: tl.int64,
    stride_vc_token: tl.int64,
    stride_vc_head: tl.int64,
    stride_vc_channel: tl.int64,
    stride_slot: tl.int64,
    stride_ks_block: tl.int64,
    stride_ks_token: tl.int64,
    stride_ks_head: tl.int64,
    stride_vs_block: tl.int64,
    stride_vs_token: tl.int64,
    stride_vs_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # a power of two
    SLICE: tl.constexpr,  # channels of a program, a power of two; the whole head with scales per token
    PACKING: tl.constexpr,
    X: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGN: tl.constexpr,  # see strides.hidden_alignment
):
    """Store SLICE channels of K and V of TOKENS tokens; grid [ceil(num_slots / TOKENS), NUM_HEADS * slices]."""
    if ALIGN > 1:
        stride_key_token = multiple(stride_key_token, ALIGN)
        stride_key_head = multiple(stride_key_head, ALIGN)
        stride_value_token = multiple(stride_value_token, ALIGN)
        stride_value_head = multiple(stride_value_head, ALIGN)
        stride_kc_block = multiple(stride_kc_block, ALIGN)
        stride_kc_token = multiple(stride_kc_token, ALIGN)
        stride_kc_head = multiple(stride_kc_head, ALIGN)
        stride_kc_group = multiple(stride_kc_group, ALIGN)
        stride_vc_block = multiple(stride_vc_block, ALIGN)
        stride_vc_token = multiple(stride_vc_token, ALIGN)
        stride_vc_head = multiple(stride_vc_head, ALIGN)
        stride_vc_channel = multiple(stride_vc_channel, ALIGN)
    head = (tl.program_id(1) % NUM_HEADS).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token * stride_slot, mask=token < num_slots, other=-1)
    channel = tl.program_id(1) // NUM_HEADS * SLICE + tl.arange(0, SLICE)
    mask = (slot >= 0)[:, None] & (channel < HEAD_SIZE)[None, :]
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    source = token * stride_key_token + head * stride_key_head
    k = tl.load(key + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = key_scale + block * stride_ks_block + offset * stride_ks_token + head * stride_ks_head
    k = stored(k, scale, slot >= 0, SCALES, FORMAT, LARGEST)
    target = block * stride_kc_block + offset * stride_kc_token + head * stride_kc_head
    tl.store(key_cache + target[:, None] + key_channels(channel, stride_kc_group, X)[None, :], k, mask=mask)

    source = token * stride_value_token + head * stride_value_head
    v = tl.load(value + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = value_scale + block * stride_vs_block + offset * stride_vs_token + head * stride_vs_head
    v = stored(v, scale, slot >= 0, SCALES, FORMAT, LARGEST)
    # Lanes along the tokens: neighbours in memory where the slots are.
    target = block * stride_vc_block + value_tokens(offset, stride_vc_token, PACKING, X, BLOCK_SIZE)
    target = (target + head * stride_vc_head)[None, :] + value_channels(channel, stride_vc_channel, PACKING)[:, None]
    tl.store(value_cache + target, tl.trans(v), mask=tl.trans(mask))
