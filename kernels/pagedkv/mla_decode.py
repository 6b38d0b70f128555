"""The launcher of MLA decode: checks, tables, persistent kernel, reduce."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton

from . import checks
from .arch import next_power_of_two
from .device import INTERPRETED, current, on
from .errors import HeadRatioError, HeadSizeError, LengthError, ScaleError, ShapeError, SplitError, TablesError
from .fp8 import FORMAT_NAMES
from .launch import tuning
from .mla_kernel import mla_decode_kernel
from .mla_launch import choose, options
from .mla_reduce import mla_reduce_kernel
from .mla_schedule import check, sizes
from .mla_tables import allocate, fill
from .strides import hidden_alignment

if TYPE_CHECKING:
    from torch import Tensor

    from .fp8 import FormatName
    from .mla_tables import Tables

LARGEST_LATENT, LARGEST_ROPE = 512, 128


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
        tables: The schedule of this step, for callers with many layers (`mla_tables.fill`); None makes one.
        programs: Programs that run at a time; None lets the tuning data decide.
        debug: Also check lengths, block ids and tables (synchronises with the device).

    Raises:
        ArgumentError: the subclass of `pagedkv.errors` that names the mistake.
        ScheduleError: with debug, tables that do not cover the step (`pagedkv.mla_schedule`).
    """
    num_seqs = _check(query, cache, out, block_table, seq_lens, query_start_loc, lse)
    _check_format(query, cache, cache_format, cache_scale)
    if max_query_len < 1:
        raise LengthError("max_query_len", got=max_query_len, expected=">= 1", remedy="Pass the bound of the step.")
    if programs is not None and programs < 1:
        raise SplitError("programs", got=programs, expected="None or >= 1", remedy="Pass None to let tuning decide.")
    num_tokens, num_heads, width = query.shape
    latent_size = out.shape[-1]
    if num_tokens == 0 or num_seqs == 0:
        return
    shape = {"latent_size": latent_size, "rope_size": width - latent_size, "num_heads": num_heads}
    shape |= {"max_query_len": max_query_len, "programs": programs, "quantised": cache_format is not None}
    if tables is None:
        tables = allocate(query, **shape, num_seqs=num_seqs)
        fill(tables, seq_lens, query_start_loc)
    else:
        _check_tables(tables, choose(current(), **shape, element_bytes=query.element_size()), num_seqs)
    if debug:
        _check_values(cache, block_table, seq_lens, query_start_loc, num_tokens, max_query_len, tables)
    launch = tables.launch
    partials = sizes(num_seqs, launch.groups).partials
    partial = query.new_empty((partials, launch.tiles * launch.rows, latent_size), dtype=torch.float32)
    partial_lse = query.new_empty((partials, launch.tiles * launch.rows), dtype=torch.float32)
    lse_strides = (0, 0) if lse is None else lse.stride()
    constants = {"NUM_HEADS": num_heads, "LATENT": latent_size, "HAS_LSE": lse is not None}
    with on(query):
        mla_decode_kernel[(launch.groups * launch.tiles,)](
            query,
            cache,
            cache_scale,
            out,
            lse,
            partial,
            partial_lse,
            tables.works,
            tables.work_indptr,
            block_table,
            seq_lens,
            query_start_loc,
            scale * math.log2(math.e),
            *query.stride()[:2],
            *cache.stride()[:2],
            *out.stride()[:2],
            *lse_strides,
            block_table.stride(0),
            **constants,
            ROPE=width - latent_size,
            HALF=next_power_of_two(latent_size) // 2,
            PADDED_ROPE=next_power_of_two(width - latent_size),
            BLOCK_SIZE=cache.shape[1],
            ROWS=launch.rows,
            TILE=launch.tile,
            TILES=launch.tiles,
            CAUSAL=max_query_len > 1,
            FORMAT=cache_format,
            ALIGN=hidden_alignment(*query.stride()[:2], *cache.stride()[:2]),
            num_warps=launch.waves,
            num_stages=launch.stages,
            **options(current(), launch),
        )
        reduce = tuning(current().name).mla_reduce
        rows = triton.cdiv(max_query_len * num_heads, reduce.rows)
        mla_reduce_kernel[(num_seqs, rows, triton.cdiv(latent_size, reduce.channels))](
            partial,
            partial_lse,
            out,
            lse,
            tables.reduce_indptr,
            seq_lens,
            query_start_loc,
            *out.stride()[:2],
            *lse_strides,
            **constants,
            TILE_ROWS=launch.tiles * launch.rows,
            ROWS=reduce.rows,
            CHANNELS=reduce.channels,
            CHUNK=reduce.chunk,
            num_warps=reduce.waves,
        )


def _check(
    query: Tensor,
    cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    lse: Tensor | None,
) -> int:
    """Check the tensors without reading them; return the number of sequences."""
    checks.shape("cache", cache, (None, None, None), "[num_blocks, block_size, latent_size + rope_size]")
    if 0 in cache.shape:
        raise ShapeError(
            "cache", got=tuple(cache.shape), expected="no empty axis", remedy="Allocate at least one block."
        )
    checks.shape("query", query, (None, None, cache.shape[-1]), "[num_tokens, num_heads, latent_size + rope_size]")
    checks.shape("out", out, (*query.shape[:2], None), "[num_tokens, num_heads, latent_size]")
    _check_channels(out.shape[-1], query.shape[-1] - out.shape[-1])
    if query.shape[1] == 0:
        raise HeadRatioError("query", got="0 heads", expected="at least one", remedy="Leave the layer out.")
    checks.shape("block_table", block_table, (None, None), "[num_seqs, max_blocks]")
    num_seqs = block_table.shape[0]
    checks.shape("seq_lens", seq_lens, (num_seqs,), "[num_seqs]")
    checks.shape("query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    checks.dtype("query", query, checks.DTYPES, "Cast it; only the cache may hold codes.")
    checks.dtype("out", out, (query.dtype,), "Allocate it in the dtype of the query.")
    for name, tensor in (("query", query), ("cache", cache), ("out", out)):
        checks.dense(name, tensor)
    if INTERPRETED and query.dtype == torch.bfloat16:
        # Triton 3.6 to 3.9 interpret bf16 arithmetic on the bit patterns.
        checks.dtype("query", query, (torch.float32, torch.float16), "Triton's interpreter computes bf16 wrongly.")
    others = {"query": query, "out": out, "block_table": block_table}
    others |= {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    if lse is not None:
        checks.shape("lse", lse, tuple(query.shape[:2]), "[num_tokens, num_heads]")
        checks.dtype("lse", lse, (torch.float32,), "Allocate it as float32.")
        others["lse"] = lse
    checks.indices({name: others[name] for name in ("block_table", "seq_lens", "query_start_loc")})
    checks.device(("cache", cache), others)
    return num_seqs


def _check_format(query: Tensor, cache: Tensor, cache_format: str | None, cache_scale: Tensor | None) -> None:
    """Check that the cache holds what the call says."""
    if cache_format is None:
        checks.dtype("cache", cache, (query.dtype,), "Cast the query, or name the cache_format of FP8 codes.")
    else:
        checks.dtype("cache", cache, (torch.uint8,), "View the FP8 codes as uint8.")
    if cache_format not in (None, *FORMAT_NAMES):
        raise ScaleError(
            "cache_format",
            got=repr(cache_format),
            expected=f"None or one of {', '.join(FORMAT_NAMES)}",
            remedy="e4m3fnuz is the format of gfx942, e4m3fn that of gfx950 and CUDA.",
        )
    if (cache_format is None) != (cache_scale is None) or (cache_scale is not None and cache_scale.numel() != 1):
        raise ScaleError(
            "cache_scale",
            got="none" if cache_scale is None else tuple(cache_scale.shape),
            expected="one number with a cache_format, none without",
            remedy="Pass the layer's scale as it is; a latent cache has one for all rows.",
        )
    if cache_scale is not None:
        checks.dtype("cache_scale", cache_scale, (torch.float32,), "Scales are fp32.")
        checks.device(("cache", cache), {"cache_scale": cache_scale})


def _check_channels(latent_size: int, rope_size: int) -> None:
    """Check the sizes that follow from `out` and `query`."""
    for name, size, most in (("out", latent_size, LARGEST_LATENT), ("query", rope_size, LARGEST_ROPE)):
        smallest = 32 if name == "out" else 16
        if not smallest <= size <= most or size % 8:
            what = "latent_size" if name == "out" else "rope_size"
            raise HeadSizeError(
                name,
                got=f"{what} {size}",
                expected=f"a multiple of 8 in {smallest} .. {most}",
                remedy="latent_size is the last extent of out, rope_size what query has beyond it.",
            )


def _check_tables(tables: Tables, expected: object, num_seqs: int) -> None:
    """Check that the tables were allocated for this step: same launch, same number of sequences."""
    if tables.launch != expected or tables.reduce_indptr.shape[0] != num_seqs + 1:
        raise TablesError(
            "tables",
            got=f"{tables.launch} for {tables.reduce_indptr.shape[0] - 1} sequences",
            expected=f"{expected} for {num_seqs} sequences",
            remedy="Allocate them with the heads, dtype, max_query_len and programs of this call.",
        )


def _check_values(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_tokens: int,
    max_query_len: int,
    tables: Tables,
) -> None:
    """Check lengths, block ids of visible tokens and the tables; reads device memory."""
    num_blocks, block_size = cache.shape[:2]
    query_lens = query_start_loc.diff()
    checks.within("query_start_loc", query_start_loc, num_tokens + 1, "num_tokens + 1")
    checks.within("query_start_loc (its differences)", query_lens, max_query_len + 1, "max_query_len + 1")
    checks.within("seq_lens", seq_lens, block_table.shape[1] * block_size + 1, "max_blocks * block_size + 1")
    column = torch.arange(block_table.shape[1], device=block_table.device)
    used = (column * block_size < seq_lens[:, None]) & (query_lens > 0)[:, None]
    checks.blocks_exist(block_table, used, num_blocks)
    check(tables.schedule(), seq_lens.tolist(), query_lens.tolist(), granularity=tables.launch.tile)
