# SPDX-License-Identifier: Apache-2.0
"""Prefill of the gated delta rule and of Kimi Delta Attention against the recurrence, NaN where nothing may be read."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.mistakes import refused
from support.tolerances import ROW_RELATIVE, UNIT_ROUNDOFF

from pagedkv.arch import limits
from pagedkv.device import INTERPRETED
from pagedkv.gdn import reference
from pagedkv.gdn.prefill import gdn_prefill
from pagedkv.launch import tuning

pytestmark = pytest.mark.device

DTYPES = ("float32", "float16") if INTERPRETED else ("float16", "bfloat16")
"""The interpreter computes bfloat16 wrongly; no model computes in fp32 on a GPU."""

STARTS = {
    "one": [0, 1],
    "edges": [0, 64, 65, 65, 130],  # a chunk, one token, no token, a chunk and one token
    "longer": [0, 200, 203],  # several chunks
}
SHAPES = {  # key heads, heads, key size, value size
    "qwen3-next": (1, 2, 128, 128),
    "odd": (1, 3, 64, 64),
    "mixed": (2, 2, 64, 128),
}
KIMI = {"kimi": (2, 2, 128, 128), **SHAPES}
BY_KEY = pytest.mark.parametrize("by_key", [False, True], ids=["head", "key"])
"""Whether there is a decay for each head or for each key."""


class Case:
    """Some sequences, their inputs on the device, and what the recurrence says of them in float64."""

    def __init__(
        self,
        shape: str,
        starts: str | list[int],
        dtype: str,
        device: str,
        *,
        hard: str = "",
        by_key: bool = False,
        lower_bound: float | None = None,
        stored: torch.dtype = torch.float32,  # states
    ) -> None:
        key_heads, heads, keys, values = KIMI[shape]
        self.ends = ends = STARTS[starts] if isinstance(starts, str) else starts
        tokens, sequences, kind = ends[-1], len(ends) - 1, getattr(torch, dtype)
        torch.manual_seed(tokens + heads)
        self.dtype, self.stored = dtype, stored
        # The convolution's output, each token's row padded with NaN: q, k and v are views of it.
        mixed = torch.randn(tokens, 2 * key_heads * keys + heads * values)
        decay = (heads, keys) if by_key else (heads,)
        gates = [torch.randn(tokens, *decay), torch.randn(tokens, heads)]
        A_log, bias = 3 * torch.rand(heads) - 1, torch.randn(decay)
        if hard == "equal":  # equal keys, no decay, all is written: the worst case of the inverse
            mixed[:, key_heads * keys : 2 * key_heads * keys] = torch.randn(key_heads * keys)
            gates[0] -= 100
            gates[1] += 20
        if hard == "steep":  # decays that underflow within a chunk
            A_log += 6
        rows = torch.full((tokens, mixed.shape[1] + 8), float("nan"), dtype=kind, device=device)
        rows[:, :-8] = mixed
        q, k, v = rows[:, :-8].split([key_heads * keys, key_heads * keys, heads * values], dim=1)
        rows_of_a = torch.full((tokens, decay[0] + 3, *decay[1:]), float("nan"), dtype=kind, device=device)
        a = rows_of_a[:, :heads].copy_(gates[0])
        b = torch.full((tokens, heads + 3), float("nan"), dtype=kind, device=device)[:, :heads].copy_(gates[1])
        # A pool with more blocks than states, each padded as vLLM pads a page, NaN wherever no state is.
        pool = torch.full((2 * sequences + 2, heads * values * keys + 24), float("nan"), dtype=stored, device=device)
        pool = pool[:, :-24].unflatten(1, (heads, values, keys))
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(1)).int().to(device)
        sources, targets = order[:sequences], order[sequences : 2 * sequences]
        pool[sources.long()] = torch.randn(sequences, heads, values, keys).to(pool)
        self.arguments = {
            "q": q.unflatten(1, (key_heads, keys)),
            "k": k.unflatten(1, (key_heads, keys)),
            "v": v.unflatten(1, (heads, values)),
            "a": a,
            "b": b,
            "out": torch.full((tokens, 2 * heads, values), float("nan"), dtype=kind, device=device)[:, ::2],
            "states": pool,
            "A_log": A_log.to(device),
            "dt_bias": bias.to(device),
            "starts": torch.tensor(ends).int().to(device),
            "sources": sources,
            "targets": targets,
        }
        if lower_bound is not None:
            self.arguments["lower_bound"] = lower_bound

    def recurrence(self, state: torch.Tensor | None, begin: int, end: int) -> reference.Delta:
        """What the recurrence makes of tokens of a sequence."""
        given = self.arguments
        q, k, v, a, b = (given[name][begin:end].cpu() for name in ("q", "k", "v", "a", "b"))
        g = reference.log_decay(a, given["A_log"].cpu(), given["dt_bias"].cpu(), given.get("lower_bound"))
        return reference.gated_delta_rule(q, k, v, g, b.double().sigmoid(), state)

    def run(self, record=None, *, ends: list[int] | None = None, last: list[int] | None = None, **options) -> None:
        """Every row and every state within its tolerance, NaN nowhere, and no other block written.

        With `ends` and `last` a sequence is several pieces.
        """
        given = self.arguments | options
        pool, known = given["states"], given.get("known")
        last = list(range(len(self.ends) - 1)) if last is None else last
        ends = self.ends if ends is None else ends
        before = pool.clone()
        golden, sequence, state = [], 0, None
        for piece, (begin, end) in enumerate(itertools.pairwise(ends)):
            if begin == self.ends[sequence] and (piece == 0 or piece - 1 in last):
                source = int(given["sources"][sequence])
                missing = source < 0 or (known is not None and not known[sequence])
                state = None if missing else before[source].cpu()
            golden.append(self.recurrence(state, begin, end))
            state = golden[-1].states[-1]
            sequence += piece in last
        gdn_prefill(**given, debug=True)
        out = given["out"][ends[0] : ends[-1]].double().cpu()
        wanted, scale = (torch.cat([getattr(each, name) for each in golden]) for name in ("y", "scale"))
        relative = (out - wanted).norm(dim=-1) / scale
        bound = ROW_RELATIVE["delta", self.dtype]
        if record:
            record("dtype", self.dtype)
            record("max_row_relative_err_delta", relative.max().item())
            record("max_row_relative_err_delta_allowed", bound)
        wrong = ~(relative <= bound)
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.numel()} (token, head) rows are off by more than {bound:.1e} of their "
            f"scale; first at {wrong.nonzero()[0].tolist()}, worst {relative.max().item():.1e}"
        )
        stored = UNIT_ROUNDOFF[str(self.stored).removeprefix("torch.")]
        for piece, (block, each) in enumerate(zip(given["targets"].tolist(), golden, strict=True)):
            if block >= 0:
                off = (pool[block].double().cpu() - each.states[-1]).flatten(1).norm(dim=1)
                allowed = (bound + stored) * each.states[-1].flatten(1).norm(dim=1)
                assert (off <= allowed).all(), f"the state after piece {piece} is off by {off}, at most {allowed}"
        untouched = torch.ones(len(pool), dtype=torch.bool)
        untouched[[block for block in given["targets"].tolist() if block >= 0]] = False
        assert torch.equal(pool[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0)), "another block changed"


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(dtype, shape, starts, device, record_property):
    """Sequences of every kind of length, states to blocks of their own."""
    Case(shape, starts, dtype, device).run(record_property)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("starts", ["edges"])
@pytest.mark.parametrize("shape", ["kimi", "odd", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decay_for_each_key(dtype, shape, starts, lower_bound, device, record_property):
    """Kimi Delta Attention, also with key heads that are shared."""
    Case(shape, starts, dtype, device, by_key=True, lower_bound=lower_bound).run(record_property)


@BY_KEY
@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_a_sequence(dtype, segments, by_key, device, record_property):
    """Walked at the same time; states go where they came from, and one sequence has fewer chunks than segments."""
    case = Case("odd", "longer", dtype, device, by_key=by_key)
    case.arguments["targets"] = case.arguments["sources"]
    case.run(record_property, num_segments=segments)


PIECES = {  # ends of the pieces, the last piece of each sequence; of 200 and 3 tokens
    "chunks": ([0, 64, 192, 200, 203], [2, 3]),
    "anywhere": ([0, 1, 70, 70, 199, 200, 202, 203], [4, 6]),
}


@BY_KEY
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("pieces", PIECES)
def test_states_at_the_edges_of_pieces(pieces, segments, by_key, device, record_property):
    """Places that a prefix cache asks for: inside a sequence, after no token, and after its last; one is not kept."""
    case = Case("odd", "longer", DTYPES[0], device, by_key=by_key)
    ends, last = PIECES[pieces]
    count = len(ends) - 1
    pool = torch.full((count + 4, *case.arguments["states"].shape[1:]), float("nan"), device=device)
    pool[count + 1] = case.arguments["states"][case.arguments["sources"][0]]
    targets = torch.arange(count).flip(0)
    targets[1] = -1
    options = {
        "states": pool,
        "starts": torch.tensor(ends).int().to(device),
        "last_pieces": torch.tensor(last).int().to(device),
        "sources": torch.tensor([count + 1, -1]).int().to(device),
        "targets": targets.int().to(device),
    }
    case.run(record_property, ends=ends, last=last, num_segments=segments, **options)


@BY_KEY
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("hard", ["equal", "steep"])
def test_keys_and_decays_at_their_worst(hard, segments, by_key, device, record_property):
    case = Case("odd", "longer", "float16", device, hard=hard, by_key=by_key)
    case.run(record_property, num_segments=segments)


@pytest.mark.parametrize("segments", [1, 3])
def test_a_new_sequence_has_no_state_before(segments, device):
    """By `known` and by a negative source; what lies in the pool there is NaN."""
    case = Case("odd", "longer", DTYPES[0], device)
    case.arguments["states"][case.arguments["sources"].long()] = float("nan")
    case.arguments["sources"][1] = -1
    case.run(known=torch.tensor([False, True], device=device), num_segments=segments)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16][: 1 if INTERPRETED else 2], ids=str)
def test_states_are_carried_in_fp32(stored, device):
    """A state kept in two bytes is rounded once, however many chunks and segments it has come through."""
    Case("odd", "longer", "float16", device, stored=stored).run(num_segments=3)


def test_a_key_of_zeros_writes_nothing(device):
    """1 / |k| would be 1,000, and large values times it infinite in fp16."""
    case = Case("odd", "longer", "float16", device)
    case.arguments["k"][70:75] = 0
    case.arguments["v"][70:75] = 300
    case.arguments["a"].fill_(-10)  # little decays: what is left of the state is no subnormal number
    case.run()


@BY_KEY
@pytest.mark.parametrize("segments", [1, 2])
def test_a_nan_stays_in_its_sequence(segments, by_key, device):
    """All inputs of the second of three sequences are NaN, and the state before it."""
    case = Case("odd", [0, 70, 200, 270], "float16", device, by_key=by_key)
    whole = {name: value.clone() for name, value in case.arguments.items()}
    given = case.arguments
    gdn_prefill(**whole, num_segments=segments)
    for name in ("q", "k", "v", "a", "b"):
        given[name][70:200] = float("nan")
    given["states"][given["sources"][1]] = float("nan")
    gdn_prefill(**given, num_segments=segments)
    for part in (slice(70), slice(200, 270)):
        assert torch.equal(given["out"][part], whole["out"][part])
    assert given["out"][70:200].isnan().all()
    target = int(given["targets"][1])
    assert given["states"][target].isnan().all()
    for block in (int(given["targets"][0]), int(given["targets"][2])):
        assert torch.equal(given["states"][block], whole["states"][block])


REACHED = {  # Input in fp32 -> where its NaN is, and which outputs that makes NaN.
    "A_log": ((0,), (slice(None), 0)),
    "dt_bias": ((0,), (slice(None), 0)),
    "states": ((slice(None), 0, 5, 7), (slice(None), 0, 5)),
}


@BY_KEY
@pytest.mark.parametrize("name", REACHED)
def test_a_nan_with_every_bit_set_reaches_its_outputs(name, by_key, device):
    """Rounding by an addition to the bits would make it a zero."""
    case = Case("odd", "longer", DTYPES[-1], device, by_key=by_key)
    at, outputs = REACHED[name]
    case.arguments[name].view(torch.int32)[at] = 0x7FFFFFFF
    gdn_prefill(**case.arguments)
    want = torch.zeros(case.arguments["out"].shape, dtype=torch.bool)
    want[outputs] = True
    assert torch.equal(case.arguments["out"].isnan().cpu(), want)


def test_tokens_of_no_sequence_are_left_alone(device):
    case = Case("odd", [0, 70, 75, 140], DTYPES[0], device)
    for name in ("sources", "targets"):
        case.arguments[name] = case.arguments[name][1:2]
    case.arguments["starts"] = torch.tensor([70, 75]).int().to(device)
    case.ends = [70, 75]
    case.run()
    assert case.arguments["out"][:70].isnan().all()
    assert case.arguments["out"][75:].isnan().all()


@BY_KEY
@pytest.mark.parametrize("far", ["v", "states"])
def test_prefill_beyond_int32(far, by_key, device, far_storage):
    """Tokens lie 2^24 elements apart, or states 2^30: offsets do not fit 32 bits."""
    case = Case("odd", [0, 140] if far == "v" else [0, 3, 6], "float16", device, stored=torch.float16, by_key=by_key)
    tensor, stride = case.arguments[far], 1 << (24 if far == "v" else 30)
    wide = far_storage(stride * (len(tensor) - 1) + tensor[0].numel(), torch.float16)
    case.arguments[far] = wide.as_strided(tensor.shape, (stride, *tensor[0].contiguous().stride()))
    case.arguments[far].copy_(tensor)
    case.run()


def test_no_sequence_is_no_work(device):
    case = Case("odd", "one", "float16", device)
    for name in ("sources", "targets"):
        case.arguments[name] = case.arguments[name][:0]
    case.arguments["starts"] = case.arguments["starts"][:1]
    gdn_prefill(**case.arguments, debug=True)
    assert case.arguments["out"].isnan().all()


def test_few_heads_and_sequences_are_cut_into_segments():
    """Segments timed on an H100, the first on an H200: one sequence of 64, 16 and 8 programs, then four and sixteen."""
    units, data = limits("sm_90").compute_units, tuning("sm_90").gdn_prefill.of(128, 128, 2)
    asked = [(64, 8192), (16, 8192), (8, 8192), (4 * 64, 2048), (4 * 8, 2048), (16 * 64, 512), (16 * 8, 512)]
    assert [data.segments(*each, units) for each in asked] == [3, 8, 8, 1, 4, 1, 1]
    data = tuning("sm_90").kda_prefill.of(128, 128, 2)
    assert [data.segments(*each, units) for each in [(32, 8192), (4 * 32, 2048)]] == [3, 1]


# What is changed of the arguments, kind and message of the mistake.
WRONG = [
    ({"q": lambda t: t[0]}, "shape", "q: got"),
    ({"q": lambda t: t.double()}, "dtype", "q: got torch.float64"),
    ({"k": lambda t: t[..., :32]}, "head size", "k: got 32 keys a head"),
    ({"k": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)}, "stride", "k: got"),
    ({"v": lambda t: t.float()}, "dtype", "v: got torch.float32"),
    ({"v": lambda t: t[..., :40]}, "head size", "v: got 40 values a head"),
    ({"v": lambda t: t.to("meta").as_strided(t.shape, (1 << 25, *t.stride()[1:]))}, "stride", "v: got 33554432"),
    ({"k": lambda t: t.repeat(1, 2, 1), "q": lambda t: t.repeat(1, 2, 1)}, "head ratio", "2 key heads for 3 heads"),
    ({"out": lambda t: t[:1]}, "shape", "out: got"),
    ({"states": lambda t: t[..., :8]}, "shape", "states: got"),
    ({"states": lambda t: t.int()}, "dtype", "states: got torch.int32"),
    ({"states": lambda t: t.transpose(2, 3)}, "stride", "states: got"),
    ({"a": lambda t: t[:, :1]}, "shape", "a: got"),
    ({"b": lambda t: t.long()}, "dtype", "b: got torch.int64"),
    ({"A_log": lambda t: t[:1]}, "shape", "A_log: got"),
    ({"A_log": lambda t: t + 100}, "decay", "A_log: got 1"),
    ({"dt_bias": lambda t: t * float("nan")}, "decay", "dt_bias: got nan"),
    ({"starts": lambda t: t.long()}, "dtype", "starts: got torch.int64"),
    ({"starts": lambda t: t[1:]}, "shape", "starts: got"),
    ({"starts": lambda t: t * 2}, "length", "starts: got"),
    ({"last_pieces": lambda _: torch.tensor([0]).int()}, "shape", "sources: got"),
    ({"starts": lambda t: t.flip(0)}, "length", "starts"),
    ({"sources": lambda t: t[:1]}, "shape", "sources: got"),
    ({"sources": lambda t: t + 6}, "block table", "sources: got block"),
    ({"targets": lambda t: t.clamp(max=0)}, "block table", "targets: got block 0 at index 1"),
    ({"targets": lambda t: t + 6}, "block table", "targets: got block"),
    ({"known": lambda _: torch.ones(2).int()}, "dtype", "known: got torch.int32"),
    ({"dt_bias": lambda t: t.to("meta")}, "device", "dt_bias: got meta"),
    ({"num_segments": lambda _: 0}, "split", "num_segments: got 0"),
    ({"lower_bound": lambda _: -5.0}, "option", "lower_bound: got -5.0"),
]
WRONG_BY_KEY = [
    ({"a": lambda t: t[..., :8]}, "shape", "a: got"),
    ({"a": lambda t: t.to("meta").as_strided(t.shape, (1 << 25, *t.stride()[1:]))}, "stride", "a: got 33554432"),
    ({"dt_bias": lambda t: t[:, 0]}, "shape", "dt_bias: got"),
    ({"dt_bias": lambda t: t.repeat(1, 2)[:, : t.shape[1]]}, "stride", "dt_bias: got strides"),
    ({"dt_bias": lambda t: t * float("nan")}, "decay", "dt_bias: got nan"),
    ({"lower_bound": lambda _: 5.0}, "option", "lower_bound: got 5.0"),
    ({"lower_bound": lambda _: float("nan")}, "option", "lower_bound: got nan"),
]


@pytest.mark.parametrize(
    ("change", "kind", "named", "by_key"),
    [*((*each, False) for each in WRONG), *((*each, True) for each in WRONG_BY_KEY)],
)
def test_prefill_refuses(change, kind, named, by_key, device):
    given = Case("odd", "longer", "float16", device, by_key=by_key).arguments
    with refused(kind, named):
        gdn_prefill(**given | {name: wrong(given.get(name)) for name, wrong in change.items()}, debug=True)
