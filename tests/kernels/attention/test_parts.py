# SPDX-License-Identifier: Apache-2.0
"""Results over parts of the KV: merged by definition, and a long context in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.attending import DTYPES, attend, check, expected_with_lse, lse_error, small
from support.mistakes import refused
from support.tolerances import LSE_ABSOLUTE, LSE_MERGED_ABSOLUTE

from pagedkv.attention.merge import merge_attention

if TYPE_CHECKING:
    from support.pools import Batch

pytestmark = pytest.mark.device

NAN, NOTHING = float("nan"), float("-inf")


def parts(device: str, dtype: str) -> list[torch.Tensor]:
    """Prefix and suffix of 9 tokens, 3 heads, 80 channels, with strides of their own; some saw nothing and are NaN."""
    torch.manual_seed(3)
    sums = torch.empty(2, 3, 9).uniform_(-8, 8).to(device).transpose(1, 2)
    sums[0, 2:4], sums[1, 3:5] = NOTHING, NOTHING
    rows = torch.randn(9, 2, 3, 96).to(device, getattr(torch, dtype))[..., :80].transpose(0, 1)
    rows[sums == NOTHING] = NAN
    return [rows[0], sums[0], rows[1].transpose(0, 1).contiguous().transpose(0, 1), sums[1]]


@pytest.mark.parametrize("part", ["float32", "float16", "bfloat16"])  # loaded and widened: the interpreter can
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_attention(part, dtype, device, record_property):
    prefix, prefix_lse, suffix, suffix_lse = parts(device, part)
    wide = torch.full((9, 6, 80), NAN, dtype=getattr(torch, dtype), device=device)
    lse = torch.full((9, 6), NAN, device=device)
    merge_attention(wide[:, ::2], lse[:, ::2], prefix, prefix_lse, suffix, suffix_lse)

    sums = torch.stack([prefix_lse, suffix_lse]).double().cpu()
    weights = torch.softmax(sums, dim=0).nan_to_num(0.0)[..., None]
    golden = (weights * torch.stack([prefix, suffix]).double().cpu().nan_to_num(0.0)).sum(0)
    check(wide[:, ::2], golden, record_property, "merge")
    assert lse_error(lse[:, ::2], torch.logsumexp(sums, dim=0)) <= LSE_ABSOLUTE
    assert (wide[3, ::2] == 0).all()
    assert (lse[3, ::2] == NOTHING).all()
    assert wide[:, 1::2].isnan().all()
    assert lse[:, 1::2].isnan().all()


def test_merge_attention_hides_no_nan(device):
    prefix, prefix_lse, suffix, suffix_lse = parts(device, "float32")
    prefix_lse[0], suffix_lse[4], prefix[5, 1, 7] = NAN, NAN, NAN
    out = torch.zeros(9, 3, 80, device=device)
    lse = torch.zeros(9, 3, device=device)
    merge_attention(out, lse, prefix, prefix_lse, suffix, suffix_lse)
    assert out[[0, 4]].isnan().all()
    assert lse[[0, 4]].isnan().all()
    assert out[5, 1].isnan().nonzero().tolist() == [[7]]
    assert out[[1, 2, 3, 6, 7, 8]].isfinite().all()


def test_merge_attention_leaves_rows_outside_its_sequences_alone(device):
    starts = torch.tensor([2, 5, 7], dtype=torch.int32, device=device)
    out = torch.full((9, 3, 80), 7.0, device=device)
    merge_attention(out, None, *parts(device, "float32"), query_start_loc=starts)
    assert (out[:2] == 7).all()
    assert (out[7:] == 7).all()
    assert (out[2:7] != 7).all()


MERGE = {
    "sums in fp16": ({"prefix_lse": torch.zeros(5, 4).half()}, "dtype", "prefix_lse"),
    "sums of fewer heads": ({"suffix_lse": torch.zeros(5, 3)}, "shape", "suffix_lse"),
    "parts of other tokens": ({"suffix_out": torch.zeros(4, 4, 64)}, "shape", "suffix_out"),
    "integers": ({"prefix_out": torch.zeros(5, 4, 64).int()}, "dtype", "prefix_out"),
    "transposed output": ({"out": torch.zeros(5, 64, 4).mT}, "stride", "out"),
    "sums elsewhere": ({"lse": torch.zeros(5, 4, device="meta")}, "device", "lse"),
    "64-bit starts": ({"query_start_loc": torch.tensor([0, 5])}, "dtype", "query_start_loc"),
}


@pytest.mark.parametrize(("wrong", "mistake", "named"), MERGE.values(), ids=MERGE)
def test_merge_attention_refuses(wrong, mistake, named, device):
    right = {name: torch.zeros(5, 4, 64) for name in ("out", "prefix_out", "suffix_out")}
    right |= {name: torch.zeros(5, 4) for name in ("lse", "prefix_lse", "suffix_lse")}
    arguments = {n: t if t.device.type == "meta" else t.to(device) for n, t in (right | wrong).items()}
    with refused(mistake, f"^{named}: got .*expected "):
        merge_attention(**arguments)


def test_merge_attention_refuses_an_output_that_is_an_input(device):
    prefix, prefix_lse, suffix, suffix_lse = parts(device, "float32")
    with refused("alias", r"^out: got the memory of suffix_out"):
        merge_attention(suffix, None, prefix, prefix_lse, suffix, suffix_lse)
    out = torch.zeros(9, 3, 80, device=device)
    with refused("alias", r"^lse: got the memory of prefix_lse"):
        merge_attention(out, prefix_lse, prefix, prefix_lse, suffix, suffix_lse)


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
    lse = torch.full(data.query.shape[:2], NAN, device=device)
    where = {"block_table": table.to(device), "seq_lens": lens.to(device), "max_seq_len": max(1, int(lens.max()))}
    return attend(data, dtype=torch.float32, lse=lse, **where, **options), lse


def in_chunks(data: Batch, chunks: int, sinks: torch.Tensor | None, **options):
    """The context of each sequence, in whole blocks, in `chunks` parts without a mask; then the rest with one.

    The sink belongs to the rest.
    """
    block_size = data.pool.cache.block_size
    lens, query_lens = data.seq_lens.tolist(), data.query_start_loc.diff().tolist()
    own = [(n - q) // block_size * block_size for n, q in zip(lens, query_lens, strict=True)]
    chunk = -(-max(own) // chunks // block_size) * block_size
    out, lse = part(data, own, lens, sinks=sinks, **options)
    for first in range(0, max(own), chunk):
        bounds = ([min(first, n) for n in own], [min(first + chunk, n) for n in own])
        seen, seen_lse = part(data, *bounds, causal=False, **options)
        merged, merged_lse = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
        merge_attention(merged, merged_lse, out, lse, seen, seen_lse)
        out, lse = merged, merged_lse
    return out.to(data.query.dtype), lse


CHUNKED = ([7, 5, 3], [250, 90, 3])  # no context at all in the last one, none in the later chunks of the second


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_context_in_chunks(chunks, sinks, softcap, dtype, device, record_property):
    data = small(device, *CHUNKED, dtype=dtype)
    options = {"sinks": (torch.arange(4, device=device) - 1.0) * 2 if sinks else None, "softcap": softcap}
    out, lse = in_chunks(data, chunks, **options)
    golden, golden_lse = expected_with_lse(data, **options)
    check(out, golden, record_property, "attention in six parts")
    assert lse_error(lse, golden_lse) <= chunks * LSE_MERGED_ABSOLUTE
