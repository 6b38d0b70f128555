# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's queries over the paged cache: prefill, extend, decode, and batches that mix them.

    out[n, h, :] = softmax_p(scale * query[n, h, :] . K[p, kv(h), :]) V[p, kv(h), :]

over the positions p that query n sees: `p <= position(n)` if causal, and `p > position(n) - sliding_window` with a
window; kv(h) is the KV head of query head h. Query t of a sequence stands at `seq_len - query_len + t`. The softmax is
online and in base 2 (`softmax.py`), accumulated in fp32. Before it a score x becomes `cap * tanh(x / cap)` with a soft
cap (Gemma 2, arXiv 2408.00118), then `x + slope[h] * (p - position(n))` with ALiBi (Press et al., arXiv 2108.12409). A
sink is one more score of head h that has no value: it takes weight from the others (Xiao et al., arXiv 2309.17453).

A program takes BLOCK_M query rows (tokens x heads of one sequence) and walks over the KV in tiles of BLOCK_N tokens of
one KV head. A tile may straddle blocks of any size. Tokens that no row of the program sees are not loaded, so their
blocks may hold anything, NaN included.

With SPLIT_KV the tiles of a sequence are shared by `splits` programs, and `reduce_kernel` merges their results; the
sink belongs to the first of them. That number is an argument and no constant: it follows the batch, and a service would
compile for each. K and V of a quantised cache are decoded without loss; the scale of K is applied to
the scores and that of V to the result, both in fp32; one for each token is applied to V itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pagedkv.attention.attend import attend_tile
from pagedkv.attention.launch import FIXED_SPLITS
from pagedkv.attention.merge import pdl_wait
from pagedkv.attention.softmax import LN2, LOG2E, log_sum
from pagedkv.attention.tiles import column_tokens, key_places, load_key_tile, value_runs
from pagedkv.fp8.scales import row_unit
from pagedkv.strides import (
    in_groups,
    locate,
    of_pairs,
    sequence_of_tile,
    side_of,
    tile_base,
    value_tokens,
    wide,
)

MOST_FIXED_SPLITS = tl.constexpr(FIXED_SPLITS)


class AttentionStrides(NamedTuple):
    """Strides that a launch of `attention_kernel` passes, in elements."""

    query: tuple[int, int]
    """Strides of token and head."""
    key_cache: tuple[int, ...]
    """Strides of block, token, head and group of X channels."""
    value_cache: tuple[int, ...]
    """Strides of block, token (in `shuffle` of a group of X tokens), head and channel."""
    out: tuple[int, ...]
    """Strides of token and head; not read with SPLIT_KV."""
    lse: tuple[int, ...]
    """Strides of token and head; not read with SPLIT_KV."""
    key_scale: tuple[int, int, int]
    """Strides of block, token and head."""
    value_scale: tuple[int, int, int]


class AttentionOptions(NamedTuple):
    """Compile-time options of `attention_kernel`: Triton compiles once for each combination of values."""

    HEAD_SIZE: int
    HEAD_SIZE_PADDED: int
    """HEAD_SIZE rounded up to a power of two."""
    BLOCK_SIZE: int
    """Tokens of a block of the cache."""
    HEADS_PER_PROGRAM: int
    """Query heads of a program; all of them read the same KV head."""
    HEAD_TILES: int
    """Programs that share the query heads of one KV head."""
    HEAD_PROGRAMS: int
    """Programs of one query tile: num_kv_heads * HEAD_TILES."""
    NUM_XCDS: int
    """XCDs to spread programs over (`remap_xcd`); 0 keeps the launch order."""
    BLOCK_Q: int
    """Query tokens of a program."""
    BLOCK_M: int
    """Query rows of a program: BLOCK_Q * HEADS_PER_PROGRAM, rounded up to a power of two."""
    BLOCK_N: int
    """KV tokens of a tile."""
    SPLIT_KV: bool
    """Whether several programs share the KV of a sequence."""
    TILES_PER_SPLIT: int
    """Tiles of one of those programs, where bits may not depend on the batch; 0 shares those of a sequence equally."""
    DECODE: bool
    """Whether every sequence has one query token."""
    IS_CAUSAL: bool
    USE_SLIDING_WINDOW: bool
    USE_SOFTCAP: bool
    USE_ALIBI_SLOPES: bool
    USE_SINKS: bool
    WRITE_LSE: bool
    PACKING: str
    """Axes of K and V in memory (`pagedkv.layout`)."""
    X: int
    """Elements in 16 bytes: the innermost axis of a packed K."""
    KV_SCALES: str
    """Kind of scales of a quantised cache (`scales.ScaleKind`)."""
    FP8_FORMAT: str
    NATIVE_FP8: bool
    """Whether the device converts FP8_FORMAT itself."""
    STRIDE_ALIGN: int
    """Largest power of two up to 16 that divides all strides (`strides.alignment`)."""
    X_DIVIDES_VALUE_STRIDE: bool
    """PACKING `shuffle`: whether the stride of a group of X tokens of V is a multiple of X."""
    SAME_STRIDES: bool
    """PACKING `rows`: whether K and V have the same strides of block and token."""
    USE_PDL: bool
    """Whether the reduce is launched before this kernel has ended (programmatic dependent launch, `merge.pdl_wait`)."""
    FP8_PAIRS: bool
    """Whether FP8 codes are loaded two at a time, as int16; see `attend.attend_pairs`."""
    X_DIVIDES_BLOCK_SIZE: bool
    """Packed cache: whether each group of X tokens of V is contiguous and lies in one block."""
    K_MFMA_LAYOUT: bool
    """Whether lanes load of K what MFMA takes from them; see `tiles.load_keys_for_mfma`."""
    V_MFMA_LAYOUT: bool
    """Whether lanes load of V what MFMA takes from them; see `tiles.load_values_for_mfma`."""
    CONTIGUOUS_TOKENS: int
    """Tokens of V in a full tile that are contiguous in memory and loaded as one run."""
    WEIGHT_EXPONENT: float
    """Softmax weights are multiplied by 2 to this power (`online_softmax`)."""
    QUERY_IN_LDS: bool
    """Whether the query stays in LDS as it was loaded, which requires that no scale is negative."""
    PRE_LOAD_V: bool
    """Whether V is loaded and decoded before the scores are computed."""
    LOAD_K_BY_TOKEN: bool
    """Whether lanes load K along the channels of a token, as in PACKING `rows`; see `tiles.load_keys_by_token`."""


class Rows(NamedTuple):
    """The query rows of a program, (token, head) pairs, [BLOCK_M]; a scalar where all rows have the same."""

    token: Any
    """Index of the token among the queries of the sequence."""
    head: Any
    row: Any
    """Row of the token in the query, int64."""
    query_len: Any
    live: Any
    """Whether the row exists."""
    mask: Any
    """[BLOCK_M, HEAD_SIZE_PADDED] Whether the row and the channel exist."""


class Queries(NamedTuple):
    """Query-side inputs of the scores."""

    q: Any
    """[BLOCK_M, HEAD_SIZE_PADDED], or with FP8_PAIRS its even and its odd channels."""
    position: Any
    """Position of each row in its sequence."""
    scale: Any
    """Factor of the scores, > 0; one or [BLOCK_M]."""
    slope: Any
    cap_log2e: Any
    window: Any


class Bounds(NamedTuple):
    """The KV that a program walks over."""

    begin: Any
    """The first token that a row sees; `end` is the one after the last."""
    end: Any
    first_tile: Any
    """The first tile of this partition; `end_tile` is the one after the last."""
    end_tile: Any


class Lookup(NamedTuple):
    """Block table and offsets of the sequence and the KV head of a program."""

    table: Any
    """Row of the block table."""
    key_head: Any
    """Offset of the head in a token of K, in elements."""
    value_head: Any
    """Offset of the head in a token of V, in elements."""


class Tile(NamedTuple):
    """A tile of K and V; its columns are tokens."""

    k: Any
    """[HEAD_SIZE_PADDED, columns]"""
    value_at: Any
    """Pointers to V (`value_cache` of `load_value_tile`)."""
    near: Any
    """Tokens that may be loaded to load whole groups, as `load_value_tile` takes them."""
    loaded: Any
    """[columns] Whether a token is loaded."""
    seen: Any
    """[BLOCK_M, columns] Whether a row sees it."""
    token: Any
    """[columns] Position of each token in the sequence."""
    key_scale_at: Any
    """Pointers to the scale of each token; read with KV_SCALES == "per_token"."""
    value_scale_at: Any


@triton.jit
def remap_xcd(place, programs, NUM_XCDS: tl.constexpr):
    """Return which of `programs` runs at `place`, so that each of NUM_XCDS dies gets neighbours.

    Workgroups go to the dies in turn, place p to die p % NUM_XCDS. The rest of a division runs where it stands.
    """
    each = programs // NUM_XCDS
    return tl.where(place < each * NUM_XCDS, place % NUM_XCDS * each + place // NUM_XCDS, place)


@triton.jit
def kv_range(seq_len, context_len, first_token, window, OPTIONS: tl.constexpr):
    """Return the bounds of the tokens that some query of the program sees: begin .. end - 1."""
    begin = tl.maximum(context_len + first_token - window + 1, 0) if OPTIONS.USE_SLIDING_WINDOW else 0
    end = seq_len
    if OPTIONS.IS_CAUSAL and not OPTIONS.DECODE:
        end = tl.minimum(seq_len, context_len + first_token + OPTIONS.BLOCK_Q)
    return begin, end


@triton.jit
def tile_range(begin, end, split, splits, BLOCK_N: tl.constexpr, SPLIT_KV: tl.constexpr, TILES_PER_SPLIT: tl.constexpr):
    """Return the bounds of the tiles over the tokens begin .. end - 1 that are this partition's."""
    first_tile = begin // BLOCK_N
    end_tile = (end + BLOCK_N - 1) // BLOCK_N
    if SPLIT_KV:
        # Equal shares; of a fixed length as long as there are few of them, for what follows from the sequence alone.
        parts = splits if TILES_PER_SPLIT == 0 else MOST_FIXED_SPLITS
        tiles = tl.maximum((tl.maximum(end_tile - first_tile, 0) + parts - 1) // parts, TILES_PER_SPLIT)
        first_tile += split * tiles
        end_tile = tl.minimum(end_tile, first_tile + tiles)
    return first_tile, end_tile


@triton.jit
def full_tiles(bounds, begin, end, OPTIONS: tl.constexpr):
    """Return the bounds of those of the tiles that hold no token outside of begin .. end - 1."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    first_tile, end_tile = bounds.first_tile, bounds.end_tile
    full_begin = first_tile
    if OPTIONS.USE_SLIDING_WINDOW:
        first_full = tl.maximum((begin + BLOCK_N - 1) // BLOCK_N, first_tile)
        full_begin = tl.minimum(first_full, tl.maximum(end_tile, first_tile))
    return full_begin, tl.maximum(tl.minimum(end // BLOCK_N, end_tile), full_begin)


@triton.jit
def visible(seen, token, queries, OPTIONS: tl.constexpr):
    """Return which of the `seen` [BLOCK_M, columns] the causal mask and the window leave."""
    if OPTIONS.IS_CAUSAL and not OPTIONS.DECODE:
        seen = seen & (token[None, :] <= queries.position[:, None])
    if OPTIONS.USE_SLIDING_WINDOW and not OPTIONS.DECODE:
        seen = seen & (token[None, :] > queries.position[:, None] - queries.window)
    return seen


@triton.jit
def rows_of(seq, first_token, first_head, query_start_loc, num_seqs, OPTIONS: tl.constexpr):
    """Return the rows of a program that begins at this query token and query head of a sequence."""
    HEADS_PER_PROGRAM: tl.constexpr = OPTIONS.HEADS_PER_PROGRAM
    row = tl.arange(0, OPTIONS.BLOCK_M)
    is_seq = seq < num_seqs
    start = tl.load(query_start_loc + seq, mask=is_seq, other=0)
    query_len = tl.load(query_start_loc + seq + 1, mask=is_seq, other=0) - start
    token = 0 if OPTIONS.DECODE else first_token + row // HEADS_PER_PROGRAM
    head = first_head + row % HEADS_PER_PROGRAM
    live = (row < OPTIONS.BLOCK_Q * HEADS_PER_PROGRAM) & (token < query_len)
    query_row = (start + token).to(tl.int64)
    channel = tl.arange(0, OPTIONS.HEAD_SIZE_PADDED)
    mask = live[:, None] & (channel < OPTIONS.HEAD_SIZE)[None, :]
    return Rows(token, head, query_row, query_len, live, mask)


@triton.jit
def load_query(query, offset, rows, OPTIONS: tl.constexpr):
    """Return the query of each row [BLOCK_M, HEAD_SIZE_PADDED] from `offset` [BLOCK_M] on; 0 where there is no row."""
    return tl.load(query + offset[:, None] + tl.arange(0, OPTIONS.HEAD_SIZE_PADDED)[None, :], mask=rows.mask, other=0.0)


@triton.jit
def kv_head_of(rows, OPTIONS: tl.constexpr):
    """Return the KV head of each row, 0 where there is no row."""
    return tl.where(rows.live, rows.head // (OPTIONS.HEADS_PER_PROGRAM * OPTIONS.HEAD_TILES), 0)


@triton.jit
def queries_of(q, rows, position, scale, key, slopes, cap_log2e, window, OPTIONS: tl.constexpr):
    """Return the query-side inputs of the scores, with the query negated where the scale is negative."""
    if OPTIONS.KV_SCALES == "per_head":
        scale = tl.load(key.scale + kv_head_of(rows, OPTIONS) * key.scale_head) * scale
    X: tl.constexpr = OPTIONS.X
    if OPTIONS.K_MFMA_LAYOUT and X > 8:
        q = tl.reshape(q, [OPTIONS.BLOCK_M, OPTIONS.HEAD_SIZE_PADDED // (4 * X), 4, X // 8, 8])
        q = tl.reshape(tl.permute(q, (0, 1, 3, 2, 4)), [OPTIONS.BLOCK_M, OPTIONS.HEAD_SIZE_PADDED])
    # The largest score is the largest product times the scale, so that must be positive; 0 * -inf would be NaN.
    if not OPTIONS.QUERY_IN_LDS:
        negative = scale[:, None] < 0 if OPTIONS.KV_SCALES == "per_head" else scale < 0
        q = tl.where(negative, -q, q)
    scale = tl.maximum(tl.abs(scale), 1e-30)
    slope = tl.load(slopes + rows.head, mask=rows.live, other=0.0) * LOG2E if OPTIONS.USE_ALIBI_SLOPES else 0.0
    if OPTIONS.FP8_PAIRS:
        q = q.to(tl.float32)
        unit = row_unit(tl.max(tl.abs(q), axis=1))
        scale *= unit
        pairs: tl.constexpr = [OPTIONS.BLOCK_M, OPTIONS.HEAD_SIZE_PADDED // 2, 2]
        q = tl.split(tl.reshape((q / unit[:, None]).to(tl.float16), pairs))
    return Queries(q, position, scale, slope, cap_log2e, window)


@triton.jit
def initial_state(rows, sinks, split, OPTIONS: tl.constexpr):
    """Return the state of rows before the first tile, sinks included; see `attend_channels` and `attend_pairs`."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    CHANNELS: tl.constexpr = OPTIONS.HEAD_SIZE_PADDED // 2 if OPTIONS.FP8_PAIRS else OPTIONS.HEAD_SIZE_PADDED
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    if OPTIONS.USE_SINKS:
        # Once: other partitions of the same row start without it.
        maximum = tl.load(sinks + rows.head, mask=rows.live & (split == 0), other=float("-inf")) * LOG2E
        total = tl.where(maximum > float("-inf"), 2.0**OPTIONS.WEIGHT_EXPONENT, 0.0)
    acc = tl.full([BLOCK_M, CHANNELS], 0.0, tl.float32)
    largest = tl.full([], 1e-30 if OPTIONS.KV_SCALES == "per_token" else 1.0, tl.float32)
    if OPTIONS.FP8_PAIRS:
        total = tl.zeros([BLOCK_M, 16], tl.float32) + total[:, None]
        state = (acc, acc, maximum, total, largest)
    else:
        state = (acc, maximum, total, largest)
    return state


@triton.jit
def bounds_of(seq_len, context_len, first_token, window, split, splits, OPTIONS: tl.constexpr):
    """Return the KV that a program walks over; its queries begin at `first_token`, after `context_len` tokens."""
    begin, end = kv_range(seq_len, context_len, first_token, window, OPTIONS)
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    first_tile, end_tile = tile_range(begin, end, split, splits, BLOCK_N, OPTIONS.SPLIT_KV, OPTIONS.TILES_PER_SPLIT)
    return Bounds(begin, end, first_tile, end_tile)


@triton.jit
def lookup_of(seq, first_head, block_table, stride_table, key, value):
    """Return the block table of a sequence and the offsets of a KV head."""
    table = block_table + tl.cast(seq, tl.int64) * stride_table
    return Lookup(table, first_head * key.head, first_head * value.head)


@triton.jit
def full_range(bounds, context_len, first_token, window, OPTIONS: tl.constexpr):
    """Return the first tile that every row sees whole, and the one after the last."""
    begin, end = bounds.begin, bounds.end
    if OPTIONS.IS_CAUSAL and not OPTIONS.DECODE:
        end = tl.minimum(end, context_len + first_token + 1)
    if OPTIONS.USE_SLIDING_WINDOW and not OPTIONS.DECODE:
        begin = tl.maximum(begin, context_len + first_token + OPTIONS.BLOCK_Q - window)
    full_begin, full_end = full_tiles(bounds, begin, end, OPTIONS)
    if OPTIONS.USE_SLIDING_WINDOW and OPTIONS.TILES_PER_SPLIT > 0 and not OPTIONS.DECODE:
        full_end = full_begin  # a token's tiles come in one order, whichever of them its neighbours see whole
    if not OPTIONS.X_DIVIDES_VALUE_STRIDE:
        full_end = full_begin  # full tiles use a stride of one token, which would be a fraction
    return full_begin, full_end


@triton.jit
def token_scales(side, table, first, column_token, last, first_head, OPTIONS: tl.constexpr):
    """Return where the scale of each token of a full tile lies, of K or of V."""
    pointers = side.scale + (column_token * side.scale_token + first_head * side.scale_head)
    return pointers + tile_base(
        table, first, column_token, last, side.scale_block, side.scale_token, OPTIONS.BLOCK_SIZE, OPTIONS.BLOCK_N
    )


@triton.jit
def walk_full_tiles(state, queries, key, value, table, first_head, column_token, end, full, OPTIONS: tl.constexpr):
    """Walk the tiles of `full_range`, without masks: what rows beyond the query compute is not stored.

    The program sees no token from `end` on.
    """
    full_begin, full_end = full
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    X: tl.constexpr = OPTIONS.X
    PACKING: tl.constexpr = OPTIONS.PACKING
    BASE_ALIGN: tl.constexpr = max(1, OPTIONS.STRIDE_ALIGN // 2) if OPTIONS.FP8_PAIRS else OPTIONS.STRIDE_ALIGN
    VALUE_BASE_ALIGN: tl.constexpr = BASE_ALIGN if PACKING != "native" or BLOCK_SIZE % BASE_ALIGN == 0 else 1
    NEIGHBOURS: tl.constexpr = X if OPTIONS.X_DIVIDES_BLOCK_SIZE and OPTIONS.CONTIGUOUS_TOKENS == 1 else 1
    last = (end + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
    column = tl.arange(0, BLOCK_N)
    place = key_places(column, OPTIONS)
    key_at = key.cache + (first_head * key.head + place * key.token)
    run = value_runs(OPTIONS)
    # Of neighbours in memory: in other packings than rows the stride of a token is that of its group of X, or 1.
    stride_value = value.token if PACKING == "rows" else value.token // X if PACKING == "shuffle" else 1
    value_at = value.cache + (first_head * value.head + run * stride_value)
    # Prefill looks a tile ahead, because its loads of K would wait for the lookup. Decode has more stages, and the
    # compiler does so itself.
    base = tile_base(table, full_begin * BLOCK_N, place, last, key.block, key.token, BLOCK_SIZE, BLOCK_N, BASE_ALIGN)
    for number in range(full_begin, full_end):
        first = number * BLOCK_N
        whole = column >= 0
        if OPTIONS.DECODE:
            base = tile_base(table, first, place, last, key.block, key.token, BLOCK_SIZE, BLOCK_N, BASE_ALIGN)
        k = load_key_tile(key_at + base, key.inner, place, OPTIONS, True)
        value_base = base
        if not OPTIONS.SAME_STRIDES:
            value_base = tile_base(
                table, first, run, last, value.block, stride_value, BLOCK_SIZE, BLOCK_N, VALUE_BASE_ALIGN, NEIGHBOURS
            )
        key_scale_at, value_scale_at = key.scale, value.scale
        if OPTIONS.KV_SCALES == "per_token":
            key_scale_at = token_scales(key, table, first, column_token, last, first_head, OPTIONS)
            value_scale_at = token_scales(value, table, first, column_token, last, first_head, OPTIONS)
        if not OPTIONS.DECODE:
            base = tile_base(table, first + BLOCK_N, place, last, key.block, key.token, BLOCK_SIZE, BLOCK_N, BASE_ALIGN)
        token = first + column_token
        tile = Tile(k, value_at + value_base, whole, whole, whole, token, key_scale_at, value_scale_at)
        state = attend_tile(state, queries, tile, value.inner, OPTIONS, True)
    return state


@triton.jit
def walk_rest(
    state, queries, rows, key, value, table, first_head, lookup, column_token, bounds, full, OPTIONS: tl.constexpr
):
    """Walk the tiles before and after the full ones, in which not every row sees every token."""
    full_begin, full_end = full
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PACKING: tl.constexpr = OPTIONS.PACKING
    X: tl.constexpr = OPTIONS.X
    X_DIVIDES_BLOCK_SIZE: tl.constexpr = OPTIONS.X_DIVIDES_BLOCK_SIZE
    K_MFMA_LAYOUT: tl.constexpr = OPTIONS.K_MFMA_LAYOUT
    V_MFMA_LAYOUT: tl.constexpr = OPTIONS.V_MFMA_LAYOUT
    # As `mfma_token` orders them, only four neighbours of the columns are neighbours in the tile.
    ALONG: tl.constexpr = 4 if V_MFMA_LAYOUT else X if X_DIVIDES_BLOCK_SIZE else 1
    if K_MFMA_LAYOUT:
        place = key_places(column_token, OPTIONS)
    if V_MFMA_LAYOUT:
        run = value_runs(OPTIONS)
    taken = full_end - full_begin
    for rest in tl.range(bounds.first_tile, bounds.end_tile - taken, num_stages=1):
        number = rest + (tl.where(rest < full_begin, 0, taken) if OPTIONS.USE_SLIDING_WINDOW else taken)
        first = number * BLOCK_N
        token = first + column_token
        loaded = (token >= bounds.begin) & (token < bounds.end)
        # Where tokens are neighbours in memory, V is read in groups of X of one block or not at all, so that a lane can
        # read a whole group; what was not asked for is dropped afterwards.
        near = in_groups(token, bounds.begin, bounds.end, X) if X_DIVIDES_BLOCK_SIZE else loaded
        block, offset = locate(lookup.table, first, column_token, near, BLOCK_SIZE, BLOCK_N, ALONG)
        key_loaded, key_block, key_offset = loaded, block, offset
        if K_MFMA_LAYOUT:
            key_loaded = (first + place >= bounds.begin) & (first + place < bounds.end)
            key_block, key_offset = locate(table, first, place, key_loaded, BLOCK_SIZE, BLOCK_N, 1)
        value_block, value_token = block, token if PACKING == "shuffle" else offset
        if V_MFMA_LAYOUT:
            near = in_groups(first + run, bounds.begin, bounds.end, X)
            value_block, value_token = locate(table, first, run, near, BLOCK_SIZE, BLOCK_N, 1)
        key_row = key.cache + (key_block * key.block + key_offset * key.token + lookup.key_head)
        k = load_key_tile(key_row, key.inner, key_loaded, OPTIONS, False)
        value_token = value_tokens(value_token, value.token, PACKING, X, BLOCK_SIZE)
        seen = rows.live[:, None] & loaded[None, :]
        seen = visible(seen, token, queries, OPTIONS)
        key_scale_at, value_scale_at = key.scale, value.scale
        if OPTIONS.KV_SCALES == "per_token":
            key_scale_at += block * key.scale_block + offset * key.scale_token + first_head * key.scale_head
            value_scale_at += block * value.scale_block + offset * value.scale_token + first_head * value.scale_head
        value_row = value.cache + (value_block * value.block + value_token + lookup.value_head)
        tile = Tile(k, value_row, near, loaded, seen, token, key_scale_at, value_scale_at)
        state = attend_tile(state, queries, tile, value.inner, OPTIONS, False)
    return state


@triton.jit
def result_of(state, rows, value, OPTIONS: tl.constexpr):
    """Return the result of each row [BLOCK_M, HEAD_SIZE_PADDED] and its log-sum-exp in base 2; 0, -inf for no token."""
    if OPTIONS.FP8_PAIRS:
        even, odd, maximum, total, largest = state
        acc, total = tl.interleave(even, odd), tl.sum(total, axis=1) / 16
    else:
        acc, maximum, total, largest = state
    if OPTIONS.KV_SCALES == "per_token":
        acc *= largest
    divisor, row_lse = log_sum(maximum, total, OPTIONS.WEIGHT_EXPONENT)
    result = acc * (1.0 / divisor)[:, None]
    if OPTIONS.KV_SCALES == "per_head":
        result *= tl.load(value.scale + kv_head_of(rows, OPTIONS) * value.scale_head)[:, None]
    return result, row_lse


@triton.jit
def write(out, lse, result, row_lse, rows, query_start_loc, split, splits, strides, OPTIONS: tl.constexpr):
    """Store result and log-sum-exp of each row; with SPLIT_KV they go to the partial results of this partition."""
    if OPTIONS.SPLIT_KV:
        call_row = rows.row - tl.load(query_start_loc)
        NUM_HEADS: tl.constexpr = OPTIONS.HEAD_PROGRAMS * OPTIONS.HEADS_PER_PROGRAM
        lse_offset = (call_row * NUM_HEADS + rows.head) * splits + split
        out_offset = lse_offset * OPTIONS.HEAD_SIZE
    else:
        out_strides, lse_strides = wide(strides.out), wide(strides.lse)
        lse_offset = rows.row * lse_strides[0] + rows.head * lse_strides[1]
        out_offset = rows.row * out_strides[0] + rows.head * out_strides[1]
    target = out + out_offset[:, None] + tl.arange(0, OPTIONS.HEAD_SIZE_PADDED)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=rows.mask)
    if OPTIONS.WRITE_LSE:
        if not OPTIONS.SPLIT_KV:
            row_lse *= LN2
        tl.store(lse + lse_offset, row_lse, mask=rows.live)


@triton.jit(
    # What differs from one step of a service to the next may make no other machine code.
    do_not_specialize=["num_seqs", "splits", "programs", "stride_table"],
    do_not_specialize_on_alignment=["lse", "block_table", "seq_lens", "query_start_loc", "slopes", "sinks"],
)
def attention_kernel(
    query,  # [num_tokens, num_q_heads, head_size]
    key_cache,  # axes of PACKING
    value_cache,
    out,  # like query; with SPLIT_KV fp32, contiguous [tokens of this call, num_q_heads, splits, head_size]
    lse,  # fp32, if WRITE_LSE: [num_tokens, num_q_heads]; with SPLIT_KV [.., splits], contiguous and in base 2
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    slopes,  # [num_q_heads] fp32, read if USE_ALIBI_SLOPES
    sinks,  # [num_q_heads] fp32, read if USE_SINKS
    num_seqs,
    splits,
    programs,  # of one partition
    stride_table,  # sequence
    scale,  # of the scores, times log2(e); with USE_SOFTCAP times 2 log2(e) / cap
    cap_log2e,
    window,
    strides,  # AttentionStrides
    OPTIONS: tl.constexpr,  # AttentionOptions
):
    """Attend BLOCK_M query rows to one partition of their KV; grid [query tiles * HEAD_PROGRAMS, splits].

    A program finds its rows, walks the tiles that all of them see whole, walks the rest, and writes.
    """
    pdl_wait(OPTIONS.USE_PDL)
    query_strides = wide(strides.query, OPTIONS.STRIDE_ALIGN)
    key_strides, value_strides = (
        wide(strides.key_cache, OPTIONS.STRIDE_ALIGN),
        wide(strides.value_cache, OPTIONS.STRIDE_ALIGN),
    )
    if OPTIONS.FP8_PAIRS:
        key_cache, key_strides = of_pairs(key_cache, key_strides)
        value_cache, value_strides = of_pairs(value_cache, value_strides)
    stride_table = tl.cast(stride_table, tl.int64)
    key = side_of(key_cache, key_strides, key_scale, wide(strides.key_scale))
    value = side_of(value_cache, value_strides, value_scale, wide(strides.value_scale))

    # Find my rows. Programs of neighbouring heads run together: in a token-first layout their rows are neighbours in
    # memory.
    program = remap_xcd(tl.program_id(0), programs, OPTIONS.NUM_XCDS) if OPTIONS.NUM_XCDS > 1 else tl.program_id(0)
    query_tile = program // OPTIONS.HEAD_PROGRAMS
    first_query_head = program % OPTIONS.HEAD_PROGRAMS * OPTIONS.HEADS_PER_PROGRAM
    first_head = first_query_head // (OPTIONS.HEADS_PER_PROGRAM * OPTIONS.HEAD_TILES)
    split = tl.program_id(1)
    if OPTIONS.DECODE:
        seq = query_tile
        first_token = 0
        # A sequence without a query is padding of a captured graph: its length and its blocks mean nothing. The length
        # stands in the condition to be on its way while the starts are: a decode step of one short sequence is a chain
        # of such waits.
        start = tl.load(query_start_loc + seq)
        end = tl.load(query_start_loc + seq + 1)
        if (end == start) & (tl.load(seq_lens + seq) > -2147483648):
            return
    else:
        seq = sequence_of_tile(query_start_loc, query_tile, num_seqs, OPTIONS.BLOCK_Q, 128, 1)
        if seq >= num_seqs:
            return
        query_start = tl.load(query_start_loc + seq)
        # The last tokens of a sequence first: they see most, and what starts last should be short (3 % at 4 x 4k).
        last_token = tl.load(query_start_loc + seq + 1) - query_start - 1
        BLOCK_Q: tl.constexpr = OPTIONS.BLOCK_Q
        first_token = (last_token // BLOCK_Q - (query_tile - query_start // BLOCK_Q - seq)) * BLOCK_Q
        if (first_token < 0) | (first_token > last_token):
            return
    rows = rows_of(seq, first_token, first_query_head, query_start_loc, num_seqs, OPTIONS)
    query_offset = rows.row * query_strides[0] + rows.head * query_strides[1]
    # With a window q comes after the bounds, because before them Triton 3.6 reserves scratch on gfx90a; without one it
    # comes before, because after them decode at head size 256 needs four registers more on gfx942, which cost a wave.
    if not OPTIONS.USE_SLIDING_WINDOW:
        q = load_query(query, query_offset, rows, OPTIONS)
    column_token = column_tokens(OPTIONS)
    seq_len = tl.load(seq_lens + seq)
    # With a single query token it sees all tokens, and the causal mask and the window need no further test.
    context_len = seq_len - (1 if OPTIONS.DECODE else rows.query_len)
    position = context_len + rows.token
    bounds = bounds_of(seq_len, context_len, first_token, window, split, splits, OPTIONS)
    if OPTIONS.USE_SLIDING_WINDOW:
        q = load_query(query, query_offset, rows, OPTIONS)
    lookup = lookup_of(seq, first_head, block_table, stride_table, key, value)
    queries = queries_of(q, rows, position, scale, key, slopes, cap_log2e, window, OPTIONS)
    state = initial_state(rows, sinks, split, OPTIONS)

    # Walk the full tiles.
    full = full_range(bounds, context_len, first_token, window, OPTIONS)
    # The same as `lookup.table`, and made here: where it is made decides the order of instructions in the walk.
    table = block_table + tl.cast(seq, tl.int64) * stride_table
    state = walk_full_tiles(state, queries, key, value, table, first_head, column_token, bounds.end, full, OPTIONS)

    # Walk the rest.
    state = walk_rest(state, queries, rows, key, value, table, first_head, lookup, column_token, bounds, full, OPTIONS)

    # Write.
    result, row_lse = result_of(state, rows, value, OPTIONS)
    write(out, lse, result, row_lse, rows, query_start_loc, split, splits, strides, OPTIONS)
