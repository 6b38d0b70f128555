# SPDX-License-Identifier: Apache-2.0
"""What the tests of attention share: small batches, calls into NaN, the float64 answer, the verdict on a row."""

from __future__ import annotations

import copy

import torch
from support.pools import Batch, batch
from support.tolerances import ROW_RELATIVE

from pagedkv.attention import reference
from pagedkv.attention.paged import paged_attention
from pagedkv.device import INTERPRETED

# The interpreter computes no bf16, so there the launcher refuses it.
DTYPES = ["float32", "float16"] + ([] if INTERPRETED else ["bfloat16"])
HALF = "float16" if INTERPRETED else "bfloat16"


def small(device: str, query_lens: list[int], seq_lens: list[int], **more) -> Batch:
    """A batch of 4 query heads and 2 KV heads of 64 channels, fp32, interleaved blocks of 16, but for what is named."""
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 64, "block_size": 16, "layout_name": "interleaved"}
    return batch(device=device, query_lens=query_lens, seq_lens=seq_lens, **(shape | {"dtype": "float32"} | more))


def promise(case, device: str, query_lens: list[int], seq_lens: list[int]) -> Batch:
    """A batch of the shapes, layout and quantisation of a `pagedkv.configurations.Configuration`."""
    names = ("dtype", "num_q_heads", "num_kv_heads", "head_size", "block_size", "window", "quantised", "scales")
    shape = {name: getattr(case, name) for name in names}
    return batch(layout_name=case.layout, device=device, query_lens=query_lens, seq_lens=seq_lens, **shape)


def sequences(data: Batch, seqs: list[int]) -> Batch:
    """Those sequences of a batch, in that order, under the bounds of the whole batch."""
    part = copy.copy(data)
    starts = data.query_start_loc.tolist()
    part.query = torch.cat([data.query[starts[s] : starts[s + 1]] for s in seqs])
    part.block_table, part.seq_lens = data.block_table[seqs], data.seq_lens[seqs]
    lens = [0, *(starts[s + 1] - starts[s] for s in seqs)]
    part.query_start_loc = torch.tensor(lens, device=data.query.device).cumsum(0).int()
    return part


def attend(data: Batch, *, call=paged_attention, scale: float | None = None, dtype=None, **options) -> torch.Tensor:
    """Attend with the data's own metadata and bounds, unless the options name others, into an output of NaN."""
    out = torch.full_like(data.query, float("nan"), dtype=dtype)
    bounds = {"max_query_len": data.max_query_len, "max_seq_len": data.max_seq_len}
    scale = data.query.shape[-1] ** -0.5 if scale is None else scale
    call(data.query, data.pool.cache, out, scale=scale, **(data.metadata | bounds | options))
    return out


def expected_with_lse(data: Batch, *, scale: float | None = None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    scale = data.query.shape[-1] ** -0.5 if scale is None else scale
    sides = [data.pool.rows(side) for side in ("key", "value")]
    return reference.attention(data.query, *sides, **data.metadata, scale=scale, **options)


def expected(data: Batch, **options) -> torch.Tensor:
    return expected_with_lse(data, **options)[0]


def check(out: torch.Tensor, golden: torch.Tensor, record, op: str = "attention") -> None:
    """Every row within the tolerance of its dtype; a row of zeros exactly zero; NaN nowhere."""
    dtype = str(out.dtype).removeprefix("torch.")
    record("dtype", dtype)
    record("shape", "x".join(map(str, out.shape)))
    error = out.double().cpu() - golden
    record("max_abs_err", error.abs().max().item())
    rows, norms = error.norm(dim=-1), golden.norm(dim=-1)
    # NaN is wrong where the answer is a number, also where that is 0; a row without an answer (NaN) cannot be wrong.
    off_from_zero = (rows > 0) | (rows.isnan() & ~norms.isnan())
    relative = torch.where(norms > 0, rows / norms, torch.where(off_from_zero, float("inf"), 0.0))
    record("max_row_relative_err", relative.max().item())
    bound = ROW_RELATIVE[op, dtype]
    wrong = ~(relative <= bound)
    record("max_row_relative_err_allowed", bound)
    record("rows_off", int(wrong.sum()))
    record("rows", wrong.numel())
    off = [float(f"{each:.2g}") for each in relative[wrong][:5].tolist()]
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} (token, head) rows are off by more than {bound:.1e} of their norm; "
        f"first (token, head): {wrong.nonzero()[:5].tolist()}, off by {off}"
    )


def lse_error(lse: torch.Tensor, golden: torch.Tensor) -> float:
    """Largest difference of sums of exponentials; 0 where both say that nothing was seen."""
    error = (lse.double().cpu() - golden).nan_to_num(nan=float("inf"))
    return torch.where(lse.cpu() == golden, 0.0, error).abs().max().item()
