# SPDX-License-Identifier: Apache-2.0
"""Mamba-1's recurrence over the prompts of a batch, in plain torch: what vLLM calls `selective_scan_fwd`."""

from __future__ import annotations

import torch

SCHEMA = (
    "selective_scan_fwd(Tensor u, Tensor! delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor!? z, "
    "Tensor? delta_bias, bool delta_softplus, Tensor? query_start_loc, Tensor? cache_indices, "
    "Tensor? has_initial_state, Tensor! ssm_states, int null_block_id, int block_size, "
    "Tensor? block_idx_first_scheduled_token, Tensor? block_idx_last_scheduled_token, Tensor? initial_state_idx, "
    "Tensor? cu_chunk_seqlen, Tensor? last_chunk_indices) -> ()"
)


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    query_start_loc: torch.Tensor | None,
    cache_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    ssm_states: torch.Tensor,
    null_block_id: int,
    block_size: int,
    block_idx_first_scheduled_token: torch.Tensor | None,
    block_idx_last_scheduled_token: torch.Tensor | None,
    initial_state_idx: torch.Tensor | None,
    cu_chunk_seqlen: torch.Tensor | None,
    last_chunk_indices: torch.Tensor | None,
) -> None:
    """Run Mamba-1's recurrence over the prompts of a batch; sums in fp32, whatever the dtype of the arguments.

    Per channel, state and token: `h = exp(dt A) h + dt B u`, `y = sum(C h) + D u`, times `silu(z)`.

    Args:
        u: Input, [channels, tokens] of all sequences one after the other, or [sequences, channels, tokens].
        delta: Time step before bias and softplus, like `u`; the output, where there is no `z`.
        A: [channels, states].
        B: [groups, states, tokens] or [sequences, groups, states, tokens]; consecutive channels share a group.
        C: Like `B`.
        D: [channels], or None.
        z: Gate, like `u`; the output, where there is one.
        delta_bias: [channels], or None.
        delta_softplus: Whether the time step passes through softplus.
        query_start_loc: [sequences + 1], where each sequence begins in `u`; None for the second shape of `u`.
        cache_indices: Slot of each sequence's state, [sequences] or with prefix caching [sequences, blocks]; a sequence
            whose slot is the null block is padding and left alone. None: sequence i has slot i.
        has_initial_state: [sequences], whether to go on from the slot's state; None for never.
        ssm_states: [slots, channels, states]; the state after the last token is written there.
        null_block_id: The slot that is nobody's.
        block_size: Tokens per block of the prefix cache.
        block_idx_first_scheduled_token: [sequences], column of `cache_indices` of the first token; None without
            prefix caching.
        block_idx_last_scheduled_token: [sequences], column where the last state goes.
        initial_state_idx: [sequences], column of the state to begin with.
        cu_chunk_seqlen: [chunks + 1], where each chunk begins: a chunk ends with its block or its sequence.
        last_chunk_indices: [sequences], the last chunk of each.
    """
    blocks = _Blocks.of(
        block_size,
        block_idx_first_scheduled_token,
        block_idx_last_scheduled_token,
        initial_state_idx,
        cu_chunk_seqlen,
        last_chunk_indices,
    )
    varlen = query_start_loc is not None
    bounds = [0] * (len(u) + 1) if query_start_loc is None else query_start_loc.tolist()
    decay = A.float()
    for i in range(len(bounds) - 1):
        part = (..., slice(bounds[i], bounds[i + 1])) if varlen else (i, ...)
        first_column = blocks.begin[i] if blocks else 0
        slots = [i] if cache_indices is None else cache_indices[i].reshape(-1).tolist()
        slot = slots[first_column]
        if cache_indices is not None and slot == null_block_id:
            continue
        x = u[part].float()
        step = delta[part].float()
        if delta_bias is not None:
            step = step + delta_bias.float()[:, None]
        if delta_softplus:
            step = torch.nn.functional.softplus(step)
        per_group = len(x) // B[part].shape[-3]
        b, c = (rows[part].float().repeat_interleave(per_group, 0) for rows in (B, C))
        state = ssm_states[slot].float() if has_initial_state is not None and has_initial_state[i] else 0 * decay
        writes = blocks.writes(i, slots) if blocks else {x.shape[-1]: slot}
        y = torch.empty_like(x)
        for t in range(x.shape[-1]):
            state = (step[:, t, None] * decay).exp() * state + (step[:, t] * x[:, t])[:, None] * b[..., t]
            y[:, t] = (state * c[..., t]).sum(-1)
            if t + 1 in writes:
                ssm_states[writes[t + 1]] = state.to(ssm_states.dtype)
        if D is not None:
            y += D.float()[:, None] * x
        if z is None:
            delta[part] = y.to(delta.dtype)
        else:
            z[part] = (y * torch.nn.functional.silu(z[part].float())).to(z.dtype)


def state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
    dst_state_batch_indices: torch.Tensor | None,
    null_block_id: int,
    out: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Run the recurrence of `selective_scan` for one token of each request.

    Args:
        state: [slots, channels, states], written.
        x: Input, [requests, channels].
        dt: Time step before bias and softplus, like `x`.
        A: [channels, states].
        B: [requests, states].
        C: Like `B`.
        D: [channels], or None.
        z: Gate, like `x`, or None.
        dt_bias: [channels], or None.
        dt_softplus: Whether the time step passes through softplus.
        state_batch_indices: [requests], the slot to read; the null block is nobody's. None: request i has slot i.
        dst_state_batch_indices: [requests], the slot to write; None: the one that was read.
        null_block_id: The slot that is nobody's.
        out: Like `x`, written but for padding.
        num_accepted_tokens: None; so is `cu_seqlens`.
        cu_seqlens: None.

    Raises:
        NotImplementedError: The step holds draft tokens.
    """
    several = state_batch_indices is not None and state_batch_indices.numel() != len(x)
    if several or num_accepted_tokens is not None or cu_seqlens is not None:
        raise NotImplementedError("the stand-in of Mamba-1's update knows no draft tokens: serve without speculation")
    read = torch.arange(len(x)) if state_batch_indices is None else state_batch_indices.reshape(len(x)).long()
    write = read if dst_state_batch_indices is None else dst_state_batch_indices.reshape(len(x)).long()
    mine = torch.ones_like(read, dtype=torch.bool) if state_batch_indices is None else read != null_block_id
    read, write = read[mine], write[mine]
    u, step, b, c = (rows[mine].float() for rows in (x, dt, B, C))
    if dt_bias is not None:
        step = step + dt_bias.float()
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    h = (step[..., None] * A.float()).exp() * state[read].float() + (step * u)[..., None] * b[:, None]
    y = (h * c[:, None]).sum(-1)
    if D is not None:
        y += D.float() * u
    if z is not None:
        y *= torch.nn.functional.silu(z[mine].float())
    state[write] = h.to(state.dtype)
    out[mine] = y.to(out.dtype)


class _Blocks:
    """Which states of a sequence go to which blocks of a prefix cache."""

    def __init__(
        self, size: int, first: list[int], last: list[int], begin: list[int], cuts: list[int], ends: list[int]
    ) -> None:
        self.size, self.first, self.last, self.begin, self.cuts, self.ends = size, first, last, begin, cuts, ends

    @classmethod
    def of(cls, size: int, *tables: torch.Tensor | None) -> _Blocks | None:
        """Read the tables; None where there is no prefix caching, whatever the last two tables hold."""
        return None if tables[0] is None else cls(size, *(table.tolist() for table in tables if table is not None))

    def writes(self, sequence: int, slots: list[int]) -> dict[int, int]:
        """Tokens done, counted from the sequence's first in this batch, to the slot that gets the state then."""
        begin = self.ends[sequence - 1] + 1 if sequence else 0
        cuts = self.cuts[begin : self.ends[sequence] + 2]
        done = [cut - cuts[0] for cut in cuts[1:]]
        columns = [self.first[sequence] + k for k in range(len(done) - 1)]
        return dict(zip(done, [slots[c] for c in [*columns, self.last[sequence]]], strict=True))
