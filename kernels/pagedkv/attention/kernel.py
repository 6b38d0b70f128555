"""Attention of a step's queries over the paged cache: prefill, extend, decode, and batches that mix them.

    out[n, h, :] = softmax_p(scale * query[n, h, :] . K[p, h // GROUP, :]) V[p, h // GROUP, :]

over the positions p that query n sees: `p <= position(n)` if causal, and `p > position(n) - sliding_window` with a
window. Query t of a sequence stands at `seq_len - query_len + t`. The softmax is online (Milakov and Gimelshein, arXiv
1805.02867) in base 2, accumulated in fp32. On the way to it a score x becomes `cap * tanh(x / cap)` with a soft cap
(Gemma 2, arXiv 2408.00118), then `x + slope[h] * (p - position(n))` with ALiBi (Press et al., arXiv 2108.12409). A
sink is one more score of head h that has no value: it takes weight from the others (Xiao et al., arXiv 2309.17453).

A program takes ROWS query rows (sequences x tokens x heads) and walks over tiles of TILE tokens x HEADS KV heads; a row
and a column of another head or sequence do not see each other. On a GPU HEADS = SEQS = 1 and that costs nothing; under
the interpreter, where an operation costs the same whatever its size, they make programs few and large. A tile may
straddle blocks of any size. Tokens that no row of the program sees are not loaded, so their blocks may hold anything,
NaN included.

With SPLITS > 1 the tiles of a sequence are shared by that many programs, and `split_reduce` merges their results; the
sink belongs to the first of them. K and V of a quantised cache are decoded without loss; the scale of K is applied to
the scores and that of V to the result, both in fp32; one for each token is applied to V itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.fp8.scales import decoded, operand
from pagedkv.strides import multiple, sequence_of_tile, value_channels, value_tokens

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attention_kernel(
    query,  # [num_tokens, num_q_heads, head_size]
    key_cache,  # axes of PACKING
    value_cache,
    out,  # like query; with SPLITS > 1 partial results [num_tokens, num_q_heads, SPLITS, head_size] fp32
    lse,  # fp32, written if LSE: [num_tokens, num_q_heads]; with SPLITS > 1 [num_tokens, num_q_heads, SPLITS], base 2
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    slopes,  # [num_q_heads] fp32, read if ALIBI
    sinks,  # [num_q_heads] fp32, read if SINKS
    num_seqs,
    scale,  # of the scores, times log2(e); with CAPPED times 2 log2(e) / cap
    cap_log2e,
    window,
    stride_query_token: tl.int64,
    stride_query_head: tl.int64,
    stride_kc_block: tl.int64,
    stride_kc_token: tl.int64,
    stride_kc_head: tl.int64,
    stride_kc_group: tl.int64,
    stride_vc_block: tl.int64,
    stride_vc_token: tl.int64,
    stride_vc_head: tl.int64,
    stride_vc_channel: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_out_split: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    stride_table: tl.int64,
    stride_ks_block: tl.int64,
    stride_ks_token: tl.int64,
    stride_ks_head: tl.int64,
    stride_vs_block: tl.int64,
    stride_vs_token: tl.int64,
    stride_vs_head: tl.int64,
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
    SPLIT_TILES: tl.constexpr,  # of a partition; 0 shares the tiles of each sequence equally
    DECODE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PACKING: tl.constexpr,
    X: tl.constexpr,
    SCALES: tl.constexpr,  # see scales.KernelScales
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,  # whether the device converts FORMAT itself
    ALIGN: tl.constexpr,  # see strides.hidden_alignment
):
    """Attend ROWS query rows to one partition of their KV; grid [query tiles * HEAD_PROGRAMS, SPLITS]."""
    if ALIGN > 1:
        stride_query_token = multiple(stride_query_token, ALIGN)
        stride_query_head = multiple(stride_query_head, ALIGN)
        stride_kc_block = multiple(stride_kc_block, ALIGN)
        stride_kc_token = multiple(stride_kc_token, ALIGN)
        stride_kc_head = multiple(stride_kc_head, ALIGN)
        stride_kc_group = multiple(stride_kc_group, ALIGN)
        stride_vc_block = multiple(stride_vc_block, ALIGN)
        stride_vc_token = multiple(stride_vc_token, ALIGN)
        stride_vc_head = multiple(stride_vc_head, ALIGN)
        stride_vc_channel = multiple(stride_vc_channel, ALIGN)
    # Programs of neighbouring heads run together: in a token-first layout their rows are neighbours in memory.
    query_tile = tl.program_id(0) // HEAD_PROGRAMS
    first_head = tl.program_id(0) % HEAD_PROGRAMS * HEADS
    split = tl.program_id(1)
    if DECODE:
        first_seq = query_tile * SEQS
        first_token = 0
        if SEQS == 1:
            # A sequence without a query is padding of a captured graph: its length and its blocks mean nothing. The
            # length stands in the condition to be on its way while the starts are: a decode step of one short sequence
            # is a chain of such waits.
            start = tl.load(query_start_loc + first_seq)
            end = tl.load(query_start_loc + first_seq + 1)
            if (end == start) & (tl.load(seq_lens + first_seq) > -2147483648):
                return
    else:
        first_seq = sequence_of_tile(query_start_loc, query_tile, num_seqs, TOKENS, 128, 1)
        if first_seq >= num_seqs:
            return
        query_start = tl.load(query_start_loc + first_seq)
        first_token = (query_tile - query_start // TOKENS - first_seq) * TOKENS
        if (first_token < 0) | (first_token >= tl.load(query_start_loc + first_seq + 1) - query_start):
            return

    GROUPED: tl.constexpr = PACKING > 0 and BLOCK_SIZE % X == 0
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
    seq_len = tl.load(seq_lens + column_seq, mask=is_seq, other=0) if SEQS > 1 else tl.load(seq_lens + first_seq)
    context_len = seq_len - (1 if DECODE else row_query_len)
    kv_begin = tl.maximum(context_len + first_token - window + 1, 0) if WINDOWED else 0
    kv_end = tl.minimum(seq_len, context_len + first_token + TOKENS) if CAUSAL and not DECODE else seq_len
    first_tile = (tl.min(kv_begin, axis=0) if SEQS > 1 else kv_begin) // TILE if WINDOWED else 0
    end_tile = ((tl.max(kv_end, axis=0) if SEQS > 1 else kv_end) + TILE - 1) // TILE
    position = context_len + row_token
    if SPLITS > 1:
        tiles = SPLIT_TILES
        if SPLIT_TILES == 0:
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
    group = tl.arange(0, PADDED // X)
    value_channel = value_channels(channel, stride_vc_channel, PACKING)
    if SCALES == 1:
        row_kv_head = tl.where(row_live, row_head // GROUP, 0)
        row_scale = tl.load(key_scale + row_kv_head * stride_ks_head) * scale
    if ALIBI:
        slope = tl.load(slopes + row_head, mask=row_live, other=0.0) * LOG2E

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if SINKS:
        # Once: other partitions of the same row start without it.
        maximum = tl.load(sinks + row_head, mask=row_live & (split == 0), other=float("-inf")) * LOG2E
        total = tl.where(maximum > float("-inf"), 1.0, 0.0)
    acc = tl.full([ROWS, PADDED], 0.0, tl.float32)
    for tile in range(first_tile, end_tile):
        token = tile * TILE + column_token
        loaded = (token >= kv_begin) & (token < kv_end)
        # Where tokens are neighbours in memory, V is read in groups of X of one block or not at all, so that a lane can
        # read a whole group; what was not asked for is dropped afterwards.
        near = loaded
        if GROUPED:
            near = (token // X * X + X > kv_begin) & (token // X * X < kv_end)
        if BLOCK_SIZE % TILE == 0 and SEQS == 1:
            block = tl.load(table + tile * TILE // BLOCK_SIZE).to(tl.int64)
            # Triton loses the divisibility of a scalar remainder, and with it the wide loads along the tokens.
            offset = multiple(tile * TILE % BLOCK_SIZE, 16) + column_token
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=near, other=0).to(tl.int64)
            if GROUPED:
                block = tl.max_constancy(block, X)
            offset = token % BLOCK_SIZE
        mask = loaded[:, None] & in_head[None, :]
        key_row = block * stride_kc_block + offset * stride_kc_token + key_head
        if PACKING == 0:
            k = tl.trans(tl.load(key_cache + key_row[:, None] + channel[None, :], mask=mask, other=0))
        else:
            # Groups of X channels lie apart and tokens side by side: lanes along the tokens.
            key_at = (group * stride_kc_group)[:, None, None] + key_row[None, :, None] + tl.arange(0, X)[None, None, :]
            key_mask = (group * X < HEAD_SIZE)[:, None, None] & loaded[None, :, None]
            k = tl.load(key_cache + key_at, mask=key_mask, other=0)
            k = tl.reshape(tl.permute(k, (0, 2, 1)), [PADDED, TILE * HEADS * SEQS])
        k = operand(k, SCALES, FORMAT, NATIVE, q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
        if SCALES == 0:
            scores *= scale
        elif SCALES == 1:
            scores *= row_scale[:, None]
        else:
            scale_row = block * stride_ks_block + offset * stride_ks_token
            scale_row += (first_head + column_head) * stride_ks_head
            scores *= (tl.load(key_scale + scale_row, mask=loaded, other=0.0) * scale)[None, :]
        if CAPPED:
            # cap * tanh(x), as 1 - 2 / (e^2x + 1): neither end overflows to NaN.
            scores = cap_log2e - 2 * cap_log2e / (tl.exp2(scores) + 1)
        if ALIBI:
            if DECODE:
                scores += slope[:, None] * (token - context_len).to(tl.float32)[None, :]
            else:
                scores += slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
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
        value_token = token if PACKING == 2 else offset
        value_token = value_tokens(value_token, stride_vc_token, PACKING, X, BLOCK_SIZE)
        value_row = block * stride_vc_block + value_token + value_head
        mask = near[:, None] & in_head[None, :]
        v = tl.load(value_cache + value_row[:, None] + value_channel[None, :], mask=mask, other=0)
        if GROUPED:
            v = tl.where(loaded[:, None], v, 0)
        if SCALES == 2:
            # Scaled before the product: weights times a scale would leave the range of fp16.
            scale_row = block * stride_vs_block + offset * stride_vs_token
            scale_row += (first_head + column_head) * stride_vs_head
            value_scales = tl.load(value_scale + scale_row, mask=loaded, other=0.0)
            v = (decoded(v, FORMAT, NATIVE, tl.float32) * value_scales[:, None]).to(q.dtype)
        else:
            v = operand(v, SCALES, FORMAT, NATIVE, q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

    # A row that saw nothing has total 0 and acc 0: its result is 0.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SCALES == 1:
        result *= tl.load(value_scale + row_kv_head * stride_vs_head)[:, None]
    out_offset = query_row * stride_out_token + row_head * stride_out_head + split * stride_out_split
    tl.store(
        out + out_offset[:, None] + channel[None, :],
        result.to(out.dtype.element_ty),
        mask=row_live[:, None] & in_head[None, :],
    )
    if LSE:
        sums = maximum + tl.log2(tl.where(total > 0.0, total, 1.0))
        if SPLITS == 1:
            sums *= LN2
        tl.store(lse + query_row * stride_lse_token + row_head * stride_lse_head + split, sums, mask=row_live)
