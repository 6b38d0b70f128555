# SPDX-License-Identifier: Apache-2.0
"""The launcher of the chunked scan's last step: checks, and one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.arch import NEVER
from pagedkv.device import current, on
from pagedkv.launch import tuning
from pagedkv.prepared import Launch, call, look
from pagedkv.ssd import checks
from pagedkv.ssd.kernel import ScanOptions, ScanStrides, chunk_scan_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.prepared import Prepared


def chunk_scan(
    products: Tensor,  # [chunks, groups, chunk_size, chunk_size]
    x: Tensor,  # [tokens, heads, head_size]
    dt: Tensor,  # [heads, chunks, chunk_size] fp32
    sums: Tensor,  # [heads, chunks, chunk_size] fp32
    C: Tensor,  # [tokens, groups, state]
    states: Tensor,  # [chunks, heads, head_size, state]
    out: Tensor,  # [tokens, heads, head_size]
    *,
    chunk_starts: Tensor,  # [chunks + 1] int32
    sequences: Tensor,  # [chunks] int32
    D: Tensor | None = None,  # [heads] or [heads, head_size]
    z: Tensor | None = None,  # [tokens, heads, head_size]
    initial_states: Tensor | None = None,  # [sequences, heads, head_size, state]
    debug: bool = False,
) -> None:
    """Outputs of Mamba-2 from the products, sums and states of its chunks (Dao and Gu 2024, section 6).

    With a_i the sum of dt A over the tokens of a chunk up to i, and H the state before the chunk,

        out_i = (exp(a_i) C_i H + sum over j <= i of (C_i . B_j) exp(a_i - a_j) dt_j x_j + D x_i) silu(z_i)

    H is the state behind the chunk before, if that is of the same sequence; else the sequence's initial state, or 0. No
    other state is read, and nothing behind a chunk's tokens. Tokens of no chunk are left alone. It never waits for the
    device, and the grid follows from shapes, so it can be captured in a graph.

    Args:
        products: C_i . B_j of each chunk; those above the diagonal are not used.
        x: Inputs; fp32, fp16 or bf16, last dimension dense.
        dt: Step sizes, softplus and bias applied.
        sums: a, for negative A. From the first -inf on each step is taken to leave nothing of the state (A = -inf).
        C: Output projections, in the dtype of x.
        states: The state behind each chunk, in any of these dtypes.
        out: Result, in the dtype of x.
        chunk_starts: The first token of each chunk, then the end of the last; a chunk has at most chunk_size tokens.
        sequences: Which sequence each chunk is of; the chunks of one follow each other.
        D: Skip connection of each head, or of each channel.
        z: Gate, in the dtype of x.
        initial_states: State before the first chunk of each sequence.
        debug: Also check `chunk_starts` and `sequences` (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """

    def prepare() -> Prepared | None:
        checks.tensors(products, x, dt, sums, C, states, out, chunk_starts, sequences, D, z, initial_states)
        chunks, groups, chunk_size, _ = products.shape
        _, heads, head_size = x.shape
        if chunks == 0 or x.shape[0] == 0:
            return None
        if debug:
            checks.chunks(chunk_starts, sequences, x.shape[0], chunk_size, initial_states)
        arch = current(x)
        data = tuning(arch.name).scan.of(head_size, C.shape[2], chunk_size)
        options: dict[str, int] = {}
        if arch.operand_from_lds_rows == NEVER:
            # With kpack 2 Triton 3.6 halves the accumulator of a chain of products of which one has 16 terms.
            options = {"matrix_instr_nonkdim": 16, "kpack": 1 if min(data.tile, data.state_tile) < 32 else data.kpack}
        scan_options = ScanOptions(
            HEADS_OF_GROUP=heads // groups,
            HEAD_SIZE=head_size,
            STATE=C.shape[2],
            CHUNK=chunk_size,
            ROWS=data.rows,
            TILE=data.tile,
            CHANNELS=data.channels,
            STATE_TILE=data.state_tile,
            HAS_INITIAL=initial_states is not None,
            HAS_Z=z is not None,
            HAS_D=D is not None,
            D_CHANNELS=D is not None and D.dim() == 2,
        )
        scan = Launch(
            chunk_scan_kernel,
            (heads * -(-head_size // data.channels), chunk_size // data.rows, chunks),
            OPTIONS=scan_options,
            num_warps=data.waves,
            num_stages=data.stages,
            **options,
        )
        strides = ScanStrides(
            products=products.stride()[:3],
            x=x.stride()[:2],
            z=(0, 0) if z is None else z.stride()[:2],
            out=out.stride()[:2],
            dt=dt.stride()[:2],
            sums=sums.stride()[:2],
            C=C.stride()[:2],
            states=states.stride()[:3],
            initial_states=(0, 0, 0) if initial_states is None else initial_states.stride()[:3],
            D=(0,) if D is None else D.stride()[:1],
        )

        def run(products: Tensor, *others: Tensor | None) -> None:
            with on(products):
                scan(products, *others, strides)

        return run, (scan,)

    tensors = (products, x, z, out, dt, sums, C, states, initial_states, D, chunk_starts, sequences)
    call(None if debug else ("scan", *map(look, tensors)), prepare, *tensors)
