# SPDX-License-Identifier: Apache-2.0
"""Every mistake of a caller of attention is refused: what was got, what is expected and what to do."""

from __future__ import annotations

import pytest
import torch
from support.mistakes import cache, check, ints

from pagedkv.attention.paged import paged_attention
from pagedkv.device import INTERPRETED

pytestmark = pytest.mark.device


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


# Wrong arguments, the kind of the mistake, what its message names.
ATTENTION = {
    "queries in another dtype": ({"query": torch.zeros(5, 4, 64).half()}, "dtype", "query"),
    "queries of another head size": ({"query": torch.zeros(5, 4, 32)}, "shape", "query"),
    "output of another shape": ({"out": torch.zeros(4, 4, 64)}, "shape", "out"),
    "transposed output": ({"out": torch.zeros(5, 64, 4).mT}, "stride", "out"),
    "3 query heads for 2": ({"query": torch.zeros(5, 3, 64), "out": torch.zeros(5, 3, 64)}, "head ratio", "query"),
    "sums of another shape": ({"lse": torch.zeros(5, 2)}, "shape", "lse"),
    "sums in fp16": ({"lse": torch.zeros(5, 4).half()}, "dtype", "lse"),
    "output beside fp32 queries in fp16": ({"out": torch.zeros(5, 4, 64).half()}, "dtype", "out"),
    "cap of nothing": ({"softcap": 0.0}, "option", "softcap"),
    "endless cap": ({"softcap": float("inf")}, "option", "softcap"),
    "cap that costs digits": ({"softcap": 10_001.0}, "option", "softcap"),
    "cap that is no number": ({"softcap": float("nan")}, "option", "softcap"),
    "slopes of fewer heads": ({"alibi_slopes": torch.ones(2)}, "shape", "alibi_slopes"),
    "slopes in fp16": ({"alibi_slopes": torch.ones(4).half()}, "dtype", "alibi_slopes"),
    "slopes without a mask": ({"alibi_slopes": torch.ones(4), "causal": False}, "option", "alibi_slopes"),
    "sinks in fp16": ({"sinks": torch.ones(4).half()}, "dtype", "sinks"),
    "strided sinks": ({"sinks": torch.ones(8)[::2]}, "stride", "sinks"),
    "lengths of more sequences": ({"seq_lens": ints(20, 20)}, "shape", "seq_lens"),
    "no bound": ({"max_seq_len": 0}, "length", "max_seq_len"),
    "window of nothing": ({"sliding_window": 0}, "window", "sliding_window"),
    "window without a mask": ({"sliding_window": 8, "causal": False}, "window", "sliding_window"),
    "no partition": ({"num_splits": 0}, "split", "num_splits"),
    "partitions of two kinds": ({"num_splits": 3, "batch_invariant": True}, "split", "with batch_invariant=True"),
    "query longer than its bound": ({"max_query_len": 4, "debug": True}, "length", "max_query_len"),
    "sequence longer than its bound": ({"max_seq_len": 19, "debug": True}, "length", "max_seq_len"),
    "sequence longer than its row": ({"seq_lens": ints(33), "max_seq_len": 40, "debug": True}, "length", "max_blocks"),
    "starts that fall": ({"query_start_loc": ints(5, 0), "debug": True}, "length", "query_start_loc"),
    "block that is none": ({"block_table": ints(0, -1).view(1, 2), "debug": True}, "block table", "block -1 at"),
}


def codes(**scales):
    return cache(dtype=torch.uint8, scales=scales)


ATTENTION |= {
    f"{side} scale {number}": (
        {"cache": codes(**{side: torch.tensor(number)}), "debug": True},
        "scale",
        f"quantisation.{side}: got {number}",
    )
    for side in ("key_scale", "value_scale")
    for number in (0.0, -1.0, float("inf"), float("nan"))
}
ATTENTION["scale of one head"] = (
    {"cache": codes(key_scale=torch.tensor([1.0, 0.0])), "debug": True},
    "scale",
    "key_scale: got 0.0",
)


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_paged_attention_refuses(case, attend, device):
    check(attend, case, device)


@pytest.mark.parametrize("head_size", [24, 36, 264])
def test_head_sizes_that_attention_refuses(head_size, attend, device):
    rows = torch.zeros(5, 4, head_size)
    wrong = {"cache": cache(shape=(3, 16, 2, head_size)), "query": rows, "out": rows.clone()}
    check(attend, (wrong, "head size", f"head_size {head_size}"), device)


def test_debug_ignores_blocks_that_are_not_looked_up(attend, device):
    """Entries after the sequence and before the window may be stale."""
    table = torch.tensor([[99, 0, 1, -1]], dtype=torch.int32, device=device)
    lengths = {"seq_lens": ints(48).to(device), "max_seq_len": 48}
    attend(block_table=table, **lengths, sliding_window=8, debug=True)


if INTERPRETED:

    def test_bf16_attention_is_refused_under_the_interpreter(attend, device):
        rows = torch.zeros(5, 4, 64, dtype=torch.bfloat16)
        wrong = {"query": rows, "out": rows.clone(), "cache": cache(dtype=torch.bfloat16)}
        check(attend, (wrong, "dtype", "interpreter"), device)
