# SPDX-License-Identifier: Apache-2.0
"""The last step of Mamba-2's chunked scan: outputs from products and states (Dao and Gu 2024, section 6).

A sequence is cut into chunks. With a_i the sum of dt A over a chunk's tokens up to i, and H the state before the chunk,

    y_i = exp(a_i) C_i H + sum over j <= i of (C_i . B_j) exp(a_i - a_j) dt_j x_j + D x_i

The steps before this one have made the products C_i . B_j, the sums a and the states. A program makes ROWS tokens of
one chunk and head. Let m be the first of them: exp(a_i - a_j) = exp(a_i - a_m) exp(a_m - a_j), both at most 1 where
j < m <= i, because A is negative. So H and every tile before m take one factor a row and one a column; only the tile at
the diagonal takes an exponential and a mask for each element.

The state before a chunk lies in one of two tensors. The branch that chooses yields the loaded tile, never a pointer:
the AMD backend of Triton 3.6 cannot compile an `if` of which a pointer comes out.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from pagedkv.attention.softmax import LOG2E, reciprocal
from pagedkv.strides import wide


class ScanStrides(NamedTuple):
    """Strides that a launch of `chunk_scan_kernel` passes, in elements; 0 of what is not used."""

    products: tuple[int, ...]
    """Of chunk, group and row."""
    x: tuple[int, ...]
    """Of token and head; likewise of z and out."""
    z: tuple[int, ...]
    out: tuple[int, ...]
    dt: tuple[int, ...]
    """Of head and chunk; likewise of sums."""
    sums: tuple[int, ...]
    C: tuple[int, ...]
    """Of token and group."""
    states: tuple[int, ...]
    """Of chunk, head and channel."""
    initial_states: tuple[int, ...]
    """Of sequence, head and channel."""
    D: tuple[int, ...]
    """Of head."""


class ScanOptions(NamedTuple):
    """What `chunk_scan_kernel` is compiled for: one machine code for each value."""

    HEADS_OF_GROUP: int
    HEAD_SIZE: int
    STATE: int
    CHUNK: int
    """Tokens of a chunk."""
    ROWS: int
    """Tokens of a program, a power of two that divides CHUNK."""
    TILE: int
    """Tokens of a tile of products, which divides ROWS."""
    CHANNELS: int
    """Channels of a program."""
    STATE_TILE: int
    """Elements of the state's last axis that are loaded at once."""
    HAS_INITIAL: bool
    HAS_Z: bool
    HAS_D: bool
    D_CHANNELS: bool
    """Whether D has a number for each channel."""


@triton.jit
def load_sums(sums, token):
    """Return the sums up to each token times log2(e): 2^(a_i - a_j) is how much of j is left at i.

    A sum below -1e30 (-inf, for a state that is gone at each step) is one that falls from token to token instead: its
    difference with itself is 0, with any other one leaves nothing, and neither is -inf - -inf. A NaN stays one.
    """
    least = -1e30 * (1 + token).to(tl.float32)
    found = tl.load(sums + token) * LOG2E
    return tl.where(found < least, least, found)


@triton.jit
def chunk_scan_kernel(
    products,  # [chunks, groups, CHUNK, CHUNK] C_i . B_j
    x,  # [tokens, heads, HEAD_SIZE]
    z,  # as x; used with HAS_Z
    out,  # as x
    dt,  # [heads, chunks, CHUNK] fp32
    sums,  # [heads, chunks, CHUNK] fp32, of dt A up to each token of the chunk
    C,  # [tokens, groups, STATE]
    states,  # [chunks, heads, HEAD_SIZE, STATE] behind each chunk
    initial_states,  # [sequences, heads, HEAD_SIZE, STATE]; used with HAS_INITIAL
    D,  # [heads], with D_CHANNELS [heads, HEAD_SIZE]; used with HAS_D
    chunk_starts,  # [chunks + 1] int32, the first token of each chunk
    sequences,  # [chunks] int32, whose it is
    strides,  # ScanStrides
    OPTIONS: tl.constexpr,  # ScanOptions
):
    """Make ROWS tokens and CHANNELS channels of a head; grid [heads * channel tiles, CHUNK / ROWS, chunks].

    Heads are next to each other, because those of a group read the same products and C; the longest rows come first.
    """
    HEAD_SIZE: tl.constexpr = OPTIONS.HEAD_SIZE
    STATE: tl.constexpr = OPTIONS.STATE
    CHUNK: tl.constexpr = OPTIONS.CHUNK
    ROWS: tl.constexpr = OPTIONS.ROWS
    TILE: tl.constexpr = OPTIONS.TILE
    CHANNELS: tl.constexpr = OPTIONS.CHANNELS
    STATE_TILE: tl.constexpr = OPTIONS.STATE_TILE
    stride_product_chunk, stride_product_group, stride_product_row = wide(strides.products)
    stride_x_token, stride_x_head = wide(strides.x)
    stride_out_token, stride_out_head = wide(strides.out)
    stride_dt_head, stride_dt_chunk = wide(strides.dt)
    stride_sum_head, stride_sum_chunk = wide(strides.sums)
    stride_C_token, stride_C_group = wide(strides.C)
    stride_state_chunk, stride_state_head, stride_state_channel = wide(strides.states)
    CHANNEL_TILES: tl.constexpr = (HEAD_SIZE + CHANNELS - 1) // CHANNELS
    head = tl.program_id(0) // CHANNEL_TILES
    first = (CHUNK // ROWS - 1 - tl.program_id(1)) * ROWS
    chunk = tl.program_id(2)
    start = tl.load(chunk_starts + chunk).to(tl.int64)
    length = (tl.load(chunk_starts + chunk + 1) - start).to(tl.int32)
    if first >= length:
        return
    sequence = tl.load(sequences + chunk)
    # The first chunk continues none, whatever its sequence is called: -1 is what a server pads with.
    continued = (chunk > 0) & (tl.load(sequences + chunk - 1, mask=chunk > 0, other=-1) == sequence)

    group = head // OPTIONS.HEADS_OF_GROUP
    offset = tl.arange(0, ROWS)
    row = first + offset
    live = row < length
    channel = tl.program_id(0) % CHANNEL_TILES * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < HEAD_SIZE
    products += chunk * stride_product_chunk + group * stride_product_group + row[:, None] * stride_product_row
    x += start * stride_x_token + head * stride_x_head + channel[None, :]
    dt += head * stride_dt_head + chunk * stride_dt_chunk
    sums += head * stride_sum_head + chunk * stride_sum_chunk
    C += start * stride_C_token + group * stride_C_group + row[:, None] * stride_C_token
    first_sum = load_sums(sums, first)

    acc = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    if continued | OPTIONS.HAS_INITIAL:
        for n in range(0, STATE, STATE_TILE):
            state = n + tl.arange(0, STATE_TILE)
            seen = inside[:, None] & (state < STATE)[None, :]
            if continued:
                before = states + (chunk - 1) * stride_state_chunk + head * stride_state_head
                before += channel[:, None] * stride_state_channel + state[None, :]
                h = tl.load(before, mask=seen, other=0.0).to(C.dtype.element_ty)
            elif OPTIONS.HAS_INITIAL:
                stride_initial, stride_initial_head, stride_initial_channel = wide(strides.initial_states)
                before = initial_states + sequence * stride_initial + head * stride_initial_head
                before += channel[:, None] * stride_initial_channel + state[None, :]
                h = tl.load(before, mask=seen, other=0.0).to(C.dtype.element_ty)
            else:
                h = tl.full([CHANNELS, STATE_TILE], 0.0, C.dtype.element_ty)
            c = tl.load(C + state[None, :], mask=live[:, None] & (state < STATE)[None, :], other=0.0)
            acc = tl.dot(c, tl.trans(h), acc, input_precision="ieee")
        acc *= tl.exp2(first_sum)

    row_sum = load_sums(sums, row)  # what is behind the chunk's tokens stays in rows that nobody stores
    for begin in range(0, first, TILE):
        token = begin + tl.arange(0, TILE)
        # None of these is the row's own token, so that of a sum of -inf nothing is left: cheaper than its bound.
        before = tl.load(sums + token) * LOG2E
        factor = tl.where(before == float("-inf"), 0.0, tl.exp2(first_sum - before)) * tl.load(dt + token)
        weights = (tl.load(products + token[None, :]) * factor[None, :]).to(x.dtype.element_ty)
        values = tl.load(x + token[:, None] * stride_x_token, mask=inside[None, :], other=0.0)
        acc = tl.dot(weights, values, acc, input_precision="ieee")
    acc *= tl.exp2(row_sum - first_sum)[:, None]

    for begin in range(first, min(first + ROWS, length), TILE):
        token = begin + tl.arange(0, TILE)
        factor = tl.exp2(row_sum[:, None] - load_sums(sums, token)[None, :]) * tl.load(dt + token)[None, :]
        weights = tl.load(products + token[None, :]) * factor
        # Behind the diagonal lie exponentials of positive numbers, and what nobody has computed.
        weights = tl.where(token[None, :] <= row[:, None], weights, 0.0).to(x.dtype.element_ty)
        used = (token < length)[:, None] & inside[None, :]
        values = tl.load(x + token[:, None] * stride_x_token, mask=used, other=0.0)
        acc = tl.dot(weights, values, acc, input_precision="ieee")

    kept = live[:, None] & inside[None, :]
    if OPTIONS.HAS_D:
        (stride_D,) = wide(strides.D)
        skip = (
            tl.load(D + head * stride_D + channel, mask=inside, other=0.0)
            if OPTIONS.D_CHANNELS
            else tl.load(D + head * stride_D)
        )
        own = tl.load(x + row[:, None] * stride_x_token, mask=kept, other=0.0)
        acc += own.to(tl.float32) * skip.to(tl.float32)
    if OPTIONS.HAS_Z:
        stride_z_token, stride_z_head = wide(strides.z)
        z += start * stride_z_token + head * stride_z_head + channel[None, :]
        gate = tl.load(z + row[:, None] * stride_z_token, mask=kept, other=0.0).to(tl.float32)
        acc *= gate * reciprocal(1 + tl.exp2(-gate * LOG2E))
    out += start * stride_out_token + head * stride_out_head + channel[None, :]
    tl.store(out + row[:, None] * stride_out_token, acc.to(out.dtype.element_ty), mask=kept)
