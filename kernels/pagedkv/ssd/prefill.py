# SPDX-License-Identifier: Apache-2.0
"""The launcher of Mamba-2's prefill: checks, and one kernel, or two where a sequence is cut into segments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.device import current, on
from pagedkv.launch import tuning
from pagedkv.prepared import Launch, compiler_settings, find, keep, signature
from pagedkv.ssd import checks
from pagedkv.ssd.kernel import PrefillOptions, PrefillStrides, ssd_carry_kernel, ssd_prefill_kernel

if TYPE_CHECKING:
    from torch import Tensor


def ssd_prefill(
    x: Tensor,  # [tokens, heads, head_size]
    dt: Tensor,  # [tokens, heads]
    A: Tensor,  # [heads] fp32
    B: Tensor,  # [tokens, groups, state]
    C: Tensor,  # [tokens, groups, state]
    out: Tensor,  # [tokens, heads, head_size]
    states: Tensor,  # [pieces, heads, head_size, state]
    *,
    starts: Tensor,  # [pieces + 1] int32
    last_pieces: Tensor | None = None,  # [sequences] int32
    D: Tensor | None = None,  # [heads] or [heads, head_size]
    z: Tensor | None = None,  # [tokens, heads, head_size]
    dt_bias: Tensor | None = None,  # [heads]
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,  # [sequences, heads, head_size, state]
    num_segments: int | None = None,
    debug: bool = False,
) -> None:
    """Outputs and states of Mamba-2 for the tokens of some sequences (Dao and Gu 2024, section 2).

    Of each sequence and head, from its initial state or 0,

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t
        out_t = (h_t C_t + D x_t) silu(z_t)

    States are carried in fp32 whatever the dtype of `states`. A NaN in x may reach the 127 tokens around it, and no
    other sequence. A sequence without tokens keeps its state. The call never waits for the device, and the grid follows
    from shapes, so it can be captured in a graph.

    Args:
        x: Inputs; fp32, fp16 or bf16, last dimension dense. So are B, C, z and out, in the same dtype.
        dt: Step sizes, before bias and softplus.
        A: Negative; of -inf each step leaves nothing of the state.
        B: Input projections.
        C: Output projections.
        out: Result.
        states: The state after each piece.
        starts: The first token of each piece, then the end of the last. Pieces follow each other without a gap.
        last_pieces: The last piece of each sequence, which has at least one. None: every sequence is one piece.
        D: Skip connection of each head, or of each channel.
        z: Gate.
        dt_bias: Added to dt.
        dt_softplus: Whether dt is then log(1 + exp(dt)).
        dt_limit: Bounds that dt is kept within after that; the lower one is at least 0.
        initial_states: State before the first token of each sequence.
        num_segments: Segments of a sequence that are walked at the same time; None lets the device decide.
        debug: Also check `starts` and `last_pieces` (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    last = starts if last_pieces is None else last_pieces
    tensors = (x, dt, A, dt_bias, B, C, D, z, out, initial_states, states, starts, last)
    given = (last_pieces is None, dt_softplus, dt_limit, num_segments)
    key = None if debug else ("ssd", *map(signature, tensors), *given, compiler_settings())
    call = find(key)
    if call is not None:
        call.run(*tensors)
        return
    checks.tensors(x, dt, A, B, C, out, states, starts, last_pieces, D, z, dt_bias, initial_states)
    checks.options(dt_limit, num_segments)
    if debug:
        checks.pieces(starts, last_pieces, x.shape[0])
    if len(states if last_pieces is None else last_pieces) == 0:
        return
    options = (dt_softplus, dt_limit, num_segments)
    call = _prepare(x, dt, dt_bias, B, C, D, z, out, initial_states, states, last_pieces, *options)
    call.run(*tensors)
    keep(key, call)


@dataclass(frozen=True)
class ScanCall:
    """Launches of the calls with one signature."""

    walk: Launch
    carry: Launch
    """Carries states from segment to segment."""
    segments: int
    compiled: bool
    """Whether kernels are compiled. `carry` is then launched once without need too, so that it is compiled early."""
    carried: tuple[int, int, int, int, int]
    """Extents of the states between segments: sequences, segments - 1, heads, head_size, state."""
    numbers: tuple[Any, ...]
    """Last arguments of both kernels."""

    def run(self, *tensors: Tensor | None) -> None:
        """Launch for the tensors of one call."""
        x, dt, A, bias, B, C, D, z, out, initial, states, starts, last = tensors
        assert x is not None
        with on(x):
            carried = falls = x.new_empty(0, dtype=torch.float32)
            if self.segments > 1:
                carried = x.new_empty(self.carried, dtype=torch.float32)
                falls = x.new_empty(self.carried[:3], dtype=torch.float32)
            if self.segments > 1 or (self.compiled and not self.carry.compiled):
                self.carry(x, dt, A, bias, B, starts, last, carried, falls, *self.numbers)
            self.walk(x, dt, A, bias, B, C, D, z, out, initial, states, starts, last, carried, falls, *self.numbers)


def _prepare(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    out: Tensor,
    initial_states: Tensor | None,
    states: Tensor,
    last_pieces: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    num_segments: int | None,
) -> ScanCall:
    """Choose the grids and the options of the compiler for a call that was checked."""
    (tokens, heads, head_size), (groups, state) = x.shape, B.shape[1:]
    sequences = len(states) if last_pieces is None else len(last_pieces)
    arch = current(x)
    data = tuning(arch.name).scan_of(head_size, state, x.element_size())
    constants = PrefillOptions(
        NUM_HEADS=heads,
        HEADS_PER_GROUP=heads // groups,
        HEAD_SIZE=head_size,
        STATE_SIZE=state,
        BLOCK_T=data.block_t,
        BLOCK_D=data.block_d,
        BLOCK_DSTATE=data.block_dstate(state),
        DT_SOFTPLUS=dt_softplus,
        HAS_DT_BIAS=dt_bias is not None,
        HAS_INITIAL_STATES=initial_states is not None,
        HAS_Z=z is not None,
        HAS_D=D is not None,
        D_HAS_HEAD_DIM=D is not None and D.dim() == 2,
        HAS_PIECES=last_pieces is not None,
    )
    strides = PrefillStrides(
        x=x.stride()[:2],
        z=(0, 0) if z is None else z.stride()[:2],
        out=out.stride()[:2],
        B=B.stride()[:2],
        C=C.stride()[:2],
        states=states.stride()[:3],
        initial_states=(0, 0, 0) if initial_states is None else initial_states.stride()[:3],
        D=(0,) if D is None else D.stride()[:1],
    )
    options: dict[str, int] = {}
    if arch.amd:
        # With kpack 2 Triton 3.6 halves the accumulator of a chain of products of which one has 16 terms.
        short = min(data.block_t, constants.BLOCK_DSTATE) < 32
        options = {"matrix_instr_nonkdim": 16, "kpack": 1 if short else data.kpack}
    programs = heads * -(-head_size // data.block_d)
    segments = num_segments or data.segments(programs * sequences, tokens // sequences, arch.compute_units)
    launch = {"OPTIONS": constants, "num_warps": data.waves, "num_stages": data.stages, **options}
    between = max(1, segments - 1)
    return ScanCall(
        walk=Launch(ssd_prefill_kernel, (programs, segments, sequences), **launch),
        carry=Launch(ssd_carry_kernel, (programs, between, sequences), **launch),
        segments=segments,
        compiled=arch.compiled,
        carried=(sequences, between, heads, head_size, state),
        numbers=(strides, dt.stride(0), segments, *map(float, dt_limit)),
    )
