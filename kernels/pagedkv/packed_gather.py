"""The gather from packed caches, where tokens are neighbours in memory: a program takes TOKENS positions of one head.

Its positions are aligned to TOKENS in the sequence and not in the output, so that groups of X tokens of a block are
read with one load. Sequence `s` therefore owns up to two tiles more than its tokens fill: those from
`cu_seq_lens[s] // TOKENS + 2 s` on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .addressing import sequence_of_tile, value_channels, value_tokens
from .scales import meant
from .strides import multiple


@triton.jit
def packed_gather_kernel(
    key_cache,  # axes of PACKING
    value_cache,
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    block_table,  # [num_seqs, max_blocks] int32
    cu_seq_lens,  # [num_seqs + 1] int32
    seq_starts,  # [num_seqs] int32
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    num_seqs,
    num_tokens,  # rows of the output that are filled
    max_blocks,
    stride_kc_block: tl.int64,
    stride_kc_token: tl.int64,
    stride_kc_head: tl.int64,
    stride_kc_group: tl.int64,
    stride_vc_block: tl.int64,
    stride_vc_token: tl.int64,
    stride_vc_head: tl.int64,
    stride_vc_channel: tl.int64,
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    stride_table: tl.int64,
    stride_ks_block: tl.int64,
    stride_ks_token: tl.int64,
    stride_ks_head: tl.int64,
    stride_vs_block: tl.int64,
    stride_vs_token: tl.int64,
    stride_vs_head: tl.int64,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # a power of two, at least 16
    PACKING: tl.constexpr,
    X: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    ALIGN: tl.constexpr,  # see strides.hidden_alignment
):
    """Copy K and V of up to TOKENS positions; grid [num_tokens // TOKENS + 2 * num_seqs, num_kv_heads]."""
    if ALIGN > 1:
        stride_kc_block = multiple(stride_kc_block, ALIGN)
        stride_kc_token = multiple(stride_kc_token, ALIGN)
        stride_kc_head = multiple(stride_kc_head, ALIGN)
        stride_kc_group = multiple(stride_kc_group, ALIGN)
        stride_vc_block = multiple(stride_vc_block, ALIGN)
        stride_vc_token = multiple(stride_vc_token, ALIGN)
        stride_vc_head = multiple(stride_vc_head, ALIGN)
        stride_vc_channel = multiple(stride_vc_channel, ALIGN)
        stride_key_token = multiple(stride_key_token, ALIGN)
        stride_key_head = multiple(stride_key_head, ALIGN)
        stride_value_token = multiple(stride_value_token, ALIGN)
        stride_value_head = multiple(stride_value_head, ALIGN)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    seq = sequence_of_tile(cu_seq_lens, tile, num_seqs, TOKENS, 128, 2)
    if seq >= num_seqs:
        return
    first_row = tl.load(cu_seq_lens + seq)
    start = tl.load(seq_starts + seq)
    end = start + tl.minimum(tl.load(cu_seq_lens + seq + 1), num_tokens) - first_row
    # A position beyond the row of the block table has no block: reading the next row would gather another sequence.
    end = tl.minimum(end, max_blocks * BLOCK_SIZE)
    first = (start // TOKENS + tile - first_row // TOKENS - 2 * seq) * TOKENS
    if (first >= end) | (first + TOKENS <= start):
        return

    GROUPED: tl.constexpr = BLOCK_SIZE % X == 0
    position = first + tl.arange(0, TOKENS)
    wanted = (position >= start) & (position < end)
    # V is read in groups of X tokens of one block or not at all; what was not asked for is not stored.
    near = wanted
    if GROUPED:
        near = (position // X * X + X > start) & (position // X * X < end)
    table = block_table + seq.to(tl.int64) * stride_table
    if BLOCK_SIZE % TOKENS == 0:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        offset = multiple(first % BLOCK_SIZE, 16) + tl.arange(0, TOKENS)
    else:
        block = tl.load(table + position // BLOCK_SIZE, mask=near, other=0).to(tl.int64)
        if GROUPED:
            block = tl.max_constancy(block, X)
        offset = position % BLOCK_SIZE
    channel = tl.arange(0, PADDED)
    in_head = channel < HEAD_SIZE
    row = (first_row + position - start).to(tl.int64)
    mask = wanted[:, None] & in_head[None, :]

    # Groups of X channels lie apart and tokens side by side: lanes along the tokens.
    group = tl.arange(0, PADDED // X)
    source = block * stride_kc_block + offset * stride_kc_token + head * stride_kc_head
    source = (group * stride_kc_group)[:, None, None] + source[None, :, None] + tl.arange(0, X)[None, None, :]
    k = tl.load(key_cache + source, mask=(group * X < HEAD_SIZE)[:, None, None] & wanted[None, :, None])
    k = tl.reshape(tl.permute(k, (1, 0, 2)), [TOKENS, PADDED])
    scale = key_scale + block * stride_ks_block + offset * stride_ks_token + head * stride_ks_head
    k = meant(k, scale, wanted, SCALES, FORMAT, NATIVE, key.dtype.element_ty)
    target = row * stride_key_token + head * stride_key_head
    tl.store(key + target[:, None] + channel[None, :], k, mask=mask)

    token = position if PACKING == 2 else offset
    source = block * stride_vc_block + value_tokens(token, stride_vc_token, PACKING, X, BLOCK_SIZE)
    source += head * stride_vc_head
    source = source[:, None] + value_channels(channel, stride_vc_channel, PACKING)[None, :]
    v = tl.load(value_cache + source, mask=near[:, None] & in_head[None, :])
    scale = value_scale + block * stride_vs_block + offset * stride_vs_token + head * stride_vs_head
    v = meant(v, scale, wanted, SCALES, FORMAT, NATIVE, value.dtype.element_ty)
    target = row * stride_value_token + head * stride_value_head
    tl.store(value + target[:, None] + channel[None, :], v, mask=mask)
