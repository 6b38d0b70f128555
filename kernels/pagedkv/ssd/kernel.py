# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's prefill as one walk through a sequence (Dao and Gu 2024, sections 2 and 6).

With a_t the sum of dt A over a tile's tokens up to t, and H the state before the tile,

    y_i = exp(a_i) C_i H + sum over j <= i of (C_i . B_j) exp(a_i - a_j) dt_j x_j + D x_i
    H'  = exp(a_last) H + sum over j of exp(a_last - a_j) dt_j x_j B_j

A program holds H of one head and of BLOCK_D channels in registers, walks the tokens of a sequence in tiles, and writes
outputs and states. Nothing between input and output is stored, so the length of a tile is free: no result depends on
the model's chunk size.

Where heads and sequences are too few to fill the device, each sequence is cut into segments. `ssd_carry_kernel`
computes what every segment but the last adds to the state, and a program of `ssd_prefill_kernel` begins with the sum of
those before it. No program waits for another.

A position at which a state is asked for ends a *piece*: without such positions, a sequence is one piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pagedkv.attention.softmax import LN2, LOG2E, narrow, reciprocal, widen
from pagedkv.strides import wide

LEAST_FALL = tl.constexpr(-160.0)
"""Least share of the state that a step leaves, in base 2: less than 2^-149 is 0 in fp32. So a sum stays finite (A =
-inf), and precise after such a step."""


class PrefillStrides(NamedTuple):
    """Strides that a launch passes, in elements; 0 of what is not used."""

    x: tuple[int, ...]
    """Strides of token and head; so are those of z and out."""
    z: tuple[int, ...]
    out: tuple[int, ...]
    B: tuple[int, ...]
    """Strides of token and group; so are those of C."""
    C: tuple[int, ...]
    states: tuple[int, ...]
    """Strides of piece, head and channel."""
    initial_states: tuple[int, ...]
    """Strides of sequence, head and channel."""
    D: tuple[int, ...]
    """Strides of head."""


class PrefillOptions(NamedTuple):
    """Compile-time options of both kernels: Triton compiles once for each combination of values."""

    NUM_HEADS: int
    HEADS_PER_GROUP: int
    """Heads that share B and C."""
    HEAD_SIZE: int
    STATE_SIZE: int
    """Elements of the state of a channel."""
    BLOCK_T: int
    """Tokens of a tile, a power of two."""
    BLOCK_D: int
    """Channels of a program, a power of two."""
    BLOCK_DSTATE: int
    """STATE_SIZE, rounded up to a power of two of at least 16."""
    DT_SOFTPLUS: bool
    HAS_DT_BIAS: bool
    HAS_INITIAL_STATES: bool
    HAS_Z: bool
    HAS_D: bool
    D_HAS_HEAD_DIM: bool
    """Whether D has a number for each channel."""
    HAS_PIECES: bool
    """Whether a sequence may have several pieces."""


class Inputs(NamedTuple):
    """Inputs of the state of a program's channels, as pointers to the tile at token 0."""

    x: Any
    x_token: Any
    """Stride of a token, int64; so are `dt_token` and `B_token`."""
    dt: Any
    dt_token: Any
    B: Any
    B_token: Any
    inside: Any
    """[BLOCK_D] Whether the head has the channel."""
    used: Any
    """[BLOCK_DSTATE] Whether a channel's state has the element."""
    rate: Any
    """A log2(e)."""
    bias: Any
    """Bias of dt."""
    low: Any
    high: Any


class TokenTile(NamedTuple):
    """The inputs of BLOCK_T tokens."""

    live: Any
    """[BLOCK_T] Whether the token is one of the sequence."""
    steps: Any
    """dt after bias, softplus and limits; 0 where not `live`."""
    sums: Any
    """Sums of dt A log2(e), up to each token."""
    fall: Any
    """The last of the sums."""
    x: Any
    B: Any


class Outputs(NamedTuple):
    """What turns the state into outputs, as pointers to the tile at token 0."""

    C: Any
    C_token: Any
    z: Any
    z_token: Any
    out: Any
    out_token: Any
    skip: Any
    """D."""


class Span(NamedTuple):
    """Tokens of a program: pieces `first` to `end_piece - 1`; of a lone piece tokens `begin` to `end - 1`."""

    first: Any
    end_piece: Any
    begin: Any
    end: Any
    empty: Any
    """Whether other segments have all tokens."""
    last: Any
    """Whether the sequence ends here."""


@triton.jit
def span_of(starts, last_pieces, sequence, segment, segments, OPTIONS: tl.constexpr):
    """Return the `Span` of a segment: a sequence of several pieces is cut between pieces, any other between tiles."""
    if OPTIONS.HAS_PIECES:
        first = tl.load(last_pieces + sequence - 1, mask=sequence > 0, other=-1) + 1
        end_piece = tl.load(last_pieces + sequence) + 1
        units = end_piece - first
        share = tl.cdiv(units, segments)
        unit = segment * share
        end_piece = tl.minimum(first + unit + share, end_piece)
        first = tl.minimum(first + unit, end_piece)
        begin = tl.load(starts + first)
        end = tl.load(starts + end_piece)
    else:
        first = sequence
        end_piece = sequence + 1
        begin = tl.load(starts + sequence)
        end = tl.load(starts + end_piece)
        units = tl.cdiv(end - begin, OPTIONS.BLOCK_T)
        share = tl.cdiv(units, segments)
        unit = segment * share
        end = tl.minimum(begin + (unit + share) * OPTIONS.BLOCK_T, end)
        begin = tl.minimum(begin + unit * OPTIONS.BLOCK_T, end)
    return Span(first, end_piece, begin, end, (unit >= units) & (segment > 0), unit + share >= units)


@triton.jit
def inputs_of(x, dt, A, bias, B, strides, stride_dt, head, channel, low, high, OPTIONS: tl.constexpr):
    """Return the `Inputs` of a program. Tokens in a tile are addressed with 32 bits, tiles with 64."""
    stride_x_token, stride_x_head = wide(strides.x)
    stride_B_token, stride_B_group = wide(strides.B)
    offset = tl.arange(0, OPTIONS.BLOCK_T)
    column = tl.arange(0, OPTIONS.BLOCK_DSTATE)
    DTYPE: tl.constexpr = x.dtype.element_ty
    rate = widen(tl.load(A + head), DTYPE) * LOG2E
    return Inputs(
        x + head * stride_x_head + offset[:, None] * strides.x[0] + channel[None, :],
        stride_x_token,
        dt + head + offset * tl.cast(stride_dt, tl.int64),
        tl.cast(stride_dt, tl.int64),
        B + head // OPTIONS.HEADS_PER_GROUP * stride_B_group + offset[:, None] * strides.B[0] + column[None, :],
        stride_B_token,
        channel < OPTIONS.HEAD_SIZE,
        column < OPTIONS.STATE_SIZE,
        tl.where(rate < -1e30, -1e30, rate),  # of 0 times -inf would be NaN
        widen(tl.load(bias + head), DTYPE) if OPTIONS.HAS_DT_BIAS else 0.0,
        low,
        high,
    )


@triton.jit
def step_sizes(dt, live, inputs, OPTIONS: tl.constexpr):
    """Return dt after bias, softplus and limits; 0 where not `live`."""
    step = widen(tl.load(dt, mask=live, other=0.0), inputs.x.dtype.element_ty) + inputs.bias
    if OPTIONS.DT_SOFTPLUS:
        grown = tl.exp2(step * LOG2E)
        # log(1 + grown): the quotient takes back what rounding 1 + grown has lost (Higham 2002, section 1.14.1).
        more = 1 + grown
        lost = tl.where(more == 1, 1.0, more - 1)
        soft = tl.where(more == 1, grown, tl.log2(more) * LN2 * (grown / lost))
        step = tl.where(step > 20, step, soft)
    step = tl.where(step < inputs.low, inputs.low, step)
    step = tl.where(step > inputs.high, inputs.high, step)
    return tl.where(live, step, 0.0)


@triton.jit
def tile_at(inputs, token, end, OPTIONS: tl.constexpr):
    """Return the `TokenTile` that begins at a token; tokens from `end` on are another's."""
    offset = tl.arange(0, OPTIONS.BLOCK_T)
    live = token + offset < end
    steps = step_sizes(inputs.dt + token * inputs.dt_token, live, inputs, OPTIONS)
    falls = steps * inputs.rate
    sums = tl.cumsum(tl.where(falls < LEAST_FALL, LEAST_FALL, falls))  # which keeps a NaN
    # At the last live token, not at the tile's end: a scan rounds each place otherwise, though zeros alone are added.
    last = tl.minimum(end - token, OPTIONS.BLOCK_T) - 1
    fall = tl.sum(tl.where(offset == last, sums, 0.0))
    x = tl.load(inputs.x + token * inputs.x_token, mask=live[:, None] & inputs.inside[None, :], other=0.0)
    B = tl.load(inputs.B + token * inputs.B_token, mask=live[:, None] & inputs.used[None, :], other=0.0)
    return TokenTile(live, steps, sums, fall, x, B)


@triton.jit
def state_after(state, tile):
    """Return the state after a tile."""
    left = tl.exp2(tile.fall - tile.sums) * tile.steps
    terms = narrow(tile.x.to(tl.float32) * left[:, None], tile.x.dtype)
    return tl.dot(tl.trans(terms), tile.B, state * tl.exp2(tile.fall), input_precision="ieee")


@triton.jit
def decays_between(tile):
    """Return exp(a_i - a_j) dt_j as [j, i]; where j > i it may be anything.

    Numbers of two bytes do not show what rounding log2(dt_j) - a_j costs, and that saves a product for each pair.
    """
    if tl.float32 == tile.x.dtype:
        out = tl.exp2(tile.sums[None, :] - tile.sums[:, None]) * tile.steps[:, None]
    else:
        out = tl.exp2(tile.sums[None, :] + (tl.log2(tile.steps) - tile.sums)[:, None])
    return out


@triton.jit
def write_rows(state, tile, token, inputs, outputs, OPTIONS: tl.constexpr):
    """Write the outputs of a tile, before which the state is `state`."""
    offset = tl.arange(0, OPTIONS.BLOCK_T)
    C = tl.load(outputs.C + token * outputs.C_token, mask=tile.live[:, None] & inputs.used[None, :], other=0.0)
    weights = tl.dot(tile.B, tl.trans(C), input_precision="ieee") * decays_between(tile)  # [j, i]
    # Tokens that come later weigh nothing; what was made of them may be infinite or NaN.
    weights = narrow(tl.where(offset[:, None] <= offset[None, :], weights, 0.0), tile.x.dtype)
    rows = tl.dot(narrow(state, C.dtype), tl.trans(C), input_precision="ieee") * tl.exp2(tile.sums)[None, :]
    rows = tl.trans(tl.dot(tl.trans(tile.x), weights, rows, input_precision="ieee"))
    if OPTIONS.HAS_D:
        rows += tile.x.to(tl.float32) * outputs.skip
    kept = tile.live[:, None] & inputs.inside[None, :]
    if OPTIONS.HAS_Z:
        gate = tl.load(outputs.z + token * outputs.z_token, mask=kept, other=0.0).to(tl.float32)
        rows *= gate * reciprocal(1 + tl.exp2(-gate * LOG2E))
    tl.store(outputs.out + token * outputs.out_token, narrow(rows, outputs.out.dtype.element_ty), mask=kept)


@triton.jit
def walk(state, begin, end, inputs, outputs, OPTIONS: tl.constexpr):
    """Write the outputs of tokens `begin` to `end` and return the state after them."""
    for token in range(begin, end, OPTIONS.BLOCK_T):
        tile = tile_at(inputs, token, end, OPTIONS)
        write_rows(state, tile, token, inputs, outputs, OPTIONS)
        state = state_after(state, tile)
    return state


@triton.jit
def channels_of(OPTIONS: tl.constexpr):
    """Return the head of a program, which of its channel tiles it is, and the channels."""
    CHANNEL_TILES: tl.constexpr = (OPTIONS.HEAD_SIZE + OPTIONS.BLOCK_D - 1) // OPTIONS.BLOCK_D
    tile = tl.program_id(0) % CHANNEL_TILES
    return tl.program_id(0) // CHANNEL_TILES, tile, tile * OPTIONS.BLOCK_D + tl.arange(0, OPTIONS.BLOCK_D)


@triton.jit
def segment_at(sequence, segments, segment, head, OPTIONS: tl.constexpr):
    """Return the row of a segment's head in the results of `ssd_carry_kernel`."""
    return (sequence.to(tl.int64) * (segments - 1) + segment) * OPTIONS.NUM_HEADS + head


@triton.jit(
    do_not_specialize=["stride_dt", "segments"],
    do_not_specialize_on_alignment=["dt", "starts", "last_pieces"],
)
def ssd_carry_kernel(
    x,
    dt,
    A,
    bias,
    B,
    starts,
    last_pieces,
    carried,  # [sequences, segments - 1, heads, HEAD_SIZE, STATE_SIZE] fp32: what a segment adds to the state
    falls,  # [sequences, segments - 1, heads] fp32: 2^fall of the state is left after a segment
    strides,
    stride_dt,
    segments,
    low,
    high,
    OPTIONS: tl.constexpr,
):
    """Compute what each segment but the last adds to the state; grid and arguments as in `ssd_prefill_kernel`."""
    head, channel_tile, channel = channels_of(OPTIONS)
    segment = tl.program_id(1)
    sequence = tl.program_id(2)
    span = span_of(starts, last_pieces, sequence, segment, segments, OPTIONS)
    if span.last | span.empty:
        return
    inputs = inputs_of(x, dt, A, bias, B, strides, stride_dt, head, channel, low, high, OPTIONS)
    state = tl.full([OPTIONS.BLOCK_D, OPTIONS.BLOCK_DSTATE], 0.0, tl.float32)
    fall = 0.0
    for token in range(span.begin, span.end, OPTIONS.BLOCK_T):
        tile = tile_at(inputs, token, span.end, OPTIONS)
        state = state_after(state, tile)
        fall += tile.fall
    row = segment_at(sequence, segments, segment, head, OPTIONS)
    at = channel[:, None] * OPTIONS.STATE_SIZE + tl.arange(0, OPTIONS.BLOCK_DSTATE)[None, :]
    kept = inputs.inside[:, None] & inputs.used[None, :]
    tl.store(carried + row * (OPTIONS.HEAD_SIZE * OPTIONS.STATE_SIZE) + at, state, mask=kept)
    tl.store(falls + row, fall, mask=channel_tile == 0)


@triton.jit(
    do_not_specialize=["stride_dt", "segments"],
    do_not_specialize_on_alignment=["dt", "starts", "last_pieces"],
)
def ssd_prefill_kernel(
    x,  # [tokens, heads, HEAD_SIZE]
    dt,  # [tokens, heads]
    A,  # [heads], negative
    bias,  # [heads], of dt; used with HAS_DT_BIAS
    B,  # [tokens, groups, STATE_SIZE]
    C,  # as B
    D,  # [heads], with D_HAS_HEAD_DIM [heads, HEAD_SIZE]; used with HAS_D
    z,  # as x; used with HAS_Z
    out,  # as x
    initial_states,  # [sequences, heads, HEAD_SIZE, STATE_SIZE]; used with HAS_INITIAL_STATES
    states,  # [pieces, heads, HEAD_SIZE, STATE_SIZE] after each piece
    starts,  # [pieces + 1] int32, the first token of each piece
    last_pieces,  # [sequences] int32; used with HAS_PIECES
    carried,  # of `ssd_carry_kernel`; used with several segments
    falls,
    strides,  # PrefillStrides
    stride_dt,  # of token
    segments,  # of each sequence
    low,  # dt is kept in low .. high
    high,
    OPTIONS: tl.constexpr,  # PrefillOptions
):
    """Walk a segment of a sequence for BLOCK_D channels of a head; grid [heads * channel tiles, segments, sequences].

    Heads are next to each other, because those of a group read the same B and C.
    """
    head, _, channel = channels_of(OPTIONS)
    segment = tl.program_id(1)
    sequence = tl.program_id(2)
    span = span_of(starts, last_pieces, sequence, segment, segments, OPTIONS)
    if span.empty:
        return
    inputs = inputs_of(x, dt, A, bias, B, strides, stride_dt, head, channel, low, high, OPTIONS)
    kept = inputs.inside[:, None] & inputs.used[None, :]
    column = tl.arange(0, OPTIONS.BLOCK_DSTATE)

    skip = 0.0
    if OPTIONS.HAS_D:
        (stride_D,) = wide(strides.D)
        if OPTIONS.D_HAS_HEAD_DIM:
            skip = tl.load(D + head * stride_D + channel, mask=inputs.inside, other=0.0)[None, :]
        else:
            skip = tl.load(D + head * stride_D)
        skip = widen(skip, x.dtype.element_ty)
    offset = tl.arange(0, OPTIONS.BLOCK_T)
    stride_C_token, stride_C_group = wide(strides.C)
    C += head // OPTIONS.HEADS_PER_GROUP * stride_C_group + offset[:, None] * strides.C[0] + column[None, :]
    stride_z_token, stride_z_head = wide(strides.z)
    if OPTIONS.HAS_Z:
        z += head * stride_z_head + offset[:, None] * strides.z[0] + channel[None, :]
    stride_out_token, stride_out_head = wide(strides.out)
    out += head * stride_out_head + offset[:, None] * strides.out[0] + channel[None, :]
    outputs = Outputs(C, stride_C_token, z, stride_z_token, out, stride_out_token, skip)

    if OPTIONS.HAS_INITIAL_STATES:
        stride_initial, stride_initial_head, stride_initial_channel = wide(strides.initial_states)
        initial_states += sequence * stride_initial + head * stride_initial_head
        initial_at = channel[:, None] * stride_initial_channel + column[None, :]
        state = widen(tl.load(initial_states + initial_at, mask=kept, other=0.0), x.dtype.element_ty)
    else:
        state = tl.full([OPTIONS.BLOCK_D, OPTIONS.BLOCK_DSTATE], 0.0, tl.float32)
    for before in range(segment):
        row = segment_at(sequence, segments, before, head, OPTIONS)
        carried_at = (
            row * (OPTIONS.HEAD_SIZE * OPTIONS.STATE_SIZE) + channel[:, None] * OPTIONS.STATE_SIZE + column[None, :]
        )
        state = state * tl.exp2(tl.load(falls + row)) + tl.load(carried + carried_at, mask=kept, other=0.0)

    stride_state_piece, stride_state_head, stride_state_channel = wide(strides.states)
    states += head * stride_state_head + channel[:, None] * stride_state_channel + column[None, :]
    if OPTIONS.HAS_PIECES:
        for piece in range(span.first, span.end_piece):
            state = walk(state, tl.load(starts + piece), tl.load(starts + piece + 1), inputs, outputs, OPTIONS)
            tl.store(states + piece * stride_state_piece, state.to(states.dtype.element_ty), mask=kept)
    else:
        state = walk(state, span.begin, span.end, inputs, outputs, OPTIONS)
        if span.last:
            tl.store(states + sequence * stride_state_piece, state.to(states.dtype.element_ty), mask=kept)
