# SPDX-License-Identifier: Apache-2.0
"""What the walk needs of a chunk of Kimi Delta Attention, where each key has a decay (Kimi Linear 2025, section 3).

As in `kernel`, with sums of decays G_i [K] for each key c, and keys and queries of length 1,

    A_ij = b_i sum_c k_ic k_jc exp(G_ic - G_jc)  for j < i,    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc) / sqrt(K)

These decays are no factors of rows and columns: exp(-G_j) overflows. But of every pair of tokens, one lies in the first
and one in the second half of a block of 2, 4, .. or C tokens. With R the sum at the end of the first half, both factors
of

    exp(G_i - G_j) = exp(G_i - R) exp(R - G_j)

are at most 1. So each size of a block takes one product of all rows with all rows, of which its pairs count.

`kda_scale_kernel` writes G, and what the walk reads in place of keys and queries: exp(G) K, exp(G_C - G) K and
exp(G) Q / sqrt(K), and exp(G_C). `kda_chunks_kernel` then makes T and P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.softmax import LOG2E, narrow, reciprocal, widen
from pagedkv.gdn.kernel import LEAST_FALL, first_chunk, of_unit, unit_factor, unit_lower_inverse
from pagedkv.strides import sequence_of_tile, wide

PART = tl.constexpr(32)
"""Channels that a program takes at a time: with more, sm_90 has too few registers."""


@triton.jit
def span_of_chunk(starts, chunk, pieces, C: tl.constexpr):
    """Return the first token of a chunk and how many of its piece follow, itself included; none if it has no tokens."""
    piece = sequence_of_tile(starts, chunk, pieces, C, 128, 1)
    first, tokens = 0, 0
    if piece < pieces:
        begin, end = tl.load(starts + piece), tl.load(starts + piece + 1)
        first = begin + (chunk - first_chunk(begin, piece, C)) * C
        tokens = tl.where(first < begin, 0, end - first)
    return first, tokens


@triton.jit
def rows_at(strides, token, head, row):
    """Return where the rows of a chunk and head lie; `token` is the first of the chunk, in int64."""
    stride_token, stride_head = wide(strides)
    return token * stride_token + head * stride_head + row * strides[0]


@triton.jit(
    do_not_specialize=["pieces"],
    do_not_specialize_on_alignment=["starts"],
)
def kda_scale_kernel(
    q,  # [tokens, key heads, K]
    k,  # as q
    a,  # [tokens, heads, K]
    A_log,  # [heads]
    dt_bias,  # [heads, K]
    sums,  # [tokens, heads, K] fp32: G in base 2
    scaled_q,  # [tokens, heads, K]: exp(G) Q / sqrt(K)
    scaled_k,  # as scaled_q: exp(G) K
    ends,  # as scaled_q: exp(G_C - G) K
    factors,  # [chunks, heads, K] fp32: exp(G_C)
    starts,  # [pieces + 1] int32, the first token of each piece
    strides,  # DeltaStrides
    pieces,
    lower_bound,  # of logarithms of decays, used with BOUNDED
    OPTIONS: tl.constexpr,  # DeltaOptions
):
    """Make the sums of decays and scale keys and queries of a chunk of a head; grid [heads, chunk numbers]."""
    C: tl.constexpr = OPTIONS.CHUNK
    K: tl.constexpr = OPTIONS.K
    DTYPE: tl.constexpr = k.dtype.element_ty
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    first, tokens = span_of_chunk(starts, chunk, pieces, C)
    if tokens <= 0:
        return
    row, part = tl.arange(0, C)[:, None], tl.arange(0, PART)
    live = row < tokens
    token = first.to(tl.int64)
    key_head = head // OPTIONS.HEADS_OF_KEY
    q += rows_at(strides.q, token, key_head, row)
    k += rows_at(strides.k, token, key_head, row)
    a += rows_at(strides.a, token, head, row)
    at = (token * OPTIONS.HEADS + head) * K + row * (OPTIONS.HEADS * K)
    of_key = of_unit(tl.load(k + tl.arange(0, K)[None, :], mask=live, other=0.0))[:, None]
    of_query = of_unit(tl.load(q + tl.arange(0, K)[None, :], mask=live, other=0.0))[:, None] * (K**-0.5)
    rate = tl.exp2(widen(tl.load(A_log + head), DTYPE) * LOG2E)
    dt_bias += head * K
    factors += (chunk.to(tl.int64) * OPTIONS.HEADS + head) * K
    for first_channel in range(0, K, PART):
        channel = first_channel + part[None, :]
        step = widen(tl.load(a + channel, mask=live, other=0.0), DTYPE) + widen(tl.load(dt_bias + channel), DTYPE)
        if OPTIONS.BOUNDED:
            fall = (lower_bound * LOG2E) * reciprocal(1.0 + tl.exp2(-rate * step * LOG2E))
        else:
            fall = -rate * tl.where(step > 20.0, step * LOG2E, tl.log2(1.0 + tl.exp2(step * LOG2E)))
        fall = tl.where(live, tl.where(fall < LEAST_FALL, LEAST_FALL, fall), 0.0)  # which keeps a NaN
        G, last = tl.cumsum(fall, axis=0), tl.sum(fall, axis=0)
        grown = tl.exp2(G)
        tl.store(factors + first_channel + part, tl.exp2(last))
        tl.store(sums + at + channel, G, mask=live)
        keys = tl.load(k + channel, mask=live, other=0.0).to(tl.float32) * of_key
        tl.store(scaled_k + at + channel, narrow(keys * grown, DTYPE), mask=live)
        # The two sums of a whole chunk differ by rounding.
        left = tl.exp2(tl.minimum(last[None, :] - G, 0.0))
        tl.store(ends + at + channel, narrow(keys * left, DTYPE), mask=live)
        queries = tl.load(q + channel, mask=live, other=0.0).to(tl.float32) * of_query
        tl.store(scaled_q + at + channel, narrow(queries * grown, DTYPE), mask=live)


@triton.jit(
    do_not_specialize=["pieces"],
    do_not_specialize_on_alignment=["b", "starts"],
)
def kda_chunks_kernel(
    q,
    k,
    b,  # [tokens, heads]
    sums,
    inverses,  # [chunks, heads, CHUNK, CHUNK]: T
    scores,  # as inverses: P
    starts,
    strides,
    pieces,
    OPTIONS: tl.constexpr,
):
    """Make T and P of a chunk of a head; arguments as of `kda_scale_kernel`, after which it runs, and grid likewise."""
    C: tl.constexpr = OPTIONS.CHUNK
    K: tl.constexpr = OPTIONS.K
    DTYPE: tl.constexpr = k.dtype.element_ty
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    first, tokens = span_of_chunk(starts, chunk, pieces, C)
    if tokens <= 0:
        return
    row, part = tl.arange(0, C), tl.arange(0, PART)
    i, j = row[:, None], row[None, :]
    live = i < tokens
    token = first.to(tl.int64)
    (stride_b,) = wide(strides.b)
    key_head = head // OPTIONS.HEADS_OF_KEY
    q += rows_at(strides.q, token, key_head, i) + part[None, :]
    k += rows_at(strides.k, token, key_head, i) + part[None, :]
    sums += (token * OPTIONS.HEADS + head) * K + part[None, :]
    stride: tl.constexpr = OPTIONS.HEADS * K
    of_key, of_query, own = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for channel in range(0, K, PART):
        keys = tl.load(k + channel, mask=live, other=0.0).to(tl.float32)
        queries = tl.load(q + channel, mask=live, other=0.0).to(tl.float32)
        of_key += tl.sum(keys * keys, axis=1)
        of_query += tl.sum(queries * queries, axis=1)
        own += tl.sum(queries * keys, axis=1)
    of_key, of_query = unit_factor(of_key), unit_factor(of_query) * (K**-0.5)
    A, P = tl.zeros([C, C], tl.float32), tl.where(i == j, own[:, None], 0.0)
    # Sizes are no constants: each turn would keep its masks in registers.
    for size in range(6 if C == 64 else 5 if C == 32 else 4):
        half = 1 << size
        of_keys, of_queries = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        middle = (i >> (size + 1) << (size + 1)) + half - 1
        for channel in range(0, K, PART):
            G = tl.load(sums + channel + i * stride, mask=live, other=0.0)
            R = tl.load(sums + channel + middle * stride, mask=middle < tokens, other=0.0)
            decay = tl.exp2(-tl.abs(G - R))  # sums fall, so this is either factor
            keys = narrow(tl.load(k + channel, mask=live, other=0.0).to(tl.float32) * decay, DTYPE)
            queries = narrow(tl.load(q + channel, mask=live, other=0.0).to(tl.float32) * decay, DTYPE)
            of_keys = tl.dot(keys, tl.trans(keys), of_keys, input_precision="ieee")
            of_queries = tl.dot(queries, tl.trans(keys), of_queries, input_precision="ieee")
        pairs = (i ^ j) >> size == 1
        A, P = tl.where(pairs, of_keys, A), tl.where(pairs, of_queries, P)
    write = widen(tl.load(b + (token + row) * stride_b + head, mask=row < tokens, other=0.0), DTYPE)
    write = tl.where(row < tokens, reciprocal(1.0 + tl.exp2(-write * LOG2E)), 0.0)
    place = chunk.to(tl.int64) * OPTIONS.HEADS + head
    at = place * (C * C) + i * C + j
    P *= of_query[:, None] * of_key[None, :]
    tl.store(scores + at, narrow(tl.where(i >= j, P, 0.0), DTYPE))
    A *= (of_key * write)[:, None] * of_key[None, :]
    T = unit_lower_inverse(tl.where(i > j, A, 0.0), C, DTYPE) * write[None, :]
    tl.store(inverses + at, narrow(T, DTYPE))
