# SPDX-License-Identifier: Apache-2.0
"""The last step of Mamba-2's chunked scan against the recurrence, with NaN wherever nobody may read."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.mistakes import refused
from support.tolerances import ROW_RELATIVE

from pagedkv.device import INTERPRETED
from pagedkv.launch import tuning
from pagedkv.ssd import reference
from pagedkv.ssd.scan import chunk_scan
from pagedkv.ssd.steps import chunked, steps

pytestmark = pytest.mark.device

DTYPES = ("float32", "float16") if INTERPRETED else ("float32", "float16", "bfloat16")
"""The interpreter computes bfloat16 wrongly."""

STARTS = {
    "one": [0, 1],
    "edges": [0, 64, 65, 128, 193, 193 + 31],  # sequences of a chunk, of one token, short of a chunk, one beyond it
    "longer": [0, 200, 203],  # several chunks, then a sequence that begins beside a state of the first
}
SHAPES = {  # heads, groups, head_size, state, chunk_size
    "bamba": (2, 1, 64, 128, 64),
    "falcon-h1": (2, 1, 64, 256, 32),
    "zamba2": (4, 2, 64, 64, 64),
    "odd": (3, 3, 80, 24, 16),
}


def test_the_tile_of_a_launch_follows_from_channels_and_state():
    scan = tuning("sm_90").scan
    shapes = {(64, 64): 64, (64, 128): 32, (128, 256): 64}
    assert {shape: scan.of(*shape).tile for shape in shapes} == shapes
    assert scan.of(64, 64, chunk_size=16).tile == 16


def spread(tensor: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The same numbers with strides of their own, NaN in between; only the last dimension is dense."""
    rows = torch.full((*(2 * size + 1 for size in tensor.shape[:-1]), tensor.shape[-1] + 8), float("nan"), dtype=dtype)
    rows = rows.to(device)[tuple(slice(1, None, 2) for _ in tensor.shape[:-1])][..., : tensor.shape[-1]]
    return rows.copy_(tensor)


class Case:
    """One step of some sequences, its inputs on the device, and what the recurrence says of them in float64."""

    def __init__(
        self,
        shape: str,
        starts: str,
        dtype: str,
        device: str,
        *,
        initial: bool,
        skip: str = "head",
        gone: int | None = None,  # a head of which each step leaves nothing
    ) -> None:
        heads, groups, head_size, size, chunk = SHAPES[shape]
        ends = STARTS[starts]
        tokens, kind = ends[-1], getattr(torch, dtype)
        torch.manual_seed(tokens + heads)
        x, z = torch.randn(2, tokens, heads, head_size).to(kind).double()
        B, C = torch.randn(2, tokens, groups, size).to(kind).double()
        dt = reference.step_size(torch.randn(tokens, heads) / 2 - 1, None, softplus=True)
        A = -(0.05 + 0.2 * torch.rand(heads)).double()
        if gone is not None:
            A[gone] = -math.inf
        D = {"none": None, "head": torch.randn(heads), "channel": torch.randn(heads, head_size)}[skip]
        states = torch.randn(len(ends) - 1, heads, head_size, size).double() if initial else None
        begins, owners, _ = chunked(ends, chunk)
        made = steps(x, dt, A, B, C, chunk_size=chunk, chunk_starts=begins, sequences=owners, initial_states=states)
        gate = z if skip != "none" else None
        self.golden = [
            reference.scan(
                x[part],
                dt[part],
                A,
                B[part],
                C[part],
                D=D,
                z=None if gate is None else gate[part],
                initial=None if states is None else states[number],
            )
            for number, part in enumerate(slice(*pair) for pair in itertools.pairwise(ends))
        ]
        # What nobody may read: behind the tokens of a chunk, above the diagonal, and states that end a sequence.
        products, laid_dt, sums, behind = (each.clone() for each in made)
        position = torch.arange(chunk)
        length = torch.tensor(begins).diff()[:, None]
        products.masked_fill_((position[:, None] < position)[None, None], float("nan"))
        products.transpose(1, 3)[(position >= length)] = float("nan")
        for each in (laid_dt, sums):
            each[:, position >= length] = float("nan")
        last = torch.tensor([*(a != b for a, b in itertools.pairwise(owners)), True])
        behind[last] = float("nan")
        single = {"dtype": torch.float32, "device": device}
        self.arguments = {
            "products": spread(products, **single),
            "x": spread(x, kind, device),
            "dt": spread(laid_dt, **single),
            "sums": spread(sums, **single),
            "C": spread(C, kind, device),
            "states": spread(behind, **single),
            "out": spread(torch.full_like(x, float("nan")), kind, device),
            "chunk_starts": torch.tensor(begins).int().to(device),
            "sequences": torch.tensor(owners).int().to(device),
            "D": None if D is None else D.to(device),
            "z": None if gate is None else spread(gate, kind, device),
            "initial_states": None if states is None else spread(states, **single),
        }
        self.dtype, self.ends = dtype, ends

    def run(self, record=None, *, but: int | None = None) -> None:
        """Every row within its tolerance, NaN nowhere; the rows of sequence `but` may be anything."""
        chunk_scan(**self.arguments, debug=True)
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


@pytest.mark.parametrize("initial", [False, True], ids=["new", "initial"])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_scan(dtype, shape, starts, initial, device, record_property):
    """Sequences and chunks of every kind of length, each from its own state, D and gate, strides of each tensor."""
    Case(shape, starts, dtype, device, initial=initial).run(record_property)


@pytest.mark.parametrize("skip", ["none", "channel"])
def test_chunk_scan_skips(skip, device, record_property):
    """Without D and gate, and with a D for each channel."""
    Case("odd", "longer", "float32", device, initial=True, skip=skip).run(record_property)


@pytest.mark.parametrize(("shape", "starts"), [("bamba", "longer"), ("odd", "longer"), ("falcon-h1", "edges")])
def test_a_head_that_forgets_at_each_step(shape, starts, device, record_property):
    """A of -inf: sums are -inf, their differences NaN, and the recurrence gives each token's own term."""
    case = Case(shape, starts, "float32", device, initial=True, gone=0)
    assert case.arguments["sums"][0].isneginf().any()
    case.run(record_property)


def test_a_nan_stays_in_its_sequence(device):
    """Of the third of five sequences everything is NaN: its inputs, its initial state and what its chunks left."""
    case = Case("bamba", "edges", "float16", device, initial=True)
    given, third = case.arguments, (case.arguments["sequences"] == 2).nonzero().flatten()
    for name in ("x", "C", "z"):
        given[name][slice(*case.ends[2:4])] = float("nan")
    given["initial_states"][2] = float("nan")
    given["products"][third] = given["states"][third] = float("nan")
    given["dt"][:, third] = given["sums"][:, third] = float("nan")
    case.run(but=2)
    assert given["out"][slice(*case.ends[2:4])].isnan().all()


def test_a_first_chunk_that_pads_continues_no_other(device):
    """-1 is what a server pads with, and is no chunk's neighbour: what lies in front of the states is not read."""
    case = Case("bamba", "one", "float32", device, initial=False)
    states = case.arguments["states"]
    behind = torch.full((2, *states.shape[1:]), float("nan"), device=device)
    behind[1:] = states
    case.arguments["states"], case.arguments["sequences"][0] = behind[1:], -1
    chunk_scan(**case.arguments)
    golden = case.golden[0]
    relative = (case.arguments["out"].double().cpu() - golden.y).norm(dim=-1) / golden.scale
    assert (relative <= ROW_RELATIVE["scan", "float32"]).all()


def test_chunk_scan_beyond_int32(device, far_storage):
    """States lie 2^28 elements apart, and 14 chunks do not fit 32 bits."""
    case = Case("odd", "longer", "float16", device, initial=False)
    far, states = 1 << 28, case.arguments["states"].half()
    chunks, *shape = states.shape
    wide = far_storage(far * (chunks - 1) + states[0].numel(), torch.float16)
    case.arguments["states"] = wide.as_strided(states.shape, (far, *torch.empty(shape).stride()))
    case.arguments["states"].copy_(states)
    case.dtype = "float16"
    case.run()


# What is changed of the arguments, kind and message of the mistake.
WRONG = [
    ({"x": lambda t: t[0]}, "shape", "x: got"),
    ({"x": lambda t: t.double()}, "dtype", "x: got torch.float64"),
    ({"out": lambda t: t.double()}, "dtype", "out: got torch.float64"),
    ({"C": lambda t: t[:, :0]}, "head ratio", "0 groups for 2 heads"),
    ({"products": lambda t: t[:, :, :8, :8]}, "option", "chunk_size 8"),
    ({"products": lambda t: t.half()}, "dtype", "products: got torch.float16"),
    ({"dt": lambda t: t.transpose(1, 2)}, "shape", "dt"),
    ({"sums": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "stride", "sums"),
    ({"states": lambda t: t[1:]}, "shape", "states"),
    ({"initial_states": lambda t: t[..., :8]}, "shape", "initial_states"),
    ({"sequences": lambda t: t.long()}, "dtype", "sequences"),
    ({"sequences": lambda t: t + 1}, "length", "sequences: got 2 at index"),
    ({"chunk_starts": lambda t: t * 2}, "length", "chunk_starts"),
    ({"D": lambda t: t[:1]}, "shape", "D: got"),
    ({"z": lambda t: t.to("meta")}, "device", "z: got meta"),
]


@pytest.mark.parametrize(("change", "kind", "named"), WRONG, ids=[f"{kind}-{named}" for _, kind, named in WRONG])
def test_chunk_scan_refuses(change, kind, named, device):
    given = Case("bamba", "longer", "float32", device, initial=True).arguments
    [(name, wrong)] = change.items()
    with refused(kind, named):
        chunk_scan(**given | {name: wrong(given[name])}, debug=True)
