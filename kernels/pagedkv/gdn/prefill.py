# SPDX-License-Identifier: Apache-2.0
"""The launcher of the gated delta rule's prefill: checks, and two kernels, or four where sequences are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagedkv.checks import at_least_one
from pagedkv.device import current, on
from pagedkv.gdn import checks
from pagedkv.gdn.kda_kernel import kda_chunks_kernel
from pagedkv.gdn.kernel import (
    FACTORS,
    DeltaOptions,
    DeltaStrides,
    gdn_carry_kernel,
    gdn_chunks_kernel,
    gdn_join_kernel,
    gdn_prefill_kernel,
)
from pagedkv.launch import tuning
from pagedkv.prepared import Launch, compiler_settings, find, keep, signature
from pagedkv.ssd.checks import pieces as check_pieces

if TYPE_CHECKING:
    from torch import Tensor

JOINED_ROWS = 16
"""Rows of the state of a program that joins segments."""


def gdn_prefill(
    q: Tensor,  # [tokens, key heads, key size]
    k: Tensor,  # [tokens, key heads, key size]
    v: Tensor,  # [tokens, heads, value size]
    a: Tensor,  # [tokens, heads], or for a decay of each key [tokens, heads, key size]
    b: Tensor,  # [tokens, heads]
    out: Tensor,  # [tokens, heads, value size]
    states: Tensor,  # [blocks, heads, value size, key size]
    *,
    A_log: Tensor,  # [heads]
    dt_bias: Tensor,  # [heads] or [heads, key size]
    starts: Tensor,  # [pieces + 1] int32
    sources: Tensor,  # [sequences] int32
    targets: Tensor,  # [pieces] int32
    known: Tensor | None = None,  # [sequences] bool
    last_pieces: Tensor | None = None,  # [sequences] int32
    lower_bound: float | None = None,
    num_segments: int | None = None,
    debug: bool = False,
) -> None:
    """Outputs and states of the gated delta rule for the tokens of some sequences (Yang, Kautz and Hatamizadeh 2024).

    With a decay for each key it is Kimi Delta Attention (Kimi Linear 2025).

    Of each sequence and head, from its state S or zeros, with q and k divided by their norms,

        S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
        out_t = S_t q_t / sqrt(key size)
        g_t = -exp(A_log) softplus(a_t + dt_bias),  beta_t = sigmoid(b_t)

    States are carried in fp32 whatever the dtype of `states`. A NaN may reach the 63 tokens before it, and no other
    sequence. A sequence without tokens keeps its state. The call never waits for the device, and the grid follows from
    shapes, so it can be captured in a graph.

    Args:
        q: Queries as the convolution left them, a view of its output; fp32, fp16 or bf16, last dimension dense. So are
            k, v and out, in the same dtype. Neighbouring heads share a key head; key and value sizes are 64 or 128.
        k: Keys, likewise.
        v: Values, likewise.
        a: Gates of the decay, before bias and softplus.
        b: Gates of the write strength, before the sigmoid.
        out: Result.
        states: The pool that states before are read from and states after are written to, any strides but the last.
        A_log: Logarithm of the rate of decay; `exp(A_log)` is finite.
        dt_bias: Added to a.
        starts: The first token of each piece, then the end of the last. Pieces follow each other without a gap.
        sources: The block of the state before each sequence; below 0 it is zeros.
        targets: The block that the state after each piece goes to; below 0 it is not written. A block may be the source
            of its own sequence, as in a chunked prefill, and of no other.
        known: False where the state before is zeros whatever `sources` says. None: `sources` alone says it.
        last_pieces: The last piece of each sequence, which has at least one. A piece ends where a state is asked for,
            as at the edges of blocks that a prefix cache keeps. None: every sequence is one piece.
        lower_bound: g is lower_bound sigmoid(exp(A_log) (a + dt_bias)) instead; for decays of each key.
        num_segments: Segments of a sequence that are walked at the same time; None lets the device decide.
        debug: Also check indices and decays (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    last = starts if last_pieces is None else last_pieces
    tensors = (q, k, v, a, b, out, states, A_log, dt_bias, starts, last, sources, known, targets)
    given = (last_pieces is None, lower_bound, num_segments)
    key = None if debug else ("gdn", *map(signature, tensors), *given, compiler_settings())
    call = find(key)
    if call is not None:
        call.run(*tensors)
        return
    layer_tensors = checks.layer(q, k, v, a, b, out, states, A_log, dt_bias)
    checks.prefill(layer_tensors, starts, sources, targets, known, last_pieces)
    checks.bound(lower_bound, by_key=a.dim() == 3)
    at_least_one("split", "num_segments", num_segments)
    if debug:
        check_pieces(starts, last_pieces, q.shape[0])
        checks.blocks(sources, targets, known, last_pieces, len(states))
        checks.decays(A_log, dt_bias)
    if not len(sources):
        return
    call = _prepare(q, k, v, a, b, out, states, sources, targets, known, last_pieces, lower_bound, num_segments)
    call.run(*tensors)
    keep(key, call)


@dataclass(frozen=True)
class DeltaCall:
    """Launches of the calls with one signature."""

    chunks: Launch
    carry: Launch | None
    """Makes what each segment does to the state; None where there is one segment."""
    join: Launch | None
    """Makes the states between segments of that; None where the walk needs none."""
    walk: Launch
    strides: DeltaStrides
    by_key: bool
    """Whether each key has a decay: keys and queries are then scaled for the walk."""
    lower_bound: float
    pieces: int
    segments: int
    chunk: int
    """Tokens of a chunk."""
    numbers: int
    """Numbers of chunks, a bound that follows from shapes."""
    room: tuple[int, int, int, int, int]
    """Extents of what is carried: sequences, segments, heads, value size + key size, key size."""

    def run(self, *tensors: Tensor | None) -> None:
        """Launch for the tensors of one call."""
        q, k, v, a, b, out, states, A_log, dt_bias, starts, last, sources, known, targets = tensors
        assert q is not None
        heads, keys = self.room[2], self.room[4]
        where = (starts, last, sources, known)
        ends, strides = None, self.strides
        with on(q):
            inverses, scores = (q.new_empty(self.numbers, heads, self.chunk, self.chunk) for _ in range(2))
            of_chunk = (keys,) if self.by_key else (FACTORS.value, self.chunk)
            factors = carried = q.new_empty(self.numbers, heads, *of_chunk, dtype=torch.float32)
            if self.by_key:
                scaled = q.new_empty(3, len(q), heads, keys)
                made = (*scaled, inverses, scores, factors)
                self.chunks(q, k, a, b, A_log, dt_bias, *made, starts, strides, self.pieces, self.lower_bound)
                q, k, ends = scaled
                strides = strides._replace(q=q.stride()[:2], k=k.stride()[:2])
            else:
                self.chunks(q, k, a, b, A_log, dt_bias, inverses, scores, factors, starts, strides, self.pieces)
            cut = (strides, self.segments)
            if self.carry is not None:
                carried = q.new_empty(self.room, dtype=torch.float32)
                self.carry(k, ends, v, states, inverses, factors, carried, *where, *cut)
            if self.join is not None:
                self.join(carried, self.segments)
            self.walk(q, k, ends, v, out, states, inverses, scores, factors, carried, *where, targets, *cut)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    states: Tensor,
    sources: Tensor,
    targets: Tensor,
    known: Tensor | None,
    last_pieces: Tensor | None,
    lower_bound: float | None,
    num_segments: int | None,
) -> DeltaCall:
    """Choose the grids and the options of the compiler for a call that was checked."""
    (tokens, key_heads, keys), (heads, values), sequences = q.shape, v.shape[1:], len(sources)
    arch = current(q)
    by_key = a.dim() == 3
    tables = tuning(arch.name)
    data = (tables.kda_prefill if by_key else tables.gdn_prefill).of(keys, values, q.element_size())
    programs = heads * values // data.block_v
    segments = num_segments or data.segments(programs * sequences, tokens // sequences, arch.compute_units)
    constants = DeltaOptions(
        NUM_HEADS=heads,
        HEADS_PER_KEY_HEAD=heads // key_heads,
        K=keys,
        V=values,
        CHUNK_SIZE=data.chunk_size,
        BLOCK_V=data.block_v,
        HAS_PIECES=last_pieces is not None,
        HAS_KNOWN=known is not None,
        HAS_SEGMENTS=segments > 1,
        IS_KDA=by_key,
        HAS_LOWER_BOUND=lower_bound is not None,
    )
    amd = {"matrix_instr_nonkdim": 16} if arch.amd else {}
    launch = {"num_warps": data.waves, "num_stages": data.stages, **amd}
    numbers = tokens // data.chunk_size + len(targets)
    chunks = Launch(
        kda_chunks_kernel if by_key else gdn_chunks_kernel,
        (heads, numbers),
        OPTIONS=constants,
        num_warps=data.chunk_waves,
        num_stages=1,
        **amd,
    )
    if by_key:  # what the walk reads is scaled for each head
        constants = constants._replace(HEADS_PER_KEY_HEAD=1)
    carry = join = None
    if segments > 1:
        of_carry = heads * (values + keys) // data.block_v, segments - 1, sequences
        carry = Launch(gdn_carry_kernel, of_carry, OPTIONS=constants, **launch)
    if segments > 2:
        # Few rows for each program that joins, because products of fp32 take three times the registers.
        few = constants._replace(BLOCK_V=JOINED_ROWS)
        join = Launch(gdn_join_kernel, (heads * values // JOINED_ROWS, sequences), OPTIONS=few, **launch)
    return DeltaCall(
        chunks=chunks,
        carry=carry,
        join=join,
        walk=Launch(gdn_prefill_kernel, (programs, segments, sequences), OPTIONS=constants, **launch),
        strides=DeltaStrides(
            q=q.stride()[:2],
            k=k.stride()[:2],
            v=v.stride()[:2],
            out=out.stride()[:2],
            a=a.stride()[: 1 + by_key],
            b=b.stride()[:1],
            states=states.stride()[:3],
        ),
        by_key=by_key,
        lower_bound=lower_bound or 0.0,
        pieces=len(targets),
        segments=segments,
        chunk=data.chunk_size,
        numbers=numbers,
        room=(sequences, segments, heads, values + keys, keys),
    )
