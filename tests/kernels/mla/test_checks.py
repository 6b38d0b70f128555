# SPDX-License-Identifier: Apache-2.0
"""What MLA decode refuses: each mistake has its kind, and says what was expected."""

from __future__ import annotations

import pytest
import torch
from support.mistakes import refused
from support.mla_steps import decode, step

from pagedkv.mla.tables import allocate, fill

pytestmark = pytest.mark.device


@pytest.mark.parametrize(
    ("other", "num_seqs"), [({"num_heads": 600}, 2), ({"max_query_len": 300}, 2), ({}, 3), ({"programs": 3}, 2)]
)
def test_tables_of_another_step_are_refused(other, num_seqs, device):
    """Sized for other heads than are launched, other queries, fewer sequences, or another number of programs."""
    data = step(device, 4, [30, 9])
    tables = allocate(data.query, data.shape(**{"programs": 7} | other), num_seqs)
    with refused("tables", "expected"):
        decode(data, tables=tables, programs=7)


def test_stale_tables_are_found(device):
    data = step(device, 4, [30, 9])
    tables = allocate(data.query, data.shape(), 2)
    fill(tables, data.seq_lens - 1, data.query_start_loc)
    with pytest.raises(ValueError, match="expected a partition"):
        decode(data, tables=tables, debug=True)


CODES = {"cache": lambda t: t.to(torch.uint8)}


def replaced(tensor: torch.Tensor, row: int, value: int) -> torch.Tensor:
    tensor[row] = value
    return tensor


# What is changed of the step, what is passed beside it, kind and message of the mistake.
WRONG = [
    ({"cache": lambda t: t[:, :, ::2]}, {}, "shape", "query"),
    ({"cache": lambda t: t[:0]}, {}, "shape", "no empty axis"),
    ({"cache": lambda t: t.half()}, {}, "dtype", "cache: got torch.float16"),
    ({"query": lambda t: t.double()}, {}, "dtype", "query"),
    ({"query": lambda t: t[:, :0]}, {}, "head ratio", "0 heads"),
    ({"query": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, {}, "stride", "query"),
    ({"latent": 24}, {}, "head size", "latent_size 24"),
    ({"latent": 72}, {}, "head size", "rope_size 8"),
    ({"latent": 36}, {}, "head size", "multiple of 8"),
    ({"seq_lens": lambda t: t.long()}, {}, "dtype", "seq_lens"),
    ({"block_table": lambda t: t[:1]}, {}, "shape", "seq_lens"),
    ({"max_query_len": 0}, {}, "length", "max_query_len"),
    ({}, {"programs": 0}, "split", "programs"),
    ({}, {"cache_format": "e4m3fn", "cache_scale": torch.ones(1)}, "dtype", "cache: got torch.float32"),
    ({}, {"cache_scale": torch.ones(1)}, "scale", "cache_scale"),
    ({}, {"lse": torch.zeros(2, 3)}, "shape", "lse"),
    ({}, {"lse": torch.zeros(2, 4, dtype=torch.float64)}, "dtype", "lse"),
    (CODES, {"cache_format": "e4m3", "cache_scale": torch.ones(1)}, "scale", "cache_format"),
    (CODES, {"cache_format": "e4m3fn"}, "scale", "cache_scale"),
    (CODES, {"cache_format": "e4m3fn", "cache_scale": torch.ones(2)}, "scale", "cache_scale"),
    (CODES, {"cache_format": "e4m3fn", "cache_scale": torch.ones(1).double()}, "dtype", "cache_scale"),
    *(
        (
            CODES,
            {"cache_format": "e4m3fn", "cache_scale": one, "debug": True},
            "scale",
            f"cache_scale: got {one}",
        )
        for one in (0.0, -1.0, float("inf"), float("nan"))
    ),
    ({"seq_lens": lambda t: replaced(t, 0, 33)}, {"debug": True}, "length", "seq_lens"),
    ({"query_start_loc": lambda t: replaced(t, 2, 5)}, {"debug": True}, "length", "query_start_loc"),
    ({"block_table": lambda t: replaced(t, 1, 99)}, {"debug": True}, "block table", "block 99 at"),
]


@pytest.mark.parametrize(("change", "options", "kind", "named"), WRONG)
def test_mla_decode_refuses(change, options, kind, named, device):
    data = step(device, 4, [30, 9])
    for name, new in change.items():
        setattr(data, name, new(getattr(data, name)) if callable(new) else new)
    if isinstance(options.get("cache_scale"), float):
        options = options | {"cache_scale": torch.tensor(options["cache_scale"], device=device)}
    with refused(kind, named):
        decode(data, **options)
