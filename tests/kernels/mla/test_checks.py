"""What MLA decode refuses: each mistake has its class, and says what was expected."""

from __future__ import annotations

import pytest
import torch
from support.mla_steps import decode, step

from pagedkv import errors
from pagedkv.mla.tables import allocate, fill

pytestmark = pytest.mark.device


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
