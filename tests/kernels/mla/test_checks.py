"""What MLA decode refuses: each mistake has its kind, and says what was expected."""

from __future__ import annotations

import pytest
import torch
from support.mistakes import refused
from support.mla_steps import decode, step

from pagedkv.mla.tables import allocate, fill

pytestmark = pytest.mark.device


@pytest.mark.parametrize("other", [{"num_heads": 600}, {"max_query_len": 300}, {"num_seqs": 3}, {"programs": 3}])
def test_tables_of_another_step_are_refused(other, device):
    """Sized for other heads than are launched, other queries, fewer sequences, or another number of programs."""
    data = step(device, 4, [30, 9])
    shape = {"latent_size": 64, "rope_size": 16, "num_heads": 4, "max_query_len": 1, "programs": 7, "num_seqs": 2}
    tables = allocate(data.query, **(shape | other))
    with refused("tables", "expected"):
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
        ({"cache": lambda t: t[:, :, ::2]}, "shape", "query"),
        ({"cache": lambda t: t[:0]}, "shape", "no empty axis"),
        ({"cache": lambda t: t.half()}, "dtype", "cache: got torch.float16"),
        ({"query": lambda t: t.double()}, "dtype", "query"),
        ({"query": lambda t: t[:, :0]}, "head ratio", "0 heads"),
        ({"query": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "stride", "query"),
        ({"latent": 24}, "head size", "latent_size 24"),
        ({"latent": 72}, "head size", "rope_size 8"),
        ({"latent": 36}, "head size", "multiple of 8"),
        ({"seq_lens": lambda t: t.long()}, "dtype", "seq_lens"),
        ({"block_table": lambda t: t[:1]}, "shape", "seq_lens"),
        ({"max_query_len": 0}, "length", "max_query_len"),
    ],
)
def test_mla_decode_refuses(change, error, named, device):
    data = step(device, 4, [30, 9])
    for name, new in change.items():
        setattr(data, name, new(getattr(data, name)) if callable(new) else new)
    with refused(error, named):
        decode(data)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"programs": 0}, "split"),
        ({"cache_format": "e4m3fn", "cache_scale": torch.ones(1)}, "dtype"),
        ({"cache_scale": torch.ones(1)}, "scale"),
        ({"lse": torch.zeros(2, 3)}, "shape"),
        ({"lse": torch.zeros(2, 4, dtype=torch.float64)}, "dtype"),
    ],
)
def test_mla_decode_refuses_options(options, error, device):
    with refused(error, "expected"):
        decode(step(device, 4, [30, 9]), **options)


@pytest.mark.parametrize(
    ("name", "scale", "error"),
    [
        ("e4m3", torch.ones(1), "scale"),
        ("e4m3fn", None, "scale"),
        ("e4m3fn", torch.ones(2), "scale"),
        ("e4m3fn", torch.ones(1, dtype=torch.float64), "dtype"),
    ],
)
def test_mla_decode_refuses_formats_and_scales(name, scale, error, device):
    data = step(device, 4, [30, 9])
    data.cache = data.cache.to(torch.uint8)
    with refused(error, "expected"):
        decode(data, cache_format=name, cache_scale=scale)


@pytest.mark.parametrize(
    ("name", "row", "value", "error"),
    [
        ("seq_lens", 0, 33, "length"),
        ("query_start_loc", 2, 5, "length"),
        ("block_table", 1, 99, "block table"),
    ],
)
def test_debug_finds_wrong_values(name, row, value, error, device):
    data = step(device, 4, [30, 9])
    getattr(data, name)[row] = value
    with refused(error, "expected"):
        decode(data, debug=True)
