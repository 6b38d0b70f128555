# SPDX-License-Identifier: Apache-2.0
"""The last step of Mamba-2's chunked scan against the recurrence, with NaN wherever nobody may read."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from support.tolerances import ROW_RELATIVE

from pagedkv.device import INTERPRETED
from pagedkv.errors import ArgumentError
from pagedkv.ssd import reference
from pagedkv.ssd.scan import chunk_scan
from pagedkv.ssd.steps import chunked, steps

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


def poisoned(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def spread(tensor: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The same numbers with strides of their own, NaN in between; only the last dimension is dense."""
    rows = torch.full((*(2 * size + 1 for size in tensor.shape[:-1]), tensor.shape[-1] + 8), float("nan"), dtype=dtype)
    rows = rows.to(device)[tuple(slice(1, None, 2) for _ in tensor.shape[:-1])][..., : tensor.shape[-1]]
    return rows.copy_(tensor)


class Case:
    """One step of some sequences, its inputs on the device, and what the recurrence says of them in float64."""

    def __init__(self, shape: str, starts: str, dtype: str, device: str, *, initial: bool, skip: str = "head") -> None:
        heads, groups, head_size, size, chunk = SHAPES[shape]
        ends = STARTS[starts]
        tokens, kind = ends[-1], getattr(torch, dtype)
        torch.manual_seed(tokens + heads)
        x, z = torch.randn(2, tokens, heads, head_size).to(kind).double()
        B, C = torch.randn(2, tokens, groups, size).to(kind).double()
        dt = reference.step_size(torch.randn(tokens, heads) / 2 - 1, None, softplus=True)
        A = -(0.05 + 0.2 * torch.rand(heads)).double()
        D = {"none": None, "head": torch.randn(heads), "channel": torch.randn(heads, head_size)}[skip]
        states = torch.randn(len(ends) - 1, heads, head_size, size).double() if initial else None
        begins, owners, _ = chunked(ends, chunk)
        made = steps(
            x, dt, A, B, C, chunk_size=chunk, chunk_starts=begins, sequences=owners, initial_states=states
        )
        gate = z if skip != "none" else None
        self.golden = [
            reference.scan(
                x[part], dt[part], A, B[part], C[part], D=D, z=None if gate is None else gate[part],
                initial=None if states is None else states[number],
            )
            for number, part in enumerate(slice(*pair) for pair in itertools.pairwise(ends))
        ]  # fmt: skip
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
        self.dtype = dtype

    def check(self, record) -> None:
        """Every row within its tolerance, NaN nowhere."""
        out = self.arguments["out"].double().cpu()
        golden = torch.cat([each.y for each in self.golden])
        relative = (out - golden).norm(dim=-1) / torch.cat([each.scale for each in self.golden])
        bound = ROW_RELATIVE["scan", self.dtype]
        record("dtype", self.dtype)
        record("max_row_relative_err_scan", relative.max().item())
        record("max_row_relative_err_scan_allowed", bound)
        wrong = ~(relative <= bound)
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.numel()} (token, head) rows are off by more than {bound:.1e} of their scale; "
            f"first at {wrong.nonzero()[0].tolist()}, worst {relative.max().item():.1e}"
        )


@pytest.mark.device
@pytest.mark.parametrize("initial", [False, True], ids=["new", "initial"])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_scan(dtype, shape, starts, initial, device, record_property):
    """Sequences and chunks of every kind of length, each from its own state, D and gate, strides of each tensor."""
    case = Case(shape, starts, dtype, device, initial=initial)
    chunk_scan(**case.arguments, debug=True)
    case.check(record_property)
