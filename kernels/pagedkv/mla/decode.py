# SPDX-License-Identifier: Apache-2.0
"""The launcher of MLA decode: checks, tables, persistent kernel, reduce."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pagedkv.arch import NEVER, next_power_of_two
from pagedkv.checks import lengths, positive
from pagedkv.device import INTERPRETED, current, on
from pagedkv.errors import ArgumentError
from pagedkv.launch import tuning
from pagedkv.mla import checks
from pagedkv.mla.kernel import MlaOptions, MlaStrides, mla_decode_kernel, mla_reduce_kernel
from pagedkv.mla.launch import MlaShape, choose, options
from pagedkv.mla.schedule import check, sizes
from pagedkv.mla.tables import allocate, fill
from pagedkv.prepared import TWO_GIB, Launch, call, look
from pagedkv.strides import alignment

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.fp8.formats import FormatName
    from pagedkv.mla.tables import Tables
    from pagedkv.prepared import Prepared


def mla_decode(
    query: Tensor,  # [num_tokens, num_heads, latent_size + rope_size]
    cache: Tensor,  # [num_blocks, block_size, latent_size + rope_size]
    out: Tensor,  # [num_tokens, num_heads, latent_size]
    *,
    block_table: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32
    query_start_loc: Tensor,  # [num_seqs + 1] int32
    max_query_len: int,
    scale: float,
    lse: Tensor | None = None,  # [num_tokens, num_heads] fp32
    cache_format: FormatName | None = None,
    cache_scale: Tensor | None = None,  # [] or [1] fp32
    tables: Tables | None = None,
    programs: int | None = None,
    debug: bool = False,
) -> None:
    """Attend the last tokens of each sequence to its latent cache, in the absorbed form; their rows are already cached.

        out[n, h, :] = softmax_p(scale * query[n, h, :] . cache[p, :]) cache[p, :latent_size],   p <= position(n)

    Query token t of a sequence stands at `seq_len - query_len + t`. Query lengths may differ; several tokens are
    multi-token prediction or a short extend. Fit for graph capture: it never waits for the device, and grid, tables and
    scratch follow from shapes and from `max_query_len`.

    Args:
        query: Absorbed queries, latent channels first; last dimension dense.
        cache: Latent rows `kv_c | k_pe`, any block and row strides (padded pages), last dimension dense. In the dtype
            of the query, or uint8 codes of `cache_format`.
        out: Result. Rows behind `query_start_loc[-1]` are left alone; a query that sees no token gets 0.
        block_table: Block ids of each sequence; entries behind its tokens are not looked up.
        seq_lens: Tokens of each sequence in the cache, those of this step included; 0 for padding.
        query_start_loc: Where the queries of each sequence begin in `query`.
        max_query_len: Upper bound of the query lengths.
        scale: Factor of the scores: that of the model's heads, not `576 ** -0.5`.
        lse: Where the natural logarithm of each row's softmax denominator goes, -inf for a query that sees nothing.
        cache_format: FP8 format of the cache, if it is quantised.
        cache_scale: What its values are multiplied with, one number for all.
        tables: The schedule of this step, for callers with many layers (`mla.tables.fill`); None makes one.
        programs: Programs that run at a time; None lets the tuning data decide.
        debug: Also check the scale, lengths, block ids and tables (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
        ScheduleError: with debug, tables that do not cover the step (`pagedkv.mla.schedule`).
    """

    def prepare() -> Prepared | None:
        num_seqs = checks.tensors(query, cache, out, block_table, seq_lens, query_start_loc, lse)
        checks.codes(query, cache, cache_format, cache_scale)
        if max_query_len < 1:
            raise ArgumentError(
                "length", "max_query_len", got=max_query_len, expected=">= 1", remedy="Pass the bound of the step."
            )
        if programs is not None and programs < 1:
            raise ArgumentError(
                "split", "programs", got=programs, expected="None or >= 1", remedy="Pass None to let tuning decide."
            )
        num_tokens, num_heads, width = query.shape
        latent_size = out.shape[-1]
        if num_tokens == 0 or num_seqs == 0:
            return None
        shape = MlaShape(
            latent_size=latent_size,
            rope_size=width - latent_size,
            element_bytes=query.element_size(),
            num_heads=num_heads,
            max_query_len=max_query_len,
            quantised=cache_format is not None,
            programs=programs,
        )
        arch = current(query)
        launch = choose(arch, shape)
        if tables is not None:
            checks.same_step(tables, launch, num_seqs)
        if debug:
            num_blocks, block_size, _ = cache.shape
            bounds = {"num_tokens": num_tokens, "max_query_len": max_query_len}
            if cache_scale is not None:
                positive("cache_scale", cache_scale)
            lengths(block_table, seq_lens, query_start_loc, **bounds, num_blocks=num_blocks, block_size=block_size)
        partials = sizes(num_seqs, launch.groups).partials
        parts = (partials, launch.tiles * launch.rows)
        lse_strides = (0, 0) if lse is None else lse.stride()
        # Two codes at a time, so at even addresses.
        even = (latent_size, width, cache.data_ptr(), *cache.stride()[:2])
        decode_options = MlaOptions(
            NUM_HEADS=num_heads,
            LATENT=latent_size,
            HAS_LSE=lse is not None,
            ROPE=width - latent_size,
            # Triton 3.6.0 for gfx942 halves the accumulator that comes into a product of 16 channels.
            HALF=max(16 if INTERPRETED else 32, next_power_of_two(latent_size) // 2),
            PADDED_ROPE=next_power_of_two(width - latent_size),
            BLOCK_SIZE=cache.shape[1],
            ROWS=launch.rows,
            TILE=launch.tile,
            TILES=launch.tiles,
            CAUSAL=max_query_len > 1,
            FORMAT=cache_format,
            NATIVE=cache_format == arch.native_fp8,
            ALIGN=alignment(*query.stride()[:2], *cache.stride()[:2]),
            AHEAD=arch.async_copies and arch.operand_from_lds_rows != NEVER,
            PAIRS=launch.pairs and not any(number % 2 for number in even),
            # In LDS, from where wgmma takes it: what is computed of it would be in registers, 36 loads a tile.
            KEPT=launch.rows >= arch.operand_from_lds_rows and cache_format is None and scale >= 0,
            SPREAD=launch.spread,
        )
        attend = Launch(
            mla_decode_kernel,
            (launch.groups * launch.tiles,),
            OPTIONS=decode_options,
            num_warps=launch.waves,
            num_stages=launch.stages,
            **options(arch, launch),
        )
        data = tuning(arch.name).mla_reduce
        rows = -(-max_query_len * num_heads // data.rows)
        merge = Launch(
            mla_reduce_kernel,
            (num_seqs, rows, -(-latent_size // data.channels)),
            NUM_HEADS=num_heads,
            LATENT=latent_size,
            HAS_LSE=lse is not None,
            TILE_ROWS=launch.tiles * launch.rows,
            ROWS=data.rows,
            CHANNELS=data.channels,
            CHUNK=data.chunk,
            num_warps=data.waves,
        )
        numbers = (
            scale * math.log2(math.e),
            MlaStrides(
                query=query.stride()[:2],
                cache=cache.stride()[:2],
                out=out.stride()[:2],
                lse=lse_strides,
                table=block_table.stride()[:1],
            ),
        )
        merge_numbers = (out.stride()[:2], lse_strides)
        mla = tuning(arch.name).mla
        wide = launch.rows == mla.rows and mla.wide_addresses  # with fewer rows the registers suffice

        def run(
            tables: Tables | None,
            query: Tensor,
            cache: Tensor,
            out: Tensor,
            block_table: Tensor,
            seq_lens: Tensor,
            query_start_loc: Tensor,
            lse: Tensor | None,
            cache_scale: Tensor | None,
        ) -> None:
            if tables is None:
                tables = allocate(query, shape, num_seqs)
                fill(tables, seq_lens, query_start_loc)
            if debug:
                query_lens = query_start_loc.diff().tolist()
                check(tables.schedule(), seq_lens.tolist(), query_lens, granularity=launch.tile)
            partial = query.new_empty((*parts, latent_size), dtype=torch.float32)
            sums = query.new_empty(parts, dtype=torch.float32)
            step = (seq_lens, query_start_loc)
            with on(query):
                works = (tables.works, tables.work_indptr, block_table)
                rows = _of_any_size(cache) if wide and not attend.compiled else cache
                attend(query, rows, cache_scale, out, lse, partial, sums, *works, *step, *numbers)
                merge(partial, sums, out, lse, tables.reduce_indptr, *step, *merge_numbers)

        return run, (attend, merge)

    tensors = (query, cache, out, block_table, seq_lens, query_start_loc, lse, cache_scale)
    given = (tables and tables.look, max_query_len, scale, cache_format, programs)
    call(None if debug else ("mla", *map(look, tensors), *given), prepare, tables, *tensors)


def _of_any_size(tensor: Tensor) -> Tensor:
    """Return the tensor as one that Triton for AMD compiles for as if it were above 2 GiB."""
    alias = tensor.detach()
    vars(alias)["ptr_range"] = lambda: TWO_GIB  # Triton asks this before it asks the storage
    return alias
