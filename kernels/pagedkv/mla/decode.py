# SPDX-License-Identifier: Apache-2.0
"""The launcher of MLA decode: checks, tables, persistent kernel, reduce."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagedkv.arch import next_power_of_two
from pagedkv.checks import at_least_one, lengths, positive
from pagedkv.device import INTERPRETED, current, on
from pagedkv.mla import checks
from pagedkv.mla.kernel import MlaOptions, MlaStrides, mla_decode_kernel, mla_reduce_kernel
from pagedkv.mla.launch import MlaShape, choose, launch_data, options
from pagedkv.mla.schedule import check, sizes
from pagedkv.mla.tables import allocate, fill
from pagedkv.prepared import TWO_GIB, Launch, compiler_settings, find, keep, signature
from pagedkv.strides import alignment

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.arch import Arch
    from pagedkv.fp8.formats import FormatName
    from pagedkv.mla.launch import MlaLaunch
    from pagedkv.mla.tables import Tables


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
        out: Result. Rows after `query_start_loc[-1]` are left alone; a query that sees no token gets 0.
        block_table: Block ids of each sequence; entries after its tokens are not looked up.
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
    tensors = (query, cache, out, block_table, seq_lens, query_start_loc, lse, cache_scale)
    options_of_call = (tables and tables.signature, max_query_len, scale, cache_format, programs)
    key = None if debug else ("mla", *map(signature, tensors), *options_of_call, compiler_settings())
    call = find(key)
    if call is not None:
        call.run(tables, *tensors)
        return
    num_seqs = checks.tensors(query, cache, out, block_table, seq_lens, query_start_loc, lse)
    checks.codes(query, cache, cache_format, cache_scale)
    at_least_one("length", "max_query_len", max_query_len, "Pass the bound of the step.")
    at_least_one("split", "programs", programs)
    if query.shape[0] == 0 or num_seqs == 0:
        return
    latent_size = out.shape[-1]
    shape = MlaShape(
        latent_size=latent_size,
        rope_size=query.shape[2] - latent_size,
        element_bytes=query.element_size(),
        num_heads=query.shape[1],
        max_query_len=max_query_len,
        quantised=cache_format is not None,
        programs=programs,
    )
    launch = choose(current(query), shape)
    if tables is not None:
        checks.same_step(tables, launch, num_seqs)
    if debug:
        if cache_scale is not None:
            positive("cache_scale", cache_scale)
        lengths(
            block_table,
            seq_lens,
            query_start_loc,
            num_tokens=query.shape[0],
            max_query_len=max_query_len,
            num_blocks=cache.shape[0],
            block_size=cache.shape[1],
        )
        tables = tables or _filled(query, shape, seq_lens, query_start_loc)
        query_lens = query_start_loc.diff().tolist()
        check(tables.schedule(), seq_lens.tolist(), query_lens, granularity=launch.block_n)
    call = _prepare(shape, launch, query, cache, out, block_table, lse, scale, cache_format)
    call.run(tables, *tensors)
    keep(key, call)


@dataclass(frozen=True)
class MlaCall:
    """Launches of the calls with one signature."""

    attend: Launch
    merge: Launch
    """Reduces the partial results of sequences that several programs share."""
    shape: MlaShape
    partial: tuple[int, int]
    """Extents of the partial results: work items, rows."""
    wide: bool
    """Whether the kernel is compiled for a cache above 2 GiB whatever its size."""
    numbers: tuple[float, MlaStrides]
    """Last arguments of `attend`."""
    merge_numbers: tuple[tuple[int, ...], tuple[int, ...]]
    """Last arguments of `merge`."""

    def run(
        self,
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
        """Launch for the tensors of one call; those of `mla_decode`."""
        if tables is None:
            tables = _filled(query, self.shape, seq_lens, query_start_loc)
        partial = query.new_empty((*self.partial, self.shape.latent_size), dtype=torch.float32)
        sums = query.new_empty(self.partial, dtype=torch.float32)
        step = (seq_lens, query_start_loc)
        with on(query):
            works = (tables.works, tables.work_indptr, block_table)
            rows = _of_any_size(cache) if self.wide and not self.attend.compiled else cache
            self.attend(query, rows, cache_scale, out, lse, partial, sums, *works, *step, *self.numbers)
            self.merge(partial, sums, out, lse, tables.reduce_indptr, *step, *self.merge_numbers)


def _filled(query: Tensor, shape: MlaShape, seq_lens: Tensor, query_start_loc: Tensor) -> Tables:
    tables = allocate(query, shape, seq_lens.shape[0])
    fill(tables, seq_lens, query_start_loc)
    return tables


def _prepare(
    shape: MlaShape,
    launch: MlaLaunch,
    query: Tensor,
    cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    lse: Tensor | None,
    scale: float,
    cache_format: FormatName | None,
) -> MlaCall:
    """Choose the launches of a call that was checked."""
    arch = current(query)
    num_seqs = block_table.shape[0]
    # Codes are read two at a time, so at even addresses.
    even = (shape.latent_size, query.shape[2], cache.data_ptr(), *cache.stride()[:2])
    constants = MlaOptions(
        NUM_HEADS=shape.num_heads,
        KV_LORA_RANK=shape.latent_size,
        WRITE_LSE=lse is not None,
        ROPE_HEAD_DIM=shape.rope_size,
        # Triton 3.6.0 for gfx942 halves the accumulator that comes into a product of 16 channels.
        HALF_RANK=max(16 if INTERPRETED else 32, next_power_of_two(shape.latent_size) // 2),
        ROPE_PADDED=next_power_of_two(shape.rope_size),
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        ROW_TILES=launch.row_tiles,
        IS_CAUSAL=shape.max_query_len > 1,
        FP8_FORMAT=cache_format,
        NATIVE_FP8=cache_format == arch.native_fp8,
        STRIDE_ALIGN=alignment(*query.stride()[:2], *cache.stride()[:2]),
        PREFETCH_BLOCK_TABLE=arch.async_copies and not arch.amd,
        FP8_PAIRS=launch.fp8_pairs and not any(number % 2 for number in even),
        # In LDS, from where wgmma takes it: what is computed of it would be in registers, 36 loads a tile.
        QUERY_IN_LDS=launch.block_m >= arch.operand_from_lds_rows and cache_format is None and scale >= 0,
        SPLIT_K_WARPS=launch.split_k_warps,
    )
    attend = Launch(
        mla_decode_kernel,
        (launch.groups * launch.row_tiles,),
        OPTIONS=constants,
        num_warps=launch.waves,
        num_stages=launch.stages,
        **options(arch, launch),
    )
    lse_strides = (0, 0) if lse is None else lse.stride()
    strides = MlaStrides(
        query=query.stride()[:2],
        cache=cache.stride()[:2],
        out=out.stride()[:2],
        lse=lse_strides,
        table=block_table.stride()[:1],
    )
    mla, _, _ = launch_data(arch)
    return MlaCall(
        attend,
        _merge(arch, shape, launch, num_seqs, has_lse=lse is not None),
        shape,
        partial=(sizes(num_seqs, launch.groups).partials, launch.row_tiles * launch.block_m),
        wide=launch.block_m == mla.block_m and bool(mla.wide_addresses),  # with fewer rows the registers suffice
        numbers=(scale * math.log2(math.e), strides),
        merge_numbers=(out.stride()[:2], lse_strides),
    )


def _merge(arch: Arch, shape: MlaShape, launch: MlaLaunch, num_seqs: int, *, has_lse: bool) -> Launch:
    """Choose the launch that reduces the partial results of sequences that several programs share."""
    _, _, data = launch_data(arch)
    rows = -(-shape.max_query_len * shape.num_heads // data.block_m)
    return Launch(
        mla_reduce_kernel,
        (num_seqs, rows, -(-shape.latent_size // data.block_d)),
        NUM_HEADS=shape.num_heads,
        KV_LORA_RANK=shape.latent_size,
        WRITE_LSE=has_lse,
        ROWS_PER_PARTIAL=launch.row_tiles * launch.block_m,
        BLOCK_M=data.block_m,
        BLOCK_D=data.block_d,
        BLOCK_SPLITS=data.block_splits,
        num_warps=data.waves,
    )


def _of_any_size(tensor: Tensor) -> Tensor:
    """Return the tensor as one that Triton for AMD compiles for as if it were above 2 GiB."""
    alias = tensor.detach()
    vars(alias)["ptr_range"] = lambda: TWO_GIB  # Triton asks this before it asks the storage
    return alias
