# SPDX-License-Identifier: Apache-2.0
"""vLLM's gated delta rule (Qwen3-Next, Qwen3.5) and Kimi Delta Attention against the recurrence, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from mamba import deltas, oracle
from mamba.data import DTYPES, check
from support.pools import assert_same_bits

from pagedkv.device import INTERPRETED

pytestmark = pytest.mark.device

STARTS = [0, 64, 65, 85, 220]
"""A chunk, one token, a part of a chunk, and two chunks with a third that is not full."""

SHAPES = [
    pytest.param((1, 2, 128, 128), id="k1x128-v2x128"),  # Qwen3-Next, two value heads of each key head
    pytest.param((2, 2, 64, 96), id="k2x64-v2x96"),
]
DTYPE = pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if INTERPRETED or dtype != "float32"])
"""vLLM refuses float32 here, and some of its configurations would not fit."""
INITIAL = pytest.mark.parametrize("initial", [True, False], ids=["initial", "new"])


@INITIAL
@DTYPE
@pytest.mark.parametrize("shape", SHAPES)
def test_chunk_gated_delta_rule(shape, dtype, initial, device, delta_ops, record_property):
    data = deltas.inputs(STARTS, shape, dtype, device, initial=initial, by_key=False)
    deltas.check_sequences(data, *deltas.gated_delta_rule(delta_ops, data), dtype, record_property)


@INITIAL
@DTYPE
def test_chunk_kda(dtype, initial, device, delta_ops, record_property):
    data = deltas.inputs(STARTS, (2, 2, 128, 128), dtype, device, initial=initial, by_key=True)
    if not initial:  # it takes none but zeros
        data.states = torch.zeros(len(STARTS) - 1, 2, 128, 128, device=device)
    deltas.check_sequences(data, *deltas.kda(delta_ops, data), dtype, record_property)


@pytest.mark.parametrize(
    ("bound", "initial"), [(None, True), (-5.0, True), (-5.0, False)], ids=["softplus", "bounded", "bounded-new"]
)
@DTYPE
def test_chunk_kda_of_kimi(dtype, initial, bound, device, delta_ops, record_property):
    """Kimi's own copy of the kernels, which it takes on ROCm."""
    data = deltas.inputs(STARTS, (2, 2, 128, 128), dtype, device, initial=initial, by_key=True)
    deltas.check_sequences(data, *deltas.with_gate(delta_ops, data, bound, kimi=True), dtype, record_property)


SLOTS = [[3, 8, 5], [0, 0, 0], [7, 1, 2], [4, 6, 9]]
"""Blocks of each sequence's states, one for each token that a step may have; 0 is the null block of padding."""


def pool(heads: int, values: int, keys: int, device: str) -> torch.Tensor:
    """[10, heads, values, keys] in float32, padded to a page; the null block is NaN, and so is all that nobody owns."""
    row = heads * values * keys
    return torch.full((10, row + 64), float("nan"), device=device)[:, :row].view(10, heads, values, keys)


@dataclass
class Step:
    """A token of each sequence, or three in a row; gates and betas as the model projects them."""

    packed: torch.Tensor  # [rows, channels of q, k and v]
    shape: tuple[int, int, int, int]  # key heads, heads, keys, values
    raw_gate: torch.Tensor  # [rows, heads] or [rows, heads, keys]
    raw_beta: torch.Tensor  # [rows, heads]
    A_log: torch.Tensor  # [heads]
    bias: torch.Tensor  # [heads] or [heads, keys]
    states: torch.Tensor
    ids: torch.Tensor  # [sequences] or [sequences, tokens]
    starts: torch.Tensor  # [sequences + 1]
    accepted: torch.Tensor | None  # [sequences]

    @property
    def qkv(self) -> list[torch.Tensor]:
        key_heads, heads, keys, values = self.shape
        parts = self.packed.split([key_heads * keys, key_heads * keys, heads * values], dim=-1)
        return [part.unflatten(-1, (-1, size))[None] for part, size in zip(parts, (keys, keys, values), strict=True)]

    @property
    def options(self) -> dict:
        given = {"initial_state": self.states, "cu_seqlens": self.starts, "ssm_state_indices": self.ids}
        return given | {"num_accepted_tokens": self.accepted, "use_qk_l2norm_in_kernel": True}


def sigmoid_gating(ops, step: Step) -> torch.Tensor:
    update = ops("fused_sigmoid_gating").fused_sigmoid_gating_delta_rule_update
    return update(step.A_log, step.raw_gate, step.raw_beta, step.bias, *step.qkv, **step.options)[0]


def recurrent(ops, step: Step) -> torch.Tensor:
    gates = oracle.delta_gate(step.raw_gate, step.A_log, step.bias), step.raw_beta.double().sigmoid()
    gates = (each.float().to(step.packed.device)[None] for each in gates)
    update = ops("fused_recurrent").fused_recurrent_gated_delta_rule
    return update(*(each.contiguous() for each in step.qkv), *gates, **step.options)[0]


def packed_decode(ops, step: Step) -> torch.Tensor:
    _, heads, keys, values = step.shape
    out = torch.empty(len(step.packed), 1, heads, values, dtype=step.packed.dtype, device=step.packed.device)
    ops("fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode(
        step.packed,
        step.raw_gate,
        step.raw_beta,
        step.A_log,
        step.bias,
        keys**-0.5,
        step.states,
        out,
        step.ids,
        use_qk_l2norm_in_kernel=True,
    )
    return out.transpose(0, 1)


def kimi_recurrent(ops, step: Step) -> torch.Tensor:
    return ops("kimi.fused_recurrent").fused_recurrent_kda(
        *step.qkv,
        step.raw_gate[None],
        step.raw_beta[None],
        step.A_log,
        step.bias,
        None,
        step.states,
        step.starts,
        step.ids,
        step.accepted,
    )[0]


def kimi_packed(ops, step: Step) -> torch.Tensor:
    return ops("kimi.fused_recurrent").fused_recurrent_kda_packed_decode(
        step.packed, step.raw_gate[None], step.raw_beta[None], step.A_log, step.bias, None, step.states, step.ids
    )[0]


@pytest.mark.parametrize(
    ("update", "tokens"),
    [
        (sigmoid_gating, 1),
        (sigmoid_gating, 3),
        (recurrent, 1),
        (recurrent, 3),
        (packed_decode, 1),
        (kimi_recurrent, 1),
        (kimi_recurrent, 3),
        (kimi_packed, 1),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
@DTYPE
def test_recurrent_step(dtype, update, tokens, device, delta_ops, record_property):
    """Some of three tokens may be refused later, so the state after each is kept in a block of its own."""
    kimi, rows, kind = update in (kimi_recurrent, kimi_packed), len(SLOTS) * tokens, getattr(torch, dtype)
    shape = key_heads, heads, keys, values = (2, 2, 128, 40) if kimi else (1, 2, 64, 40)
    torch.manual_seed(rows)
    accepted = [2, 1, 3, 1] if tokens > 1 else [1] * len(SLOTS)
    states, ids = pool(heads, values, keys, device), torch.tensor(SLOTS, dtype=torch.int32, device=device)
    for slots, count in zip(SLOTS, accepted, strict=True):
        if slots[0]:
            states[slots[count - 1]] = torch.randn(heads, values, keys, device=device)
    before, per_gate = states.clone(), (heads, keys) if kimi else (heads,)
    step = Step(
        torch.randn(rows, 2 * key_heads * keys + heads * values).to(device, kind),
        shape,
        torch.randn(rows, *per_gate).to(device, kind),
        torch.randn(rows, heads).to(device, kind),
        torch.tensor([0.2, 0.5], device=device).log(),
        torch.randn(per_gate, device=device) / 4,
        states,
        ids if tokens > 1 else ids[:, 0],
        torch.arange(0, rows + 1, tokens, dtype=torch.int32, device=device),
        torch.tensor(accepted).int().to(device) if tokens > 1 else None,
    )
    out = update(delta_ops, step)
    g, beta = oracle.delta_gate(step.raw_gate, step.A_log, step.bias), step.raw_beta.double().sigmoid()
    inputs_of_step = [*(each[0] for each in step.qkv), g, beta]
    for number, (slots, count) in enumerate(zip(SLOTS, accepted, strict=True)):
        part = slice(number * tokens, (number + 1) * tokens)
        if slots[0] == 0:
            if update in (packed_decode, kimi_recurrent, kimi_packed):
                assert (out[0, part.start] == 0).all(), "padding"
            continue
        golden = oracle.delta(*(each[part] for each in inputs_of_step), initial=before[slots[count - 1]])
        check(out[0, part], golden.y, "delta step", dtype, record_property, scale=golden.scale)
        for token, slot in enumerate(slots[:tokens]):
            check(states[slot], golden.states[token], "delta step", "float32", record_property)
        states[slots] = before[slots] = float("nan")
    assert_same_bits(states, before, "states of nobody, and the null block")


@DTYPE
def test_post_conv_prep(dtype, device, delta_ops, record_property):
    """What Qwen's prefill makes of the convolution's rows: q and k by their norms, v as it is, decays and betas."""
    torch.manual_seed(2)
    rows, kind = 37, getattr(torch, dtype)
    packed = torch.randn(rows, 2 * 2 * 48 + 4 * 40).to(device, kind)
    raw_gate, raw_beta = torch.randn(2, rows, 4).to(device, kind)
    A_log, bias = torch.randn(4, device=device), torch.randn(4, device=device)
    prepare = delta_ops("fused_gdn_prefill_post_conv").fused_post_conv_prep
    q, k, v, g, beta = prepare(packed, raw_gate, raw_beta, A_log, bias, 2, 48, 40)
    golden_q, golden_k, golden_v = packed.double().cpu().split([96, 96, 160], dim=-1)
    for got, line in ((q, golden_q.view(rows, 2, 48)), (k, golden_k.view(rows, 2, 48))):
        norm = (line.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        check(got, line / norm, "gated_norm", dtype, record_property)
    assert_same_bits(v.cpu(), golden_v.view(rows, 4, 40).to(kind), "values")
    check(g[..., None], oracle.delta_gate(raw_gate, A_log, bias)[..., None], "delta", "float32", record_property)
    check(beta[..., None], raw_beta.double().cpu().sigmoid()[..., None], "delta step", "float32", record_property)


def test_a_sequence_of_no_tokens_shifts_those_after_it(delta_ops):
    """Declared: vLLM counts sequences by where chunks begin. It passes none without tokens today, nor do we.

    Repaired, the second row is [2, 0], and STARTS above gets such a sequence.
    """
    chunks = delta_ops("index").prepare_chunk_indices(torch.tensor([0, 64, 64, 70], dtype=torch.int32), 64)
    assert chunks.tolist() == [[0, 0], [1, 0]]
