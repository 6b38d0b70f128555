# SPDX-License-Identifier: Apache-2.0
"""Mamba-1's recurrence in plain torch, for prompts and for a decode step, as vLLM's layer asks for both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = (
    "selective_scan_fwd(Tensor u, Tensor! delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor!? z, "
    "Tensor? delta_bias, bool delta_softplus, Tensor? query_start_loc, Tensor? cache_indices, "
    "Tensor? has_initial_state, Tensor! ssm_states, int null_block_id, int block_size, "
    "Tensor? block_idx_first_scheduled_token, Tensor? block_idx_last_scheduled_token, Tensor? initial_state_idx, "
    "Tensor? cu_chunk_seqlen, Tensor? last_chunk_indices) -> ()"
)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    ssm_states: Tensor,
    null_block_id: int,
    block_size: int,  # noqa: ARG001
    *tables: Tensor | None,
) -> None:
    """Run Mamba-1's recurrence over the prompts of a batch; sums in fp32, whatever the dtype of the arguments.

    Per channel, state and token: `h = exp(dt A) h + dt B u`, `y = (sum(C h) + D u) silu(z)`.

    Args:
        u: Input, [channels, tokens] of all sequences one after the other.
        delta: Time step before bias and softplus, like `u`.
        A: [channels, states].
        B: [groups, states, tokens]; consecutive channels share a group.
        C: Like `B`.
        D: [channels].
        z: Gate, like `u`; the output.
        delta_bias: [channels], or None.
        delta_softplus: True.
        query_start_loc: [sequences + 1], where each sequence begins in `u`.
        cache_indices: [sequences], slot of each sequence's state; a sequence whose slot is the null block is padding
            and left alone.
        has_initial_state: [sequences], whether to go on from the slot's state; None for never.
        ssm_states: [slots, channels, states]; the state after the last token is written there.
        null_block_id: The slot of no request.
        block_size: Tokens per block of the prefix cache.
        *tables: Where states within a prompt go in a prefix cache of all states, and where its chunks end.

    Raises:
        NotImplementedError: States within a prompt are asked for.
    """
    if tables[0] is not None or not delta_softplus:
        raise NotImplementedError("the stand-in of Mamba-1's scan writes last states alone, and takes softplus")
    bounds, decay = query_start_loc.tolist(), A.float()
    for i, slot in enumerate(cache_indices.tolist()):
        if slot == null_block_id:
            continue
        part = (..., slice(bounds[i], bounds[i + 1]))
        x, step = u[part].float(), _step_size(delta[part].T, delta_bias).T
        b, c = (rows[part].float().repeat_interleave(len(x) // rows.shape[-3], 0) for rows in (B, C))
        state = ssm_states[slot].float() if has_initial_state is not None and has_initial_state[i] else 0 * decay
        y = torch.empty_like(x)
        for t in range(x.shape[-1]):
            state = (step[:, t, None] * decay).exp() * state + (step[:, t] * x[:, t])[:, None] * b[..., t]
            y[:, t] = (state * c[..., t]).sum(-1)
        ssm_states[slot] = state.to(ssm_states.dtype)
        z[part] = ((y + D.float()[:, None] * x) * torch.nn.functional.silu(z[part].float())).to(z.dtype)


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor,
    dst_state_batch_indices: Tensor,
    null_block_id: int,
    out: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Run the recurrence of `selective_scan` for one token of each request.

    Args:
        state: [slots, channels, states], written.
        x: Input, [requests, channels].
        dt: Time step before bias and softplus, like `x`.
        A: [channels, states].
        B: [requests, states].
        C: Like `B`.
        D: [channels].
        z: Gate, like `x`.
        dt_bias: [channels], or None.
        dt_softplus: True.
        state_batch_indices: [requests], the slot to read; the null block belongs to no request.
        dst_state_batch_indices: [requests], the slot to write.
        null_block_id: The slot of no request.
        out: Like `x`, written but for padding.
        num_accepted_tokens: None; so is `cu_seqlens`.
        cu_seqlens: None.

    Raises:
        NotImplementedError: The step holds draft tokens.
    """
    if state_batch_indices.numel() != len(x) or num_accepted_tokens is not None or cu_seqlens is not None:
        raise NotImplementedError("the stand-in of Mamba-1's update knows no draft tokens: serve without speculation")
    if not dt_softplus:
        raise NotImplementedError("the stand-in of Mamba-1's update takes softplus")
    read, write = (slots.reshape(len(x)).long() for slots in (state_batch_indices, dst_state_batch_indices))
    mine = read != null_block_id
    read, write = read[mine], write[mine]
    u, b, c, gate = (rows[mine].float() for rows in (x, B, C, z))
    step = _step_size(dt[mine], dt_bias)
    h = (step[..., None] * A.float()).exp() * state[read].float() + (step * u)[..., None] * b[:, None]
    y = ((h * c[:, None]).sum(-1) + D.float() * u) * torch.nn.functional.silu(gate)
    state[write] = h.to(state.dtype)
    out[mine] = y.to(out.dtype)


def _step_size(dt: Tensor, bias: Tensor | None) -> Tensor:
    """Time steps [..., channels] as the recurrence takes them."""
    return torch.nn.functional.softplus(dt.float() if bias is None else dt.float() + bias.float())
