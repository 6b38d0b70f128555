# SPDX-License-Identifier: Apache-2.0
"""The launcher of attention over the paged cache: checks, launch configuration, kernel, reduce of a split KV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pagedkv import checks as tensor_checks
from pagedkv.arch import NEVER, next_power_of_two
from pagedkv.attention import checks
from pagedkv.attention.kernel import AttentionOptions, AttentionStrides, attention_kernel
from pagedkv.attention.launch import bound, bound_of_queries, choose, options, query_stays, query_tiles, reduced_at_once
from pagedkv.attention.merge import reduce_kernel
from pagedkv.attention.softmax import WEIGHT_SHIFT
from pagedkv.cache import checks as cache_checks
from pagedkv.device import current, on
from pagedkv.fp8.scales import kernel_scales
from pagedkv.launch import tuning
from pagedkv.layout import PACKINGS
from pagedkv.prepared import Launch, call, look
from pagedkv.strides import alignment

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.arch import Arch
    from pagedkv.attention.launch import AttentionLaunch
    from pagedkv.cache.cache import PagedCache
    from pagedkv.prepared import Prepared


def launch_of(
    arch: Arch,
    query: Tensor,
    cache: PagedCache,
    *,
    num_tokens: int,
    num_seqs: int,
    most_queries: int,
    longest: int,
    sliding_window: int | None,
    num_splits: int | None,
    batch_invariant: bool,
) -> AttentionLaunch:
    """Return the launch of a step; its bounds are those of `bound_of_queries` and `bound`."""
    return choose(
        arch,
        head_size=query.shape[2],
        element_bytes=query.element_size(),
        num_q_heads=query.shape[1],
        num_kv_heads=cache.num_kv_heads,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        max_query_len=most_queries,
        max_kv_len=longest if sliding_window is None else min(longest, sliding_window + most_queries),
        num_splits=num_splits,
        cache_bytes=cache.key.element_size(),
        packing=cache.packing,
        block_size=cache.block_size,
        windowed=sliding_window is not None,
        batch_invariant=batch_invariant,
    )


def paged_attention(
    query: Tensor,  # [num_tokens, num_q_heads, head_size]
    cache: PagedCache,
    out: Tensor,  # [num_tokens, num_q_heads, head_size]
    *,
    block_table: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32
    query_start_loc: Tensor,  # [num_seqs + 1] int32
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,  # [num_q_heads] fp32
    sinks: Tensor | None = None,  # [num_q_heads] fp32
    lse: Tensor | None = None,  # [num_tokens, num_q_heads] fp32
    num_splits: int | None = None,
    batch_invariant: bool = False,
    debug: bool = False,
) -> None:
    """Attend each query to the cached K and V of its sequence; K and V of this step must already be in the cache.

    Fit for graph capture: it never waits for the device; grid and scratch follow from shapes and the two bounds.

    A batch that mixes decode with prefill is right in one call and fast in two. With the decode sequences first, call
    it with their rows of the metadata and max_query_len=1, then with the other rows; both with the whole `query` and
    `out` (a call touches only the tokens of its own sequences, wherever `query_start_loc` begins).

    Args:
        query: Queries of all sequences, one after the other, in the dtype of the cache; beside a quantised cache in
            fp32, fp16 or bf16. Last dimension dense.
        cache: The cache, in any packing, quantised or not.
        out: Result, in the dtype of the query or in fp32. Rows behind `query_start_loc[-1]` are left alone; a query
            that sees no token gets 0.
        block_table: Block ids of each sequence. Entries outside the visible tokens are not looked up.
        seq_lens: Tokens of each sequence in the cache, those of this step included.
        query_start_loc: Where the queries of each sequence begin in `query`.
        max_query_len: Upper bound of the query lengths; 1 says that this is a decode step.
        max_seq_len: Upper bound of `seq_lens`.
        scale: Factor of the scores, usually `head_size ** -0.5`.
        causal: Whether a query sees no token after its own. False is cross-attention and encoder attention.
        sliding_window: How many tokens a query sees, its own included; None for all.
        softcap: Scores x become `softcap * tanh(x / softcap)`; None leaves them as they are.
        alibi_slopes: `slope[h] * (position of the key - position of the query)` is added to the scores, after the cap.
            vLLM counts from the end of the sequence: the same after the softmax, but not in `lse` nor beside sinks.
        sinks: One more score of each head, unscaled and uncapped, that has no value but a share of the weight.
        lse: Output: natural logarithm of the sum of exponentials of each query, the sink included; -inf for a query
            that sees nothing. Two results over parts of the KV are merged by it (`merge_attention`).
        num_splits: Partitions of the KV of each sequence; None lets the tuning data decide.
        batch_invariant: Whether a sequence gets the same bits whatever else is in the batch, in whatever order and
            under whatever bounds, as long as it is in the same phase: decode sequences and the others in two calls, as
            above. Decode is then split every `fixed_split_tokens` tokens (`tuning/<arch>.toml`), the others not; what
            would be more than 64 partitions are 64 longer ones, which bounds the scratch.
        debug: Also check scales, lengths and block ids (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    index = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    # A launch follows from bounds that many steps share, so that a call of a growing sequence looks like earlier ones.
    most_queries, longest = bound_of_queries(max_query_len), bound(max_seq_len)
    given = (most_queries, longest, scale, causal, sliding_window, softcap, num_splits, batch_invariant)

    def prepare() -> Prepared | None:
        checks.tensors(query, cache, out, lse, index)
        checks.options(
            query,
            max_query_len,
            max_seq_len,
            causal=causal,
            sliding_window=sliding_window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
        )
        if debug:
            cache_checks.scales(cache)
            tensor_checks.within("seq_lens", seq_lens, max_seq_len + 1, "max_seq_len + 1")
            tensor_checks.lengths(
                **index,
                num_tokens=query.shape[0],
                max_query_len=max_query_len,
                num_blocks=cache.num_blocks,
                block_size=cache.block_size,
                sliding_window=sliding_window,
            )
        num_tokens, num_q_heads, head_size = query.shape
        num_seqs, num_kv_heads = block_table.shape[0], cache.num_kv_heads
        if num_tokens == 0 or num_seqs == 0:
            return None
        arch = current(query)
        launch = launch_of(
            arch,
            query,
            cache,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            most_queries=most_queries,
            longest=longest,
            sliding_window=sliding_window,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
        )
        decode = max_query_len == 1
        splits = launch.splits
        scales = kernel_scales(cache)
        lse_strides = (0, 0) if lse is None else lse.stride()
        num_rows = min(num_tokens, num_seqs * most_queries) * num_q_heads
        partial = (num_rows, splits)
        tiles = query_tiles(num_tokens, num_seqs, launch.tokens, decode=decode)
        dependent = decode and arch.dependent_launches
        # Two bytes at a time, so at even addresses.
        pairs = launch.pairs and all(
            side.data_ptr() % 2 == 0 and not any(stride % 2 for stride in strides[:3])
            for side, strides in ((cache.key, cache.key_strides), (cache.value, cache.value_strides))
        )
        follows = {"launch_pdl": True} if dependent else {}
        head_programs = num_kv_heads * launch.parts
        padded = next_power_of_two(head_size)
        # tanh(x) is computed from exp2(2 log2(e) x), so that factor and the cap's go into the one multiplication.
        log2e = math.log2(math.e)
        numbers = (
            num_seqs,
            splits,
            tiles * head_programs,
            block_table.stride(0),
            scale * log2e * (2 / softcap if softcap else 1),
            (softcap or 0.0) * log2e,
            sliding_window or 0,
            AttentionStrides(
                query.stride()[:2],
                cache.key_strides,
                cache.value_strides,
                (0, 0) if splits > 1 else out.stride()[:2],
                (0, 0) if splits > 1 else lse_strides,
                *scales.strides,
            ),
        )
        # Decode on CDNA: lanes load what MFMA takes from them (`attention.kernel.matched_token`).
        mfma = decode and arch.operand_from_lds_rows == NEVER
        keys_matched = mfma and cache.packing != "rows" and cache.x >= 8 and padded % (4 * cache.x) == 0
        grouped = cache.packing != "rows" and cache.block_size % cache.x == 0
        values_matched = keys_matched and grouped and launch.tile % (4 * cache.x) == 0
        run_length = 1
        if cache.packing == "shuffle" or values_matched:
            run_length = cache.x
        elif cache.packing == "native" and launch.tile % cache.block_size == 0:
            run_length = cache.block_size  # in larger blocks the compiler finds better runs
        attention_options = AttentionOptions(
            HEAD_SIZE=head_size,
            PADDED=padded,
            BLOCK_SIZE=cache.block_size,
            GROUP=num_q_heads // num_kv_heads // launch.parts,
            PARTS=launch.parts,
            HEAD_PROGRAMS=head_programs,
            XCDS=launch.xcds,
            TOKENS=launch.tokens,
            ROWS=launch.rows,
            TILE=launch.tile,
            SPLIT=splits > 1,
            SPLIT_TILES=launch.split_tiles if splits > 1 else 0,
            DECODE=decode,
            CAUSAL=causal,
            WINDOWED=sliding_window is not None,
            CAPPED=softcap is not None,
            ALIBI=alibi_slopes is not None,
            SINKS=sinks is not None,
            LSE=splits > 1 or lse is not None,
            PACKING=PACKINGS.index(cache.packing),
            X=cache.x,
            SCALES=scales.kind,
            FORMAT=scales.format,
            NATIVE=scales.native_on(arch),
            ALIKE=cache.packing == "rows" and cache.key_strides[:2] == cache.value_strides[:2],
            ALIGN=alignment(*query.stride()[:2], *cache.key_strides, *cache.value_strides),
            EVEN_GROUPS=cache.packing != "shuffle" or cache.value_strides[1] % cache.x == 0,
            DEPENDENT=dependent,
            PAIRS=pairs,
            GROUPED=grouped,
            KEYS_MATCHED=keys_matched,
            VALUES_MATCHED=values_matched,
            RUN=run_length,
            SHIFT=WEIGHT_SHIFT.value if pairs or query.dtype == torch.float16 else 0.0,
            KEPT=query_stays(arch, launch.rows) and scales.kind == 0 and scale >= 0,
            VALUES_FIRST=launch.values_first,
            KEY_ROWS=cache.packing == "rows" or (launch.key_rows and not keys_matched),
        )
        attend = Launch(
            attention_kernel,
            (tiles * head_programs, splits),
            OPTIONS=attention_options,
            num_warps=launch.waves,
            num_stages=launch.stages,
            **options(arch, launch, decode=decode),
            **follows,
        )
        data = tuning(arch.name).reduce
        chunk = reduced_at_once(splits, data.chunk, decode=decode, batch_invariant=batch_invariant)
        merge_numbers = (num_seqs, num_rows, splits, out.stride()[:2], lse_strides)
        merge = Launch(
            reduce_kernel,
            (-(-num_rows // data.rows),),
            NUM_HEADS=num_q_heads,
            HEAD_SIZE=head_size,
            PADDED=padded,
            ROWS=data.rows,
            CHUNK=chunk,
            ONCE=splits <= chunk,
            LSE=lse is not None,
            DEPENDENT=dependent,
            num_warps=data.waves_of(chunk, padded),
            **follows,
        )

        def run(
            cache: PagedCache,
            query: Tensor,
            out: Tensor,
            block_table: Tensor,
            seq_lens: Tensor,
            query_start_loc: Tensor,
            lse: Tensor | None,
            slopes: Tensor | None,
            sinks: Tensor | None,
        ) -> None:
            target, sums = out, seq_lens if lse is None else lse
            if splits > 1:
                target = query.new_empty((*partial, head_size), dtype=torch.float32)
                sums = query.new_empty(partial, dtype=torch.float32)
            with on(query):
                attend(
                    query,
                    cache.key,
                    cache.value,
                    target,
                    sums,
                    block_table,
                    seq_lens,
                    query_start_loc,
                    *cache.scales,
                    seq_lens if slopes is None else slopes,
                    seq_lens if sinks is None else sinks,
                    *numbers,
                )
                if splits > 1:
                    merge(target, sums, out, sums if lse is None else lse, query_start_loc, *merge_numbers)

        return run, (attend, merge) if splits > 1 else (attend,)

    tensors = (query, out, *index.values(), lse, alibi_slopes, sinks)
    looks = None if debug else ("attention", cache.look, *map(look, tensors), *given)
    call(looks, prepare, cache, *tensors)
