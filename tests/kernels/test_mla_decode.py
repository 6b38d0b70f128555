from __future__ import annotations

import dataclasses

import pytest
import torch
from tolerances import LSE_ABSOLUTE, ROW_RELATIVE

from pagedkv import errors, fp8, mla_launch, reference_mla
from pagedkv.device import INTERPRETED
from pagedkv.launch import tuning
from pagedkv.mla_decode import mla_decode
from pagedkv.mla_tables import allocate, fill

pytestmark = pytest.mark.device


@dataclasses.dataclass
class Step:
    cache: torch.Tensor  # [num_blocks, block_size, latent + rope]
    query: torch.Tensor  # [num_tokens, num_heads, latent + rope]
    latent: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int

    @property
    def metadata(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("block_table", "seq_lens", "query_start_loc")}

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5


def step(
    device, heads, seq_lens, query_lens=None, *, block_size=16, latent=64, rope=16, dtype="float32", padding=(24, 40)
) -> Step:
    """Unit-normal sequences in a NaN pool: rows and blocks are padded, block ids permuted, and columns of the block
    table behind a sequence name a block that holds nothing but NaN."""
    query_lens = [min(1, n) for n in seq_lens] if query_lens is None else query_lens
    gen = torch.Generator().manual_seed(sum(seq_lens) * 31 + heads)
    as_dtype, width = getattr(torch, dtype), latent + rope
    max_blocks = max(1, *(-(-n // block_size) for n in seq_lens))
    num_blocks = len(seq_lens) * max_blocks + 2
    row = width + padding[0]
    strides = (block_size * row + padding[1], row, 1)
    pool = torch.full((num_blocks * strides[0],), float("nan"), dtype=as_dtype, device=device)
    cache = pool.as_strided((num_blocks, block_size, width), strides)
    order = torch.randperm(num_blocks, generator=gen)
    blocks = order[1 : 1 + len(seq_lens) * max_blocks].view(len(seq_lens), max_blocks)
    table = torch.full((len(seq_lens), max_blocks), int(order[0]), dtype=torch.int32)
    for seq, seq_len in enumerate(seq_lens):
        position = torch.arange(seq_len)
        block = blocks[seq, position // block_size]
        table[seq, position // block_size] = block.int()
        rows = torch.randn(seq_len, width, generator=gen)
        cache[block.to(device), (position % block_size).to(device)] = rows.to(device, as_dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), heads, width, generator=gen).to(device, as_dtype)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return Step(cache, query, latent, table.to(device), lens, starts.to(device), max(1, *query_lens))


def decode(data: Step, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of our kernels; both are NaN before."""
    shape = data.query.shape[:2]
    out = torch.full((*shape, data.latent), float("nan"), dtype=data.query.dtype, device=data.query.device)
    lse = torch.full(shape, float("nan"), device=data.query.device)
    options = {"scale": data.scale, "max_query_len": data.max_query_len, "lse": lse} | options
    mla_decode(data.query, data.cache, out, **data.metadata, **options)
    return out, lse


def expected(data: Step, **options) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"scale": data.scale} | options
    return reference_mla.mla_decode(data.query, data.cache, data.latent, **data.metadata, **options)


def check(got, golden, record) -> None:
    """Every row within the tolerance of its dtype, a row of zeros exactly zero; lse -inf exactly where it must be."""
    (out, lse), (golden_out, golden_lse) = got, golden
    dtype = str(out.dtype).removeprefix("torch.")
    error, norm = (out.double().cpu() - golden_out).norm(dim=-1), golden_out.norm(dim=-1)
    relative = torch.where(norm > 0, error / norm, torch.where(error > 0, float("inf"), 0.0))
    record("max_row_relative_err", relative.max().item())
    wrong = ~(relative <= ROW_RELATIVE["mla", dtype])
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} (token, head) rows are off; first {wrong.nonzero()[:5].tolist()}, by "
        f"{relative[wrong][:5].tolist()}, allowed {ROW_RELATIVE['mla', dtype]:.1e}"
    )
    lse = lse.double().cpu()
    same = lse == golden_lse  # -inf
    off = torch.where(same, 0.0, (lse - golden_lse).abs())
    record("max_abs_lse_err", off.max().item())
    assert (off <= LSE_ABSOLUTE).all(), f"lse off by {off[~(off <= LSE_ABSOLUTE)][:5].tolist()}"


@pytest.fixture
def small_tiles(monkeypatch):
    """16 rows and 16 tokens a program on every device, so that few heads make several row tiles."""

    def tuned(arch):
        data = tuning(arch)
        return dataclasses.replace(data, mla=dataclasses.replace(data.mla, rows=16, tokens=16, split_tokens=1))

    mla_launch.choose.cache_clear()
    monkeypatch.setattr(mla_launch, "tuning", tuned)
    yield
    mla_launch.choose.cache_clear()


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


def test_mla_decode_of_1_to_128_heads(device):
    """n heads give what the first n of 128 give; the rows that pad them reach neither output nor lse."""
    data = step(device, 128, [20], [2], latent=32)
    golden, golden_lse = expected(data)
    everything = data.query
    for heads in range(1, 129):
        data.query = everything[:, :heads]
        check(decode(data), (golden[:, :heads], golden_lse[:, :heads]), lambda *_: None)


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
        data.query, data.cache, out[:, ::2], **data.metadata, max_query_len=3, scale=data.scale, lse=lse[:, ::2],
        programs=4,
    )  # fmt: skip
    check((out[:, ::2], lse[:, ::2]), golden, record_property)
    assert out[:, 1::2].isnan().all()
    assert lse[:, 1::2].isnan().all()


@pytest.mark.parametrize("programs", [1, 6])
def test_mla_decode_leaves_padding_rows_alone(programs, device):
    """Tokens behind the last sequence, and sequences without a query but with stale lengths."""
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2"])
def test_mla_decode_of_a_quantised_cache(name, dtype, device, record_property):
    """Codes of torch's own cast with a scale that is not 1; the padding of rows and blocks holds the code of NaN."""
    data, scale = step(device, 6, [270, 40, 0, 3], [1, 2, 1, 1], latent=96, rope=32, dtype=dtype), 0.37
    kind = fp8.FORMATS[name].dtype
    numbers, strides = data.cache, data.cache.stride()
    codes = torch.full((data.cache.untyped_storage().nbytes() // data.cache.element_size(),), 0xFF, device=device)
    codes = codes.to(torch.uint8) if name != "e4m3fnuz" else torch.full_like(codes, 0x80).to(torch.uint8)
    quantised = codes.as_strided(numbers.shape, strides)
    quantised.copy_((numbers.float() / scale).to(kind).view(torch.uint8))
    data.cache = quantised.view(kind).float().double() * torch.tensor(scale).double().item()
    golden = expected(data)
    data.cache = quantised
    options = {"cache_format": name, "cache_scale": torch.tensor([scale], device=device)}
    check(decode(data, **options, programs=4, debug=True), golden, record_property)


def test_mla_decode_without_lse(device):
    data = step(device, 4, [200, 20])
    torch.testing.assert_close(decode(data, lse=None, programs=3)[0], decode(data, programs=3)[0], rtol=0, atol=0)


def test_mla_decode_reuses_tables_of_the_same_shapes(device, record_property):
    """Filled again for each step, as around a captured graph."""
    first, later = step(device, 4, [30, 9, 0], [2, 1, 1]), step(device, 4, [260, 100, 41], [1, 2, 2])
    shape = {"latent_size": 64, "rope_size": 16, "num_heads": 4, "max_query_len": 2, "programs": 7}
    tables = allocate(first.query, **shape, num_seqs=3)
    for data in (first, later, first):
        fill(tables, data.seq_lens, data.query_start_loc)
        check(decode(data, tables=tables, programs=7, debug=True), expected(data), record_property)


@pytest.mark.parametrize("other", [{"num_heads": 600}, {"max_query_len": 300}, {"num_seqs": 3}, {"programs": 3}])
def test_tables_of_another_step_are_refused(other, device):
    """Sized for other heads than are launched, other queries, fewer sequences, or another number of programs."""
    data = step(device, 4, [30, 9])
    shape = {"latent_size": 64, "rope_size": 16, "num_heads": 4, "max_query_len": 1, "programs": 7, "num_seqs": 2}
    tables = allocate(data.query, **(shape | other))
    with pytest.raises(errors.TablesError, match="expected"):
        decode(data, tables=tables, programs=7)


def test_stale_tables_are_found(device):
    data = step(device, 4, [30, 9])
    shape = {"latent_size": 64, "rope_size": 16, "num_heads": 4, "max_query_len": 1, "num_seqs": 2}
    tables = allocate(data.query, **shape)
    fill(tables, data.seq_lens - 1, data.query_start_loc)
    with pytest.raises(ValueError, match="expected a partition"):
        decode(data, tables=tables, debug=True)


def test_mla_decode_beyond_int32(device, tmp_path, record_property):
    """Block 4 lies 2^32 elements behind block 0; 32-bit offsets would wrap into block 0, which holds NaN."""
    stride, width, block = 2**30 + 64, 48, 16 * 48
    elements = 4 * stride + block
    if device == "cpu":
        storage = torch.from_file(str(tmp_path / "pool"), shared=True, size=elements, dtype=torch.float16)
    else:
        storage = torch.empty(elements, dtype=torch.float16, device=device)
    data = step(device, 4, [16], latent=32, dtype="float16")
    cache = storage.as_strided((5, 16, width), (stride, width, 1))
    cache[0] = float("nan")
    cache[4] = data.cache[data.block_table[0, 0].long()]
    data.cache = cache
    data.block_table.fill_(4)
    check(decode(data), expected(data), record_property)


def test_mla_decode_is_repeatable(device):
    data = step(device, 4, [270, 9], dtype="float16")
    first, second = decode(data, programs=5), decode(data, programs=5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"cache": lambda t: t[:, :, ::2]}, errors.ShapeError, "query"),
        ({"cache": lambda t: t[:0]}, errors.ShapeError, "no empty axis"),
        ({"cache": lambda t: t.half()}, errors.DtypeError, "cache: got torch.float16"),
        ({"query": lambda t: t.double()}, errors.DtypeError, "query"),
        ({"query": lambda t: t[:, :0]}, errors.HeadRatioError, "0 heads"),
        ({"query": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, errors.DenseError, "query"),
        ({"latent": 24}, errors.HeadSizeError, "latent_size 24"),
        ({"latent": 72}, errors.HeadSizeError, "rope_size 8"),
        ({"latent": 36}, errors.HeadSizeError, "multiple of 8"),
        ({"seq_lens": lambda t: t.long()}, errors.DtypeError, "seq_lens"),
        ({"block_table": lambda t: t[:1]}, errors.ShapeError, "seq_lens"),
        ({"max_query_len": 0}, errors.LengthError, "max_query_len"),
    ],
)
def test_mla_decode_refuses(change, error, named, device):
    data = step(device, 4, [30, 9])
    for name, new in change.items():
        setattr(data, name, new(getattr(data, name)) if callable(new) else new)
    with pytest.raises(error, match=named):
        decode(data)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"programs": 0}, errors.SplitError),
        ({"cache_format": "e4m3fn", "cache_scale": torch.ones(1)}, errors.DtypeError),
        ({"cache_scale": torch.ones(1)}, errors.ScaleError),
        ({"lse": torch.zeros(2, 3)}, errors.ShapeError),
        ({"lse": torch.zeros(2, 4, dtype=torch.float64)}, errors.DtypeError),
    ],
)
def test_mla_decode_refuses_options(options, error, device):
    with pytest.raises(error, match="expected"):
        decode(step(device, 4, [30, 9]), **options)


@pytest.mark.parametrize(
    ("name", "scale", "error"),
    [
        ("e4m3", torch.ones(1), errors.ScaleError),
        ("e4m3fn", None, errors.ScaleError),
        ("e4m3fn", torch.ones(2), errors.ScaleError),
        ("e4m3fn", torch.ones(1, dtype=torch.float64), errors.DtypeError),
    ],
)
def test_mla_decode_refuses_formats_and_scales(name, scale, error, device):
    data = step(device, 4, [30, 9])
    data.cache = data.cache.to(torch.uint8)
    with pytest.raises(error, match="expected"):
        decode(data, cache_format=name, cache_scale=scale)


@pytest.mark.parametrize(
    ("name", "row", "value", "error"),
    [
        ("seq_lens", 0, 33, errors.LengthError),
        ("query_start_loc", 2, 5, errors.LengthError),
        ("block_table", 1, 99, errors.BlockTableError),
    ],
)
def test_debug_finds_wrong_values(name, row, value, error, device):
    data = step(device, 4, [30, 9])
    getattr(data, name)[row] = value
    with pytest.raises(error, match="expected"):
        decode(data, debug=True)


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
        shape = {"latent_size": 512, "rope_size": 64, "num_heads": 16, "max_query_len": 1, "num_seqs": 4}
        tables = allocate(data.query, **shape) if prefilled else None
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
