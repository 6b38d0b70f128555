# SPDX-License-Identifier: Apache-2.0
"""Prefills of vLLM's delta rules: inputs, launchers, and the comparison with the recurrence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from mamba import oracle
from mamba.data import check


@dataclass
class Inputs:
    """Tensors of one prefill, packed in a batch of one, with NaN after the last token."""

    starts: list[int]
    """First token of each sequence, and the number of tokens."""
    q: torch.Tensor  # [1, tokens, key heads, keys]
    k: torch.Tensor
    v: torch.Tensor  # [1, tokens, heads, values]
    g: torch.Tensor  # [1, tokens, heads] or [1, tokens, heads, keys], float32
    beta: torch.Tensor  # [1, tokens, heads], float32
    states: torch.Tensor | None  # [sequences, heads, values, keys], float32
    cu_seqlens: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.cu_seqlens = torch.tensor(self.starts).int().to(self.q.device)

    def golden(self, number: int, tokens: slice) -> oracle.Delta:
        parts = (each[0, tokens] for each in (self.q, self.k, self.v, self.g, self.beta))
        return oracle.delta(*parts, initial=None if self.states is None else self.states[number])


def inputs(
    starts: list[int], shape: tuple[int, int, int, int], dtype: str, device: str, *, initial: bool, by_key: bool
) -> Inputs:
    """Unit-normal data; decays between 0.7 and 1 a token, beta from 0.1 to 0.9."""
    key_heads, heads, keys, values = shape
    tokens = starts[-1]
    torch.manual_seed(tokens + keys + by_key)

    def rows(data: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        whole = torch.full((1, tokens + 3, *data.shape[1:]), float("nan"), dtype=kind, device=device)
        whole[0, :tokens] = data.to(whole)
        return whole[:, :tokens]

    kind = getattr(torch, dtype)
    return Inputs(
        starts,
        rows(torch.randn(tokens, key_heads, keys), kind),
        rows(torch.randn(tokens, key_heads, keys), kind),
        rows(torch.randn(tokens, heads, values), kind),
        rows(-0.35 * torch.rand(tokens, heads, *([keys] if by_key else [])), torch.float32),
        rows(0.1 + 0.8 * torch.rand(tokens, heads), torch.float32),
        torch.randn(len(starts) - 1, heads, values, keys).to(device) if initial else None,
    )


def check_sequences(data: Inputs, out: torch.Tensor, states: torch.Tensor, dtype: str, record) -> None:
    """Outputs of every sequence, and the state that it leaves."""
    for number, ends in enumerate(itertools.pairwise(data.starts)):
        golden = data.golden(number, slice(*ends))
        check(out[0, slice(*ends)], golden.y, "delta", dtype, record, scale=golden.scale)
        check(states[number], golden.states[-1], "delta", dtype, record)


def gated_delta_rule(ops, data: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states of vLLM's gated delta rule."""
    norm, chunk = ops("l2norm").l2norm_fwd, ops("chunk").chunk_gated_delta_rule_fwd
    scale = data.k.shape[-1] ** -0.5
    _, out, _, states, *_ = chunk(
        norm(data.q), norm(data.k), data.v, data.g, data.beta, scale, data.states, True, cu_seqlens=data.cu_seqlens
    )
    return out, states


def kda(ops, data: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states of Bailing's Kimi Delta Attention."""
    return ops("kda").chunk_kda(
        data.q,
        data.k,
        data.v.clone(),
        data.g,
        data.beta,
        initial_state=data.states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=data.cu_seqlens,
    )


def with_gate(ops, data: Inputs, bound: float | None, *, kimi: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states of Kimi's own copy, or of Bailing's; a kernel makes the gate of what the model projects.

    `data.g` becomes what was made of it, and so does `data.beta` of Kimi's. What becomes there of a gate without a
    bound is computed by another kernel, token by token.
    """
    heads, keys = data.g.shape[2:]
    raw_gate, raw_beta = (torch.randn(each.shape).to(data.q) for each in (data.g, data.beta))
    A_log = torch.linspace(1.0, 1.5, heads) if bound else torch.linspace(0.2, 0.5, heads)
    A_log = A_log.to(data.q.device).log()
    bias = torch.randn(heads * keys, device=data.q.device) / 4 - (4 if bound else 1)  # both decay by about 0.1 a token
    data.g = oracle.delta_gate(raw_gate[0], A_log, bias.view(heads, keys), bound)[None]
    if kimi:
        data.beta = raw_beta.double().sigmoid()
    return ops("kimi.chunk" if kimi else "kda").chunk_kda_with_fused_gate(
        data.q,
        data.k,
        data.v.clone(),
        raw_gate,
        raw_beta if kimi else data.beta,
        A_log,
        bias,
        lower_bound=bound,
        initial_state=data.states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=data.cu_seqlens,
    )
