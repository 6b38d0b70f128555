# SPDX-License-Identifier: Apache-2.0
"""The launcher of attention over the paged cache: checks, launch configuration, kernel, reduce of a split KV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagedkv.arch import next_power_of_two
from pagedkv.attention import checks
from pagedkv.attention.kernel import AttentionOptions, AttentionStrides, attention_kernel
from pagedkv.attention.launch import bound, bound_of_queries, choose, query_tiles
from pagedkv.attention.merge import reduce_kernel, reduced_at_once
from pagedkv.attention.softmax import FP16_WEIGHT_EXPONENT
from pagedkv.device import current, on
from pagedkv.fp8.scales import kernel_scales
from pagedkv.launch import tuning
from pagedkv.prepared import Launch, compiler_settings, find, keep, signature
from pagedkv.strides import alignment

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.arch import Arch
    from pagedkv.attention.launch import AttentionLaunch
    from pagedkv.cache.cache import PagedCache
    from pagedkv.fp8.scales import KernelScales


class Step(NamedTuple):
    """Bounds and options of a call. Many steps share the bounds, so a growing sequence has few signatures."""

    most_queries: int
    """Bound of the query lengths, from `bound_of_queries`; 1 in a decode step."""
    longest: int
    """Bound of the sequence lengths, from `bound`."""
    scale: float
    causal: bool
    sliding_window: int | None
    softcap: float | None
    num_splits: int | None
    batch_invariant: bool

    @property
    def decode(self) -> bool:
        """Whether each sequence has one query."""
        return self.most_queries == 1


@dataclass(frozen=True)
class AttentionCall:
    """Launches of the calls with one signature."""

    attend: Launch
    merge: Launch | None
    """Reduces the partial results of a split KV; None where the KV is not split."""
    partial: tuple[int, int]
    """Rows (token, head) and splits: extents of the partial results."""
    numbers: tuple[Any, ...]
    """Last arguments of `attend`."""
    merge_numbers: tuple[Any, ...]
    """Last arguments of `merge`."""

    def run(
        self,
        cache: PagedCache,
        query: Tensor,
        out: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        lse: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Launch for the tensors of one call; those of `paged_attention`."""
        # Where an optional tensor is absent, any other takes its place: the kernel does not read it.
        target, sums = out, seq_lens if lse is None else lse
        if self.merge is not None:
            target = query.new_empty((*self.partial, query.shape[2]), dtype=torch.float32)
            sums = query.new_empty(self.partial, dtype=torch.float32)
        with on(query):
            self.attend(
                query,
                cache.key,
                cache.value,
                target,
                sums,
                block_table,
                seq_lens,
                query_start_loc,
                *cache.scales,
                seq_lens if alibi_slopes is None else alibi_slopes,
                seq_lens if sinks is None else sinks,
                *self.numbers,
            )
            if self.merge is not None:
                self.merge(target, sums, out, sums if lse is None else lse, query_start_loc, *self.merge_numbers)


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
        out: Result, in the dtype of the query or in fp32. Rows after `query_start_loc[-1]` are left alone; a query
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
    step = Step(
        bound_of_queries(max_query_len),
        bound(max_seq_len),
        scale,
        causal,
        sliding_window,
        softcap,
        num_splits,
        batch_invariant,
    )
    tensors = (query, out, block_table, seq_lens, query_start_loc, lse, alibi_slopes, sinks)
    key = None if debug else ("attention", cache.signature, *map(signature, tensors), step, compiler_settings())
    call = find(key)
    if call is not None:
        call.run(cache, *tensors)
        return
    index = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
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
        checks.contents(query, cache, index, max_query_len, max_seq_len, sliding_window)
    if query.shape[0] == 0 or block_table.shape[0] == 0:
        return
    call = _prepare(cache, step, query, out, block_table, lse, alibi_slopes, sinks)
    call.run(cache, *tensors)
    keep(key, call)


def _prepare(
    cache: PagedCache,
    step: Step,
    query: Tensor,
    out: Tensor,
    block_table: Tensor,
    lse: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> AttentionCall:
    """Choose the launches of a call that was checked."""
    arch = current(query)
    num_tokens, num_q_heads, _ = query.shape
    num_seqs = block_table.shape[0]
    launch = launch_of(
        arch,
        query,
        cache,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        most_queries=step.most_queries,
        longest=step.longest,
        sliding_window=step.sliding_window,
        num_splits=step.num_splits,
        batch_invariant=step.batch_invariant,
    )
    split = launch.num_splits > 1
    scales = kernel_scales(cache)
    programs = (
        query_tiles(num_tokens, num_seqs, launch.block_q, decode=step.decode) * cache.num_kv_heads * launch.head_tiles
    )
    dependent = step.decode and arch.dependent_launches
    constants = _options(
        arch,
        query,
        cache,
        step,
        launch,
        scales,
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
        lse=split or lse is not None,
        dependent=dependent,
    )
    follows = {"launch_pdl": True} if dependent else {}
    attend = Launch(
        attention_kernel,
        (programs, launch.num_splits),
        OPTIONS=constants,
        num_warps=launch.waves,
        num_stages=launch.stages,
        **dict(launch.compiler_options),
        **follows,
    )
    lse_strides = (0, 0) if lse is None else lse.stride()
    strides = AttentionStrides(
        query.stride()[:2],
        cache.key_strides,
        cache.value_strides,
        (0, 0) if split else out.stride()[:2],
        (0, 0) if split else lse_strides,
        *scales.strides,
    )
    # tanh(x) is computed from exp2(2 log2(e) x), so that factor and the cap's go into the one multiplication.
    log2e = math.log2(math.e)
    factor = step.scale * log2e * (2 / step.softcap if step.softcap else 1)
    cap = (step.softcap or 0.0) * log2e
    window = step.sliding_window or 0
    numbers = (num_seqs, launch.num_splits, programs, block_table.stride(0), factor, cap, window, strides)
    partial = (min(num_tokens, num_seqs * step.most_queries) * num_q_heads, launch.num_splits)
    merge = _merge(arch, query, step, partial, has_lse=lse is not None, follows=follows) if split else None
    return AttentionCall(attend, merge, partial, numbers, (num_seqs, *partial, out.stride()[:2], lse_strides))


def _merge(
    arch: Arch, query: Tensor, step: Step, partial: tuple[int, int], *, has_lse: bool, follows: dict[str, bool]
) -> Launch:
    """Choose the launch that reduces the partial results of a split KV, of `partial` rows and splits."""
    num_rows, splits = partial
    _, num_q_heads, head_size = query.shape
    data = tuning(arch.name).reduce
    padded = next_power_of_two(head_size)
    chunk = reduced_at_once(splits, data.block_splits, decode=step.decode, batch_invariant=step.batch_invariant)
    return Launch(
        reduce_kernel,
        (-(-num_rows // data.block_m),),
        NUM_HEADS=num_q_heads,
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=padded,
        BLOCK_M=data.block_m,
        BLOCK_SPLITS=chunk,
        SINGLE_PASS=splits <= chunk,
        WRITE_LSE=has_lse,
        USE_PDL=bool(follows),
        num_warps=data.waves_of(chunk, padded),
        **follows,
    )


def _options(
    arch: Arch,
    query: Tensor,
    cache: PagedCache,
    step: Step,
    launch: AttentionLaunch,
    scales: KernelScales,
    *,
    alibi: bool,
    sinks: bool,
    lse: bool,
    dependent: bool,
) -> AttentionOptions:
    """Choose what the attention kernel is compiled for."""
    padded = next_power_of_two(cache.head_size)
    split = launch.num_splits > 1
    # Codes are read two bytes at a time, so at even addresses.
    pairs = launch.fp8_pairs and all(
        side.data_ptr() % 2 == 0 and not any(stride % 2 for stride in strides[:3])
        for side, strides in ((cache.key, cache.key_strides), (cache.value, cache.value_strides))
    )
    # Decode on CDNA: lanes load what MFMA takes from them (`attention.tiles.mfma_token`).
    mfma = step.decode and arch.matrix == "mfma"
    keys_matched = mfma and cache.packing != "rows" and cache.x >= 8 and padded % (4 * cache.x) == 0
    grouped = cache.packing != "rows" and cache.block_size % cache.x == 0
    values_matched = keys_matched and grouped and launch.block_n % (4 * cache.x) == 0
    run_length = 1
    if cache.packing == "shuffle" or values_matched:
        run_length = cache.x
    elif cache.packing == "native" and launch.block_n % cache.block_size == 0:
        run_length = cache.block_size  # in larger blocks the compiler finds better runs
    return AttentionOptions(
        HEAD_SIZE=cache.head_size,
        HEAD_SIZE_PADDED=padded,
        BLOCK_SIZE=cache.block_size,
        HEADS_PER_PROGRAM=query.shape[1] // cache.num_kv_heads // launch.head_tiles,
        HEAD_TILES=launch.head_tiles,
        HEAD_PROGRAMS=cache.num_kv_heads * launch.head_tiles,
        NUM_XCDS=launch.num_xcds,
        BLOCK_Q=launch.block_q,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        SPLIT_KV=split,
        TILES_PER_SPLIT=launch.tiles_per_split if split or (step.sliding_window and not step.decode) else 0,
        DECODE=step.decode,
        IS_CAUSAL=step.causal,
        USE_SLIDING_WINDOW=step.sliding_window is not None,
        USE_SOFTCAP=step.softcap is not None,
        USE_ALIBI_SLOPES=alibi,
        USE_SINKS=sinks,
        WRITE_LSE=lse,
        PACKING=cache.packing,
        X=cache.x,
        KV_SCALES=scales.kind,
        FP8_FORMAT=scales.format,
        NATIVE_FP8=scales.native_on(arch),
        SAME_STRIDES=cache.packing == "rows" and cache.key_strides[:2] == cache.value_strides[:2],
        STRIDE_ALIGN=alignment(*query.stride()[:2], *cache.key_strides, *cache.value_strides),
        X_DIVIDES_VALUE_STRIDE=cache.packing != "shuffle" or cache.value_strides[1] % cache.x == 0,
        USE_PDL=dependent,
        FP8_PAIRS=pairs,
        X_DIVIDES_BLOCK_SIZE=grouped,
        K_MFMA_LAYOUT=keys_matched,
        V_MFMA_LAYOUT=values_matched,
        CONTIGUOUS_TOKENS=run_length,
        WEIGHT_EXPONENT=FP16_WEIGHT_EXPONENT.value if pairs or query.dtype == torch.float16 else 0.0,
        QUERY_IN_LDS=launch.query_in_lds and scales.kind == "none" and step.scale >= 0,
        PRE_LOAD_V=launch.pre_load_v,
        LOAD_K_BY_TOKEN=cache.packing == "rows" or (launch.load_k_by_token and not keys_matched),
    )
