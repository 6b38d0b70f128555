# SPDX-License-Identifier: Apache-2.0
"""Inputs of a Mamba2 layer, laid out as a model lays them out, and the comparison with the oracle."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
from mamba import oracle
from support.tolerances import ROW_RELATIVE
from torch import Tensor

from pagedkv.device import INTERPRETED

DTYPES = ("float32", "float16") if INTERPRETED else ("float32", "float16", "bfloat16")
"""The interpreter computes bfloat16 arithmetic wrongly."""


def dots(dtype: str) -> str:
    """What `tl.dot` computes with by default: of fp32, tf32 on CUDA and xf32 on gfx942, which keeps as many bits."""
    if INTERPRETED or dtype != "float32":
        return dtype
    target = triton.runtime.driver.active.get_current_target()
    return "tf32" if target.backend == "cuda" or target.arch == "gfx942" else dtype


@dataclass(frozen=True)
class Layer:
    heads: int
    head_size: int
    state: int
    groups: int
    chunk: int

    @property
    def id(self) -> str:
        return f"h{self.heads}x{self.head_size}-n{self.state}-g{self.groups}-chunk{self.chunk}"


LAYERS = (
    Layer(2, 64, 128, 1, 64),  # Bamba and Granite 4, a few of their heads
    Layer(4, 80, 24, 2, 32),  # sizes that are no powers of two
    Layer(4, 64, 64, 2, 128),  # Zamba2: the chunk is longer than some sequences
)


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [batch, tokens, heads, head_size]
    z: Tensor  # as x
    B: Tensor  # [batch, tokens, groups, state]
    C: Tensor  # as B
    dt: Tensor  # [batch, tokens, heads]
    dt_bias: Tensor  # [heads] float32
    A: Tensor  # [heads] float32, negative
    D: Tensor  # [heads] float32


def inputs(layer: Layer, batch: int, tokens: int, dtype: str, device: str) -> Inputs:
    """Unit-normal data in one projection per token, z x B C dt side by side, as Mamba2's in_proj gives it.

    Rows, batches and the space after the last token are separated by NaN. dt is softplus(normal / 2 - 1), 0.06 to 1,
    and A lies in -0.25 .. -0.05, so the exponents of a chunk of 128 tokens end near -6.
    """
    torch.manual_seed(layer.heads * 1000 + tokens)
    inner, project = layer.heads * layer.head_size, layer.groups * layer.state
    widths = [inner, inner, project, project, layer.heads]
    rows = torch.full((batch, tokens + 3, sum(widths) + 16), float("nan"), dtype=getattr(torch, dtype), device=device)
    used = rows[:, :tokens, : sum(widths)]
    used.copy_(torch.randn(used.shape))
    used[..., -layer.heads :] /= 2
    z, x, B, C, dt = used.split(widths, dim=-1)
    heads, groups = (layer.heads, layer.head_size), (layer.groups, layer.state)
    A = -(0.05 + 0.2 * torch.rand(layer.heads))
    per_head = (0.1 * torch.randn(layer.heads) - 1, A, torch.randn(layer.heads))
    return Inputs(
        x.unflatten(-1, heads),
        z.unflatten(-1, heads),
        B.unflatten(-1, groups),
        C.unflatten(-1, groups),
        dt,
        *(tensor.to(device) for tensor in per_head),
    )


def check(got: Tensor, golden: Tensor, op: str, dtype: str, record, *, scale: Tensor | None = None) -> None:
    """Every row of channels within the tolerance of (op, dtype), relative to `scale` or its own norm; NaN nowhere."""
    assert got.shape == golden.shape
    record("dtype", str(got.dtype).removeprefix("torch."))
    record("shape", "x".join(map(str, got.shape)))
    record(f"max_abs_err_{op}", (got.double().cpu() - golden).abs().max().item())
    rows = (got.double().cpu() - golden).norm(dim=-1)
    relative = rows / (golden.norm(dim=-1) if scale is None else scale).clamp(min=1e-30)
    record(f"max_row_relative_err_{op}", relative.max().item())
    bound = ROW_RELATIVE[op, dtype]
    wrong = ~(relative <= bound)
    record(f"max_row_relative_err_{op}_allowed", bound)
    record("rows_off", int(wrong.sum()))
    record("rows", wrong.numel())
    assert not wrong.any(), (
        f"{op}: {int(wrong.sum())} of {wrong.numel()} rows are off by more than {bound:.1e} of their scale; first at "
        f"{wrong.nonzero()[0].tolist()}, worst {relative.max().item():.1e}"
    )


STARTS = [0, 90, 91, 124]


def chunked(starts: list[int], chunk: int) -> tuple[list[int], list[int], list[int]]:
    """Where the chunks of some sequences begin, and all end; whose each is; the last of each sequence."""
    spans = [range(begin, end, chunk) for begin, end in itertools.pairwise(starts)]
    owners = [owner for owner, span in enumerate(spans) for _ in span]
    last = [count - 1 for count in itertools.accumulate(map(len, spans))]
    return [*itertools.chain(*spans), starts[-1]], owners, last


def check_packed_scan(ops, layer, dtype, device, record_property):
    """Check vLLM's scan, whatever does its steps, on three packed sequences.

    Only the middle one is new; states are kept in float32, as hybrid models keep them.
    """
    data = inputs(layer, 1, STARTS[-1], dtype, device)
    x, z, B, C, dt = (each[0] for each in (data.x, data.z, data.B, data.C, data.dt))
    initial = torch.randn(3, layer.heads, layer.head_size, layer.state)
    initial[1] = 0.0
    begins, owners, last = (torch.tensor(each).int().to(device) for each in chunked(STARTS, layer.chunk))
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    states = ops.mamba_chunk_scan_combined_varlen(
        x,
        dt,
        data.A,
        B,
        C,
        layer.chunk,
        torch.tensor(STARTS).int().to(device),
        begins,
        last,
        owners,
        out,
        D=data.D,
        z=z,
        dt_bias=data.dt_bias,
        initial_states=initial.to(device),
        dt_softplus=True,
        state_dtype=torch.float32,
    )
    step_size = oracle.step_size(dt, data.dt_bias, softplus=True)
    for number, tokens in enumerate(slice(*ends) for ends in itertools.pairwise(STARTS)):
        golden = oracle.scan(
            x[tokens], step_size[tokens], data.A, B[tokens], C[tokens], D=data.D, z=z[tokens], initial=initial[number]
        )
        check(out[tokens], golden.y, "scan", dots(dtype), record_property, scale=golden.scale)
        check(states[number], golden.state, "scan", dots(dtype), record_property)
