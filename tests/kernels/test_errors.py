"""Every mistake a caller can make has a class of its own, and says what was got, what is expected and what to do."""

from __future__ import annotations

import pytest
import torch

from pagedkv import errors
from pagedkv.cache_gather import gather_kv_cache
from pagedkv.cache_write import write_kv_cache
from pagedkv.device import INTERPRETED
from pagedkv.paged_attention import paged_attention

pytestmark = pytest.mark.device


@pytest.fixture
def write(device):
    arguments = {
        "key": torch.randn(5, 2, 64, device=device),
        "value": torch.randn(5, 2, 64, device=device),
        "key_cache": torch.full((3, 16, 2, 64), float("nan"), device=device),
        "value_cache": torch.full((3, 16, 2, 64), float("nan"), device=device),
        "slot_mapping": torch.arange(5, device=device),
    }
    return lambda **wrong: write_kv_cache(**(arguments | wrong))


@pytest.fixture
def gather(device):
    arguments = {
        "key_cache": torch.randn(3, 16, 2, 64, device=device),
        "value_cache": torch.randn(3, 16, 2, 64, device=device),
        "key": torch.full((5, 2, 64), float("nan"), device=device),
        "value": torch.full((5, 2, 64), float("nan"), device=device),
        "block_table": torch.zeros(1, 2, dtype=torch.int32, device=device),
        "cu_seq_lens": torch.tensor([0, 5], dtype=torch.int32, device=device),
        "token_to_seq": torch.zeros(5, dtype=torch.int32, device=device),
        "seq_starts": torch.zeros(1, dtype=torch.int32, device=device),
    }
    return lambda **wrong: gather_kv_cache(**(arguments | wrong))


@pytest.fixture
def attend(device):
    arguments = {
        "query": torch.randn(5, 4, 64, device=device),
        "key_cache": torch.randn(3, 16, 2, 64, device=device),
        "value_cache": torch.randn(3, 16, 2, 64, device=device),
        "out": torch.full((5, 4, 64), float("nan"), device=device),
        "block_table": torch.zeros(1, 2, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([20], dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor([0, 5], dtype=torch.int32, device=device),
        "max_query_len": 5,
        "max_seq_len": 20,
        "scale": 1.0,
    }
    return lambda **wrong: paged_attention(**(arguments | wrong))


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# Wrong argument, the class of the mistake, the argument that its message names.
WRITE = {
    "cache of rank 3": ({"key_cache": torch.zeros(3, 16, 64)}, errors.ShapeError, "key_cache"),
    "V cache of another shape": ({"value_cache": torch.zeros(3, 16, 1, 64)}, errors.ShapeError, "value_cache"),
    "no block": (
        {"key_cache": torch.zeros(0, 16, 2, 64), "value_cache": torch.zeros(0, 16, 2, 64)},
        errors.ShapeError,
        "key_cache",
    ),
    "transposed rows": ({"key_cache": torch.zeros(3, 16, 64, 2).mT}, errors.DenseError, "key_cache"),
    "transposed rows of V": ({"value_cache": torch.zeros(3, 16, 64, 2).mT}, errors.DenseError, "value_cache"),
    "8-bit cache": ({"key_cache": torch.zeros(3, 16, 2, 64, dtype=torch.int8)}, errors.DtypeError, "key_cache"),
    "V cache in another dtype": ({"value_cache": torch.zeros(3, 16, 2, 64).half()}, errors.DtypeError, "value_cache"),
    "tokens in another dtype": ({"key": torch.zeros(5, 2, 64).half()}, errors.DtypeError, "key"),
    "tokens with fewer heads": ({"key": torch.zeros(5, 1, 64)}, errors.ShapeError, "key"),
    "V tokens fewer than K": ({"value": torch.zeros(4, 2, 64)}, errors.ShapeError, "value"),
    "transposed tokens": ({"value": torch.zeros(5, 64, 2).mT}, errors.DenseError, "value"),
    "32-bit slots": ({"slot_mapping": ints(0, 1, 2, 3, 4)}, errors.DtypeError, "slot_mapping"),
    "more slots than tokens": ({"slot_mapping": torch.arange(6)}, errors.ShapeError, "slot_mapping"),
    "2-d slots": ({"slot_mapping": torch.zeros(1, 5, dtype=torch.int64)}, errors.ShapeError, "slot_mapping"),
    "slots elsewhere": (
        {"slot_mapping": torch.empty(5, dtype=torch.int64, device="meta")},
        errors.DeviceError,
        "slot_mapping",
    ),
    "slot beyond the pool": (
        {"slot_mapping": torch.tensor([0, -1, 48]), "debug": True},
        errors.SlotError,
        "48 for token 2",
    ),
    "slot named twice": ({"slot_mapping": torch.tensor([7, 3, 7]), "debug": True}, errors.SlotError, r"\[0, 2\]"),
}

GATHER = {
    "64-bit table": ({"block_table": torch.zeros(1, 2, dtype=torch.int64)}, errors.DtypeError, "block_table"),
    "starts of fewer sequences": ({"cu_seq_lens": ints(0)}, errors.ShapeError, "cu_seq_lens"),
    "starts of more sequences": ({"seq_starts": ints(0, 0)}, errors.ShapeError, "seq_starts"),
    "more rows than output": ({"token_to_seq": ints(*[0] * 6)}, errors.ShapeError, "token_to_seq"),
    "output in another dtype": ({"key": torch.zeros(5, 2, 64).half()}, errors.DtypeError, "key"),
    "transposed output": ({"value": torch.zeros(5, 64, 2).mT}, errors.DenseError, "value"),
    "transposed table": (
        {"block_table": ints(0, 0, 0, 0).view(2, 2).T, "cu_seq_lens": ints(0, 5, 5), "seq_starts": ints(0, 0)},
        errors.DenseError,
        "block_table",
    ),
    "sequence that is none": ({"token_to_seq": ints(0, 0, 1, 0, 0), "debug": True}, errors.LengthError, "token_to_seq"),
    "position beyond the row": ({"seq_starts": ints(30), "debug": True}, errors.LengthError, "seq_starts"),
    "block that is none": ({"block_table": ints(3, 0).view(1, 2), "debug": True}, errors.BlockTableError, "block 3 at"),
}

ATTENTION = {
    "queries in another dtype": ({"query": torch.zeros(5, 4, 64).half()}, errors.DtypeError, "query"),
    "queries of another head size": ({"query": torch.zeros(5, 4, 32)}, errors.ShapeError, "query"),
    "output of another shape": ({"out": torch.zeros(4, 4, 64)}, errors.ShapeError, "out"),
    "transposed output": ({"out": torch.zeros(5, 64, 4).mT}, errors.DenseError, "out"),
    "3 query heads for 2": (
        {"query": torch.zeros(5, 3, 64), "out": torch.zeros(5, 3, 64)},
        errors.HeadRatioError,
        "query",
    ),
    "lengths of more sequences": ({"seq_lens": ints(20, 20)}, errors.ShapeError, "seq_lens"),
    "no bound": ({"max_seq_len": 0}, errors.LengthError, "max_seq_len"),
    "window of nothing": ({"sliding_window": 0}, errors.WindowError, "sliding_window"),
    "window without a mask": ({"sliding_window": 8, "causal": False}, errors.WindowError, "sliding_window"),
    "no partition": ({"num_splits": 0}, errors.SplitError, "num_splits"),
    "query longer than its bound": ({"max_query_len": 4, "debug": True}, errors.LengthError, "max_query_len"),
    "sequence longer than its bound": ({"max_seq_len": 19, "debug": True}, errors.LengthError, "max_seq_len"),
    "sequence longer than its row": (
        {"seq_lens": ints(33), "max_seq_len": 40, "debug": True},
        errors.LengthError,
        "max_blocks",
    ),
    "starts that fall": ({"query_start_loc": ints(5, 0), "debug": True}, errors.LengthError, "query_start_loc"),
    "block that is none": (
        {"block_table": ints(0, -1).view(1, 2), "debug": True},
        errors.BlockTableError,
        "block -1 at",
    ),
}


def check(call, case, device) -> None:
    wrong, mistake, named = case
    moved = {
        name: v.to(device) if isinstance(v, torch.Tensor) and v.device.type != "meta" else v
        for name, v in wrong.items()
    }
    with pytest.raises(mistake, match=named) as caught:
        call(**moved)
    assert type(caught.value) is mistake
    assert "got" in str(caught.value)
    assert "expected" in str(caught.value)
    assert str(caught.value).endswith("."), "the message ends with what to do"


@pytest.mark.parametrize("case", WRITE.values(), ids=WRITE)
def test_write_kv_cache_refuses(case, write, device):
    check(write, case, device)


@pytest.mark.parametrize("case", GATHER.values(), ids=GATHER)
def test_gather_kv_cache_refuses(case, gather, device):
    check(gather, case, device)


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_paged_attention_refuses(case, attend, device):
    check(attend, case, device)


@pytest.mark.parametrize("head_size", [24, 36, 264])
def test_head_sizes_that_are_refused(head_size, write, device):
    cache = torch.zeros(3, 16, 2, head_size)
    wrong = {"key_cache": cache, "value_cache": cache.clone()}
    check(write, (wrong, errors.HeadSizeError, f"head_size {head_size}"), device)


def test_debug_ignores_blocks_that_are_not_looked_up(attend, device):
    """Entries behind the sequence and before the window may be stale."""
    table = torch.tensor([[99, 0, 1, -1]], dtype=torch.int32, device=device)
    lengths = {"seq_lens": ints(48).to(device), "max_seq_len": 48}
    attend(block_table=table, **lengths, sliding_window=8, debug=True)


if INTERPRETED:

    def test_bf16_attention_is_refused_under_the_interpreter(attend, device):
        names = ("query", "key_cache", "value_cache", "out")
        shapes = ((5, 4, 64), (3, 16, 2, 64), (3, 16, 2, 64), (5, 4, 64))
        wrong = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in zip(names, shapes, strict=True)}
        check(attend, (wrong, errors.DtypeError, "interpreter"), device)
