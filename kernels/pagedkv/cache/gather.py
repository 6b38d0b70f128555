# SPDX-License-Identifier: Apache-2.0
"""Gather K and V of the context of several sequences from the paged cache into dense rows.

    pos = n - cu_seq_lens[s] + seq_starts[s],  s = token_to_seq[n]
    key[n, h, :] = key_cache[block_table[s, pos // block_size], pos % block_size, h, :]     V alike

This is the gather before the extend step of a chunked prefill (vLLM PR 37228). A program copies BLOCK_M head rows
(token, head) of K and of V; every stride but the innermost is an argument, for K and V separately; offsets are int64.
Codes of a quantised cache become `decode(code) * scale`, computed in fp32 and rounded to the dtype of the output.

In a packed cache tokens are neighbours in memory: a program of `packed_gather_kernel` takes BLOCK_M positions of one
head, aligned to BLOCK_M in the sequence and not in the output, so that groups of X tokens of a block are read with one
load. Sequence `s` therefore owns up to two tiles more than its tokens fill: those from
`cu_seq_lens[s] // BLOCK_M + 2 s` on. Library only: the vLLM plugin attends to the context in place and calls no gather.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pagedkv import checks
from pagedkv.arch import next_power_of_two
from pagedkv.cache import checks as cache_checks
from pagedkv.device import current, on
from pagedkv.fp8.scales import dequantised, kernel_scales
from pagedkv.launch import rows_of_program, tuning
from pagedkv.strides import (
    alignment,
    in_groups,
    locate,
    scale_at,
    sequence_of_tile,
    sides_of,
    value_channels,
    value_tokens,
    wide,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache


class GatherStrides(NamedTuple):
    """Strides that a launch of a gather passes, in elements."""

    key_cache: tuple[int, ...]
    """Strides of block, token, head and group of X channels."""
    value_cache: tuple[int, ...]
    """Strides of block, token (in `shuffle` of a group of X tokens), head and channel."""
    key: tuple[int, ...]
    """Strides of token and head."""
    value: tuple[int, ...]
    """Strides of token and head."""
    table: tuple[int, ...]
    """Strides of sequence."""
    key_scale: tuple[int, int, int]
    """Strides of block, token and head."""
    value_scale: tuple[int, int, int]


class GatherOptions(NamedTuple):
    """Compile-time options of a gather: Triton compiles once for each combination of values."""

    NUM_HEADS: int
    """KV heads."""
    HEAD_SIZE: int
    HEAD_SIZE_PADDED: int
    """HEAD_SIZE rounded up to a power of two."""
    BLOCK_SIZE: int
    BLOCK_M: int
    """Head rows of a program; from a packed cache tokens, at least 16. A power of two."""
    PACKING: str
    X: int
    KV_SCALES: str
    """Kind of scales of a quantised cache (`scales.ScaleKind`)."""
    FP8_FORMAT: str
    NATIVE_FP8: bool
    """Whether the device converts FP8_FORMAT itself."""
    STRIDE_ALIGN: int
    """Largest power of two up to 16 that divides all strides (`strides.alignment`)."""


@triton.jit(do_not_specialize=["num_rows", "max_blocks"])
def _gather_kernel(
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    block_table,  # [num_seqs, max_blocks] int32
    cu_seq_lens,  # [num_seqs + 1] int32
    token_to_seq,  # [n] int32
    seq_starts,  # [num_seqs] int32
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    num_rows,  # n * NUM_HEADS
    max_blocks,
    strides,  # GatherStrides
    OPTIONS: tl.constexpr,  # GatherOptions
):
    KV_SCALES: tl.constexpr = OPTIONS.KV_SCALES
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    NATIVE_FP8: tl.constexpr = OPTIONS.NATIVE_FP8
    stride_key_token, stride_key_head = wide(strides.key, OPTIONS.STRIDE_ALIGN)
    stride_value_token, stride_value_head = wide(strides.value, OPTIONS.STRIDE_ALIGN)
    key_side, value_side = sides_of(key_cache, value_cache, key_scale, value_scale, strides, OPTIONS.STRIDE_ALIGN)
    (stride_table,) = wide(strides.table)
    row = tl.program_id(0).to(tl.int64) * OPTIONS.BLOCK_M + tl.arange(0, OPTIONS.BLOCK_M)
    # Indices are clamped, not masked: over a chain of masked index loads Triton 3.6's RemoveLayoutConversions gives a
    # mask another layout than its pointer and then fails its own verifier. Only the copy itself is masked.
    token = tl.minimum(row, num_rows - 1) // OPTIONS.NUM_HEADS
    head = row % OPTIONS.NUM_HEADS
    seq = tl.load(token_to_seq + token).to(tl.int64)
    position = token - tl.load(cu_seq_lens + seq) + tl.load(seq_starts + seq)
    column = position // OPTIONS.BLOCK_SIZE
    # A position beyond the row of the block table has no block: reading the next row would gather another sequence.
    inside = (row < num_rows) & (position >= 0) & (column < max_blocks)
    column = tl.minimum(tl.maximum(column, 0), max_blocks - 1)
    block = tl.load(block_table + seq * stride_table + column).to(tl.int64)
    offset = position % OPTIONS.BLOCK_SIZE
    channel = tl.arange(0, OPTIONS.HEAD_SIZE_PADDED)
    mask = inside[:, None] & (channel < OPTIONS.HEAD_SIZE)[None, :]

    source = block * key_side.block + offset * key_side.token + head * key_side.head
    target = token * stride_key_token + head * stride_key_head
    k = tl.load(key_cache + source[:, None] + channel[None, :], mask=mask)
    scale = scale_at(key_side, block, offset, head)
    k = dequantised(k, scale, inside, KV_SCALES, FP8_FORMAT, NATIVE_FP8, key.dtype.element_ty)
    tl.store(key + target[:, None] + channel[None, :], k, mask=mask)

    source = block * value_side.block + offset * value_side.token + head * value_side.head
    target = token * stride_value_token + head * stride_value_head
    v = tl.load(value_cache + source[:, None] + channel[None, :], mask=mask)
    scale = scale_at(value_side, block, offset, head)
    v = dequantised(v, scale, inside, KV_SCALES, FP8_FORMAT, NATIVE_FP8, value.dtype.element_ty)
    tl.store(value + target[:, None] + channel[None, :], v, mask=mask)


def _check_positions(
    cache: PagedCache, block_table: Tensor, cu_seq_lens: Tensor, token_to_seq: Tensor, seq_starts: Tensor
) -> None:
    num_seqs, max_blocks = block_table.shape
    checks.within("token_to_seq", token_to_seq, num_seqs, "num_seqs of block_table")
    seq = token_to_seq.long()
    position = torch.arange(seq.shape[0], device=seq.device) - cu_seq_lens[seq] + seq_starts[seq]
    end = max_blocks * cache.block_size
    checks.within("cu_seq_lens, seq_starts", position, end, "max_blocks * block_size, a position")
    used = torch.zeros(block_table.shape, dtype=torch.bool, device=block_table.device)
    used[seq, position // cache.block_size] = True
    checks.blocks_exist(block_table, used, cache.num_blocks)


def gather_kv_cache(
    cache: PagedCache,
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,  # [num_tokens, num_kv_heads, head_size]
    block_table: Tensor,  # [num_seqs, max_blocks] int32
    cu_seq_lens: Tensor,  # [num_seqs + 1] int32
    token_to_seq: Tensor,  # [n <= num_tokens] int32
    seq_starts: Tensor,  # [num_seqs] int32
    *,
    debug: bool = False,
) -> None:
    """Fill rows 0 .. n - 1 of `key` and `value` from the cache; the other rows are left as they are.

    Args:
        cache: The cache, in any packing, quantised or not.
        key: Output for K, in the dtype of the cache; of a quantised cache in fp32, fp16 or bf16.
        value: Output for V, in the same dtype.
        block_table: Block ids of each sequence.
        cu_seq_lens: Where the rows of each sequence begin in the output.
        token_to_seq: The sequence of each output row, as `cu_seq_lens` says it.
        seq_starts: The position at which the gathered part of each sequence begins.
        debug: Also check scales, sequences, positions and block ids (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    cache_checks.whole(cache)
    num_kv_heads, head_size = cache.num_kv_heads, cache.head_size
    axes = "[num_tokens, num_kv_heads, head_size]"
    checks.shape("key", key, (None, num_kv_heads, head_size), axes)
    checks.shape("value", value, tuple(key.shape), axes)
    checks.shape("block_table", block_table, (None, None), "[num_seqs, max_blocks]")
    num_seqs, max_blocks = block_table.shape
    checks.shape("cu_seq_lens", cu_seq_lens, (num_seqs + 1,), "[num_seqs + 1]")
    checks.shape("seq_starts", seq_starts, (num_seqs,), "[num_seqs]")
    checks.shape("token_to_seq", token_to_seq, (None,), "[n], the sequence of each output row")
    checks.at_most("token_to_seq", token_to_seq.shape[0], key.shape[0], "num_tokens of key")
    for name, tensor in (("key", key), ("value", value)):
        cache_checks.beside(name, tensor, cache)
        checks.dense(name, tensor)
        if cache.quantisation is not None:
            checks.computable(name, tensor)
    indices = {"block_table": block_table, "cu_seq_lens": cu_seq_lens}
    indices |= {"token_to_seq": token_to_seq, "seq_starts": seq_starts}
    checks.indices(indices)
    checks.device(("cache.key", cache.key), {"key": key, "value": value, **indices})
    if debug:
        cache_checks.scales(cache)
        _check_positions(cache, block_table, cu_seq_lens, token_to_seq, seq_starts)
    num_rows = token_to_seq.shape[0]
    if num_rows == 0 or max_blocks == 0:
        return
    arch = current(key)
    launch = tuning(arch.name).gather
    scales = kernel_scales(cache)
    strides = (cache.key_strides, cache.value_strides, key.stride()[:2], value.stride()[:2])
    grid: tuple[int, ...]
    index: tuple[Tensor, ...]
    counts: tuple[int, ...]
    if cache.packing == "rows":
        kernel, count = _gather_kernel, num_rows * num_kv_heads
        rows = rows_of_program(arch, count, most=launch.block_m, fewest=next_power_of_two(num_kv_heads))
        grid, index, counts = (triton.cdiv(count, rows),), (token_to_seq, seq_starts), (count, max_blocks)
    else:
        kernel, rows = packed_gather_kernel, max(16, rows_of_program(arch, num_rows, most=launch.block_m, fewest=16))
        grid, index = (num_rows // rows + 2 * num_seqs, num_kv_heads), (seq_starts,)
        counts = (num_seqs, num_rows, max_blocks)
    options = GatherOptions(
        NUM_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=next_power_of_two(head_size),
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=rows,
        PACKING=cache.packing,
        X=cache.x,
        KV_SCALES=scales.kind,
        FP8_FORMAT=scales.format,
        NATIVE_FP8=scales.native_on(arch),
        STRIDE_ALIGN=alignment(*itertools.chain(*strides)),
    )
    with on(cache.key):
        kernel[grid](
            cache.key,
            cache.value,
            key,
            value,
            block_table,
            cu_seq_lens,
            *index,
            *cache.scales,
            *counts,
            GatherStrides(*strides, block_table.stride()[:1], *scales.strides),
            OPTIONS=options,
            num_warps=launch.waves,
        )


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "max_blocks"])
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
    strides,  # GatherStrides
    OPTIONS: tl.constexpr,  # GatherOptions
):
    """Copy K and V of up to BLOCK_M positions; grid [num_tokens // BLOCK_M + 2 * num_seqs, num_kv_heads]."""
    HEAD_SIZE: tl.constexpr = OPTIONS.HEAD_SIZE
    HEAD_SIZE_PADDED: tl.constexpr = OPTIONS.HEAD_SIZE_PADDED
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    PACKING: tl.constexpr = OPTIONS.PACKING
    X: tl.constexpr = OPTIONS.X
    KV_SCALES: tl.constexpr = OPTIONS.KV_SCALES
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    NATIVE_FP8: tl.constexpr = OPTIONS.NATIVE_FP8
    stride_key_token, stride_key_head = wide(strides.key, OPTIONS.STRIDE_ALIGN)
    stride_value_token, stride_value_head = wide(strides.value, OPTIONS.STRIDE_ALIGN)
    key_side, value_side = sides_of(key_cache, value_cache, key_scale, value_scale, strides, OPTIONS.STRIDE_ALIGN)
    (stride_table,) = wide(strides.table)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    seq = sequence_of_tile(cu_seq_lens, tile, num_seqs, BLOCK_M, 128, 2)
    if seq >= num_seqs:
        return
    first_row = tl.load(cu_seq_lens + seq)
    start = tl.load(seq_starts + seq)
    end = start + tl.minimum(tl.load(cu_seq_lens + seq + 1), num_tokens) - first_row
    # A position beyond the row of the block table has no block: reading the next row would gather another sequence.
    end = tl.minimum(end, tl.cast(max_blocks, tl.int64) * BLOCK_SIZE).to(tl.int32)
    first = (start // BLOCK_M + tile - first_row // BLOCK_M - 2 * seq) * BLOCK_M
    if (first >= end) | (first + BLOCK_M <= start):
        return

    X_DIVIDES_BLOCK_SIZE: tl.constexpr = BLOCK_SIZE % X == 0
    position = first + tl.arange(0, BLOCK_M)
    wanted = (position >= start) & (position < end)
    # V is read in groups of X tokens of one block or not at all; what was not asked for is not stored.
    near = in_groups(position, start, end, X) if X_DIVIDES_BLOCK_SIZE else wanted
    table = block_table + seq.to(tl.int64) * stride_table
    column = tl.arange(0, BLOCK_M)
    block, offset = locate(table, first, column, near, BLOCK_SIZE, BLOCK_M, X if X_DIVIDES_BLOCK_SIZE else 1)
    channel = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = channel < HEAD_SIZE
    row = (first_row + position - start).to(tl.int64)
    mask = wanted[:, None] & in_head[None, :]

    # Groups of X channels lie apart and tokens side by side: lanes along the tokens.
    group = tl.arange(0, HEAD_SIZE_PADDED // X)
    source = block * key_side.block + offset * key_side.token + head * key_side.head
    source = (group * key_side.inner)[:, None, None] + source[None, :, None] + tl.arange(0, X)[None, None, :]
    k = tl.load(key_cache + source, mask=(group * X < HEAD_SIZE)[:, None, None] & wanted[None, :, None])
    k = tl.reshape(tl.permute(k, (1, 0, 2)), [BLOCK_M, HEAD_SIZE_PADDED])
    scale = scale_at(key_side, block, offset, head)
    k = dequantised(k, scale, wanted, KV_SCALES, FP8_FORMAT, NATIVE_FP8, key.dtype.element_ty)
    target = row * stride_key_token + head * stride_key_head
    tl.store(key + target[:, None] + channel[None, :], k, mask=mask)

    token = position if PACKING == "shuffle" else offset
    source = block * value_side.block + value_tokens(token, value_side.token, PACKING, X, BLOCK_SIZE)
    source += head * value_side.head
    source = source[:, None] + value_channels(channel, value_side.inner, PACKING)[None, :]
    v = tl.load(value_cache + source, mask=near[:, None] & in_head[None, :])
    scale = scale_at(value_side, block, offset, head)
    v = dequantised(v, scale, wanted, KV_SCALES, FP8_FORMAT, NATIVE_FP8, value.dtype.element_ty)
    target = row * stride_value_token + head * stride_value_head
    tl.store(value + target[:, None] + channel[None, :], v, mask=mask)
