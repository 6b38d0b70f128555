# SPDX-License-Identifier: Apache-2.0
"""Loads of a tile of K and of V, a function for each way in which lanes share the work.

OPTIONS are the kernel's `AttentionOptions`. Caches whose rows are contiguous (PACKING `rows`) need `load_keys_by_token`
and `load_values_by_token` alone; the other functions serve packed caches. All loads go through `load_tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.strides import key_channels, value_channels


@triton.jit
def load_tile(pointers, in_head, asked, PADDED: tl.constexpr, FULL: tl.constexpr):
    """Return what `pointers` point at: everything of a FULL tile, otherwise 0 where it is not `asked` for.

    With PADDED channels, those outside of the head are 0 too.
    """
    if not FULL:
        tile = tl.load(pointers, mask=in_head & asked, other=0)
    elif PADDED:
        tile = tl.load(pointers, mask=in_head, other=0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_key_tile(key_cache, stride_group, loaded, OPTIONS: tl.constexpr, FULL: tl.constexpr):
    """Return K of a tile, [channels, columns]; `key_cache` [columns] points at the first channel of each token.

    Unless the tile is FULL, K is 0 where a token is not `loaded`, which is of the shape of `key_cache`. FP8_PAIRS
    count as channels.
    """
    HEAD_SIZE: tl.constexpr = OPTIONS.HEAD_SIZE // 2 if OPTIONS.FP8_PAIRS else OPTIONS.HEAD_SIZE
    CHANNELS: tl.constexpr = OPTIONS.HEAD_SIZE_PADDED // 2 if OPTIONS.FP8_PAIRS else OPTIONS.HEAD_SIZE_PADDED
    if OPTIONS.LOAD_K_BY_TOKEN:
        k = load_keys_by_token(key_cache, stride_group, loaded, HEAD_SIZE, CHANNELS, OPTIONS, FULL)
    elif OPTIONS.K_MFMA_LAYOUT:
        k = load_keys_for_mfma(key_cache, stride_group, loaded, HEAD_SIZE, CHANNELS, OPTIONS.X, FULL)
    else:
        k = load_keys_by_group(key_cache, stride_group, loaded, HEAD_SIZE, CHANNELS, OPTIONS.X, FULL)
    return k


@triton.jit
def load_keys_by_token(
    key_cache,
    stride_group,
    loaded,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    OPTIONS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return K where lanes load along the channels of a token: X of them at once.

    Such a load goes straight to LDS where there is cp.async.
    """
    channel = tl.arange(0, CHANNELS)
    in_head = (channel < HEAD_SIZE)[None, :]
    asked = loaded[:, None]
    offset = channel if OPTIONS.PACKING == "rows" else key_channels(channel, stride_group, OPTIONS.X)
    key_cache = key_cache[:, None] + offset[None, :]
    return tl.trans(load_tile(key_cache, in_head, asked, HEAD_SIZE < CHANNELS, FULL))


@triton.jit
def load_keys_by_group(
    key_cache,
    stride_group,
    loaded,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    X: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return K of a packed cache where lanes load along the tokens.

    Groups of X channels lie apart there, and tokens side by side.
    """
    group = tl.arange(0, CHANNELS // X)
    in_head = (group * X < HEAD_SIZE)[:, None, None]
    asked = loaded[None, :, None]
    key_cache = key_cache[None, :, None] + (group * stride_group)[:, None, None] + tl.arange(0, X)[None, None, :]
    k = load_tile(key_cache, in_head, asked, HEAD_SIZE < CHANNELS, FULL)
    return tl.reshape(tl.permute(k, (0, 2, 1)), [CHANNELS, loaded.shape[0]])


@triton.jit
def load_keys_for_mfma(
    key_cache,
    stride_group,
    loaded,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    X: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return K of a packed cache where lanes load what MFMA takes from them, so that nothing moves between lanes.

    Lanes lie along 16 tokens and four groups: `key_cache` and `loaded` are [16, columns // 16]. Channels are in the
    order in which a lane holds its X of every 4 * X: eight neighbours of every 32 (CDNA3 ISA, "MFMA", two at a time),
    the first eights first.
    """
    group = tl.arange(0, CHANNELS // X)
    in_head = (group * X < HEAD_SIZE)[None, :, None, None]
    asked = loaded[:, None, :, None]
    key_cache = key_cache[:, None, :, None] + (group * stride_group)[None, :, None, None]
    key_cache += tl.arange(0, X)[None, None, None, :]
    k = load_tile(key_cache, in_head, asked, HEAD_SIZE < CHANNELS, FULL)
    SIXTEENS: tl.constexpr = k.shape[2]
    k = tl.permute(tl.reshape(k, [16, CHANNELS // (4 * X), 4, SIXTEENS, X // 8, 8]), (1, 4, 2, 5, 3, 0))
    return tl.reshape(k, [CHANNELS, SIXTEENS * 16])


@triton.jit
def load_value_tile(value_cache, stride_channel, near, loaded, OPTIONS: tl.constexpr, FULL: tl.constexpr):
    """Return V of a tile, [columns, channels]; `value_cache` [columns] points at the first channel of each token.

    In a FULL tile, or with V_MFMA_LAYOUT, `value_cache` has an element for each run of CONTIGUOUS_TOKENS tokens and
    points at the first of them. In other tiles V is 0 where a token is not `loaded`, and not whatever the block holds:
    0 * NaN would be NaN. Tokens that are `near`, of the shape of `value_cache`, may be loaded to load whole groups.
    """
    HEAD_SIZE: tl.constexpr = OPTIONS.HEAD_SIZE // 2 if OPTIONS.FP8_PAIRS else OPTIONS.HEAD_SIZE
    CHANNELS: tl.constexpr = OPTIONS.HEAD_SIZE_PADDED // 2 if OPTIONS.FP8_PAIRS else OPTIONS.HEAD_SIZE_PADDED
    RUN: tl.constexpr = OPTIONS.CONTIGUOUS_TOKENS
    if OPTIONS.V_MFMA_LAYOUT:
        v = load_values_for_mfma(value_cache, stride_channel, near, HEAD_SIZE, CHANNELS, RUN, FULL)
    elif FULL and RUN > 1:
        v = load_values_by_run(value_cache, stride_channel, HEAD_SIZE, CHANNELS, RUN)
    else:
        v = load_values_by_token(value_cache, stride_channel, near, HEAD_SIZE, CHANNELS, OPTIONS, FULL)
    if OPTIONS.X_DIVIDES_BLOCK_SIZE and not FULL:
        v = tl.where(loaded[:, None], v, 0)
    return v


@triton.jit
def load_values_by_token(
    value_cache,
    stride_channel,
    near,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    OPTIONS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return V where a pointer is that of one token."""
    PACKING: tl.constexpr = OPTIONS.PACKING
    channel = tl.arange(0, CHANNELS)
    in_head = (channel < HEAD_SIZE)[None, :]
    value_cache = value_cache[:, None] + value_channels(channel, stride_channel, PACKING)[None, :]
    return load_tile(value_cache, in_head, near[:, None], HEAD_SIZE < CHANNELS, FULL)


@triton.jit
def load_values_by_run(value_cache, stride_channel, HEAD_SIZE: tl.constexpr, CHANNELS: tl.constexpr, RUN: tl.constexpr):
    """Return V of a full tile of a packed cache, [columns, channels].

    A lane reads a run of tokens, and neighbouring lanes its neighbours in the run before the next channel.
    """
    channel = tl.arange(0, CHANNELS)
    in_head = (channel < HEAD_SIZE)[None, :]
    value_cache = value_cache[:, None, None] + (channel * stride_channel)[None, :, None]
    value_cache += tl.arange(0, RUN)[None, None, :]
    v = load_tile(value_cache, in_head[:, :, None], True, HEAD_SIZE < CHANNELS, True)
    return tl.reshape(tl.permute(v, (0, 2, 1)), [value_cache.shape[0] * RUN, CHANNELS])


@triton.jit
def load_values_for_mfma(
    value_cache,
    stride_channel,
    near,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return V of a packed cache where lanes load what MFMA takes from them: along 16 channels and four runs.

    Columns are in the order of `mfma_token`.
    """
    RUNS: tl.constexpr = value_cache.shape[0]
    channel = tl.arange(0, 16)[:, None] + 16 * tl.arange(0, CHANNELS // 16)[None, :]
    in_head = (channel < HEAD_SIZE)[:, None, :, None]
    value_cache = value_cache[None, :, None, None] + (channel * stride_channel)[:, None, :, None]
    value_cache += tl.arange(0, RUN)[None, None, None, :]
    v = load_tile(value_cache, in_head, near[None, :, None, None], HEAD_SIZE < CHANNELS, FULL)
    v = tl.permute(tl.reshape(v, [16, RUNS // 4, 4, CHANNELS // 16, RUN // 4, 4]), (1, 4, 2, 5, 3, 0))
    return tl.reshape(v, [RUNS * RUN, CHANNELS])


@triton.jit
def mfma_token(position, X: tl.constexpr):
    """Return the token of a tile at each `position` of its columns, in the operand layout of MFMA.

    In a product over tokens a lane holds four neighbours of every 16 (CDNA3 ISA, "MFMA": K in the fourths of a wave).
    A packed V gives a lane X neighbours: its fours, in the order of the sixteens.
    """
    return position // (4 * X) * (4 * X) + position % 16 // 4 * X + position % (4 * X) // 16 * 4 + position % 4


@triton.jit
def column_tokens(OPTIONS: tl.constexpr):
    """Return the token of each column of a tile, [BLOCK_N]."""
    column = tl.arange(0, OPTIONS.BLOCK_N)
    # The remainder changes no token. Without it the compiler orders the instructions of the loop otherwise.
    return mfma_token(column, OPTIONS.X) if OPTIONS.V_MFMA_LAYOUT else column % OPTIONS.BLOCK_N


@triton.jit
def key_places(column_token, OPTIONS: tl.constexpr):
    """Return the tokens of a tile in the order in which K is loaded; see `load_key_tile`."""
    place = column_token
    if OPTIONS.K_MFMA_LAYOUT:
        place = tl.arange(0, 16)[:, None] + 16 * tl.arange(0, OPTIONS.BLOCK_N // 16)[None, :]
        place = mfma_token(place, OPTIONS.X) if OPTIONS.V_MFMA_LAYOUT else place
    return place


@triton.jit
def value_runs(OPTIONS: tl.constexpr):
    """Return the first tokens of the runs of a tile (CONTIGUOUS_TOKENS)."""
    return tl.arange(0, OPTIONS.BLOCK_N // OPTIONS.CONTIGUOUS_TOKENS) * OPTIONS.CONTIGUOUS_TOKENS
