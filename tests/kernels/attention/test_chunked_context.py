"""A long context attended in chunks, each by a call of its own over a slice of the block table, merged as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.attending import DTYPES, check, expected, expected_with_lse, lse_error, small
from support.mistakes import refused
from support.tolerances import LSE_MERGED_ABSOLUTE

from pagedkv.attention.cascade import merge_attention
from pagedkv.attention.paged import paged_attention

if TYPE_CHECKING:
    from support.pools import Batch

pytestmark = pytest.mark.device


def part(data: Batch, first: list[int], end: list[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend tokens `first .. end - 1` of each sequence, `first` at the beginning of a block: fp32 result and sums."""
    block_size = data.pool.cache.block_size
    width = max(1, *(-(-(e - f) // block_size) for f, e in zip(first, end, strict=True)))
    table = torch.full((len(first), width), 2**31 - 1, dtype=torch.int32)
    for seq, begin in enumerate(first):
        row = data.block_table[seq, begin // block_size :][:width]
        table[seq, : len(row)] = row
    lens = torch.tensor([max(0, e - f) for f, e in zip(first, end, strict=True)], dtype=torch.int32)
    device = data.query.device
    out = torch.full(data.query.shape, float("nan"), device=device)
    lse = torch.full(data.query.shape[:2], float("nan"), device=device)
    paged_attention(
        data.query,
        data.pool.cache,
        out,
        block_table=table.to(device),
        seq_lens=lens.to(device),
        query_start_loc=data.query_start_loc,
        max_query_len=data.max_query_len,
        max_seq_len=max(1, int(lens.max())),
        scale=data.query.shape[-1] ** -0.5,
        lse=lse,
        **options,
    )
    return out, lse


def in_chunks(data: Batch, chunks: int, sinks: torch.Tensor | None, *, everywhere: bool = False, **options):
    """The context of each sequence, in whole blocks, in `chunks` parts without a mask; then the rest with one.

    The sink belongs to the rest; `everywhere` is the mistake of counting it with each chunk too.
    """
    block_size = data.pool.cache.block_size
    lens, query_lens = data.seq_lens.tolist(), data.query_start_loc.diff().tolist()
    own = [(n - q) // block_size * block_size for n, q in zip(lens, query_lens, strict=True)]
    chunk = -(-max(own) // chunks // block_size) * block_size
    out, lse = part(data, own, lens, sinks=sinks, **options)
    for first in range(0, max(own), chunk):
        bounds = ([min(first, n) for n in own], [min(first + chunk, n) for n in own])
        seen, seen_lse = part(data, *bounds, causal=False, sinks=sinks if everywhere else None, **options)
        merged, merged_lse = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
        merge_attention(merged, merged_lse, out, lse, seen, seen_lse)
        out, lse = merged, merged_lse
    return out.to(data.query.dtype), lse


LENGTHS = ([7, 5, 3], [250, 90, 3])  # no context at all in the last one, none in the later chunks of the second


def sinks_of(device: str) -> torch.Tensor:
    return (torch.arange(4, device=device) - 1.0) * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_context_in_chunks(chunks, sinks, softcap, dtype, device, record_property):
    data = small(device, *LENGTHS, dtype=dtype)
    options = {"sinks": sinks_of(device) if sinks else None, "softcap": softcap}
    out, lse = in_chunks(data, chunks, **options)
    golden, golden_lse = expected_with_lse(data, **options)
    check(out, golden, record_property, "attention in six parts")
    assert lse_error(lse, golden_lse) <= chunks * LSE_MERGED_ABSOLUTE


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_a_sink_in_every_chunk_is_noticed(chunks, device, record_property):
    """Its weight would count once more for each chunk."""
    data = small(device, *LENGTHS)
    wrong, _ = in_chunks(data, chunks, sinks_of(device), everywhere=True)
    with pytest.raises(AssertionError, match=r"are off by more than"):
        check(wrong, expected(data, sinks=sinks_of(device)), record_property, "attention in six parts")


def test_a_part_is_fp32_or_of_the_dtype_of_the_query(device):
    """fp16 beside fp32 queries would be rounded before the merge."""
    data = small(device, [1], [20])
    out = torch.full_like(data.query, float("nan"), dtype=torch.float16)
    bounds = {"max_query_len": 1, "max_seq_len": 20, "scale": 0.125}
    with refused("dtype", r"^out: got torch\.float16"):
        paged_attention(data.query, data.pool.cache, out, **data.metadata, **bounds)
