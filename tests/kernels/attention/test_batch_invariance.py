# SPDX-License-Identifier: Apache-2.0
"""What a sequence gets does not depend on the other sequences of the batch.

Bit by bit where the split is fixed and the bounds are the same, and with `batch_invariant` under any bounds; within the
tolerance, each against the float64 answer, where the launch is chosen for the batch.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attending import HALF, attend, check, expected, sequences, small
from support.pools import Batch, assert_same_bits

from pagedkv.arch import ARCHES, limits
from pagedkv.attention import launch
from pagedkv.attention.launch import FIXED_SPLITS

pytestmark = pytest.mark.device

PHASES = {
    "decode": ([1] * 5, [300, 17, 2000, 64, 1]),
    "extend": ([5, 33, 9, 2, 70], [300, 33, 520, 64, 90]),
    "mixed": ([1, 33, 1, 2, 1], [300, 33, 600, 64, 1]),
}
COMPANIES = ([2], [0, 2], [4, 2, 3, 1, 0])  # sequence 2 alone, after another one, and in the midst of all


def same_in_all_companies(data: Batch, bounds: dict[int, dict[str, int]], **options) -> torch.Tensor:
    """Attend all sequences, then those of each company under the bounds of its size: same bits. Returns the first."""
    whole = attend(data, **options)
    assert whole.isfinite().all()
    starts = data.query_start_loc.tolist()
    for company in COMPANIES:
        got = attend(sequences(data, company), **options, **bounds.get(len(company), {}))
        want = torch.cat([whole[starts[s] : starts[s + 1]] for s in company])
        assert_same_bits(got, want, f"sequences {company}")
    return whole


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_fixed_splits_give_the_same_bits(phase, splits, device):
    same_in_all_companies(small(device, *PHASES[phase], dtype=HALF), {}, num_splits=splits)


@pytest.mark.parametrize("phase", PHASES)
def test_chosen_splits_are_right_in_any_company(phase, device, record_property):
    data = small(device, *PHASES[phase])
    for company in COMPANIES:
        part = sequences(data, company)
        check(attend(part), expected(part), record_property)


LOOSER = {1: {"max_seq_len": 2000}, 2: {"max_seq_len": 2600}, 5: {"max_seq_len": 9000}}
OPTIONS = {
    "plain": {},
    "window and sinks": {"sliding_window": 270, "sinks": True},
    "cap and slopes": {"softcap": 5.0, "alibi_slopes": True},
}
POOLS = {
    "interleaved": {},
    "shuffle": {"layout_name": "shuffle", "dtype": HALF},
    "codes": {"layout_name": "native-interleaved", "dtype": HALF, "quantised": "e4m3fn", "scales": "token"},
}
CASES = [(phase, "plain", pool) for phase in PHASES for pool in POOLS]
CASES += [
    (phase, options, "interleaved") for phase in ("decode", "extend") for options in OPTIONS if options != "plain"
]


@pytest.mark.parametrize(("phase", "options", "pool"), CASES, ids=map("-".join, CASES))
def test_batch_invariant_attention(phase, options, pool, device, record_property):
    """Whatever the bounds: those of the longest sequence alone, and much looser ones."""
    options = {
        name: torch.arange(4.0, device=device) / 4 if it is True else it for name, it in OPTIONS[options].items()
    }
    data = small(device, *PHASES[phase], **POOLS[pool], window=options.get("sliding_window"))
    longest = {n: bounds | {"max_query_len": data.max_query_len * n} for n, bounds in LOOSER.items()}
    bounds = LOOSER if phase == "decode" else longest
    out = same_in_all_companies(data, bounds, **options, batch_invariant=True)
    kind = "attention of scaled rows" if pool == "codes" else "attention of capped scores"
    check(
        out,
        expected(data, **options),
        record_property,
        kind if pool == "codes" or "softcap" in options else "attention",
    )


@pytest.mark.usefixtures("products_of_any_place")
@pytest.mark.parametrize(
    ("context", "window", "starts"),
    [(0, None, (0, 37, 101, 150)), (640, 600, (0, 37, 60, 61))],
    ids=["plain", "window"],
)
def test_batch_invariant_prefill_in_chunks(context, window, starts, device, record_property):
    """A prompt in one step or in several: the step that a token came in does not show in its bits."""
    data = small(device, [starts[-1]], [context + starts[-1]], window=window)
    options = {"sliding_window": window, "batch_invariant": True}
    whole = attend(data, **options)
    check(whole, expected(data, sliding_window=window), record_property)
    for first, end in itertools.pairwise(starts):
        bounds = {"max_query_len": max(end - first, 2), "max_seq_len": context + end}
        part = dataclasses.replace(data, query=data.query[first:end], **bounds)
        part.seq_lens = torch.full_like(data.seq_lens, context + end)
        part.query_start_loc = torch.tensor([0, end - first], dtype=torch.int32, device=device)
        assert_same_bits(attend(part, **options), whole[first:end], f"tokens {first} .. {end - 1}")


batches = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, 4096),
        "num_seqs": st.integers(1, 512),
        "max_kv_len": st.integers(1, 200_000),
        "windowed": st.booleans(),
    }
)
models = st.sampled_from([(32, 8, 128), (16, 2, 256), (8, 8, 64), (7, 1, 96), (64, 4, 192)])


@given(
    st.sampled_from(list(ARCHES)),
    models,
    st.sampled_from([2, 4]),
    batches,
    batches,
    st.lists(st.integers(2, 4096), min_size=2, max_size=2),
)
def test_an_invariant_launch_depends_on_the_model_alone(arch, model, element_bytes, one, other, query_lens):
    """All but the number of partitions, and that follows from the longest sequence: enough for it."""
    names = ("num_q_heads", "num_kv_heads", "head_size")
    shape = dict(zip(names, model, strict=True)) | {"element_bytes": element_bytes, "num_splits": None}
    for bounds in ((1, 1), query_lens):
        chosen = [
            launch.choose(limits(arch), **shape, **batch, max_query_len=bound, batch_invariant=True)
            for batch, bound in zip((one, other), bounds, strict=True)
        ]
        assert len({dataclasses.replace(each, num_splits=1) for each in chosen}) == 1
        for each, batch in zip(chosen, (one, other), strict=True):
            length = each.tiles_per_split * each.block_n
            assert length >= 256
            spare = each.block_n - 1 if batch["windowed"] else 0
            assert each.num_splits == min(-(-(batch["max_kv_len"] + spare) // length), FIXED_SPLITS)


@given(st.sampled_from(list(ARCHES)), models, batches, batches, st.integers(1, 64))
def test_a_fixed_split_launch_does_not_count_sequences(arch, model, one, other, splits):
    shape = dict(zip(("num_q_heads", "num_kv_heads", "head_size"), model, strict=True))
    shape |= {"element_bytes": 2, "num_splits": splits, "max_query_len": 1, "max_kv_len": 8192}
    counts = [{name: batch[name] for name in ("num_tokens", "num_seqs")} for batch in (one, other)]
    assert len({launch.choose(limits(arch), **shape, **each) for each in counts}) == 1
