# SPDX-License-Identifier: Apache-2.0
"""A few launches of each kernel with one machine code and other data: for figures and mutants of machine code.

Each says what is wrong with its result; a NaN, an infinity and rows that nobody uses are among the data.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import torch
from support import mla_steps
from support.attending import attend, expected_with_lse, lse_error, small
from support.pools import FAR, Pool, pool
from support.tolerances import LSE_ABSOLUTE, ROW_RELATIVE

from pagedkv import layout
from pagedkv.attention import reference
from pagedkv.attention.merge import reduce_kernel
from pagedkv.cache import reference as cache_reference
from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.write import write_kv_cache
from pagedkv.mla import schedule
from pagedkv.mla.kernel import mla_reduce_kernel
from pagedkv.mla.tables import allocate, fill

LENGTHS = ([200, 117], [130, 1], [151, 49], [80, 177])
"""Tables of 13, 9, 10 and 12 blocks: Triton compiles another kernel for a stride of 1."""
SCALES = (0.125, 0.125, 0.125, -0.3)


def wrong(out: torch.Tensor, golden: torch.Tensor, bound: float) -> str:
    """What is wrong with rows: NaN where there is none or none where there is one, or an error beyond the bound."""
    if not torch.equal(out.isnan(), golden.isnan()):
        return "NaN"
    error = (out.double() - golden).nan_to_num(0.0, float("inf"), float("inf")).norm(dim=-1)
    return "" if (error <= bound * golden.nan_to_num(0.0).norm(dim=-1)).all() else f"error {error.max():.2g}"


SPARSE = tempfile.TemporaryDirectory()


def far(near: Pool) -> Pool:
    """The same rows, each block 2^30 elements behind the one before: addresses of 64 bits, as a pool in service has."""
    plan = layout.describe("interleaved", *near.plan.shape, padding=FAR + 8 - near.plan.shape[1] * 256, x=8)
    file = Path(SPARSE.name) / "pool"
    file.unlink(missing_ok=True)
    storage = torch.from_file(str(file), shared=True, size=plan.elements, dtype=near.storage.dtype)
    views = [storage.as_strided(view.shape, view.strides, view.offset) for view in (plan.key, plan.value)]
    for view, rows in zip(views, (near.key, near.value), strict=True):
        view.copy_(rows)
    return Pool(storage, plan, *views)


def attention(seq_lens, query_lens, **more):
    options = {"num_splits": more.pop("num_splits", 1), "max_query_len": max(query_lens), "max_seq_len": 256}
    data = small("cpu", query_lens, seq_lens, dtype="bfloat16", num_q_heads=32, **more)
    if seq_lens == LENGTHS[1]:
        data.query[0, ::5, 3] = float("nan")
    if seq_lens == LENGTHS[2] and "quantised" not in more:
        data.pool.value[data.block_table[0, 1].long(), 3, :, 5::7] = float("nan")
    if "quantised" not in more:
        data.pool = far(data.pool)
    op = "attention of scaled rows" if more else "attention"
    lse = torch.full(data.query.shape[:2], float("nan"))
    scale = SCALES[LENGTHS.index(seq_lens)]
    out = attend(data, **options, lse=lse, scale=scale)
    golden, golden_lse = expected_with_lse(data, scale=scale)
    off = lse_error(lse[~golden_lse.isnan()], golden_lse[~golden_lse.isnan()]) > LSE_ABSOLUTE
    return wrong(out, golden, ROW_RELATIVE[op, "bfloat16"]) or "lse" * off


def write(seed):
    gen = torch.Generator().manual_seed(seed)
    golden = pool("interleaved", (7, 16, 2, 64), "bfloat16", "cpu")
    got = far(golden)
    key, value = torch.randn(2, 37, 2, 64, generator=gen).bfloat16()
    key[3, 1, 5], value[4, 0, 6] = float("nan"), float("inf")
    slots = torch.randperm(7 * 16, generator=gen)[:37]
    slots[seed :: 5 + seed] = -1
    write_kv_cache(key, value, got.cache, slots)
    where = (slots[slots >= 0] // 16, slots[slots >= 0] % 16)
    golden.put("key", *where, key[slots >= 0])
    golden.put("value", *where, value[slots >= 0])
    pairs = [
        [getattr(each, side).contiguous().view(torch.int16) for each in (got, golden)] for side in ("key", "value")
    ]
    return "" if all(torch.equal(*pair) for pair in pairs) else "bytes of the pool"


def gather(starts, counts):
    data = small("cpu", [1] * 4, [start + count for start, count in zip(starts, counts, strict=True)], dtype="bfloat16")
    arguments = {
        "cu_seq_lens": torch.tensor([0, *counts]).cumsum(0).int(),
        "token_to_seq": torch.arange(4).repeat_interleave(torch.tensor(counts)).int(),
        "seq_starts": torch.tensor(starts).int(),
    }
    data.pool = far(data.pool)
    got, golden = (torch.full((2, sum(counts), 2, 64), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    gather_kv_cache(data.pool.cache, *got, data.block_table, **arguments)
    sides = [data.pool.rows(side) for side in ("key", "value")]
    cache_reference.gather(*sides, *golden, data.block_table, **arguments)
    return "" if torch.equal(got.view(torch.int16), golden.view(torch.int16)) else "gathered bytes"


def mla(seq_lens):
    data = mla_steps.step(
        "cpu", 32, [5 * seq_lens[0], 3 * seq_lens[1], 0], [1, 1, 0], dtype="bfloat16", latent=64, rope=64
    )
    if seq_lens == LENGTHS[1]:
        data.query[:, 3::5, 7] = float("nan")
    rows, scale = data.cache[:, :, None], SCALES[LENGTHS.index(seq_lens)]
    golden, golden_lse = reference.attention(data.query, rows, rows[..., :64], **data.metadata, scale=scale)
    out, lse = mla_steps.decode(data, programs=64, scale=scale)
    off = lse_error(lse[~golden_lse.isnan()], golden_lse[~golden_lse.isnan()]) > LSE_ABSOLUTE
    return wrong(out, golden, ROW_RELATIVE["mla", "bfloat16"]) or "lse" * off


def mla_schedule(seq_lens):
    lens = torch.randint(0, 900, (290,), generator=torch.Generator().manual_seed(seq_lens[0])).tolist()
    lens[3::7] = [0] * len(lens[3::7])
    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    data = mla_steps.step("cpu", 20, [16], dtype="bfloat16", latent=64, rope=64)
    tables = allocate(data.query, data.shape(programs=6), len(lens))
    for table in (tables.works, tables.work_indptr, tables.reduce_indptr):
        table.fill_(-7)
    launch = dataclasses.replace(tables.launch, tile=16, fixed=3, least=4)
    tables = dataclasses.replace(tables, launch=launch)
    fill(tables, torch.tensor(lens, dtype=torch.int32), starts)
    if tables.schedule() != schedule.plan(lens, [1] * len(lens), groups=launch.groups, fixed=3, least=4):
        return "another schedule"
    return "" if (tables.works[tables.work_indptr[-1] :] == -7).all() else "rows of no work item"


def reduce(seed):
    """As tests/kernels/attention/test_merge.py."""
    gen = torch.Generator().manual_seed(seed)
    partial, lse = torch.randn(7, 3, 13, 80, generator=gen), 8 * torch.randn(7, 3, 13, generator=gen)
    lse[:, :, 1 + seed :: 5] = float("-inf")
    lse[3, 1] = float("-inf")
    lse[4, 2] *= 1 + 12 * seed
    partial[lse == float("-inf")] = 0.0
    starts = torch.tensor([1, 3, 6], dtype=torch.int32)
    out, sums = torch.full((7, 3, 80), float("nan")), torch.full((3, 7), float("nan")).T
    sizes = {"NUM_HEADS": 3, "HEAD_SIZE": 80, "PADDED": 128, "ROWS": 4, "CHUNK": 8, "ONCE": False}
    strides = (out.stride()[:2], sums.stride())
    reduce_kernel[(6,)](
        partial[1:], lse[1:], out, sums, starts, 2, 18, 13, *strides, **sizes, LSE=True, DEPENDENT=False
    )
    weights = torch.exp2(lse.double() - lse.double().amax(-1, keepdim=True)).nan_to_num(0.0)
    total = weights.sum(-1, keepdim=True)
    golden = (weights[..., None] * partial.double()).sum(2) / torch.where(total > 0, total, 1.0)
    golden_sums = torch.logsumexp(lse.double() * torch.tensor(2.0).double().log(), dim=-1)
    golden[:1], golden[6:], golden_sums[:1], golden_sums[6:] = (float("nan"),) * 4
    close = torch.allclose(sums.double(), golden_sums, rtol=2.0**-22, atol=3 * 32 * 2.0**-24, equal_nan=True)
    return wrong(out, golden, ROW_RELATIVE["attention", "float32"]) or "lse" * (not close)


def mla_reduce(seed):
    """Sequences of no, one and many partial results; the single one was written by the decode and stays as it is."""
    gen = torch.Generator().manual_seed(seed)
    counts, heads, channels = torch.tensor([0, 3, 0, 17, 40]), 3, 80
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    partial, lse = torch.randn(60, 8, channels, generator=gen), 8 * torch.randn(60, 8, generator=gen)
    lse[seed::5] = float("-inf")
    lse[:, 4] *= 1 + 12 * seed
    partial[lse == float("-inf")] = 0.0
    starts, seq_lens = torch.tensor([0, 1, 2, 3, 5, 7]).int(), torch.tensor([9, 40, 0, 300, 900]).int()
    out, sums = torch.full((7, heads, channels), float("nan")), torch.full((7, heads), float("nan"))
    sizes = {"NUM_HEADS": heads, "LATENT": channels, "TILE_ROWS": 8, "ROWS": 4, "CHANNELS": 64, "CHUNK": 8}
    mla_reduce_kernel[(5, 2, 2)](
        partial, lse, out, sums, indptr, seq_lens, starts, out.stride()[:2], sums.stride(), HAS_LSE=True, **sizes
    )
    golden, golden_sums = torch.full(out.shape, float("nan")).double(), torch.full(sums.shape, float("nan")).double()
    for seq in range(1, 5):
        parts = slice(indptr[seq], indptr[seq + 1])
        for row in range((starts[seq + 1] - starts[seq]) * heads):
            token, head, own = starts[seq] + row // heads, row % heads, lse[parts, row].double()
            weights = torch.exp2(own - own.amax()) if len(own) else own
            golden[token, head] = (weights[:, None] * partial[parts, row].double()).sum(0) / weights.sum().clamp(
                min=1e-30
            )
            golden_sums[token, head] = torch.logsumexp(own * torch.tensor(2.0).double().log(), 0)
    close = torch.allclose(sums.double(), golden_sums, rtol=2.0**-22, atol=3 * 32 * 2.0**-24, equal_nan=True)
    return wrong(out, golden, ROW_RELATIVE["attention", "float32"]) or "lse" * (not close)


def of_lengths(case, *rest, **more):
    return [functools.partial(case, lengths, *rest, **more) for lengths in LENGTHS]


FIGURES = {
    "_write_kernel": [functools.partial(write, seed) for seed in range(4)],
    "_gather_kernel": [functools.partial(gather, [0, 5, 15, start], [17, 1, 18, 3]) for start in range(4)],
    "attention_kernel": of_lengths(attention, [1, 1]),
    "attention_kernel, extend": of_lengths(attention, [17, 1]),
    "attention_kernel, e4m3fn": of_lengths(attention, [1, 1], quantised="e4m3fn", scales="token"),
    "reduce_kernel": [functools.partial(reduce, seed) for seed in range(4)],
    "mla_decode_kernel": of_lengths(mla),
    "mla_reduce_kernel": [functools.partial(mla_reduce, seed) for seed in range(4)],
    "mla_schedule_kernel": of_lengths(mla_schedule),
}
"""Kernel, and what of it -> its launches."""
CASES = {name: cases for name, cases in FIGURES.items() if "," not in name}
"""What `support.mutants` changes."""
