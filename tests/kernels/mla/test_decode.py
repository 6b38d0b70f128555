# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import pytest
import torch
from support import attending
from support.mla_steps import Step, decode, step
from support.pools import FAR
from support.tolerances import LSE_ABSOLUTE

from pagedkv.attention import reference
from pagedkv.device import INTERPRETED
from pagedkv.fp8 import formats
from pagedkv.launch import tuning
from pagedkv.mla import launch
from pagedkv.mla.decode import mla_decode
from pagedkv.mla.tables import allocate, fill

pytestmark = pytest.mark.device


def expected(data: Step, **options) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"scale": data.scale} | options
    rows = data.cache[:, :, None]
    return reference.attention(data.query, rows, rows[..., : data.latent], **data.metadata, **options)


def check(got, golden, record) -> None:
    """Every row within the tolerance of its dtype; sums of exponentials too, -inf exactly where nothing is seen."""
    attending.check(got[0], golden[0], record, "mla")
    assert attending.lse_error(got[1], golden[1]) <= LSE_ABSOLUTE


@pytest.fixture
def small_tiles(monkeypatch):
    """16 rows and 16 tokens a program on every device, so that few heads make several row tiles."""

    def tuned(arch):
        data = tuning(arch)
        return dataclasses.replace(data, mla=dataclasses.replace(data.mla, block_m=16, block_n=16, split_tokens=1))

    launch.choose.cache_clear()
    monkeypatch.setattr(launch, "tuning", tuned)
    yield
    launch.choose.cache_clear()


DTYPES = ["float32", "float16"] if INTERPRETED else ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 24, 40, 128])
def test_mla_decode_of_deepseek(heads, dtype, device, record_property):
    """512 + 64 channels; lengths around the ends of blocks and tiles, one long, one padding."""
    data = step(device, heads, [1, 16, 17, 700, 0, 33], [1, 1, 1, 1, 1, 0], latent=512, rope=64, dtype=dtype)
    check(decode(data, programs=5, debug=True), expected(data), record_property)


@pytest.mark.parametrize("block_size", [1, 16, 64, 784])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 1, 2]])
def test_mla_decode_block_sizes(block_size, query_lens, device, record_property):
    data = step(device, 6, [790, 64, 3], query_lens, block_size=block_size, latent=96, rope=32)
    check(decode(data, programs=4, debug=True), expected(data), record_property)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("programs", [1, 2, 9, 40])
def test_mla_decode_with_any_number_of_programs(programs, device, record_property):
    """24 heads times up to 3 tokens are 5 row tiles of 16; a long sequence among short ones is split."""
    data = step(device, 24, [3, 260, 1, 40, 0, 16], [3, 2, 1, 0, 1, 3])
    check(decode(data, programs=programs, debug=True), expected(data), record_property)


HEADS = (*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128)
"""Every remainder of a tile of 16 rows, and around the tiles; `test_schedule.py` has a place for the rows of all."""


def test_mla_decode_of_1_to_128_heads(device):
    """n heads give what the first n of 128 give; the rows that pad them reach neither output nor lse."""
    data = step(device, 128, [20], [2], latent=32)
    golden, golden_lse = expected(data)
    everything = data.query
    for heads in HEADS:
        data.query = everything[:, :heads]
        check(decode(data, programs=4), (golden[:, :heads], golden_lse[:, :heads]), lambda *_: None)


@pytest.mark.parametrize(("latent", "rope"), [(32, 16), (40, 24), (256, 64), (384, 72), (512, 128)])
def test_mla_decode_of_other_sizes(latent, rope, device, record_property):
    data = step(device, 3, [50, 9], [1, 3], latent=latent, rope=rope, padding=(8, 0))
    check(decode(data, programs=3, debug=True), expected(data), record_property)


def test_mla_decode_takes_strided_queries_outputs_and_lse(device, record_property):
    data = step(device, 4, [300, 20], [3, 1])
    golden = expected(data)
    wide = torch.full((4, 3, 4, 80), float("nan"), device=device)
    wide[:, 1] = data.query
    data.query = wide[:, 1]
    out, lse = (torch.full(shape, float("nan"), device=device) for shape in ((4, 8, 64), (4, 8)))
    mla_decode(
        data.query,
        data.cache,
        out[:, ::2],
        **data.metadata,
        max_query_len=3,
        scale=data.scale,
        lse=lse[:, ::2],
        programs=4,
    )
    check((out[:, ::2], lse[:, ::2]), golden, record_property)
    assert out[:, 1::2].isnan().all()
    assert lse[:, 1::2].isnan().all()


@pytest.mark.parametrize("programs", [1, 6])
def test_mla_decode_leaves_padding_rows_alone(programs, device):
    """Tokens after the last sequence, and sequences without a query but with stale lengths."""
    data = step(device, 4, [90, 9, 25], [1, 1, 0])
    data.query = torch.cat([data.query, data.query.new_full((2, 4, 80), float("nan"))])
    out, lse = decode(data, programs=programs)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()
    assert lse[2:].isnan().all()


def test_mla_decode_looks_up_no_block_it_does_not_need(device, record_property):
    data = step(device, 4, [100, 20])
    golden = expected(data)
    data.block_table[1, 2:] = -(2**31)
    check(decode(data, programs=3), golden, record_property)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_mla_decode_scale(scale, device, record_property):
    data = step(device, 4, [60, 20], [1, 4], latent=32, dtype="float16")
    check(decode(data, scale=scale, programs=2), expected(data, scale=scale), record_property)


@pytest.mark.parametrize("gap", [11, 16])
def test_mla_decode_of_fp16_beside_a_key_far_above(gap, device, record_property):
    """One key `gap` nats above equal others, by its rope channels alone, which are no value."""
    data = step(device, 4, [4096], latent=64, rope=16, dtype="float16")
    data.query.zero_()[..., 64] = 1
    data.cache[..., :64], data.cache[..., 64:] = 1, 0
    first = data.block_table[0, 0]
    data.cache[first, 0, :64], data.cache[first, 0, 64] = 0, gap
    check(decode(data, scale=1.0, programs=3), expected(data, scale=1.0), record_property)


def quantised(data: Step, name: str, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Put codes of torch's own cast into the cache of a step, and the code of NaN where it holds NaN.

    Returns:
        What the kernel should make of them: output and log-sum-exp, in float64.
    """
    kind, nan = formats.FORMATS[name].dtype, 0x80 if name == "e4m3fnuz" else 0xFF
    numbers = data.cache
    size = numbers.untyped_storage().nbytes() // numbers.element_size()
    codes = torch.full((size,), nan, dtype=torch.uint8, device=numbers.device)
    codes = codes.as_strided(numbers.shape, numbers.stride())
    codes.copy_((numbers.float() / scale).to(kind).view(torch.uint8))
    data.cache = codes.view(kind).float().double() * torch.tensor(scale).double().item()
    golden = expected(data)
    data.cache = codes
    return golden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_mla_decode_of_a_quantised_cache(name, dtype, device, record_property):
    """With a scale that is not 1; the padding of rows and blocks holds the code of NaN."""
    data, scale = step(device, 6, [270, 40, 0, 3], [1, 2, 1, 1], latent=96, rope=32, dtype=dtype), 0.37
    golden = quantised(data, name, scale)
    options = {"cache_format": name, "cache_scale": torch.tensor([scale], device=device)}
    check(decode(data, **options, programs=4, debug=True), golden, record_property)


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each != "float32"])
@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("heads", [16, 128])
def test_mla_decode_of_deepseek_codes(heads, name, dtype, device, record_property):
    """512 + 64 channels, where waves share channels and tiles have many rows; one sequence is split, one has a NaN."""
    data, scale = step(device, heads, [129, 17, 33], latent=512, rope=64, dtype=dtype), 0.025
    data.cache[data.block_table[1, 0].long(), 3, 40] = float("nan")
    golden = quantised(data, name, scale)
    options = {"cache_format": name, "cache_scale": torch.tensor([scale], device=device)}
    out, lse = decode(data, **options, programs=4, debug=True)
    check((out[::2], lse[::2]), [each[::2] for each in golden], record_property)
    assert out[1].isnan().all(), "the NaN of a cached row became a number"


def test_mla_decode_without_lse(device):
    data = step(device, 4, [200, 20])
    torch.testing.assert_close(decode(data, lse=None, programs=3)[0], decode(data, programs=3)[0], rtol=0, atol=0)


def test_mla_decode_reuses_tables_of_the_same_shapes(device, record_property):
    """Filled again for each step, as around a captured graph."""
    first, later = step(device, 4, [30, 9, 0], [2, 1, 1]), step(device, 4, [260, 100, 41], [1, 2, 2])
    tables = allocate(first.query, first.shape(programs=7), 3)
    for data in (first, later, first):
        fill(tables, data.seq_lens, data.query_start_loc)
        check(decode(data, tables=tables, programs=7, debug=True), expected(data), record_property)


def test_mla_decode_beyond_int32(device, far_storage, record_property):
    """Block 4 lies 2^32 elements after block 0; 32-bit offsets would wrap into block 0, which holds NaN."""
    data = step(device, 4, [16], latent=32, dtype="float16")
    cache = far_storage(4 * FAR + 16 * 48, torch.float16).as_strided((5, 16, 48), (FAR, 48, 1))
    cache[0] = float("nan")
    cache[4] = data.cache[data.block_table[0, 0].long()]
    data.cache = cache
    data.block_table.fill_(4)
    check(decode(data), expected(data), record_property)


def test_mla_decode_is_repeatable(device):
    data = step(device, 4, [270, 9], dtype="float16")
    first, second = decode(data, programs=5), decode(data, programs=5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


if not INTERPRETED:  # the interpreter has no graphs

    @pytest.mark.parametrize("prefilled", [True, False])
    def test_mla_decode_in_a_captured_graph(prefilled, device, record_property):
        """Captured with one set of lengths and blocks, replayed with another; tables filled outside or inside."""
        later = step(device, 16, [3000, 17, 640, 1], latent=512, rope=64, dtype="bfloat16")
        data = dataclasses.replace(
            later,
            query=torch.zeros_like(later.query),
            block_table=torch.zeros_like(later.block_table),
            seq_lens=torch.ones_like(later.seq_lens),
            query_start_loc=later.query_start_loc.clone(),
        )
        tables = allocate(data.query, data.shape(), 4) if prefilled else None
        if tables:
            fill(tables, data.seq_lens, data.query_start_loc)
        decode(data, tables=tables)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = decode(data, tables=tables)
        for name in ("query", "block_table", "seq_lens"):
            getattr(data, name).copy_(getattr(later, name))
        if tables:
            fill(tables, data.seq_lens, data.query_start_loc)
        for tensor in got:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(got, expected(later), record_property)
