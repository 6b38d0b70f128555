"""Attention of a step's queries over the paged cache: prefill, extend, decode, and batches that mix them.

    out[n, h, :] = softmax_p(scale * query[n, h, :] . K[p, h // GROUP, :]) V[p, h // GROUP, :]

over the positions p that query n sees: `p <= position(n)` if causal, and `p > position(n) - sliding_window` with a
window. Query t of a sequence stands at `seq_len - query_len + t`. The softmax is online (Milakov and Gimelshein, arXiv
1805.02867) in base 2, accumulated in fp32.

A program takes ROWS query rows (sequences x tokens x heads) and walks over tiles of TILE tokens x HEADS KV heads; a row
and a column of another head or sequence do not see each other. On a GPU HEADS = SEQS = 1 and that costs nothing; under
the interpreter, where an operation costs the same whatever its size, they make programs few and large. A tile may
straddle blocks of any size. Tokens that no row of the program sees are not loaded, so their blocks may hold anything,
NaN included.

With SPLITS > 1 the tiles of a sequence are shared by that many programs, and `split_reduce` merges their results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .strides import multiple


@triton.jit
def _sequence_of_tile(query_start_loc, tile, num_seqs, TOKENS: tl.constexpr, SEARCH: tl.constexpr):
    """Return the sequence that owns the query tile (see `launch.query_tiles`); num_seqs if none does."""
    seq = 0
    for first in range(0, num_seqs, SEARCH):
        s = first + tl.arange(0, SEARCH)
        end = tl.load(query_start_loc + s + 1, mask=s < num_seqs, other=0) // TOKENS + s + 1
        seq += tl.sum(((end <= tile) & (s < num_seqs)).to(tl.int32), axis=0)
    return seq


@triton.jit
def attention_kernel(
    query,  # [num_tokens, num_q_heads, head_size]
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,
    out,  # like query; with SPLITS > 1 partial results [num_tokens, num_q_heads, SPLITS, head_size] fp32
    lse,  # [num_tokens, num_q_heads, SPLITS] fp32, base 2; used with SPLITS > 1
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    num_seqs,
    scale_log2e,
    window,
    stride_query_token: tl.int64,
    stride_query_head: tl.int64,
    stride_kc_block: tl.int64,
    stride_kc_token: tl.int64,
    stride_kc_head: tl.int64,
    stride_vc_block: tl.int64,
    stride_vc_token: tl.int64,
    stride_vc_head: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_out_split: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    stride_table: tl.int64,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    HEAD_PROGRAMS: tl.constexpr,  # num_kv_heads // HEADS
    HEADS: tl.constexpr,
    SEQS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DECODE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIGN: tl.constexpr,  # see strides.hidden_alignment
):
    """Attend ROWS query rows to one partition of their KV; grid [query tiles * HEAD_PROGRAMS, SPLITS]."""
    if ALIGN > 1:
        stride_query_token = multiple(stride_query_token, ALIGN)
        stride_query_head = multiple(stride_query_head, ALIGN)
        stride_kc_block = multiple(stride_kc_block, ALIGN)
        stride_kc_token = multiple(stride_kc_token, ALIGN)
        stride_kc_head = multiple(stride_kc_head, ALIGN)
        stride_vc_block = multiple(stride_vc_block, ALIGN)
        stride_vc_token = multiple(stride_vc_token, ALIGN)
        stride_vc_head = multiple(stride_vc_head, ALIGN)
    # Programs of neighbouring heads run together: in a token-first layout their rows are neighbours in memory.
    query_tile = tl.program_id(0) // HEAD_PROGRAMS
    first_head = tl.program_id(0) % HEAD_PROGRAMS * HEADS
    split = tl.program_id(1)
    if DECODE:
        first_seq = query_tile * SEQS
        first_token = 0
        if SEQS == 1:
            # A sequence without a query is padding of a captured graph: its length and its blocks mean nothing.
            end = tl.load(query_start_loc + first_seq + 1)
            if end == tl.load(query_start_loc + first_seq):
                return
    else:
        first_seq = _sequence_of_tile(query_start_loc, query_tile, num_seqs, TOKENS, 128)
        if first_seq >= num_seqs:
            return
        query_start = tl.load(query_start_loc + first_seq)
        first_token = (query_tile - query_start // TOKENS - first_seq) * TOKENS
        if (first_token < 0) | (first_token >= tl.load(query_start_loc + first_seq + 1) - query_start):
            return

    PER_SEQ: tl.constexpr = TOKENS * GROUP * HEADS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, TILE * HEADS * SEQS)
    channel = tl.arange(0, PADDED)
    # Sequence, lengths and bounds are scalars with one sequence in the program, else vectors: over rows, over columns.
    row_seq = first_seq + (row // PER_SEQ if SEQS > 1 else 0)
    is_seq = row_seq < num_seqs
    row_start = tl.load(query_start_loc + row_seq, mask=is_seq, other=0)
    row_query_len = tl.load(query_start_loc + row_seq + 1, mask=is_seq, other=0) - row_start
    row_token = 0 if DECODE else first_token + row // (GROUP * HEADS)
    row_head = first_head * GROUP + row % (GROUP * HEADS)
    row_live = (row < SEQS * PER_SEQ) & (row_token < row_query_len)

    # Tokens that some row of the program sees: kv_begin .. kv_end - 1, per sequence. With a single query token that row
    # sees all of them, and the causal mask and the window need no further test.
    if SEQS > 1:
        column_seq = first_seq + column // (HEADS * TILE)
        start = tl.load(query_start_loc + column_seq, mask=column_seq < num_seqs, other=0)
        is_seq = tl.load(query_start_loc + column_seq + 1, mask=column_seq < num_seqs, other=0) > start
    else:
        column_seq = row_seq
    seq_len = tl.load(seq_lens + column_seq, mask=is_seq, other=0)
    context_len = seq_len - (1 if DECODE else row_query_len)
    kv_begin = tl.maximum(context_len + first_token - window + 1, 0) if WINDOWED else 0
    kv_end = tl.minimum(seq_len, context_len + first_token + TOKENS) if CAUSAL and not DECODE else seq_len
    first_tile = (tl.min(kv_begin, axis=0) if SEQS > 1 else kv_begin) // TILE if WINDOWED else 0
    end_tile = ((tl.max(kv_end, axis=0) if SEQS > 1 else kv_end) + TILE - 1) // TILE
    position = context_len + row_token
    if SPLITS > 1:
        tiles = (tl.maximum(end_tile - first_tile, 0) + SPLITS - 1) // SPLITS
        first_tile += split * tiles
        end_tile = tl.minimum(end_tile, first_tile + tiles)

    query_row = (row_start + row_token).to(tl.int64)
    query_offset = query_row * stride_query_token + row_head * stride_query_head
    in_head = channel < HEAD_SIZE
    q = tl.load(query + query_offset[:, None] + channel[None, :], mask=row_live[:, None] & in_head[None, :], other=0.0)

    column_head = column % HEADS
    column_token = column // HEADS % TILE
    same = row_live[:, None]
    if HEADS > 1:
        same = same & ((row % (GROUP * HEADS) // GROUP)[:, None] == column_head[None, :])
    if SEQS > 1:
        same = same & (row_seq[:, None] == column_seq[None, :])
    table = block_table + column_seq.to(tl.int64) * stride_table
    key_head = (first_head + column_head) * stride_kc_head
    value_head = (first_head + column_head) * stride_vc_head

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, PADDED], 0.0, tl.float32)
    for tile in range(first_tile, end_tile):
        token = tile * TILE + column_token
        loaded = (token >= kv_begin) & (token < kv_end)
        if BLOCK_SIZE % TILE == 0 and SEQS == 1:
            block = tl.load(table + tile * TILE // BLOCK_SIZE).to(tl.int64)
            offset = tile * TILE % BLOCK_SIZE + column_token
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=loaded, other=0).to(tl.int64)
            offset = token % BLOCK_SIZE
        mask = loaded[:, None] & in_head[None, :]
        key_row = block * stride_kc_block + offset * stride_kc_token + key_head
        k = tl.load(key_cache + key_row[:, None] + channel[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        seen = same & loaded[None, :]
        if CAUSAL and not DECODE:
            seen = seen & (token[None, :] <= position[:, None])
        if WINDOWED and not DECODE:
            seen = seen & (token[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        # A row that has seen nothing yet keeps the maximum -inf; -inf - -inf would be NaN.
        maximum_now = tl.maximum(maximum, tl.max(scores, axis=1))
        base = tl.where(maximum_now == float("-inf"), 0.0, maximum_now)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        maximum = maximum_now
        # Lanes of V that were not loaded are 0 and not whatever the block holds: 0 * NaN would be NaN.
        value_row = block * stride_vc_block + offset * stride_vc_token + value_head
        v = tl.load(value_cache + value_row[:, None] + channel[None, :], mask=mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

    # A row that saw nothing has total 0 and acc 0: its result is 0.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_offset = query_row * stride_out_token + row_head * stride_out_head + split * stride_out_split
    tl.store(
        out + out_offset[:, None] + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=row_live[:, None] & in_head[None, :],
    )
    if SPLITS > 1:
        tl.store(
            lse + query_row * stride_lse_token + row_head * stride_lse_head + split,
            maximum + tl.log2(tl.where(total > 0.0, total, 1.0)),
            mask=row_live,
        )
