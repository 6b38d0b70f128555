# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's queries over the paged cache: prefill, extend, decode, and batches that mix them.

    out[n, h, :] = softmax_p(scale * query[n, h, :] . K[p, h // GROUP, :]) V[p, h // GROUP, :]

over the positions p that query n sees: `p <= position(n)` if causal, and `p > position(n) - sliding_window` with a
window. Query t of a sequence stands at `seq_len - query_len + t`. The softmax is online and in base 2 (`softmax.py`),
accumulated in fp32. On the way to it a score x becomes `cap * tanh(x / cap)` with a soft cap
(Gemma 2, arXiv 2408.00118), then `x + slope[h] * (p - position(n))` with ALiBi (Press et al., arXiv 2108.12409). A
sink is one more score of head h that has no value: it takes weight from the others (Xiao et al., arXiv 2309.17453).

A program takes ROWS query rows (tokens x heads of one sequence) and walks over the KV in tiles of TILE tokens of one KV
head. A tile may straddle blocks of any size. Tokens that no row of the program sees are not loaded, so their blocks may
hold anything, NaN included. Under Triton's interpreter, where an operation costs the same whatever its size, a program
takes SEQS sequences and HEADS KV heads at once: see `batching.py`, and read both as 1.

With SPLIT the tiles of a sequence are shared by `splits` programs, and `reduce_kernel` merges their results; the sink
belongs to the first of them. That number is an argument and no constant: it follows the batch, and a service would
compile for each. K and V of a quantised cache are decoded without loss; the scale of K is applied to
the scores and that of V to the result, both in fp32; one for each token is applied to V itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.batching import highest, lengths_of, lowest, sequence_of, shared
from pagedkv.attention.launch import FIXED_SPLITS
from pagedkv.attention.merge import follow
from pagedkv.attention.softmax import LN2, LOG2E, WEIGHT_SHIFT, log_sum, narrow, online_softmax, reciprocal
from pagedkv.fp8.scales import half_of, operand, row_unit
from pagedkv.strides import in_groups, locate, sequence_of_tile, tile_base, value_channels, value_tokens, wide

MOST_FIXED_SPLITS = tl.constexpr(FIXED_SPLITS)


@triton.jit
def dealt(place, programs, XCDS: tl.constexpr):
    """Return which of `programs` runs at `place`, so that each of XCDS dies gets neighbours.

    Workgroups go to the dies in turn, place p to die p % XCDS. The rest of a division runs where it stands.
    """
    each = programs // XCDS
    return tl.where(place < each * XCDS, place % XCDS * each + place // XCDS, place)


@triton.jit
def kv_range(
    seq_len, context_len, first_token, window, TOKENS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr
):
    """Return the bounds of the tokens that some query of the program sees: begin .. end - 1."""
    begin = tl.maximum(context_len + first_token - window + 1, 0) if WINDOWED else 0
    end = tl.minimum(seq_len, context_len + first_token + TOKENS) if CAUSAL else seq_len
    return begin, end


@triton.jit
def tile_range(begin, end, split, splits, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLIT_TILES: tl.constexpr):
    """Return the bounds of the tiles over the tokens begin .. end - 1 that are this partition's."""
    first_tile = begin // TILE
    end_tile = (end + TILE - 1) // TILE
    if SPLIT:
        # Equal shares; of a fixed length as long as there are few of them, for what follows from the sequence alone.
        parts = splits if SPLIT_TILES == 0 else MOST_FIXED_SPLITS
        tiles = tl.maximum((tl.maximum(end_tile - first_tile, 0) + parts - 1) // parts, SPLIT_TILES)
        first_tile += split * tiles
        end_tile = tl.minimum(end_tile, first_tile + tiles)
    return first_tile, end_tile


@triton.jit
def full_tiles(first_tile, end_tile, begin, end, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the bounds of those of the tiles that hold no token outside of begin .. end - 1."""
    full_begin = first_tile
    if WINDOWED:
        full_begin = tl.minimum(tl.maximum((begin + TILE - 1) // TILE, first_tile), tl.maximum(end_tile, first_tile))
    return full_begin, tl.maximum(tl.minimum(end // TILE, end_tile), full_begin)


@triton.jit
def matched_token(position, X: tl.constexpr):
    """Return the token of a tile at each `position` of its columns, where lanes load what MFMA takes from them.

    In a product over tokens a lane holds four neighbours of every 16 (CDNA3 ISA, "MFMA": K in the fourths of a wave).
    A packed V gives a lane X neighbours: its fours, in the order of the sixteens.
    """
    return position // (4 * X) * (4 * X) + position % 16 // 4 * X + position % (4 * X) // 16 * 4 + position % 4


@triton.jit
def load_key_tile(
    key_cache,
    stride_group,
    loaded,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PACKING: tl.constexpr,
    X: tl.constexpr,
    FULL: tl.constexpr,
    MATCHED: tl.constexpr,
):
    """Return K of a tile, [PADDED, columns]; `key_cache` [columns] points at where each token's row begins.

    Unless the tile is FULL, K is 0 where a token is not `loaded`, which is of the shape of `key_cache`. That is
    [16, columns // 16] if MATCHED. Channels are then in the order in which a lane holds its X of every 4 * X: eight
    neighbours of every 32 (CDNA3 ISA, "MFMA", two at a time), the first eights first.
    """
    if PACKING == 0:
        channel = tl.arange(0, PADDED)
        mask = (channel < HEAD_SIZE)[None, :]
        seen = loaded[:, None]
        key_cache = key_cache[:, None] + channel[None, :]
    elif MATCHED:
        # Lanes along 16 tokens and four groups, as the product has them, so that nothing moves between lanes.
        group = tl.arange(0, PADDED // X)
        mask = (group * X < HEAD_SIZE)[None, :, None, None]
        seen = loaded[:, None, :, None]
        key_cache = key_cache[:, None, :, None] + (group * stride_group)[None, :, None, None]
        key_cache += tl.arange(0, X)[None, None, None, :]
    else:
        # Groups of X channels lie apart and tokens side by side: lanes along the tokens.
        group = tl.arange(0, PADDED // X)
        mask = (group * X < HEAD_SIZE)[:, None, None]
        seen = loaded[None, :, None]
        key_cache = key_cache[None, :, None] + (group * stride_group)[:, None, None] + tl.arange(0, X)[None, None, :]
    if not FULL:
        k = tl.load(key_cache, mask=mask & seen, other=0)
    elif HEAD_SIZE < PADDED:
        k = tl.load(key_cache, mask=mask, other=0)
    else:
        k = tl.load(key_cache)
    if PACKING == 0:
        k = tl.trans(k)
    elif MATCHED:
        SIXTEENS: tl.constexpr = k.shape[2]
        k = tl.permute(tl.reshape(k, [16, PADDED // (4 * X), 4, SIXTEENS, X // 8, 8]), (1, 4, 2, 5, 3, 0))
        k = tl.reshape(k, [PADDED, SIXTEENS * 16])
    else:
        k = tl.reshape(tl.permute(k, (0, 2, 1)), [PADDED, loaded.shape[0]])
    return k


@triton.jit
def load_value_tile(
    value_cache,
    stride_channel,
    near,
    loaded,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PACKING: tl.constexpr,
    GROUPED: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
    MATCHED: tl.constexpr,
):
    """Return V of a tile, [columns, PADDED]; `value_cache` [columns] points at where each token begins.

    In a FULL tile, or MATCHED, `value_cache` [columns // RUN] points at the first of RUN tokens that are neighbours in
    memory. In others V is 0 where a token is not `loaded`, and not whatever the block holds: 0 * NaN would be NaN. What
    is `near`, of the shape of `value_cache`, may be read to read whole groups.
    """
    channel = tl.arange(0, PADDED)
    mask = (channel < HEAD_SIZE)[None, :]
    if MATCHED:
        # Lanes along 16 channels and four runs, as the product has them; columns are in the order of `matched_token`.
        RUNS: tl.constexpr = value_cache.shape[0]
        channel = tl.arange(0, 16)[:, None] + 16 * tl.arange(0, PADDED // 16)[None, :]
        mask = (channel < HEAD_SIZE)[:, None, :, None]
        value_cache = value_cache[None, :, None, None] + (channel * stride_channel)[:, None, :, None]
        value_cache += tl.arange(0, RUN)[None, None, None, :]
        if not FULL:
            v = tl.load(value_cache, mask=mask & near[None, :, None, None], other=0)
        elif HEAD_SIZE < PADDED:
            v = tl.load(value_cache, mask=mask, other=0)
        else:
            v = tl.load(value_cache)
        v = tl.permute(tl.reshape(v, [16, RUNS // 4, 4, PADDED // 16, RUN // 4, 4]), (1, 4, 2, 5, 3, 0))
        v = tl.reshape(v, [RUNS * RUN, PADDED])
    elif not FULL:
        value_cache = value_cache[:, None] + value_channels(channel, stride_channel, PACKING)[None, :]
        v = tl.load(value_cache, mask=mask & near[:, None], other=0)
    elif RUN > 1:
        # A lane reads a run of tokens, and neighbouring lanes its neighbours in the run before the next channel.
        value_cache = (
            value_cache[:, None, None] + (channel * stride_channel)[None, :, None] + tl.arange(0, RUN)[None, None, :]
        )
        v = tl.load(value_cache, mask=mask[:, :, None], other=0) if HEAD_SIZE < PADDED else tl.load(value_cache)
        v = tl.reshape(tl.permute(v, (0, 2, 1)), [value_cache.shape[0] * RUN, PADDED])
    else:
        value_cache = value_cache[:, None] + value_channels(channel, stride_channel, PACKING)[None, :]
        v = tl.load(value_cache, mask=mask, other=0) if HEAD_SIZE < PADDED else tl.load(value_cache)
    if GROUPED and not FULL:
        v = tl.where(loaded[:, None], v, 0)
    return v


@triton.jit
def bend(scores, token, position, slope, cap_log2e, CAPPED: tl.constexpr, ALIBI: tl.constexpr, DECODE: tl.constexpr):
    """Return the scores after soft cap and ALiBi; `position` is of a row, with DECODE of all rows (of a column)."""
    if CAPPED:
        # cap * tanh(x), as 1 - 2 / (e^2x + 1): neither end overflows to NaN.
        scores = cap_log2e - 2 * cap_log2e * reciprocal(tl.exp2(scores) + 1)
    if ALIBI:
        distance = (token - position)[None, :] if DECODE else token[None, :] - position[:, None]
        scores += slope[:, None] * distance.to(tl.float32)
    return scores


@triton.jit
def visible(seen, token, position, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return which of the `seen` [ROWS, columns] the causal mask and the window leave."""
    if CAUSAL:
        seen = seen & (token[None, :] <= position[:, None])
    if WINDOWED:
        seen = seen & (token[None, :] > position[:, None] - window)
    return seen


@triton.jit
def scaled_weights(weights, decay, largest, value_scale_at, loaded):
    """Return the weights times the scale of each value, and decay, relative to the largest scale so far, and that."""
    value_scales = tl.load(value_scale_at, mask=loaded, other=0.0)
    larger = tl.maximum(largest, tl.max(tl.abs(value_scales), axis=0))
    unit = 1.0 / larger
    return weights * (value_scales * unit)[None, :], decay * (largest * unit), larger


@triton.jit
def attend_tile(
    state,
    q,
    k,
    value_at,
    stride_channel,
    near,
    loaded,
    seen,
    key_scale_at,
    value_scale_at,
    token,
    position,
    scale,
    slope,
    cap_log2e,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    DECODE: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    PACKING: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    SHIFT: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
    MATCHED: tl.constexpr,
):
    """Take a tile of K [PADDED, columns] and V into the state of the rows: sum of values, maximum and total.

    And the largest scale of a value so far, which the sum of values is relative to: 1 unless SCALES == 2, when
    `key_scale_at` and `value_scale_at` [columns] point at the scale of each token.
    """
    acc, maximum, total, largest = state
    scores = tl.dot(q, operand(k, SCALES, FORMAT, NATIVE, q.dtype), input_precision="ieee")
    factor = scale
    if SCALES == 2:
        scores *= (tl.load(key_scale_at, mask=loaded, other=0.0) * scale)[None, :]
        factor = 1.0
    elif CAPPED or ALIBI:
        scores *= scale[:, None] if SCALES == 1 else scale
        factor = 1.0
    scores = bend(scores, token, position, slope, cap_log2e, CAPPED, ALIBI, DECODE)
    if not FULL:
        scores = tl.where(seen, scores, float("-inf"))
    weights, decay, maximum, total = online_softmax(scores, maximum, total, factor, SHIFT)
    v = load_value_tile(value_at, stride_channel, near, loaded, HEAD_SIZE, PADDED, PACKING, GROUPED, RUN, FULL, MATCHED)
    if SCALES == 2:
        weights, decay, largest = scaled_weights(weights, decay, largest, value_scale_at, loaded)
    v = operand(v, SCALES, FORMAT, NATIVE, q.dtype)
    # A scale may be any NaN, which the sum of weights does not see.
    weights = weights.to(v.dtype) if SCALES == 2 else narrow(weights, v.dtype)
    acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return acc, maximum, total, largest


@triton.jit
def attend_pairs(
    state,
    q,
    k,
    value_at,
    loaded,
    seen,
    key_scale_at,
    value_scale_at,
    token,
    position,
    scale,
    slope,
    cap_log2e,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Like `attend_tile`, where k [PADDED, columns] and V hold int16 pairs of codes; HEAD_SIZE and PADDED count pairs.

    Codes of one byte would change their register layout on the way to the product, pairs need not; even and odd
    channels are products of their own, with q those of the queries in fp16. The state: sums of values of even and of
    odd channels, maximum, total (in each of 16 columns: a sum by a product needs no exchange between lanes), and the
    largest scale of a value so far, which the sums are relative to.
    """
    even, odd, maximum, total, largest = state
    q_even, q_odd = q
    scores = tl.dot(q_even, half_of(k, False, FORMAT, NATIVE))
    scores = tl.dot(q_odd, half_of(k, True, FORMAT, NATIVE), scores)
    factor = scale
    if SCALES == 2:
        scores *= tl.load(key_scale_at, mask=loaded, other=0.0)[None, :]
    if CAPPED or ALIBI:
        scores *= scale[:, None]
        factor = 1.0
    scores = bend(scores, token, position, slope, cap_log2e, CAPPED, ALIBI, True)
    if not FULL:
        scores = tl.where(seen, scores, float("-inf"))
    weights, decay, maximum, _ = online_softmax(scores, maximum, maximum, factor, WEIGHT_SHIFT)
    ones = tl.full([scores.shape[1], 16], 1.0, tl.float16)
    total = tl.dot(weights.to(tl.float16), ones, total * decay[:, None])
    if SCALES == 2:
        weights, decay, largest = scaled_weights(weights, decay, largest, value_scale_at, loaded)
    weights = weights.to(tl.float16)
    v = load_value_tile(value_at, 1, loaded, loaded, HEAD_SIZE, PADDED, 0, False, 1, FULL, False)
    even = tl.dot(weights, half_of(v, False, FORMAT, NATIVE), even * decay[:, None])
    odd = tl.dot(weights, half_of(v, True, FORMAT, NATIVE), odd * decay[:, None])
    return even, odd, maximum, total, largest


@triton.jit(
    # What differs from one step of a service to the next may make no other machine code.
    do_not_specialize=["num_seqs", "splits", "programs", "stride_table"],
    do_not_specialize_on_alignment=["lse", "block_table", "seq_lens", "query_start_loc", "slopes", "sinks"],
)
def attention_kernel(
    query,  # [num_tokens, num_q_heads, head_size]
    key_cache,  # axes of PACKING
    value_cache,
    out,  # like query; with SPLIT fp32, contiguous [tokens of this call, num_q_heads, splits, head_size]
    lse,  # fp32, written if LSE: [num_tokens, num_q_heads]; with SPLIT one more axis, splits, contiguous and in base 2
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    slopes,  # [num_q_heads] fp32, read if ALIBI
    sinks,  # [num_q_heads] fp32, read if SINKS
    num_seqs,
    splits,
    programs,  # of one partition
    stride_table,  # sequence
    scale,  # of the scores, times log2(e); with CAPPED times 2 log2(e) / cap
    cap_log2e,
    window,
    query_strides,  # token, head
    key_strides,  # block, token, head, group of X channels
    value_strides,  # block, token (of PACKING 2: group of X tokens), head, channel
    out_strides,  # token, head; those of partial results follow from `splits`
    lse_strides,
    key_scale_strides,  # block, token, head
    value_scale_strides,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # head_size rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head that a program takes
    PARTS: tl.constexpr,  # programs that share the query heads of one KV head
    HEAD_PROGRAMS: tl.constexpr,  # num_kv_heads // HEADS * PARTS
    HEADS: tl.constexpr,
    XCDS: tl.constexpr,  # see dealt; 0 for the order as it comes
    SEQS: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens
    ROWS: tl.constexpr,  # SEQS * TOKENS * HEADS * GROUP, rounded up to a power of two
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,  # whether there is more than one partition
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
    ALIGN: tl.constexpr,  # see strides.alignment
    EVEN_GROUPS: tl.constexpr,  # of V in PACKING 2: whether the stride of a group is a multiple of X
    ALIKE: tl.constexpr,  # whether blocks and tokens of K and of V are equally far apart
    DEPENDENT: tl.constexpr,  # see merge.follow
    PAIRS: tl.constexpr,  # whether codes are read in pairs; see attend_pairs
    MFMA: tl.constexpr,  # whether this is decode on CDNA; see matched_token
    KEPT: tl.constexpr,  # True if the query is used unmodified (requires every scale >= 0)
):
    """Attend ROWS query rows to one partition of their KV; grid [query tiles * HEAD_PROGRAMS, splits]."""
    follow(DEPENDENT)
    stride_query_token, stride_query_head = wide(query_strides, ALIGN)
    stride_kc_block, stride_kc_token, stride_kc_head, stride_kc_group = wide(key_strides, ALIGN)
    stride_vc_block, stride_vc_token, stride_vc_head, stride_vc_channel = wide(value_strides, ALIGN)
    if PAIRS:
        key_cache, value_cache = key_cache.to(tl.pointer_type(tl.int16)), value_cache.to(tl.pointer_type(tl.int16))
        stride_kc_block, stride_kc_token, stride_kc_head = (
            stride_kc_block // 2,
            stride_kc_token // 2,
            stride_kc_head // 2,
        )
        stride_vc_block, stride_vc_token, stride_vc_head = (
            stride_vc_block // 2,
            stride_vc_token // 2,
            stride_vc_head // 2,
        )
    stride_table = tl.cast(stride_table, tl.int64)
    strides_ks, strides_vs = wide(key_scale_strides), wide(value_scale_strides)

    # The queries of the program. Programs of neighbouring heads run together: in a token-first layout their rows are
    # neighbours in memory.
    program = dealt(tl.program_id(0), programs, XCDS) if XCDS > 1 else tl.program_id(0)
    query_tile = program // HEAD_PROGRAMS
    first_query_head = program % HEAD_PROGRAMS * HEADS * GROUP
    first_head = first_query_head // (GROUP * PARTS)
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
        # The last tokens of a sequence first: they see most, and what starts last should be short (3 % at 4 x 4k).
        last_token = tl.load(query_start_loc + first_seq + 1) - query_start - 1
        first_token = (last_token // TOKENS - (query_tile - query_start // TOKENS - first_seq)) * TOKENS
        if (first_token < 0) | (first_token > last_token):
            return
    TOKEN_ROWS: tl.constexpr = GROUP * HEADS
    row = tl.arange(0, ROWS)
    row_seq = sequence_of(row, first_seq, TOKENS * TOKEN_ROWS, SEQS)
    is_seq = row_seq < num_seqs
    row_start = tl.load(query_start_loc + row_seq, mask=is_seq, other=0)
    query_len = tl.load(query_start_loc + row_seq + 1, mask=is_seq, other=0) - row_start
    row_token = 0 if DECODE else first_token + row // TOKEN_ROWS
    row_head = first_query_head + row % TOKEN_ROWS
    row_live = (row < SEQS * TOKENS * TOKEN_ROWS) & (row_token < query_len)
    query_row = (row_start + row_token).to(tl.int64)
    channel = tl.arange(0, PADDED)
    row_mask = row_live[:, None] & (channel < HEAD_SIZE)[None, :]
    query_offset = query_row * stride_query_token + row_head * stride_query_head
    GROUPED: tl.constexpr = PACKING > 0 and BLOCK_SIZE % X == 0
    KEYS_MATCHED: tl.constexpr = MFMA and PACKING > 0 and X >= 8 and PADDED % (4 * X) == 0 and HEADS * SEQS == 1
    VALUES_MATCHED: tl.constexpr = KEYS_MATCHED and GROUPED and TILE % (4 * X) == 0
    # With a window q comes after the bounds, because before them Triton 3.6 reserves scratch on gfx90a; without one it
    # comes before, because after them decode at head size 256 needs four registers more on gfx942, which cost a wave.
    if not WINDOWED:
        q = tl.load(query + query_offset[:, None] + channel[None, :], mask=row_mask, other=0.0)

    # The tokens they see, and the tiles over them. With a single query token it sees all of those, and the causal mask
    # and the window need no further test.
    column = tl.arange(0, TILE * HEADS * SEQS)
    column_seq = sequence_of(column, first_seq, TILE * HEADS, SEQS)
    column_head = first_head + column % HEADS
    column_token = matched_token(column, X) if VALUES_MATCHED else column // HEADS % TILE
    seq_len = lengths_of(column_seq, seq_lens, query_start_loc, num_seqs, SEQS)
    context_len = seq_len - (1 if DECODE else query_len)
    position = context_len + row_token
    kv_begin, kv_end = kv_range(seq_len, context_len, first_token, window, TOKENS, CAUSAL and not DECODE, WINDOWED)
    first_tile, end_tile = tile_range(
        lowest(kv_begin, SEQS if WINDOWED else 1), highest(kv_end, SEQS), split, splits, TILE, SPLIT, SPLIT_TILES
    )
    if WINDOWED:
        q = tl.load(query + query_offset[:, None] + channel[None, :], mask=row_mask, other=0.0)
    same = shared(row_live, row_seq, row % TOKEN_ROWS // GROUP, column_seq, column % HEADS, HEADS, SEQS)
    table = block_table + column_seq.to(tl.int64) * stride_table
    key_head = (first_head if KEYS_MATCHED else column_head) * stride_kc_head
    value_head = (first_head if VALUES_MATCHED else column_head) * stride_vc_head
    if SCALES == 1:
        row_kv_head = tl.where(row_live, row_head // (GROUP * PARTS), 0)
        scale = tl.load(key_scale + row_kv_head * strides_ks[2]) * scale
    if KEYS_MATCHED and X > 8:
        q = tl.reshape(q, [ROWS, PADDED // (4 * X), 4, X // 8, 8])
        q = tl.reshape(tl.permute(q, (0, 1, 3, 2, 4)), [ROWS, PADDED])
    # The largest score is the largest product times the scale, so that must be positive; 0 * -inf would be NaN.
    if not KEPT:
        negative = scale[:, None] < 0 if SCALES == 1 else scale < 0
        q = tl.where(negative, -q, q)
    scale = tl.maximum(tl.abs(scale), 1e-30)
    slope = tl.load(slopes + row_head, mask=row_live, other=0.0) * LOG2E if ALIBI else 0.0

    SHIFT: tl.constexpr = WEIGHT_SHIFT if PAIRS or q.dtype == tl.float16 else 0.0
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if SINKS:
        # Once: other partitions of the same row start without it.
        maximum = tl.load(sinks + row_head, mask=row_live & (split == 0), other=float("-inf")) * LOG2E
        total = tl.where(maximum > float("-inf"), 2.0**SHIFT, 0.0)
    # How much of a row of K and V a product takes.
    WIDTH: tl.constexpr = HEAD_SIZE // 2 if PAIRS else HEAD_SIZE
    CHANNELS: tl.constexpr = PADDED // 2 if PAIRS else PADDED
    acc = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    largest = tl.full([], 1e-30 if SCALES == 2 else 1.0, tl.float32)
    if PAIRS:
        q = q.to(tl.float32)
        unit = row_unit(tl.max(tl.abs(q), axis=1))
        scale *= unit
        q = tl.split(tl.reshape((q / unit[:, None]).to(tl.float16), [ROWS, CHANNELS, 2]))
        total = tl.zeros([ROWS, 16], tl.float32) + total[:, None]
        state = (acc, acc, maximum, total, largest)
    else:
        state = (acc, maximum, total, largest)

    # First the tiles that every row sees whole, without a mask; what a row that is not live gets there is not stored.
    full_begin, full_end = first_tile, first_tile
    if SEQS == 1 and HEADS == 1:
        whole_begin, whole_end = kv_begin, kv_end
        if CAUSAL and not DECODE:
            whole_end = tl.minimum(kv_end, context_len + first_token + 1)
        if WINDOWED and not DECODE:
            whole_begin = tl.maximum(kv_begin, context_len + first_token + TOKENS - window)
        full_begin, full_end = full_tiles(first_tile, end_tile, whole_begin, whole_end, TILE, WINDOWED)
        if not EVEN_GROUPS:
            full_end = full_begin  # below a token has a stride, and there it would be a fraction
        last = (kv_end + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
        entries = block_table + tl.cast(first_seq, tl.int64) * stride_table
        place = column
        if KEYS_MATCHED:
            place = tl.arange(0, 16)[:, None] + 16 * tl.arange(0, TILE // 16)[None, :]
            place = matched_token(place, X) if VALUES_MATCHED else place
        key_at = key_cache + (first_head * stride_kc_head + place * stride_kc_token)
        # Tokens of V that are neighbours in memory and read as one; in native blocks larger than a tile the compiler
        # finds better ones.
        WHOLE: tl.constexpr = BLOCK_SIZE if PACKING == 1 and TILE % BLOCK_SIZE == 0 else 1
        RUN: tl.constexpr = X if PACKING == 2 or VALUES_MATCHED else WHOLE
        run = tl.arange(0, TILE // RUN) * RUN
        stride_value = stride_vc_token if PACKING == 0 else stride_vc_token // X if PACKING == 2 else 1
        value_at = value_cache + (first_head * stride_vc_head + run * stride_value)
        UNIT: tl.constexpr = ALIGN // 2 if PAIRS and ALIGN > 1 else ALIGN
        # Prefill looks a tile ahead, because its loads of K would wait for the lookup. Decode has more stages, and the
        # compiler does so itself.
        base = tile_base(
            entries, full_begin * TILE, place, last, stride_kc_block, stride_kc_token, BLOCK_SIZE, TILE, UNIT
        )
        for tile in range(full_begin, full_end):
            first = tile * TILE
            all_loaded = column >= 0
            if DECODE:
                base = tile_base(entries, first, place, last, stride_kc_block, stride_kc_token, BLOCK_SIZE, TILE, UNIT)
            k = load_key_tile(key_at + base, stride_kc_group, place, WIDTH, CHANNELS, PACKING, X, True, KEYS_MATCHED)
            value_base = base
            if not ALIKE:
                value_base = tile_base(
                    entries,
                    first,
                    run,
                    last,
                    stride_vc_block,
                    stride_value,
                    BLOCK_SIZE,
                    TILE,
                    UNIT if PACKING != 1 or BLOCK_SIZE % UNIT == 0 else 1,
                    X if GROUPED and RUN == 1 else 1,
                )
            key_scale_at, value_scale_at = key_scale, value_scale
            if SCALES == 2:
                key_scale_at += column_token * strides_ks[1] + first_head * strides_ks[2]
                key_scale_at += tile_base(
                    entries, first, column_token, last, strides_ks[0], strides_ks[1], BLOCK_SIZE, TILE
                )
                value_scale_at += column_token * strides_vs[1] + first_head * strides_vs[2]
                value_scale_at += tile_base(
                    entries, first, column_token, last, strides_vs[0], strides_vs[1], BLOCK_SIZE, TILE
                )
            if not DECODE:
                base = tile_base(
                    entries, first + TILE, place, last, stride_kc_block, stride_kc_token, BLOCK_SIZE, TILE, UNIT
                )
            if PAIRS:
                state = attend_pairs(
                    state,
                    q,
                    k,
                    value_at + value_base,
                    all_loaded,
                    all_loaded,
                    key_scale_at,
                    value_scale_at,
                    first + column_token,
                    position,
                    scale,
                    slope,
                    cap_log2e,
                    WIDTH,
                    CHANNELS,
                    CAPPED,
                    ALIBI,
                    SCALES,
                    FORMAT,
                    NATIVE,
                    True,
                )
            else:
                state = attend_tile(
                    state,
                    q,
                    k,
                    value_at + value_base,
                    stride_vc_channel,
                    all_loaded,
                    all_loaded,
                    all_loaded,
                    key_scale_at,
                    value_scale_at,
                    first + column_token,
                    position,
                    scale,
                    slope,
                    cap_log2e,
                    HEAD_SIZE,
                    PADDED,
                    DECODE,
                    CAPPED,
                    ALIBI,
                    PACKING,
                    GROUPED,
                    SCALES,
                    FORMAT,
                    NATIVE,
                    SHIFT,
                    RUN,
                    True,
                    VALUES_MATCHED,
                )
    # Then those at the ends, or all of several sequences or heads.
    full = full_end - full_begin
    for rest in tl.range(first_tile, end_tile - full, num_stages=1):
        tile = rest + (tl.where(rest < full_begin, 0, full) if WINDOWED else full)
        token = tile * TILE + column_token
        loaded = (token >= kv_begin) & (token < kv_end)
        # Where tokens are neighbours in memory, V is read in groups of X of one block or not at all, so that a lane can
        # read a whole group; what was not asked for is dropped afterwards.
        near = in_groups(token, kv_begin, kv_end, X) if GROUPED else loaded
        # As `matched_token` orders them, only four neighbours of the columns are neighbours in the tile.
        ALONG: tl.constexpr = 4 if VALUES_MATCHED else X if GROUPED else 1
        block, offset = locate(table, tile * TILE, column_token, near, BLOCK_SIZE, TILE if SEQS == 1 else 0, ALONG)
        key_loaded, key_block, key_offset = loaded, block, offset
        if KEYS_MATCHED:
            key_loaded = (tile * TILE + place >= kv_begin) & (tile * TILE + place < kv_end)
            key_block, key_offset = locate(entries, tile * TILE, place, key_loaded, BLOCK_SIZE, TILE, 1)
        value_block, value_token = block, token if PACKING == 2 else offset
        if VALUES_MATCHED:
            near = in_groups(tile * TILE + run, kv_begin, kv_end, X)
            value_block, value_token = locate(entries, tile * TILE, run, near, BLOCK_SIZE, TILE, 1)
        key_row = key_cache + (key_block * stride_kc_block + key_offset * stride_kc_token + key_head)
        k = load_key_tile(key_row, stride_kc_group, key_loaded, WIDTH, CHANNELS, PACKING, X, False, KEYS_MATCHED)
        value_token = value_tokens(value_token, stride_vc_token, PACKING, X, BLOCK_SIZE)
        seen = same & loaded[None, :]
        seen = visible(seen, token, position, window, CAUSAL and not DECODE, WINDOWED and not DECODE)
        key_scale_at, value_scale_at = key_scale, value_scale
        if SCALES == 2:
            key_scale_at += block * strides_ks[0] + offset * strides_ks[1] + column_head * strides_ks[2]
            value_scale_at += block * strides_vs[0] + offset * strides_vs[1] + column_head * strides_vs[2]
        value_row = value_cache + (value_block * stride_vc_block + value_token + value_head)
        if PAIRS:
            state = attend_pairs(
                state,
                q,
                k,
                value_row,
                loaded,
                seen,
                key_scale_at,
                value_scale_at,
                token,
                position,
                scale,
                slope,
                cap_log2e,
                WIDTH,
                CHANNELS,
                CAPPED,
                ALIBI,
                SCALES,
                FORMAT,
                NATIVE,
                False,
            )
        else:
            state = attend_tile(
                state,
                q,
                k,
                value_row,
                stride_vc_channel,
                near,
                loaded,
                seen,
                key_scale_at,
                value_scale_at,
                token,
                position,
                scale,
                slope,
                cap_log2e,
                HEAD_SIZE,
                PADDED,
                DECODE,
                CAPPED,
                ALIBI,
                PACKING,
                GROUPED,
                SCALES,
                FORMAT,
                NATIVE,
                SHIFT,
                RUN if VALUES_MATCHED else 1,
                False,
                VALUES_MATCHED,
            )

    # A row that saw nothing has total 0 and acc 0: its result is 0.
    if PAIRS:
        even, odd, maximum, total, largest = state
        acc, total = tl.interleave(even, odd), tl.sum(total, axis=1) / 16
    else:
        acc, maximum, total, largest = state
    if SCALES == 2:
        acc *= largest
    divisor, row_lse = log_sum(maximum, total, SHIFT)
    result = acc * (1.0 / divisor)[:, None]
    if SCALES == 1:
        result *= tl.load(value_scale + row_kv_head * strides_vs[2])[:, None]
    if SPLIT:
        call_row = query_row - tl.load(query_start_loc)
        lse_offset = (call_row * (HEAD_PROGRAMS * HEADS * GROUP) + row_head) * splits + split
        out_offset = lse_offset * HEAD_SIZE
    else:
        stride_out_token, stride_out_head = wide(out_strides)
        stride_lse_token, stride_lse_head = wide(lse_strides)
        lse_offset = query_row * stride_lse_token + row_head * stride_lse_head
        out_offset = query_row * stride_out_token + row_head * stride_out_head
    tl.store(out + out_offset[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=row_mask)
    if LSE:
        if not SPLIT:
            row_lse *= LN2
        tl.store(lse + lse_offset, row_lse, mask=row_live)
