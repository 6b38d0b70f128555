# SPDX-License-Identifier: Apache-2.0
"""Every mistake of a caller of write and gather is refused: what was got, what is expected and what to do."""

from __future__ import annotations

import pytest
import torch
from support.mistakes import SHAPE, cache, check, ints, refused

from pagedkv.cache.cache import Quantisation
from pagedkv.cache.gather import gather_kv_cache
from pagedkv.cache.write import write_kv_cache
from pagedkv.device import INTERPRETED

pytestmark = pytest.mark.device


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


# Wrong arguments, the kind of the mistake, what its message names.
WRITE = {
    "cache of rank 3": ({"cache": cache(key=torch.zeros(3, 16, 64))}, "shape", "cache.key"),
    "V cache of another shape": ({"cache": cache(value=torch.zeros(3, 16, 1, 64))}, "shape", "cache.value"),
    "no block": ({"cache": cache(shape=(0, 16, 2, 64))}, "shape", "cache.key"),
    "transposed rows": ({"cache": cache(key=torch.zeros(3, 16, 64, 2).mT)}, "stride", "cache.key"),
    "transposed rows of V": ({"cache": cache(value=torch.zeros(3, 16, 64, 2).mT)}, "stride", "cache.value"),
    "codes without scales": ({"cache": cache(key=torch.zeros(SHAPE).byte())}, "dtype", "Quantisation"),
    "V cache in another dtype": ({"cache": cache(value=torch.zeros(SHAPE).half())}, "dtype", "cache.value"),
    "scales without codes": (
        {"cache": cache(quantisation=Quantisation("e5m2", torch.ones(1), torch.ones(1)))},
        "dtype",
        "cache.key",
    ),
    "format that does not exist": ({"cache": cache(dtype=torch.uint8, format="e3m4")}, "scale", "quantisation.format"),
    "scales of more heads": (
        {"cache": cache(dtype=torch.uint8, scales={"key_scale": torch.ones(3)})},
        "scale",
        "key_scale",
    ),
    "scales per token for V alone": (
        {"cache": cache(dtype=torch.uint8, scales={"value_scale": torch.ones(3, 16, 2)})},
        "scale",
        "value_scale",
    ),
    "scales in fp16": (
        {"cache": cache(dtype=torch.uint8, scales={"value_scale": torch.ones(1).half()})},
        "dtype",
        "value_scale",
    ),
    "native K of rank 4": ({"cache": cache(packing="native")}, "shape", "cache.key"),
    "native K with another x": (
        {"cache": cache(packing="native", key=torch.zeros(3, 2, 8, 16, 8), value=torch.zeros(3, 2, 64, 16))},
        "shape",
        "cache.key",
    ),
    "shuffled V as native V": (
        {"cache": cache(packing="shuffle", key=torch.zeros(3, 2, 16, 16, 4), value=torch.zeros(3, 2, 64, 16))},
        "shape",
        "cache.value",
    ),
    "shuffled block of 18": (
        {"cache": cache(packing="shuffle", key=torch.zeros(3, 2, 16, 18, 4), value=torch.zeros(3, 2, 4, 64, 4))},
        "shape",
        "block_size 18",
    ),
    "native V with padded tokens": (
        {"cache": cache(packing="native", key=torch.zeros(3, 2, 16, 16, 4), value=torch.zeros(3, 2, 64, 32)[..., ::2])},
        "stride",
        "cache.value",
    ),
    "tokens in another dtype": ({"key": torch.zeros(5, 2, 64).half()}, "dtype", "key"),
    "tokens with fewer heads": ({"key": torch.zeros(5, 1, 64)}, "shape", "key"),
    "V tokens fewer than K": ({"value": torch.zeros(4, 2, 64)}, "shape", "value"),
    "transposed tokens": ({"value": torch.zeros(5, 64, 2).mT}, "stride", "value"),
    "32-bit slots": ({"slot_mapping": ints(0, 1, 2, 3, 4)}, "dtype", "slot_mapping"),
    "more slots than tokens": ({"slot_mapping": torch.arange(6)}, "shape", "slot_mapping"),
    "2-d slots": ({"slot_mapping": torch.zeros(1, 5, dtype=torch.int64)}, "shape", "slot_mapping"),
    "slots elsewhere": ({"slot_mapping": torch.empty(5, dtype=torch.int64, device="meta")}, "device", "slot_mapping"),
    "scale of nothing": (
        {"cache": cache(dtype=torch.uint8, scales={"key_scale": torch.zeros(1)}), "debug": True},
        "scale",
        "key_scale: got 0.0",
    ),
    "endless scale": (
        {"cache": cache(dtype=torch.uint8, scales={"value_scale": torch.tensor([1.0, torch.inf])}), "debug": True},
        "scale",
        "value_scale: got inf",
    ),
    "slot beyond the pool": ({"slot_mapping": torch.tensor([0, -1, 48]), "debug": True}, "slot", "48 for token 2"),
    "slot named twice": ({"slot_mapping": torch.tensor([7, 3, 7]), "debug": True}, "slot", r"\[0, 2\]"),
}


@pytest.mark.parametrize("case", WRITE.values(), ids=WRITE)
def test_write_kv_cache_refuses(case, write, device):
    check(write, case, device)


def test_a_packing_that_does_not_exist():
    with refused("option", "expected one of rows, native, shuffle"):
        cache(packing="x-packed")


GATHER = {
    "64-bit table": ({"block_table": torch.zeros(1, 2, dtype=torch.int64)}, "dtype", "block_table"),
    "starts of fewer sequences": ({"cu_seq_lens": ints(0)}, "shape", "cu_seq_lens"),
    "starts of more sequences": ({"seq_starts": ints(0, 0)}, "shape", "seq_starts"),
    "more rows than output": ({"token_to_seq": ints(*[0] * 6)}, "shape", "token_to_seq"),
    "output in another dtype": ({"key": torch.zeros(5, 2, 64).half()}, "dtype", "key"),
    "transposed output": ({"value": torch.zeros(5, 64, 2).mT}, "stride", "value"),
    "transposed table": (
        {"block_table": ints(0, 0, 0, 0).view(2, 2).T, "cu_seq_lens": ints(0, 5, 5), "seq_starts": ints(0, 0)},
        "stride",
        "block_table",
    ),
    "scale of nothing": (
        {"cache": cache(dtype=torch.uint8, scales={"value_scale": torch.zeros(())}), "debug": True},
        "scale",
        "value_scale: got 0.0",
    ),
    "sequence that is none": ({"token_to_seq": ints(0, 0, 1, 0, 0), "debug": True}, "length", "token_to_seq"),
    "position beyond the row": ({"seq_starts": ints(30), "debug": True}, "length", "seq_starts"),
    "block that is none": ({"block_table": ints(3, 0).view(1, 2), "debug": True}, "block table", "block 3 at"),
}


@pytest.mark.parametrize("case", GATHER.values(), ids=GATHER)
def test_gather_kv_cache_refuses(case, gather, device):
    check(gather, case, device)


if INTERPRETED:

    def test_bf16_gather_of_codes_is_refused_under_the_interpreter(gather, device):
        wrong = {"key": torch.zeros(5, 2, 64, dtype=torch.bfloat16), "cache": cache(dtype=torch.uint8)}
        check(gather, (wrong, "dtype", "interpreter"), device)
