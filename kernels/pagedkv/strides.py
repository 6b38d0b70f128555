# SPDX-License-Identifier: Apache-2.0
"""Address arithmetic of the kernels: strides as int64 of known alignment, where a token lies, who owns a query tile.

PACKING is one of `pagedkv.layout.PACKINGS`. Strides are those of `pagedkv.cache.cache.PagedCache`, in elements; X is
the number of elements in 16 bytes. In any packing the place of a channel in its block is a sum of a token term and a
channel term.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl


def alignment(*strides: int) -> int:
    """Return the largest of 16, 8, 4, 2 and 1 that divides every stride (in elements).

    Triton specialises an integer argument on divisibility by 16 only. A head of 40 or 72 channels has rows that are
    16-byte aligned (8 elements of two bytes) and would be read element by element without this.
    """
    return math.gcd(16, *strides)


@triton.jit
def multiple(stride, ALIGN: tl.constexpr):
    """Return `stride`, known to the compiler as a multiple of ALIGN, which the caller guarantees.

    A product with a constant survives every pass; the attribute that `tl.multiple_of` sets does not.
    """
    return stride // ALIGN * ALIGN


@triton.jit
def wide(strides, ALIGN: tl.constexpr = 1):
    """Return a tuple of strides as int64, so that no product with them wraps, each a multiple of ALIGN.

    Triton passes a small integer as int32, and 1 as a constant; that one is a multiple of 16 it sees by itself.
    """
    out = ()
    for i in tl.static_range(len(strides)):
        stride = tl.cast(strides[i], tl.int64)
        if ALIGN > 1 and ALIGN < 16:
            stride = multiple(stride, ALIGN)
        out += (stride,)
    return out


class Side(NamedTuple):
    """K or V of a cache as a kernel addresses it; strides are int64, in elements."""

    cache: Any
    """Pointer."""
    block: Any
    """Stride of a block."""
    token: Any
    """Stride of a token; of V in `shuffle` that of a group of X tokens."""
    head: Any
    inner: Any
    """Stride of a group of X channels of K, or of a channel of V."""
    scale: Any
    """Pointer to the scales, see `fp8.scales.KernelScales`; their strides follow."""
    scale_block: Any
    scale_token: Any
    scale_head: Any


@triton.jit
def side_of(cache, strides, scale, scale_strides):
    """Return a `Side` of strides that are int64 already."""
    block, token, head, inner = strides
    scale_block, scale_token, scale_head = scale_strides
    return Side(cache, block, token, head, inner, scale, scale_block, scale_token, scale_head)


@triton.jit
def sides_of(key_cache, value_cache, key_scale, value_scale, strides, ALIGN: tl.constexpr):
    """Return K and V of a cache, each a `Side`; `strides` has those of the four tensors, ALIGN is that of `wide`."""
    key_strides, value_strides = wide(strides.key_cache, ALIGN), wide(strides.value_cache, ALIGN)
    key = side_of(key_cache, key_strides, key_scale, wide(strides.key_scale))
    return key, side_of(value_cache, value_strides, value_scale, wide(strides.value_scale))


@triton.jit
def of_pairs(cache, strides):
    """Return K or V of codes of one byte as int16 pairs of them, and its strides, which count half as many."""
    block, token, head, inner = strides
    return cache.to(tl.pointer_type(tl.int16)), (block // 2, token // 2, head // 2, inner)


@triton.jit
def scale_at(side, block, token, head):
    """Return where the scale of each token and head lies; `token` counts inside its block."""
    return side.scale + block * side.scale_block + token * side.scale_token + head * side.scale_head


@triton.jit
def key_channels(channel, stride_group, X: tl.constexpr):
    """Return the channel term of K in groups of X; its token term is `token * stride_token` in every packing."""
    return channel // X * stride_group + channel % X


@triton.jit
def value_tokens(token, stride_token, PACKING: tl.constexpr, X: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the token term of V; `token` counts inside its block, in `shuffle` it may count from anywhere.

    There the compiler sees neighbours only where it divides a contiguous range, which the tokens of a tile are and
    their remainders in several blocks are not.
    """
    if PACKING == "rows":
        term = token * stride_token
    elif PACKING == "native":
        term = token
    else:
        term = token // X % (BLOCK_SIZE // X) * stride_token + token % X
    return term


@triton.jit
def value_channels(channel, stride_channel, PACKING: tl.constexpr):
    """Return the channel term of V."""
    return channel if PACKING == "rows" else channel * stride_channel


@triton.jit
def in_groups(token, begin, end, GROUP: tl.constexpr):
    """Return whether the aligned group of GROUP tokens around each token has one in `begin .. end - 1`."""
    first = token // GROUP * GROUP
    return (first + GROUP > begin) & (first < end)


@triton.jit
def locate(table, first, column, mask, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the block (int64) and the place in it of the tokens `first + column` of a tile of BLOCK_N tokens.

    Args:
        table: Row of the block table; a pointer for all tokens, or one for each.
        first: The first token of the tile, a multiple of BLOCK_N.
        column: [n] tokens of the tile, from 0.
        mask: [n] entries that may be looked up; the others are taken as block 0.
        BLOCK_SIZE: Tokens of a block.
        BLOCK_N: Tokens of the tile.
        GROUP: Tokens that are known to lie in one block, 1 for no such knowledge.
    """
    if BLOCK_N > 0 and BLOCK_SIZE % max(BLOCK_N, 1) == 0:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        # Triton loses the divisibility of a scalar remainder, and with it the wide loads along the tokens.
        offset = multiple(first % BLOCK_SIZE, 16) + column
    else:
        token = first + column
        block = tl.load(table + token // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        if GROUP > 1:
            block = tl.max_constancy(block, GROUP)
        offset = token % BLOCK_SIZE
    return block, offset


@triton.jit
def tile_base(
    table,
    first,
    column,
    last,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr = 1,
    GROUP: tl.constexpr = 1,
):
    """Return where BLOCK_N tokens from `first` on lie, [BLOCK_N] int64, less `column * stride_token`.

    What is left out is the same for every tile and stays outside of a loop. The blocks that a tile can meet are looked
    up as scalars, and lanes choose among them: a lookup for each token would be as many loads as K itself has.

    Args:
        table: Row of the block table, a pointer.
        first: The first token of the tile, a multiple of BLOCK_N.
        column: [BLOCK_N] tokens of the tile, from 0.
        last: The last entry that may be looked up; later ones are taken as block 0.
        stride_block: Stride of a block in elements, int64.
        stride_token: Stride of a token in elements, int64.
        BLOCK_SIZE: Tokens of a block.
        BLOCK_N: Tokens of the tile.
        ALIGN: What divides the places of all blocks, a power of two up to 16.
        GROUP: Tokens that are known to lie in one block, 1 for no such knowledge.
    """
    entry = first // BLOCK_SIZE
    base = tl.zeros_like(column).to(tl.int64)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + entry, mask=entry <= last, other=0).to(tl.int64)
        # Triton loses the divisibility of a scalar remainder, and with it the wide loads along the tokens.
        base += block * stride_block + multiple(first % BLOCK_SIZE, 16) * stride_token
    elif BLOCK_SIZE > BLOCK_N or (BLOCK_N % BLOCK_SIZE == 0 and BLOCK_N <= 8 * BLOCK_SIZE):
        inside = first - entry * BLOCK_SIZE
        BLOCKS: tl.constexpr = BLOCK_N // BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else 2
        for n in tl.static_range(BLOCKS):
            block = tl.load(table + entry + n, mask=entry + n <= last, other=0).to(tl.int64)
            start = block * stride_block + (inside - n * BLOCK_SIZE) * stride_token
            # A tile of whole blocks begins with one, and the compiler need not find that out.
            at = column if BLOCK_SIZE < BLOCK_N else inside + column
            base = tl.where(at // BLOCK_SIZE == n, start, base)
        # Triton 3.8 takes how many neighbours a choice yields, of scalars 1, for the most that can divide it. Less than
        # it knows would be believed too.
        if ALIGN > 1:
            base = tl.multiple_of(base, [ALIGN] * len(base.shape))
    else:
        token = first + column
        block = tl.load(table + token // BLOCK_SIZE, mask=token // BLOCK_SIZE <= last, other=0).to(tl.int64)
        before = token % BLOCK_SIZE - column
        if GROUP > 1:
            block, before = tl.max_constancy(block, GROUP), tl.max_constancy(before, GROUP)
        base = block * stride_block + before * stride_token
    return base


@triton.jit
def sequence_of_tile(starts, tile, num_seqs, TOKENS: tl.constexpr, SEARCH: tl.constexpr, SPARE: tl.constexpr):
    """Return the sequence that owns the tile; num_seqs if none does.

    Sequence `s` owns the tiles from `starts[s] // TOKENS + SPARE * s` on; `starts` [num_seqs + 1] never falls. With
    SPARE 1 those hold its tokens (see `attention.launch.query_tiles`), with 2 also if its first one lies inside a tile.
    """
    seq = 0
    for first in range(0, num_seqs, SEARCH):
        s = first + tl.arange(0, SEARCH)
        end = tl.load(starts + s + 1, mask=s < num_seqs, other=0) // TOKENS + SPARE * (s + 1)
        seq += tl.sum(((end <= tile) & (s < num_seqs)).to(tl.int32), axis=0)
    return seq
