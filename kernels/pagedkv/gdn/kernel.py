# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule's prefill: two matrices of each chunk, then one walk through a sequence (Yang et al. 2025).

Of a head with state S [V, K], decay exp(g_t), write strength b_t and keys and queries of length 1,

    S_t = exp(g_t) S_{t-1} + b_t (v_t - exp(g_t) S_{t-1} k_t) k_t^T          o_t = S_t q_t / sqrt(K)

With G_i = g_1 + .. + g_i in a chunk of C tokens, S the state before it, and rows that are tokens,

    A_ij = b_i exp(G_i - G_j) k_i.k_j  for j < i,   T = (I + A)^-1 diag(b)
    X = V - exp(G) K S^T                            what the state does not yet say of the values
    U = T X                                         what is written
    O = exp(G) Q S^T / sqrt(K) + P U,               P_ij = exp(G_i - G_j) q_i.k_j / sqrt(K)  for j <= i
    S' = exp(G_C) S + U^T diag(exp(G_C - G)) K

`gdn_chunks_kernel` makes T and P of every chunk and head, all at the same time. A program of `gdn_prefill_kernel` holds
BLOCK_V rows of a state in registers and walks the chunks of a sequence. It makes S^T, X^T and U^T as the left operands
of the next product, so that they stay in registers. q and k are read as the convolution left them: 1 / |q| and 1 / |k|
are factors of rows and columns that are scaled anyway.

Where heads and sequences are too few to fill the device, each sequence is cut into segments. What a segment does to a
row of the state is s -> s M + n. `gdn_carry_kernel` makes n from a state of zeros, and M from the unit matrix without
values; `gdn_join_kernel` makes of these the states between segments, with which programs of `gdn_prefill_kernel` begin.
No program waits for another.

A position at which a state is asked for ends a *piece*: without such positions, a sequence is one piece. Chunks begin
with a piece, and are numbered so that a piece's first one follows from where it begins: see `first_chunk`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pagedkv.attention.softmax import INTERPRETED, LN2, LOG2E, compiled_for, narrow, reciprocal, widen
from pagedkv.strides import sequence_of_tile, wide

LEAST_FALL = tl.constexpr(-160.0)
"""Least log2 of what a step leaves of the state: less than 2^-149 is 0 in fp32. So a sum stays finite."""
EPSILON = tl.constexpr(1e-6)
"""Added to the sum of squares of a key or query before its root is taken, as models do."""
FACTORS = tl.constexpr(4)
"""Rows of `factors`: of K S^T, of Q S^T, of U in the new state, and exp(G_C)."""


class DeltaStrides(NamedTuple):
    """Strides that a launch passes, in elements."""

    q: tuple[int, ...]
    """Strides of token and key head, as k has them."""
    k: tuple[int, ...]
    v: tuple[int, ...]
    """Strides of token and head, as out has them."""
    out: tuple[int, ...]
    a: tuple[int, ...]
    """Stride of token; with IS_KDA of token and head."""
    b: tuple[int, ...]
    """Stride of token."""
    states: tuple[int, ...]
    """Strides of block, head and value."""


class DeltaOptions(NamedTuple):
    """Compile-time options of the kernels: Triton compiles once for each combination of values."""

    NUM_HEADS: int
    HEADS_PER_KEY_HEAD: int
    """Value heads that share a key head."""
    K: int
    """Channels of a key."""
    V: int
    """Channels of a value."""
    CHUNK_SIZE: int
    """Tokens of a chunk: 16, 32 or 64."""
    BLOCK_V: int
    """Rows of the state (values) of a program, a divisor of K and V."""
    HAS_PIECES: bool
    """Whether a sequence may have several pieces."""
    HAS_KNOWN: bool
    """Whether `known` is given, which says which sequences have a state before."""
    HAS_SEGMENTS: bool
    """Whether a sequence has several segments."""
    IS_KDA: bool
    """Kimi Delta Attention: each key has a decay (`kda_kernel`); q and k of a walk are then scaled for each head."""
    HAS_LOWER_BOUND: bool
    """Whether decays have a lower bound; used with IS_KDA."""


class DeltaInputs(NamedTuple):
    """What a walk reads of each chunk; pointers of token 0 and chunk 0."""

    k: Any
    k_token: Any
    """Stride of a token, int64; likewise below."""
    ends: Any
    """With IS_KDA as k: keys scaled by the decay from a token to the end of its chunk."""
    v: Any
    v_token: Any
    inverses: Any
    factors: Any


class DeltaOutputs(NamedTuple):
    """What makes outputs of the state; pointers and strides as of `DeltaInputs`."""

    q: Any
    q_token: Any
    scores: Any
    out: Any
    out_token: Any


class DeltaSpan(NamedTuple):
    """What a program walks: chunks `begin` to `end` of pieces `first` to before `end_piece`."""

    first: Any
    end_piece: Any
    begin: Any
    end: Any
    empty: Any
    """Whether other segments have all chunks."""
    last: Any
    """Whether the sequence ends here."""


@triton.jit
def first_chunk(start, piece, CHUNK_SIZE: tl.constexpr):
    """Return the number of the first chunk of a piece that begins at token `start`.

    A piece has at least one number, and as many as its tokens need or one more: see `sequence_of_tile`.
    """
    return start // CHUNK_SIZE + piece


@triton.constexpr_function
def exact():
    """Return how products of fp32 keep their digits: CUDA has no matrix instruction for them, but three of TF32."""
    return "ieee" if INTERPRETED or compiled_for() else "tf32x3"


@triton.jit
def rounded(a, b, DTYPE: tl.constexpr):
    """Return a b, whose entries are at most 1 for keys of length 1: from fp16, unless the inputs are fp32."""
    if tl.float32 != DTYPE:
        a, b = a.to(tl.float16), b.to(tl.float16)
    return tl.dot(a, b, input_precision=exact())


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr, DTYPE: tl.constexpr):
    """Return (I + A)^-1 of a strictly lower triangular A [C, C].

    Blocks of 8 come from their finite series, (I - A)(I + A^2)(I + A^4). With equal keys, no decay and b = 1 its terms
    grow to 35, so fp32 loses five bits; with blocks of 16 they would grow to 6,435, of 64 to 9e17. Then the blocks are
    doubled, T - T L T, up to three times. No entry of those exceeds the largest b, because I - b k k^T makes no vector
    longer.
    """
    BLOCKS: tl.constexpr = C // 16
    up, across = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    block = tl.sum(tl.where(up == across, tl.reshape(A, [BLOCKS, 16, BLOCKS, 16]), 0.0), axis=2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inner = tl.where((i // 8 == j // 8) & (i > j), block, 0.0)
    outer = tl.where(i // 8 > j // 8, block, 0.0)
    two = tl.dot(inner, inner, input_precision=exact())
    four = tl.dot(two, two, input_precision=exact())
    inverse = tl.where(i == j, 1.0, 0.0) - inner
    inverse += tl.dot(inverse, two, input_precision=exact())
    inverse += tl.dot(inverse, four, input_precision=exact())
    inverse -= tl.dot(tl.dot(inverse, outer, input_precision=exact()), inverse, input_precision=exact())
    T = tl.reshape(tl.where(up == across, inverse[:, :, None, :], 0.0), [C, C])
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if C >= 32:
        low = tl.where((i // 32 == j // 32) & (i // 16 > j // 16), A, 0.0)
        T -= rounded(rounded(T, low, DTYPE), T, DTYPE)
    if C >= 64:
        low = tl.where(i // 32 > j // 32, A, 0.0)
        T -= rounded(rounded(T, low, DTYPE), T, DTYPE)
    return T


@triton.jit
def unit_factor(squares):
    """Return the factor that makes a row one of length 1, of the sum of its squares; 0 of a row of zeros."""
    return tl.where(squares > 0.0, tl.rsqrt(squares + EPSILON), 0.0)


@triton.jit
def of_unit(rows):
    """Return the factor that makes each row one of length 1; 0 of a row of zeros, which has no direction."""
    return unit_factor(tl.sum(rows.to(tl.float32) * rows.to(tl.float32), axis=1))


@triton.jit(
    do_not_specialize=["pieces"],
    do_not_specialize_on_alignment=["a", "b", "starts"],
)
def gdn_chunks_kernel(
    q,  # [tokens, key heads, K]
    k,  # as q
    a,  # [tokens, heads]
    b,  # as a
    A_log,  # [heads]
    dt_bias,  # [heads]
    inverses,  # [chunks, heads, CHUNK_SIZE, CHUNK_SIZE]: T
    scores,  # as inverses: P
    factors,  # [chunks, heads, FACTORS, CHUNK_SIZE] fp32
    starts,  # [pieces + 1] int32, the first token of each piece
    strides,  # DeltaStrides
    pieces,
    OPTIONS: tl.constexpr,  # DeltaOptions
):
    """Make T, P and the factors of a chunk of a head; grid [heads, chunk numbers].

    Heads are next to each other, because those of a key head read the same q and k.
    """
    C: tl.constexpr = OPTIONS.CHUNK_SIZE
    DTYPE: tl.constexpr = k.dtype.element_ty
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    piece = sequence_of_tile(starts, chunk, pieces, C, 128, 1)
    if piece >= pieces:
        return
    begin, end = tl.load(starts + piece), tl.load(starts + piece + 1)
    token = begin + (chunk - first_chunk(begin, piece, C)) * C
    if (token < begin) | (token >= end):
        return
    row, channel = tl.arange(0, C), tl.arange(0, OPTIONS.K)
    live = token + row < end
    i, j = row[:, None], row[None, :]
    token = token.to(tl.int64)
    stride_q_token, stride_q_head = wide(strides.q)
    stride_k_token, stride_k_head = wide(strides.k)
    (stride_a,) = wide(strides.a)
    (stride_b,) = wide(strides.b)
    key_head = head // OPTIONS.HEADS_PER_KEY_HEAD
    q += token * stride_q_token + key_head * stride_q_head
    k += token * stride_k_token + key_head * stride_k_head
    keys = tl.load(k + i * strides.k[0] + channel[None, :], mask=live[:, None], other=0.0)
    queries = tl.load(q + i * strides.q[0] + channel[None, :], mask=live[:, None], other=0.0)

    step = widen(tl.load(a + (token + row) * stride_a + head, mask=live, other=0.0), DTYPE)
    step += widen(tl.load(dt_bias + head), DTYPE)
    step = tl.where(step > 20.0, step, tl.log2(1.0 + tl.exp2(step * LOG2E)) * LN2)
    fall = -tl.exp2(widen(tl.load(A_log + head), DTYPE) * LOG2E) * step * LOG2E
    fall = tl.where(live, tl.where(fall < LEAST_FALL, LEAST_FALL, fall), 0.0)  # which keeps a NaN
    write = widen(tl.load(b + (token + row) * stride_b + head, mask=live, other=0.0), DTYPE)
    write = tl.where(live, reciprocal(1.0 + tl.exp2(-write * LOG2E)), 0.0)
    G = tl.cumsum(fall)
    last = tl.sum(tl.where(row == C - 1, G, 0.0))
    of_key = of_unit(keys)
    of_query = of_unit(queries) * (OPTIONS.K**-0.5)

    place = chunk.to(tl.int64) * OPTIONS.NUM_HEADS + head
    grown = tl.exp2(G)
    factor = factors + place * (FACTORS * C) + row
    tl.store(factor, grown * of_key)
    tl.store(factor + C, grown * of_query)
    tl.store(factor + 2 * C, tl.exp2(last - G) * of_key)
    tl.store(factor + 3 * C, tl.exp2(last) + tl.zeros([C], tl.float32))
    at = place * (C * C) + i * C + j
    decay = tl.exp2(tl.where(i >= j, G[:, None] - G[None, :], 0.0)) * of_key[None, :]
    P = tl.dot(queries, tl.trans(keys), input_precision="ieee") * decay * of_query[:, None]
    tl.store(scores + at, narrow(tl.where(i >= j, P, 0.0), DTYPE))
    A = tl.dot(keys, tl.trans(keys), input_precision="ieee") * decay * (of_key * write)[:, None]
    T = unit_lower_inverse(tl.where(i > j, A, 0.0), C, DTYPE) * write[None, :]
    tl.store(inverses + at, narrow(T, DTYPE))


@triton.jit
def span_of(starts, last_pieces, sequence, segment, segments, OPTIONS: tl.constexpr):
    """Return the `DeltaSpan` of a segment; a sequence is cut between chunks."""
    first, end_piece = sequence, sequence + 1
    if OPTIONS.HAS_PIECES:
        first = tl.load(last_pieces + sequence - 1, mask=sequence > 0, other=-1) + 1
        end_piece = tl.load(last_pieces + sequence) + 1
    begin = first_chunk(tl.load(starts + first), first, OPTIONS.CHUNK_SIZE)
    end = first_chunk(tl.load(starts + end_piece), end_piece, OPTIONS.CHUNK_SIZE)
    share = tl.cdiv(end - begin, segments)
    begin += segment * share
    return DeltaSpan(first, end_piece, begin, tl.minimum(begin + share, end), begin >= end, begin + share >= end)


@triton.jit
def inputs_of(k, ends, v, inverses, factors, strides, head, value, OPTIONS: tl.constexpr):
    """Return the `DeltaInputs` of a program. Tokens in a chunk are addressed with 32 bits, chunks with 64."""
    C: tl.constexpr = OPTIONS.CHUNK_SIZE
    NUMBERS: tl.constexpr = OPTIONS.K if OPTIONS.IS_KDA else FACTORS * C
    stride_k_token, stride_k_head = wide(strides.k)
    stride_v_token, stride_v_head = wide(strides.v)
    row, channel = tl.arange(0, C), tl.arange(0, OPTIONS.K // 2)
    scaled = k
    if OPTIONS.IS_KDA:
        scaled = ends + head * stride_k_head + row[:, None] * strides.k[0] + channel[None, :]
    return DeltaInputs(
        k + head // OPTIONS.HEADS_PER_KEY_HEAD * stride_k_head + row[:, None] * strides.k[0] + channel[None, :],
        stride_k_token,
        scaled,
        v + head * stride_v_head + row[:, None] * strides.v[0] + value[None, :],
        stride_v_token,
        inverses + head * (C * C) + row[:, None] * C + row[None, :],
        factors + head * NUMBERS,
    )


@triton.jit
def walk(low, high, begin, end, span, piece, inputs, outputs, has_values, OPTIONS: tl.constexpr, WRITES: tl.constexpr):
    """Return the state after what a segment has of a piece; with WRITES, write the outputs of those tokens.

    The piece has tokens `begin` to `end`. A state is two halves of its keys, so that all products are of one shape and
    layout.
    """
    C: tl.constexpr = OPTIONS.CHUNK_SIZE
    HALF: tl.constexpr = OPTIONS.K // 2
    NUMBERS: tl.constexpr = OPTIONS.K if OPTIONS.IS_KDA else FACTORS * C  # factors of a chunk and head
    DTYPE: tl.constexpr = inputs.k.dtype.element_ty
    row = tl.arange(0, C)
    first = first_chunk(begin, piece, C)
    for chunk in range(tl.maximum(span.begin, first), tl.minimum(span.end, first + tl.cdiv(end - begin, C))):
        token = begin + (chunk - first) * C
        live = (token + row < end)[:, None]
        token = token.to(tl.int64)
        place = tl.cast(chunk, tl.int64) * OPTIONS.NUM_HEADS
        keys_at = inputs.k + token * inputs.k_token
        keys_low, keys_high = tl.load(keys_at, mask=live, other=0.0), tl.load(keys_at + HALF, mask=live, other=0.0)
        values = tl.load(inputs.v + token * inputs.v_token, mask=live & has_values, other=0.0)
        T = tl.load(inputs.inverses + place * (C * C))
        factor = inputs.factors + place * NUMBERS
        if OPTIONS.IS_KDA:
            ends_at = inputs.ends + token * inputs.k_token
            ends_low, ends_high = tl.load(ends_at, mask=live, other=0.0), tl.load(ends_at + HALF, mask=live, other=0.0)
            left_low = tl.load(factor + tl.arange(0, HALF))[None, :]
            left_high = tl.load(factor + HALF + tl.arange(0, HALF))[None, :]
        else:
            ends_low, ends_high = keys_low, keys_high
            of_key, of_write = tl.load(factor + row), tl.load(factor + 2 * C + row)
            left_low = tl.load(factor + 3 * C)
            left_high = left_low

        old_low, old_high = narrow(low, DTYPE), narrow(high, DTYPE)
        said = tl.dot(old_low, tl.trans(keys_low), input_precision="ieee")
        said = tl.dot(old_high, tl.trans(keys_high), said, input_precision="ieee")
        if not OPTIONS.IS_KDA:
            said *= of_key[None, :]
        X = tl.trans(values).to(tl.float32) - said
        U = tl.dot(narrow(X, DTYPE), tl.trans(T), input_precision="ieee")
        if WRITES:
            queries_at = outputs.q + token * outputs.q_token
            queries_low = tl.load(queries_at, mask=live, other=0.0)
            queries_high = tl.load(queries_at + HALF, mask=live, other=0.0)
            P = tl.load(outputs.scores + place * (C * C))
            if not OPTIONS.IS_KDA:
                of_query = tl.load(factor + C + row)
            rows = tl.dot(old_low, tl.trans(queries_low), input_precision="ieee")
            rows = tl.dot(old_high, tl.trans(queries_high), rows, input_precision="ieee")
            if not OPTIONS.IS_KDA:
                rows *= of_query[None, :]
            rows = tl.dot(narrow(U, DTYPE), tl.trans(P), rows, input_precision="ieee")
            out = narrow(tl.trans(rows), outputs.out.dtype.element_ty)
            tl.store(outputs.out + token * outputs.out_token, out, mask=live)
        if not OPTIONS.IS_KDA:
            U *= of_write[None, :]
        writes = narrow(U, DTYPE)
        low = tl.dot(writes, ends_low, low * left_low, input_precision="ieee")
        high = tl.dot(writes, ends_high, high * left_high, input_precision="ieee")
    return low, high


@triton.jit
def load_state(states, block, has, strides, head, value, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """Return rows of a state in fp32, in two halves; zeros where it `has` none."""
    stride_block, stride_head, stride_value = wide(strides.states)
    channel = tl.arange(0, OPTIONS.K // 2)
    states += block.to(tl.int64) * stride_block + head * stride_head
    at = states + value[:, None] * stride_value + channel[None, :]
    low = tl.load(at, mask=has, other=0.0)
    high = tl.load(at + OPTIONS.K // 2, mask=has, other=0.0)
    return widen(low, DTYPE), widen(high, DTYPE)


@triton.jit
def source_of(sources, known, sequence, OPTIONS: tl.constexpr):
    """Return the block of the state before a sequence, and whether there is one."""
    block = tl.load(sources + sequence)
    has = block >= 0
    if OPTIONS.HAS_KNOWN:
        has = has & (tl.load(known + sequence) != 0)
    return tl.maximum(block, 0), has


@triton.jit
def carried_at(carried, sequence, segments, segment, head, value, OPTIONS: tl.constexpr):
    """Return where the first half of rows of what a segment does to the state lies: n in rows up to V, then M."""
    channel = tl.arange(0, OPTIONS.K // 2)
    place = (sequence.to(tl.int64) * segments + segment) * OPTIONS.NUM_HEADS + head
    return carried + place * ((OPTIONS.V + OPTIONS.K) * OPTIONS.K) + value[:, None] * OPTIONS.K + channel[None, :]


@triton.jit(
    do_not_specialize=["segments"],
    do_not_specialize_on_alignment=["starts", "last_pieces", "sources", "known"],
)
def gdn_carry_kernel(
    k,
    ends,
    v,
    states,
    inverses,
    factors,
    carried,  # [sequences, segments, heads, V + K, K] fp32: the state before a sequence, then n and M of each segment
    starts,
    last_pieces,
    sources,
    known,
    strides,
    segments,
    OPTIONS: tl.constexpr,
):
    """Make what each segment but a sequence's last does to the state; arguments as of `gdn_prefill_kernel`.

    Grid [heads * (V + K) / BLOCK_V, segments - 1, sequences]. The first segment needs no M: of it, n is the state after
    it. The state before it is copied, because where it lies the other kernel may write before all have read.
    """
    HALF: tl.constexpr = OPTIONS.K // 2
    TILES: tl.constexpr = (OPTIONS.V + OPTIONS.K) // OPTIONS.BLOCK_V
    head = tl.program_id(0) // TILES
    segment = tl.program_id(1)
    sequence = tl.program_id(2)
    row = tl.program_id(0) % TILES * OPTIONS.BLOCK_V + tl.arange(0, OPTIONS.BLOCK_V)
    has_values = tl.program_id(0) % TILES * OPTIONS.BLOCK_V < OPTIONS.V
    span = span_of(starts, last_pieces, sequence, segment, segments, OPTIONS)
    if (segment > 0) & (span.last | span.empty) | (segment == 0) & (has_values == 0):
        return
    block, has = source_of(sources, known, sequence, OPTIONS)
    has = has & (segment == 0)
    low, high = load_state(states, block, has, strides, head, row, k.dtype.element_ty, OPTIONS)
    at = carried_at(carried, sequence, segments, segment, head, row, OPTIONS)
    if segment == 0:
        tl.store(at, low)
        tl.store(at + HALF, high)
    if span.last:
        return
    key, channel = (row - OPTIONS.V)[:, None], tl.arange(0, HALF)[None, :]
    low += tl.where((has_values == 0) & (key == channel), 1.0, 0.0)
    high += tl.where((has_values == 0) & (key == channel + HALF), 1.0, 0.0)
    inputs = inputs_of(k, ends, v, inverses, factors, strides, head, row, OPTIONS)
    if OPTIONS.HAS_PIECES:
        for piece in range(span.first, span.end_piece):
            begin, end = tl.load(starts + piece), tl.load(starts + piece + 1)
            low, high = walk(low, high, begin, end, span, piece, inputs, None, has_values, OPTIONS, False)
    else:
        begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        low, high = walk(low, high, begin, end, span, sequence, inputs, None, has_values, OPTIONS, False)
    at = carried_at(carried, sequence, segments, segment + 1, head, row, OPTIONS)
    tl.store(at, low)
    tl.store(at + HALF, high)


@triton.jit(do_not_specialize=["segments"])
def gdn_join_kernel(carried, segments, OPTIONS: tl.constexpr):
    """Put the state before each segment in the place of n; arguments as of `gdn_carry_kernel`, after which it runs.

    Grid [heads * V / BLOCK_V, sequences]. A short sequence has no numbers for its last segments; what is made of
    them is not read.
    """
    HALF: tl.constexpr = OPTIONS.K // 2
    TILES: tl.constexpr = OPTIONS.V // OPTIONS.BLOCK_V
    head = tl.program_id(0) // TILES
    sequence = tl.program_id(1)
    value = tl.program_id(0) % TILES * OPTIONS.BLOCK_V + tl.arange(0, OPTIONS.BLOCK_V)
    at = carried_at(carried, sequence, segments, 1, head, value, OPTIONS)
    low, high = tl.load(at), tl.load(at + HALF)
    for segment in range(2, segments):
        at = carried_at(carried, sequence, segments, segment, head, value, OPTIONS)
        matrix = carried_at(carried, sequence, segments, segment, head, OPTIONS.V + tl.arange(0, HALF), OPTIONS)
        matrix_high = matrix + HALF * OPTIONS.K
        new_low = tl.dot(low, tl.load(matrix), tl.load(at), input_precision=exact())
        new_high = tl.dot(low, tl.load(matrix + HALF), tl.load(at + HALF), input_precision=exact())
        low = tl.dot(high, tl.load(matrix_high), new_low, input_precision=exact())
        high = tl.dot(high, tl.load(matrix_high + HALF), new_high, input_precision=exact())
        tl.store(at, low)
        tl.store(at + HALF, high)


@triton.jit
def store_state(states, block, low, high, strides, head, value, OPTIONS: tl.constexpr):
    """Write rows of a state to a block; to none below 0."""
    stride_block, stride_head, stride_value = wide(strides.states)
    channel = tl.arange(0, OPTIONS.K // 2)
    states += tl.maximum(block, 0).to(tl.int64) * stride_block + head * stride_head
    at = states + value[:, None] * stride_value + channel[None, :]
    tl.store(at, narrow(low, states.dtype.element_ty), mask=block >= 0)
    tl.store(at + OPTIONS.K // 2, narrow(high, states.dtype.element_ty), mask=block >= 0)


@triton.jit(
    do_not_specialize=["segments"],
    do_not_specialize_on_alignment=["starts", "last_pieces", "sources", "known", "targets"],
)
def gdn_prefill_kernel(
    q,  # [tokens, key heads, K]
    k,  # as q
    ends,  # with IS_KDA as k: keys scaled by the decay to the end of a chunk
    v,  # [tokens, heads, V]
    out,  # as v
    states,  # [blocks, heads, V, K]
    inverses,  # of `gdn_chunks_kernel`
    scores,
    factors,
    carried,  # [sequences, segments, heads, V + K, K] fp32: the state before each segment in V; used with HAS_SEGMENTS
    starts,  # [pieces + 1] int32, the first token of each piece
    last_pieces,  # [sequences] int32; used with HAS_PIECES
    sources,  # [sequences] int32: the block of the state before each sequence; zeros below 0
    known,  # [sequences]: 0 where the state before is zeros too; used with HAS_KNOWN
    targets,  # [pieces] int32: the block that the state after each piece goes to; none below 0
    strides,  # DeltaStrides
    segments,  # of each sequence
    OPTIONS: tl.constexpr,  # DeltaOptions
):
    """Walk a segment of a sequence for BLOCK_V rows of a state; grid [heads * V / BLOCK_V, segments, sequences]."""
    HALF: tl.constexpr = OPTIONS.K // 2
    TILES: tl.constexpr = OPTIONS.V // OPTIONS.BLOCK_V
    DTYPE: tl.constexpr = k.dtype.element_ty
    head = tl.program_id(0) // TILES
    segment = tl.program_id(1)
    sequence = tl.program_id(2)
    value = tl.program_id(0) % TILES * OPTIONS.BLOCK_V + tl.arange(0, OPTIONS.BLOCK_V)
    span = span_of(starts, last_pieces, sequence, segment, segments, OPTIONS)
    if span.empty:
        return
    if OPTIONS.HAS_SEGMENTS:
        at = carried_at(carried, sequence, segments, segment, head, value, OPTIONS)
        low, high = tl.load(at), tl.load(at + HALF)
    else:
        block, has = source_of(sources, known, sequence, OPTIONS)
        low, high = load_state(states, block, has, strides, head, value, DTYPE, OPTIONS)

    inputs = inputs_of(k, ends, v, inverses, factors, strides, head, value, OPTIONS)
    row, channel = tl.arange(0, OPTIONS.CHUNK_SIZE), tl.arange(0, HALF)
    stride_q_token, stride_q_head = wide(strides.q)
    stride_out_token, stride_out_head = wide(strides.out)
    outputs = DeltaOutputs(
        q + head // OPTIONS.HEADS_PER_KEY_HEAD * stride_q_head + row[:, None] * strides.q[0] + channel[None, :],
        stride_q_token,
        scores + head * (OPTIONS.CHUNK_SIZE * OPTIONS.CHUNK_SIZE) + row[:, None] * OPTIONS.CHUNK_SIZE + row[None, :],
        out + head * stride_out_head + row[:, None] * strides.out[0] + value[None, :],
        stride_out_token,
    )
    if OPTIONS.HAS_PIECES:
        for piece in range(span.first, span.end_piece):
            begin, end = tl.load(starts + piece), tl.load(starts + piece + 1)
            low, high = walk(low, high, begin, end, span, piece, inputs, outputs, True, OPTIONS, True)
            # The segment that has the last number of a piece ends it.
            final = first_chunk(end, piece + 1, OPTIONS.CHUNK_SIZE)
            if (span.begin < final) & (final <= span.end):
                store_state(states, tl.load(targets + piece), low, high, strides, head, value, OPTIONS)
    else:
        begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        low, high = walk(low, high, begin, end, span, sequence, inputs, outputs, True, OPTIONS, True)
        if span.last:
            store_state(states, tl.load(targets + sequence), low, high, strides, head, value, OPTIONS)
