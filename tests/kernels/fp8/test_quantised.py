# SPDX-License-Identifier: Apache-2.0
"""Quantised caches: what is stored, code by code, and what every reader makes of it.

The oracle is `pagedkv.fp8.reference`, the formats by their definition. Stored codes and scales and gathered rows are
compared exactly. Attention reads codes exactly too, so it is judged against the float64 attention over what the codes
mean, with the tolerances of an unquantised cache (tolerances.py says where a rounding is added).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.attending import DTYPES, attend, check, small
from support.pools import Batch, Pool, assert_same_bits, pool
from support.tolerances import UNIT_ROUNDOFF

from pagedkv.attention import reference
from pagedkv.cache.cache import PagedCache, Quantisation
from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.write import write_kv_cache
from pagedkv.fp8 import reference as reference_fp8
from pagedkv.fp8.formats import FORMATS

pytestmark = pytest.mark.device

PACKED = ("packed", "native-interleaved", "shuffle-interleaved")  # a layout of each packing, K and V in every block
KINDS = list(itertools.product(FORMATS, PACKED, ("tensor", "head", "token")))
BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = SHAPE = (5, 48, 3, 48)


def stored(pages: Pool, side: str) -> torch.Tensor:
    """Codes `[num_blocks, block_size, num_kv_heads, head_size]` of "key" or "value", whatever the packing."""
    return pages.storage[pages._elements(side)]


def scale_of(pages: Pool, side: str) -> torch.Tensor:
    """Scales that broadcast to the codes."""
    scale = getattr(pages.quantisation, f"{side}_scale")
    return scale[..., None] if scale.dim() else scale


def meaning(pages: Pool, side: str) -> torch.Tensor:
    """What the codes mean, float64."""
    return reference_fp8.dequantise(stored(pages, side), scale_of(pages, side), pages.quantisation.format)


def awkward_rows(count: int, dtype: str) -> torch.Tensor:
    """`[count, HEADS, HEAD_SIZE]`: numbers of all magnitudes and signs; every code and overflow occurs at scale 0.05.

    A row of zeros, rows with infinities and with NaN among ordinary numbers, and a row of nothing but NaN.
    """
    numbers = torch.exp2(torch.empty(count, HEADS, HEAD_SIZE).uniform_(-24, 15))
    numbers *= torch.randint(0, 2, numbers.shape) * 2 - 1
    numbers[0] = 0.0
    numbers[1, :, :2] = -0.0
    numbers[2, :, 5], numbers[2, 1, 6] = float("inf"), -float("inf")
    numbers[3, :, 7] = float("nan")
    numbers[4] = torch.randn(HEADS, HEAD_SIZE)
    numbers[4, 0, 8] = float("nan")
    numbers[5, 2] = float("nan")
    return numbers.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])  # loaded and widened: the interpreter can
@pytest.mark.parametrize(("name", "layout", "scales"), KINDS)
def test_write_stores_the_nearest_code(name, layout, scales, dtype, device):
    """Clamped and never infinite, NaN kept, -0 only where there is one; nothing else of the pool or the scales."""
    torch.manual_seed(7)
    got = pool(layout, SHAPE, "uint8", device, quantised=name, scales=scales)
    got.storage.fill_(0x2A)  # not NaN: a NaN that was not stored shows
    want = got.clone()
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[:40]
    key, value = awkward_rows(40, dtype).to(device), awkward_rows(40, dtype).flip(0).to(device)
    skipped = torch.zeros(40, dtype=torch.bool, device=device)
    skipped[7::6] = True
    write_kv_cache(key, value, got.cache, slots.masked_fill(skipped, -1), debug=True)

    block, token = slots[~skipped] // BLOCK_SIZE, slots[~skipped] % BLOCK_SIZE
    for side, rows in (("key", key[~skipped]), ("value", value[~skipped])):
        if scales == "token":
            getattr(want.quantisation, f"{side}_scale")[block, token] = reference_fp8.row_scales(rows, name)
        scale = scale_of(want, side).expand(*SHAPE[:3], 1)[block, token]
        codes = reference_fp8.quantise(rows, scale, name)
        assert len(codes.unique()) > 100, "the data do not reach the codes"
        want.storage[want._elements(side)[block, token]] = codes
        assert_same_bits(*(getattr(p.quantisation, f"{side}_scale") for p in (got, want)), f"{side} scale")
    # The sign of a NaN is the platform's: a division may lose it.
    nan = [reference_fp8.decode(pages.storage, name).isnan() for pages in (got, want)]
    assert torch.equal(*nan), "NaN and numbers took each other's place"
    assert_same_bits(*(pages.storage.masked_fill(nan[0], 0) for pages in (got, want)), "storage of the pool")


def every_code(name: str, layout: str, scales: str, device: str, shape: tuple[int, int, int, int] = SHAPE) -> Pool:
    """A pool with random codes, finite or not, in every slot of K and V, and no two scales alike."""
    pages = pool(layout, shape, "uint8", device, quantised=name, scales=scales)
    for side in ("key", "value"):
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        pages.storage[pages._elements(side)] = codes
        if scales == "token":
            getattr(pages.quantisation, f"{side}_scale").uniform_(0.01, 0.1)
    return pages


def gathered(cache: PagedCache, table: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens 0 .. count - 1 of the sequence in `table` `[1, max_blocks]`; K and V share a tensor."""
    shape = (count, 2, cache.num_kv_heads, cache.head_size)
    both = torch.full(shape, 7.0, dtype=dtype, device=cache.key.device)
    bounds = torch.tensor([0, count], dtype=torch.int32, device=cache.key.device)
    zeros = torch.zeros(count, dtype=torch.int32, device=cache.key.device)
    gather_kv_cache(cache, both[:, 0], both[:, 1], table, bounds, zeros, zeros[:1], debug=True)
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "layout", "scales"), KINDS)
def test_gather_gives_the_dtype_of_its_output(name, layout, scales, dtype, device):
    """Code times scale in fp32, rounded once to the output's dtype and never to that of the cache."""
    torch.manual_seed(8)
    pages = every_code(name, layout, scales, device)
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32, device=device)
    count = 2 * BLOCK_SIZE + 11
    got = gathered(pages.cache, table, count, getattr(torch, dtype))
    for side, rows in zip(("key", "value"), got, strict=True):
        want = meaning(pages, side)[table[0].long()].flatten(0, 1)[:count].float().to(rows.dtype)
        torch.testing.assert_close(rows, want, rtol=0, atol=0, equal_nan=True, msg=lambda m, s=side: f"{s}: {m}")


def test_reading_the_wrong_format_is_off_by_two(device):
    """The signature of fnuz codes read as fn: every number twice as large. The tests above cannot mistake them."""
    pages = every_code("e4m3fnuz", "shuffle", "tensor", device)
    table = torch.tensor([[1]], dtype=torch.int32, device=device)
    right = gathered(pages.cache, table, BLOCK_SIZE, torch.float32)
    pages.quantisation = Quantisation("e4m3fn", pages.quantisation.key_scale, pages.quantisation.value_scale)
    wrong = gathered(pages.cache, table, BLOCK_SIZE, torch.float32)
    for side, one, other in zip(("key", "value"), right, wrong, strict=True):
        finite = one.isfinite() & other.isfinite()
        assert torch.equal(other[finite], 2 * one[finite])
        code = stored(pages, side)[1]
        assert torch.equal(finite, (code != 0x80) & (code & 0x7F != 0x7F))
        assert finite.sum() > 200


LENGTHS = {"decode": ([1, 1, 1], [1, 49, 130]), "extend": ([5, 33], [60, 33])}


@pytest.mark.parametrize("phase", LENGTHS)
@pytest.mark.parametrize(("name", "layout", "scales"), KINDS)
def test_attention_over_what_the_codes_mean(name, layout, scales, phase, device, record_property):
    query_lens, seq_lens = LENGTHS[phase]
    op = "attention of scaled rows" if scales == "token" else "attention"
    for dtype in DTYPES:
        shape = {"num_q_heads": 6, "num_kv_heads": 3, "head_size": HEAD_SIZE, "block_size": BLOCK_SIZE, "dtype": dtype}
        data = small(device, query_lens, seq_lens, layout_name=layout, quantised=name, scales=scales, **shape)
        sides = (meaning(data.pool, side) for side in ("key", "value"))
        golden, _ = reference.attention(data.query, *sides, **data.metadata, scale=0.2)
        check(attend(data, scale=0.2, debug=True), golden, record_property, op)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phase", LENGTHS)
@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
def test_attention_over_codes_of_256_channels(name, phase, dtype, device, record_property):
    """Which gfx950 launches with tiles of its own."""
    query_lens, seq_lens = LENGTHS[phase]
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 256, "block_size": 16, "dtype": dtype}
    data = small(device, query_lens, seq_lens, layout_name="interleaved", quantised=name, scales="tensor", **shape)
    sides = (meaning(data.pool, side) for side in ("key", "value"))
    golden, _ = reference.attention(data.query, *sides, **data.metadata, scale=0.1)
    check(attend(data, scale=0.1, debug=True), golden, record_property)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["tensor", "token"])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_reads_every_code(name, scales, dtype, device):
    """One key, so weight 1: the result is the value itself, for all 256 codes, NaN and infinity included."""
    torch.manual_seed(10)
    pages = every_code(name, "shuffle", scales, device, (2, 16, 1, 256))
    pages.storage[pages._elements("key")[1, 0, 0]] = 0
    pages.storage[pages._elements("value")[1, 0, 0]] = torch.randperm(256).to(device, torch.uint8)
    query = torch.randn(1, 2, 256).to(device, getattr(torch, dtype))

    one, starts = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([1], [0, 1]))
    out = attend(Batch(pages, query, one[None], one, starts, 1, 1), scale=0.1, debug=True)
    want = meaning(pages, "value")[1, 0].float().to(out.dtype).expand(2, 256)
    rtol = 0.0
    if scales == "token":
        # The weight is scale * (1 / scale): a reciprocal right to a unit in the last place (`softmax.reciprocal`), and
        # two roundings more. What that moves over a tie is rounded to the other side in a dtype of half the size.
        rtol = 4 * UNIT_ROUNDOFF["float32"] + (2 * UNIT_ROUNDOFF[dtype] if dtype != "float32" else 0)
    torch.testing.assert_close(out[0], want, rtol=rtol, atol=0, equal_nan=True)
