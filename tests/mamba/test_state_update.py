# SPDX-License-Identifier: Apache-2.0
"""mamba-ssm's decode step on a pool of states: each sequence's slot is found, read and written, and no other."""

from __future__ import annotations

import pytest
import torch
from mamba import oracle
from mamba.data import DTYPES, check
from support.pools import assert_same_bits

pytestmark = pytest.mark.device

SLOTS = [5, -1, 0, 3, -1, 6]
"""Slot of each sequence, -1 for the padding of a captured graph; 1, 2, 4 and 7 belong to nobody."""

SHAPES = [
    pytest.param(2, 64, 128, 1, id="h2x64-n128-g1"),
    pytest.param(6, 40, 24, 3, id="h6x40-n24-g3"),
    pytest.param(1, 96, 16, 1, id="mamba1-96-n16"),
]


def pool(heads: int, head_size: int, state: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[8, heads, head_size, state], blocks padded to a page as hybrid models pad them; NaN wherever nobody owns it.

    One more block lies in front, so that a slot of -1 would be a place in memory, and NaN.
    """
    row = heads * head_size * state
    storage = torch.full((9, row + 48), float("nan"), dtype=dtype, device=device)
    states = storage[1:, :row].view(8, heads, head_size, state)
    for slot in SLOTS:
        if slot >= 0:
            states[slot] = torch.randn(heads, head_size, state).to(states)
    return states


def arguments(heads: int, head_size: int, state: int, groups: int, dtype: torch.dtype, device: str) -> dict:
    """Inputs of one step; rows of the padding are NaN. Mamba2 has one dt, A and D a head: their strides are 0."""
    batch, size = len(SLOTS), (heads, head_size)
    data = {
        "x": torch.randn(batch, *size, dtype=torch.float32),
        "z": torch.randn(batch, *size),
        "B": torch.randn(batch, groups, state),
        "C": torch.randn(batch, groups, state),
        "dt": torch.randn(batch, heads, head_size if heads == 1 else 1) / 2,
        "dt_bias": torch.randn(heads, head_size if heads == 1 else 1) / 10 - 1,
        "D": torch.randn(heads, head_size if heads == 1 else 1),
        "A": -(0.05 + 0.2 * torch.rand(heads, head_size if heads == 1 else 1, state if heads == 1 else 1)),
    }
    for name in ("x", "z", "B", "C", "dt"):
        data[name][[slot < 0 for slot in SLOTS]] = float("nan")
        data[name] = data[name].to(dtype)
    whole = {"dt": (batch, *size), "dt_bias": size, "D": size, "A": (*size, state)}
    return {name: tensor.to(device).expand(whole.get(name, tensor.shape)) for name, tensor in data.items()}


def step(states: torch.Tensor, data: dict, row: int, slot: int) -> oracle.Scan:
    """What one row of a step computes from the state in a slot."""
    one = {name: data[name][row : row + 1] for name in ("x", "B", "C")}
    dt = oracle.step_size(data["dt"][row : row + 1], data["dt_bias"], softplus=True)
    z = data["z"][row : row + 1] if data["z"] is not None else None
    return oracle.scan(one["x"], dt, data["A"], one["B"], one["C"], D=data["D"], z=z, initial=states[slot])


def check_step(out: torch.Tensor, state: torch.Tensor, golden: oracle.Scan, dtype: str, record, kept="float32") -> None:
    """A row of output [heads, head_size] in `dtype`, and the state that it leaves, in `kept`."""
    check(out[None], golden.y, "scan", dtype, record, scale=golden.scale)
    check(state, golden.state, "scan", kept, record)


@pytest.mark.parametrize(("heads", "head_size", "state", "groups"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_selective_state_update(heads, head_size, state, groups, dtype, gated, device, package, record_property):
    torch.manual_seed(heads)
    states = pool(heads, head_size, state, torch.float32, device)
    data = arguments(heads, head_size, state, groups, getattr(torch, dtype), device)
    if not gated:
        data["z"] = None
    before = states.clone()
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    update = package("selective_state_update").selective_state_update
    out = update(states, **data, dt_softplus=True, state_batch_indices=slots)
    for row, slot in enumerate(SLOTS):
        if slot < 0:
            assert (out[row] == 0).all(), "the rows of padding must be 0, their inputs are NaN"
            continue
        check_step(out[row], states[slot], step(before, data, row, slot), dtype, record_property)
        before[slot] = states[slot]
    assert_same_bits(states, before, "slots of nobody")


def test_selective_state_update_without_indices(device, package, record_property):
    """The state of sequence i is row i, in fp16; dt is beyond 20, where softplus is the identity."""
    torch.manual_seed(1)
    states = torch.randn(len(SLOTS), 2, 32, 48).to(device, torch.float16)
    data = arguments(2, 32, 48, 2, torch.float32, device)
    data |= {name: torch.randn_like(data[name]) for name in ("x", "z", "B", "C")}
    data["dt"] = torch.full_like(data["dt"][:, :, :1], 25.0).expand(data["dt"].shape)
    before = states.clone()
    out = package("selective_state_update").selective_state_update(states, **data, dt_softplus=True)
    for row in range(len(SLOTS)):
        check_step(out[row], states[row], step(before, data, row, row), "float32", record_property, kept="float16")
