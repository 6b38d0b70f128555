# SPDX-License-Identifier: Apache-2.0
"""What the walk needs of a chunk of Kimi Delta Attention, where each key has a decay (Kimi Linear 2025, section 3).

As in `kernel`, with sums of decays G_i [K] for each key c, and keys and queries of length 1,

    A_ij = b_i sum_c k_ic k_jc exp(G_ic - G_jc)  for j < i,    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc) / sqrt(K)

These decays are no factors of rows and columns: exp(-G_j) overflows. But of every pair of tokens, one lies in the first
and one in the second half of a block of 2, 4, .. or C tokens. With R the sum at the end of the first half, both factors
of

    exp(G_i - G_j) = exp(G_i - R) exp(R - G_j)

are at most 1. So each size of a block takes one product of all rows with all rows, of which its pairs count. Small
blocks share one: where the halves of a block fall by at most 2^58, exp(G_i - R) and exp(R - G_j) are finite for all of
its i and j. With decays of at least exp(-5) that is so for blocks of 16 tokens, and three products do for 64.

`kda_chunks_kernel` also writes what the walk reads in place of keys and queries: exp(G) K, exp(G_C - G) K and
exp(G) Q / sqrt(K), and exp(G_C).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from pagedkv.attention.softmax import INTERPRETED, LOG2E, compiled_for, narrow, reciprocal, widen
from pagedkv.gdn.kernel import LEAST_FALL, first_chunk, unit_factor, unit_lower_inverse
from pagedkv.strides import sequence_of_tile, wide

BLOCK_K = tl.constexpr(32)
"""Channels that a program takes at a time: with more, sm_90 has too few registers."""
MOST_RISE = tl.constexpr(58.0)
"""Log2 of the largest factor: a product of two is finite, and eight tokens of decay exp(-5) fall by less."""


@triton.jit
def rows_at(strides, token, head, row):
    """Return where the rows of a chunk and head lie; `token` is the first of the chunk, in int64."""
    stride_token, stride_head = wide(strides)
    return token * stride_token + head * stride_head + row * strides[0]


@triton.constexpr_function
def on_cuda():
    """Return whether the kernel is compiled for a GPU of NVIDIA's."""
    return not INTERPRETED and not compiled_for()


@triton.jit
def log2_of_softplus(x):
    """Return softplus(x) in base 2, log2(1 + exp(x)).

    Near 1 a logarithm has an absolute error, so a small exp(x) goes through the first terms of the series.
    """
    grown = tl.exp2(x * LOG2E)
    # On NVIDIA the exact one is a polynomial of 26 instructions.
    log = libdevice.fast_log2f(1.0 + grown) if on_cuda() else tl.log2(1.0 + grown)
    series = grown * (1.0 - grown * (1 / 2 - grown * (1 / 3 - grown / 4))) * LOG2E
    return tl.where(x > 20.0, x * LOG2E, tl.where(grown < 1 / 64, series, log))


@triton.jit
def rows_of(G, row):
    """Return G [C, BLOCK_K] with row row[i] in place of row i."""
    return tl.gather(G, tl.broadcast_to(row[:, None], G.shape), axis=0)


@triton.jit
def rise_from_middle(G, size, LEAST: tl.constexpr):
    """Return sums of decays less that at the end of the first half of each block of 2 << size tokens; size >= LEAST."""
    row = tl.arange(0, G.shape[0])
    middle = (row >> (size + 1) << (size + 1)) + (1 << size) - 1
    if LEAST > 0:
        middle |= 1  # as it is: the compiler then leaves out half of the shuffles
    return G - rows_of(G, middle)


@triton.jit(
    do_not_specialize=["pieces"],
    do_not_specialize_on_alignment=["b", "starts"],
)
def kda_chunks_kernel(
    q,  # [tokens, key heads, K]
    k,  # as q
    a,  # [tokens, heads, K]
    b,  # [tokens, heads]
    A_log,  # [heads]
    dt_bias,  # [heads, K]
    scaled_q,  # [tokens, heads, K]: exp(G) Q / sqrt(K)
    scaled_k,  # as scaled_q: exp(G) K
    ends,  # as scaled_q: exp(G_C - G) K
    inverses,  # [chunks, heads, CHUNK_SIZE, CHUNK_SIZE]: T
    scores,  # as inverses: P
    factors,  # [chunks, heads, K] fp32: exp(G_C)
    starts,  # [pieces + 1] int32, the first token of each piece
    strides,  # DeltaStrides
    pieces,
    lower_bound,  # of logarithms of decays, used with HAS_LOWER_BOUND
    OPTIONS: tl.constexpr,  # DeltaOptions
):
    """Scale keys and queries of a chunk of a head, and make T and P; grid [heads, chunk numbers]."""
    C: tl.constexpr = OPTIONS.CHUNK_SIZE
    K: tl.constexpr = OPTIONS.K
    DTYPE: tl.constexpr = k.dtype.element_ty
    SIZES: tl.constexpr = 6 if C == 64 else 5 if C == 32 else 4  # of blocks
    RANGE: tl.constexpr = 0.0 if tl.float16 == DTYPE else MOST_RISE
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    piece = sequence_of_tile(starts, chunk, pieces, C, 128, 1)
    if piece >= pieces:
        return
    begin, end = tl.load(starts + piece), tl.load(starts + piece + 1)
    first = begin + (chunk - first_chunk(begin, piece, C)) * C
    tokens = end - first
    if (first < begin) | (tokens <= 0):
        return
    row, part = tl.arange(0, C), tl.arange(0, BLOCK_K)
    i, j = row[:, None], row[None, :]
    live = i < tokens
    token = first.to(tl.int64)
    (stride_b,) = wide(strides.b)
    key_head = head // OPTIONS.HEADS_PER_KEY_HEAD
    q += rows_at(strides.q, token, key_head, i) + part[None, :]
    k += rows_at(strides.k, token, key_head, i) + part[None, :]
    a += rows_at(strides.a, token, head, i) + part[None, :]
    at = (token * OPTIONS.NUM_HEADS + head) * K + i * (OPTIONS.NUM_HEADS * K) + part[None, :]
    place = chunk.to(tl.int64) * OPTIONS.NUM_HEADS + head
    factors += place * K + part[None, :]
    dt_bias += head * K + part
    of_key, of_query, own = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for channel in range(0, K, BLOCK_K):
        keys = tl.load(k + channel, mask=live, other=0.0).to(tl.float32)
        queries = tl.load(q + channel, mask=live, other=0.0).to(tl.float32)
        of_key += tl.sum(keys * keys, axis=1)
        of_query += tl.sum(queries * queries, axis=1)
        own += tl.sum(queries * keys, axis=1)
    of_key, of_query = unit_factor(of_key), unit_factor(of_query) * (K**-0.5)
    rate = tl.exp2(widen(tl.load(A_log + head), DTYPE) * LOG2E)
    A, P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for channel in range(0, K, BLOCK_K):
        step = widen(tl.load(a + channel, mask=live, other=0.0), DTYPE)
        step += widen(tl.load(dt_bias + channel), DTYPE)[None, :]
        if OPTIONS.HAS_LOWER_BOUND:
            fall = (lower_bound * LOG2E) * reciprocal(1.0 + tl.exp2(-rate * step * LOG2E))
        else:
            fall = -rate * log2_of_softplus(step)
        fall = tl.where(live, tl.where(fall < LEAST_FALL, LEAST_FALL, fall), 0.0)  # which keeps a NaN
        # Gathers that move no row: all else the compiler would compute twice, in the layouts of stores and of products.
        fall = rows_of(fall, row)
        G = rows_of(tl.cumsum(fall, axis=0), row)
        left = tl.exp2(rows_of(G, tl.full([C], C - 1, tl.int32)) - G)
        keys = tl.load(k + channel, mask=live, other=0.0).to(tl.float32)
        queries = tl.load(q + channel, mask=live, other=0.0).to(tl.float32)
        grown = tl.exp2(G)
        tl.store(factors + channel + tl.zeros_like(i), grown, mask=i == C - 1)
        tl.store(scaled_k + at + channel, narrow(keys * (grown * of_key[:, None]), DTYPE), mask=live)
        tl.store(scaled_q + at + channel, narrow(queries * (grown * of_query[:, None]), DTYPE), mask=live)
        tl.store(ends + at + channel, narrow(keys * (left * of_key[:, None]), DTYPE), mask=live)
        steepest = -tl.min(fall)
        merged = 0  # all pairs of blocks of 2 << merged tokens take one product
        for size in tl.static_range(1, SIZES):
            merged += tl.where(steepest * (1 << size) <= RANGE, 1, 0)
        rise = rise_from_middle(G, merged, 0)
        grown = tl.exp2(tl.minimum(rise, RANGE))
        right = tl.trans(narrow(keys * tl.exp2(tl.minimum(-rise, RANGE)), DTYPE))
        of_keys = tl.dot(narrow(keys * grown, DTYPE), right, input_precision="ieee")
        of_queries = tl.dot(narrow(queries * grown, DTYPE), right, input_precision="ieee")
        pairs = i >> (merged + 1) == j >> (merged + 1)
        A, P = tl.where(pairs, A + of_keys, A), tl.where(pairs, P + of_queries, P)
        # Sizes are no constants: each turn would keep its masks in registers.
        for size in range(merged + 1, SIZES):
            decay = tl.exp2(-tl.abs(rise_from_middle(G, size, 1)))  # sums fall, so this is either factor
            decayed = narrow(keys * decay, DTYPE)
            right = tl.trans(decayed)
            of_keys = tl.dot(decayed, right, input_precision="ieee")
            of_queries = tl.dot(narrow(queries * decay, DTYPE), right, input_precision="ieee")
            pairs = (i ^ j) >> size == 1
            A, P = tl.where(pairs, A + of_keys, A), tl.where(pairs, P + of_queries, P)
    write = widen(tl.load(b + (token + row) * stride_b + head, mask=row < tokens, other=0.0), DTYPE)
    write = tl.where(row < tokens, reciprocal(1.0 + tl.exp2(-write * LOG2E)), 0.0)
    at = place * (C * C) + i * C + j
    P = tl.where(i > j, P, tl.where(i == j, own[:, None], 0.0)) * of_query[:, None] * of_key[None, :]
    tl.store(scores + at, narrow(P, DTYPE))
    A *= (of_key * write)[:, None] * of_key[None, :]
    T = unit_lower_inverse(tl.where(i > j, A, 0.0), C, DTYPE) * write[None, :]
    tl.store(inverses + at, narrow(T, DTYPE))
