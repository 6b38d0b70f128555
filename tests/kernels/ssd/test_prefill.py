# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's prefill against the recurrence, with NaN wherever nothing may be read."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.mistakes import refused
from support.tolerances import ROW_RELATIVE, UNIT_ROUNDOFF

from pagedkv.arch import limits
from pagedkv.device import INTERPRETED
from pagedkv.launch import tuning
from pagedkv.ssd import reference
from pagedkv.ssd.prefill import ssd_prefill

pytestmark = pytest.mark.device

DTYPES = ("float32", "float16") if INTERPRETED else ("float32", "float16", "bfloat16")
"""The interpreter computes bfloat16 wrongly."""

STARTS = {
    "one": [0, 1],
    "edges": [0, 64, 65, 128, 193, 193 + 31],  # sequences of a tile, of one token, short of a tile, one beyond it
    "longer": [0, 300, 303],  # several tiles
    "empty": [0, 0, 70, 70],
}
SHAPES = {  # heads, groups, head_size, state
    "bamba": (2, 1, 64, 128),
    "falcon-h1": (2, 1, 128, 256),
    "zamba2": (4, 2, 64, 64),
    "odd": (3, 3, 80, 24),
}


def spread(tensor: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The same numbers with strides of their own, NaN in between; only the last dimension is dense."""
    rows = torch.full((*(2 * size + 1 for size in tensor.shape[:-1]), tensor.shape[-1] + 8), float("nan"), dtype=dtype)
    rows = rows.to(device)[tuple(slice(1, None, 2) for _ in tensor.shape[:-1])][..., : tensor.shape[-1]]
    return rows.copy_(tensor)


class Case:
    """Some sequences, their inputs on the device, and what the recurrence says of them in float64."""

    def __init__(
        self,
        shape: str,
        starts: str | list[int],
        dtype: str,
        device: str,
        *,
        initial: bool = True,
        skip: str = "head",
        A: dict[int, float] | None = None,  # of some heads
        raw_dt: torch.Tensor | None = None,
        limit: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        heads, groups, head_size, size = SHAPES[shape]
        self.ends = ends = STARTS[starts] if isinstance(starts, str) else starts
        tokens, kind = ends[-1], getattr(torch, dtype)
        torch.manual_seed(tokens + heads)
        x, z = torch.randn(2, tokens, heads, head_size).to(kind).double()
        B, C = torch.randn(2, tokens, groups, size).to(kind).double()
        raw = torch.randn(tokens, heads) / 2 - 1 if raw_dt is None else raw_dt
        bias = torch.randn(heads) / 4
        rates = -(0.05 + 0.2 * torch.rand(heads))
        for head, rate in (A or {}).items():
            rates[head] = rate
        D = {"none": None, "head": torch.randn(heads), "channel": torch.randn(heads, head_size)}[skip]
        states = torch.randn(len(ends) - 1, heads, head_size, size) if initial else None
        gate = z if skip != "none" else None
        steps = reference.step_size(raw, bias, softplus=True, limit=limit)
        self.inputs = (x, steps, rates, B, C)
        self.more = {"D": D, "z": gate, "initial": states}
        self.golden = [self.recurrence(number, *pair) for number, pair in enumerate(itertools.pairwise(ends))]
        single = {"dtype": torch.float32, "device": device}
        self.arguments = {
            "x": spread(x, kind, device),
            "dt": spread(raw, **single),
            "A": rates.to(device),
            "B": spread(B, kind, device),
            "C": spread(C, kind, device),
            "out": spread(torch.full_like(x, float("nan")), kind, device),
            "states": spread(torch.full((len(ends) - 1, heads, head_size, size), float("nan")), **single),
            "starts": torch.tensor(ends).int().to(device),
            "D": None if D is None else D.to(device),
            "z": None if gate is None else spread(gate, kind, device),
            "dt_bias": bias.to(device),
            "dt_softplus": True,
            "dt_limit": limit,
            "initial_states": None if states is None else spread(states, **single),
        }
        self.dtype = dtype

    def recurrence(self, number: int, begin: int, end: int) -> reference.Scan:
        """What the recurrence makes of tokens of a sequence."""
        part = slice(begin, end)
        x, steps, A, B, C = self.inputs
        given = {name: None if value is None else value[part] for name, value in self.more.items() if name == "z"}
        initial = None if self.more["initial"] is None else self.more["initial"][number]
        return reference.scan(x[part], steps[part], A, B[part], C[part], D=self.more["D"], initial=initial, **given)

    def run(self, record=None, *, but: int | None = None, **options) -> None:
        """Every row and every state within its tolerance, NaN nowhere; those of sequence `but` may be anything."""
        ssd_prefill(**self.arguments | options, debug=True)
        out = self.arguments["out"].double().cpu()
        golden = torch.cat([each.y for each in self.golden])
        relative = (out - golden).norm(dim=-1) / torch.cat([each.scale for each in self.golden])
        if but is not None:
            relative[slice(*self.ends[but : but + 2])] = 0
        bound = ROW_RELATIVE["scan", self.dtype]
        if record:
            record("dtype", self.dtype)
            record("max_row_relative_err_scan", relative.max().item())
            record("max_row_relative_err_scan_allowed", bound)
        wrong = ~(relative <= bound)
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.numel()} (token, head) rows are off by more than {bound:.1e} of their "
            f"scale; first at {wrong.nonzero()[0].tolist()}, worst {relative.max().item():.1e}"
        )
        if "states" not in options:
            for number, each in enumerate(self.golden):
                if number != but:
                    self.check_state(self.arguments["states"][number], each.state, f"of sequence {number}")

    def check_state(self, found: torch.Tensor, golden: torch.Tensor, what: str, stored: float = 0.0) -> None:
        """Each head within its tolerance; `stored` is the rounding of the dtype that states are kept in."""
        off = (found.double().cpu() - golden).flatten(1).norm(dim=1)
        allowed = (ROW_RELATIVE["scan", self.dtype] + stored) * golden.flatten(1).norm(dim=1)
        assert (off <= allowed).all(), f"the state {what} is off by {off.tolist()}, at most {allowed.tolist()}"


@pytest.mark.parametrize("initial", [False, True], ids=["new", "initial"])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(dtype, shape, starts, initial, device, record_property):
    """Sequences of every kind of length, each from its own state, D and gate, strides of each tensor."""
    Case(shape, starts, dtype, device, initial=initial).run(record_property)


@pytest.mark.parametrize("segments", [2, 7])
@pytest.mark.parametrize(("dtype", "starts"), [("float32", "edges"), ("float32", "empty"), (DTYPES[-1], "longer")])
def test_segments_of_a_sequence(dtype, starts, segments, device, record_property):
    """Walked at the same time; some sequences have fewer tiles than segments."""
    Case("zamba2", starts, dtype, device).run(record_property, num_segments=segments)


PIECES = {  # ends of the pieces, the last piece of each sequence; of 300 and 3 tokens
    "tiles": ([0, 128, 256, 300, 303], [2, 3]),
    "anywhere": ([0, 1, 70, 70, 199, 300, 302, 303], [4, 6]),
}


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_after_pieces(dtype, pieces, segments, device, record_property):
    """Places that a prefix cache asks for: inside a sequence, after no token at all, and after its last."""
    case = Case("zamba2", "longer", dtype, device)
    ends, last = PIECES[pieces]
    states = torch.full((len(ends) - 1, *case.arguments["states"].shape[1:]), float("nan"), device=device)
    given = {
        "states": states,
        "starts": torch.tensor(ends).int().to(device),
        "last_pieces": torch.tensor(last).int().to(device),
    }
    case.run(record_property, num_segments=segments, **given)
    for piece, end in enumerate(ends[1:]):
        number = sum(piece > each for each in last)
        case.check_state(states[piece], case.recurrence(number, case.ends[number], end).state, f"after piece {piece}")


@pytest.mark.parametrize("skip", ["none", "channel"])
def test_prefill_skips(skip, device, record_property):
    """Without D and gate, and with a D for each channel."""
    Case("odd", "longer", "float32", device, skip=skip).run(record_property)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_that_forgets_at_each_step(dtype, segments, device, record_property):
    """A of -inf leaves each token's own term; beside it a head that forgets fast, and one that keeps all."""
    case = Case("odd", "longer", dtype, device, A={0: -math.inf, 1: -300.0, 2: 0.0})
    case.run(record_property, num_segments=segments)


@pytest.mark.parametrize("tokens", [61, 62])
def test_heads_that_forget_in_a_tile_that_is_not_full(tokens, device, record_property):
    """The last token has a weight of 1, although sums of decays are rounded by up to 1e-3 there."""
    Case("odd", [0, tokens], "float32", device, A={1: -300.0, 2: -40.0}).run(record_property)


def test_step_sizes(device, record_property):
    """From 1e-8, where 1 + exp(dt) is 1, to beyond 20, where softplus is the identity."""
    raw = torch.linspace(-18, 24, 300)[:, None].repeat(1, 3)
    Case("odd", [0, 300], "float32", device, raw_dt=raw, A={0: -0.01, 1: -0.01, 2: -0.01}).run(record_property)


@pytest.mark.parametrize("limit", [(0.1, math.inf), (0.0, 0.2), (0.15, 0.3)])
def test_step_sizes_are_kept_within_their_limits(limit, device, record_property):
    Case("odd", "longer", "float32", device, limit=limit).run(record_property)


def test_step_sizes_as_they_are(device):
    """Without bias and softplus; below 0 there is no step."""
    case = Case("odd", "longer", "float32", device)
    steps = case.inputs[1]
    steps[5] = 0.0
    case.golden = [case.recurrence(number, *pair) for number, pair in enumerate(itertools.pairwise(case.ends))]
    raw = steps.float()
    raw[5] = -3.0
    case.run(dt=raw.to(device), dt_bias=None, dt_softplus=False)


def test_states_are_carried_in_fp32(device):
    """A state kept in fp16 is rounded once, however many segments and pieces it has come through."""
    case = Case("zamba2", "longer", "float32", device)
    states = case.arguments["states"].half()
    case.run(states=states, num_segments=3)
    for number, each in enumerate(case.golden):
        case.check_state(states[number], each.state, f"of sequence {number}", stored=UNIT_ROUNDOFF["float16"])


@pytest.mark.parametrize("segments", [1, 2])
def test_a_nan_stays_in_its_sequence(segments, device):
    """All inputs of the third of five sequences are NaN, and its initial state."""
    case = Case("bamba", "edges", "float16", device)
    given = case.arguments
    for name in ("x", "B", "C", "z", "dt"):
        given[name][slice(*case.ends[2:4])] = float("nan")
    given["initial_states"][2] = float("nan")
    case.run(but=2, num_segments=segments)
    assert given["out"][slice(*case.ends[2:4])].isnan().all()
    assert given["states"][2].isnan().all()


REACHED = {  # Input in fp32 -> where its NaN is, and which outputs that makes NaN.
    "dt": ((70, 0), (slice(70, 300), 0)),
    "A": ((0,), (slice(None), 0)),
    "dt_bias": ((0,), (slice(None), 0)),
    "D": ((0,), (slice(None), 0)),
    "initial_states": ((0, 0, 5, 7), (slice(300), 0, 5)),
}


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("name", REACHED)
def test_a_nan_with_every_bit_set_reaches_its_outputs(name, segments, device):
    """Rounding by an addition to the bits would make it a zero."""
    case = Case("bamba", "longer", DTYPES[-1], device)
    at, outputs = REACHED[name]
    given = case.arguments[name].clone()
    given.view(torch.int32)[at] = 0x7FFFFFFF
    ssd_prefill(**case.arguments | {name: given}, num_segments=segments)
    want = torch.zeros(case.arguments["out"].shape, dtype=torch.bool)
    want[outputs] = True
    assert torch.equal(case.arguments["out"].isnan().cpu(), want)


def test_what_a_token_weighs_for_earlier_ones_may_be_nan(device):
    """Its x may not: a tile shares it, and 0 times NaN is NaN."""
    case = Case("zamba2", "longer", "float32", device)
    for name in ("B", "C", "dt"):
        case.arguments[name][40] = float("nan")
    ssd_prefill(**case.arguments)
    golden = case.golden[0]
    relative = (case.arguments["out"][:40].double().cpu() - golden.y[:40]).norm(dim=-1) / golden.scale[:40]
    assert (relative <= ROW_RELATIVE["scan", "float32"]).all()
    assert case.arguments["out"][40:300].isnan().all()


def test_tokens_of_no_sequence_are_left_alone(device):
    case = Case("zamba2", "edges", "float32", device)
    case.arguments["starts"] = torch.tensor([65, 128, 193]).int().to(device)
    for name in ("states", "initial_states"):
        case.arguments[name] = case.arguments[name][2:4]
    ssd_prefill(**case.arguments, debug=True)
    out = case.arguments["out"]
    assert out[:65].isnan().all()
    assert out[193:].isnan().all()
    assert not out[65:193].isnan().any()


@pytest.mark.parametrize("far", ["x", "initial_states"])
def test_prefill_beyond_int32(far, device, far_storage):
    """Tokens lie 2^24 elements apart, or states 2^30: offsets do not fit 32 bits."""
    case = Case("odd", [0, 140] if far == "x" else [0, 30, 60, 90], "float16", device)
    stride = 1 << (24 if far == "x" else 30)
    tensor = case.arguments[far].half()
    wide = far_storage(stride * (len(tensor) - 1) + tensor[0].numel(), torch.float16)
    case.arguments[far] = wide.as_strided(tensor.shape, (stride, *torch.empty(tensor.shape[1:]).stride()))
    case.arguments[far].copy_(tensor)
    if far == "initial_states":
        case.more["initial"] = tensor.cpu()
        case.golden = [case.recurrence(number, *pair) for number, pair in enumerate(itertools.pairwise(case.ends))]
    case.run()


def test_no_sequence_is_no_work(device):
    case = Case("odd", "one", "float32", device)
    for name in ("states", "initial_states"):
        case.arguments[name] = case.arguments[name][:0]
    case.arguments["starts"] = case.arguments["starts"][:1]
    ssd_prefill(**case.arguments, debug=True)
    assert case.arguments["out"].isnan().all()


def test_channels_of_a_program_follow_from_the_state():
    """Sizes timed on an H200: 64 channels; tiles of 32 tokens with states of 64 (17 % faster than 64) and of 256."""
    sizes = {(64, 64): (64, 32), (64, 128): (64, 64), (128, 128): (64, 64), (80, 24): (64, 32), (128, 256): (128, 32)}
    found = {size: tuning("sm_90").scan_of(*size, 2) for size in sizes}
    assert {size: (data.block_d, data.block_t) for size, data in found.items()} == sizes
    single = tuning("sm_90").scan_of(64, 128, 4)
    assert (single.block_d, single.block_t) == (32, 32)


def test_few_heads_and_sequences_are_cut_into_segments():
    """Segments timed on an H200, 8,192 tokens: 16, 48 and 128 heads of one sequence; 128 of four need no cut."""
    units, data = limits("sm_90").compute_units, tuning("sm_90").scan_of(64, 128, 2)
    asked = [(16, 8192), (48, 8192), (128, 8192), (4 * 128, 2048), (16, 700), (16, 40)]
    assert [data.segments(*each, units) for each in asked] == [16, 11, 4, 1, 1, 1]


# What is changed of the arguments, kind and message of the mistake.
WRONG = [
    ({"x": lambda t: t[0]}, "shape", "x: got"),
    ({"x": lambda t: t.double()}, "dtype", "x: got torch.float64"),
    ({"out": lambda t: t.double()}, "dtype", "out: got torch.float64"),
    ({"B": lambda t: t[:, :0]}, "head ratio", "0 groups for 2 heads"),
    ({"C": lambda t: t[..., :8]}, "shape", "C: got"),
    ({"C": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)}, "stride", "C"),
    (
        {"B": lambda t: t.to("meta").as_strided(t.shape, (1 << 25, *t.stride()[1:]))},
        "stride",
        "B: got 33554432 elements",
    ),
    ({"dt": lambda t: t[:, :1]}, "shape", "dt: got"),
    ({"A": lambda t: t[:1]}, "shape", "A: got"),
    ({"states": lambda t: t[1:]}, "shape", "starts"),
    ({"states": lambda t: t.int()}, "dtype", "states: got torch.int32"),
    ({"initial_states": lambda t: t[..., :8]}, "shape", "initial_states"),
    ({"starts": lambda t: t.long()}, "dtype", "starts"),
    ({"starts": lambda t: t * 2}, "length", "starts: got"),
    ({"starts": lambda t: t.flip(0)}, "length", "starts"),
    ({"last_pieces": lambda _: [0, 0]}, "length", "last_pieces"),
    ({"last_pieces": lambda _: [0, 2]}, "length", "last_pieces: got 2"),
    ({"D": lambda t: t[:1]}, "shape", "D: got"),
    ({"z": lambda t: t.to("meta")}, "device", "z: got meta"),
    ({"dt_bias": lambda t: t[:1]}, "shape", "dt_bias: got"),
    ({"dt_limit": lambda _: (-1.0, 1.0)}, "option", "dt_limit: got"),
    ({"dt_limit": lambda _: (1.0, 0.5)}, "option", "dt_limit: got"),
    ({"num_segments": lambda _: 0}, "split", "num_segments: got 0"),
]


@pytest.mark.parametrize(("change", "kind", "named"), WRONG, ids=[f"{kind}-{named}" for _, kind, named in WRONG])
def test_prefill_refuses(change, kind, named, device):
    given = Case("bamba", "longer", "float32", device).arguments
    [(name, wrong)] = change.items()
    value = wrong(given.get(name))
    if isinstance(value, list):
        value = torch.tensor(value, dtype=torch.int32, device=device)
    with refused(kind, named):
        ssd_prefill(**given | {name: value}, debug=True)
