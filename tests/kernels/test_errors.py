"""Every mistake a caller can make has a class of its own, and says what was got, what is expected and what to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagedkv import errors
from pagedkv.cache import PagedCache, Quantisation
from pagedkv.cache_gather import gather_kv_cache
from pagedkv.cache_write import write_kv_cache
from pagedkv.device import INTERPRETED
from pagedkv.paged_attention import paged_attention

pytestmark = pytest.mark.device


SHAPE = (3, 16, 2, 64)


def cache(device: str = "cpu", *, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE, **changes):
    """A cache that is right but for the changes."""
    if dtype == torch.uint8:
        scales = {"key_scale": torch.ones(1, device=device), "value_scale": torch.ones(1, device=device)}
        changes["quantisation"] = Quantisation(changes.pop("format", "e4m3fn"), **(scales | changes.pop("scales", {})))
    sides = {side: torch.zeros(shape, dtype=dtype, device=device) for side in ("key", "value")}
    return PagedCache(**(sides | changes))


@pytest.fixture
def write(device):
    arguments = {
        "key": torch.randn(5, 2, 64, device=device),
        "value": torch.randn(5, 2, 64, device=device),
        "cache": cache(device),
        "slot_mapping": torch.arange(5, device=device),
    }
    return lambda **wrong: write_kv_cache(**(arguments | wrong))


@pytest.fixture
def gather(device):
    arguments = {
        "cache": cache(device),
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
        "cache": cache(device),
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
    "cache of rank 3": ({"cache": cache(key=torch.zeros(3, 16, 64))}, errors.ShapeError, "cache.key"),
    "V cache of another shape": ({"cache": cache(value=torch.zeros(3, 16, 1, 64))}, errors.ShapeError, "cache.value"),
    "no block": ({"cache": cache(shape=(0, 16, 2, 64))}, errors.ShapeError, "cache.key"),
    "transposed rows": ({"cache": cache(key=torch.zeros(3, 16, 64, 2).mT)}, errors.DenseError, "cache.key"),
    "transposed rows of V": ({"cache": cache(value=torch.zeros(3, 16, 64, 2).mT)}, errors.DenseError, "cache.value"),
    "codes without scales": ({"cache": cache(key=torch.zeros(SHAPE).byte())}, errors.DtypeError, "Quantisation"),
    "V cache in another dtype": ({"cache": cache(value=torch.zeros(SHAPE).half())}, errors.DtypeError, "cache.value"),
    "scales without codes": (
        {"cache": cache(quantisation=Quantisation("e5m2", torch.ones(1), torch.ones(1)))},
        errors.DtypeError,
        "cache.key",
    ),
    "format that does not exist": (
        {"cache": cache(dtype=torch.uint8, format="e3m4")},
        errors.ScaleError,
        "quantisation.format",
    ),
    "scales of more heads": (
        {"cache": cache(dtype=torch.uint8, scales={"key_scale": torch.ones(3)})},
        errors.ScaleError,
        "key_scale",
    ),
    "scales per token for V alone": (
        {"cache": cache(dtype=torch.uint8, scales={"value_scale": torch.ones(3, 16, 2)})},
        errors.ScaleError,
        "value_scale",
    ),
    "scales in fp16": (
        {"cache": cache(dtype=torch.uint8, scales={"value_scale": torch.ones(1).half()})},
        errors.DtypeError,
        "value_scale",
    ),
    "native K of rank 4": ({"cache": cache(packing="native")}, errors.ShapeError, "cache.key"),
    "native K with another x": (
        {"cache": cache(packing="native", key=torch.zeros(3, 2, 8, 16, 8), value=torch.zeros(3, 2, 64, 16))},
        errors.ShapeError,
        "cache.key",
    ),
    "shuffled V as native V": (
        {"cache": cache(packing="shuffle", key=torch.zeros(3, 2, 16, 16, 4), value=torch.zeros(3, 2, 64, 16))},
        errors.ShapeError,
        "cache.value",
    ),
    "shuffled block of 18": (
        {"cache": cache(packing="shuffle", key=torch.zeros(3, 2, 16, 18, 4), value=torch.zeros(3, 2, 4, 64, 4))},
        errors.ShapeError,
        "block_size 18",
    ),
    "native V with padded tokens": (
        {"cache": cache(packing="native", key=torch.zeros(3, 2, 16, 16, 4), value=torch.zeros(3, 2, 64, 32)[..., ::2])},
        errors.DenseError,
        "cache.value",
    ),
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
    "sums of another shape": ({"lse": torch.zeros(5, 2)}, errors.ShapeError, "lse"),
    "sums in fp16": ({"lse": torch.zeros(5, 4).half()}, errors.DtypeError, "lse"),
    "cap of nothing": ({"softcap": 0.0}, errors.OptionError, "softcap"),
    "endless cap": ({"softcap": float("inf")}, errors.OptionError, "softcap"),
    "slopes of fewer heads": ({"alibi_slopes": torch.ones(2)}, errors.ShapeError, "alibi_slopes"),
    "slopes in fp16": ({"alibi_slopes": torch.ones(4).half()}, errors.DtypeError, "alibi_slopes"),
    "slopes without a mask": ({"alibi_slopes": torch.ones(4), "causal": False}, errors.OptionError, "alibi_slopes"),
    "sinks in fp16": ({"sinks": torch.ones(4).half()}, errors.DtypeError, "sinks"),
    "strided sinks": ({"sinks": torch.ones(8)[::2]}, errors.DenseError, "sinks"),
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


def moved(value: object, device: str) -> object:
    """The same argument where the kernels run, strides included; what lies on "meta" is refused for lying there."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return value
        whole = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device=device)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset()).copy_(value)
    if dataclasses.is_dataclass(value):
        parts = {field.name: moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def check(call, case, device) -> None:
    wrong, mistake, named = case
    with pytest.raises(mistake, match=named) as caught:
        call(**{name: moved(value, device) for name, value in wrong.items()})
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
def test_head_sizes_that_attention_refuses(head_size, attend, device):
    rows = torch.zeros(5, 4, head_size)
    wrong = {"cache": cache(shape=(3, 16, 2, head_size)), "query": rows, "out": rows.clone()}
    check(attend, (wrong, errors.HeadSizeError, f"head_size {head_size}"), device)


def test_a_packing_that_does_not_exist():
    with pytest.raises(ValueError, match="expected one of rows, native, shuffle"):
        cache(packing="x-packed")


def test_debug_ignores_blocks_that_are_not_looked_up(attend, device):
    """Entries behind the sequence and before the window may be stale."""
    table = torch.tensor([[99, 0, 1, -1]], dtype=torch.int32, device=device)
    lengths = {"seq_lens": ints(48).to(device), "max_seq_len": 48}
    attend(block_table=table, **lengths, sliding_window=8, debug=True)


if INTERPRETED:

    def test_bf16_attention_is_refused_under_the_interpreter(attend, device):
        rows = torch.zeros(5, 4, 64, dtype=torch.bfloat16)
        wrong = {"query": rows, "out": rows.clone(), "cache": cache(dtype=torch.bfloat16)}
        check(attend, (wrong, errors.DtypeError, "interpreter"), device)

    def test_bf16_gather_of_codes_is_refused_under_the_interpreter(gather, device):
        wrong = {"key": torch.zeros(5, 2, 64, dtype=torch.bfloat16), "cache": cache(dtype=torch.uint8)}
        check(gather, (wrong, errors.DtypeError, "interpreter"), device)
