# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over a batch of requests, in plain torch: what vLLM-CPU computes in bfloat16 alone."""

from __future__ import annotations

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


def run(layer: Any, metadata: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """Compute convolution, gates and recurrence of one of vLLM's layers, with its states, for one step.

    Args:
        layer: vLLM's gated-delta-net layer; its `kv_cache` is the pools of convolution and recurrent states.
        metadata: vLLM's metadata of the step for this layer; decodes come first.
        mixed: Queries, keys and values side by side before the convolution, [tokens, channels].
        b: Beta before the sigmoid, [tokens, value heads].
        a: Time step before bias and softplus, [tokens, value heads].
        out: [tokens, value heads, value channels], written.

    Raises:
        NotImplementedError: The step holds draft tokens.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

    if metadata.spec_sequence_masks is not None:
        raise NotImplementedError("the stand-in of the delta rule knows no draft tokens: serve without speculation")
    conv_pool, state_pool = layer.kv_cache
    if not is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(-1, -2)
    log_decay = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())
    beta = b.float().sigmoid()
    taps = layer.conv1d.weight.size(-1) - 1
    heads = (layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size)
    for tokens, slot, resumes in _sequences(metadata):
        if slot == NULL_BLOCK_ID:
            continue
        past = conv_pool[slot, :, :taps].clone() if resumes else mixed.new_zeros(mixed.shape[1], taps)
        seen = torch.cat([past.to(mixed.dtype), mixed[tokens].T], -1)
        conv_pool[slot, :, :taps] = seen[:, -taps:]
        rows = conv1d(seen[None], layer.conv1d.weight, layer.conv1d.bias, groups=len(seen))[0].T
        rows = silu(rows) if layer.activation in ("silu", "swish") else rows
        widths = [heads[0] * layer.head_k_dim] * 2 + [heads[1] * layer.head_v_dim]
        query, key, value = rows.split(widths, -1)
        state = state_pool[slot].float() if resumes else torch.zeros_like(state_pool[slot], dtype=torch.float32)
        out[tokens] = delta_rule(
            query.unflatten(-1, (heads[0], -1)),
            key.unflatten(-1, (heads[0], -1)),
            value.unflatten(-1, (heads[1], -1)),
            log_decay[tokens],
            beta[tokens],
            state,
        ).to(out.dtype)
        state_pool[slot] = state.to(state_pool.dtype)


def _sequences(metadata: Any) -> Iterator[tuple[slice, int, bool]]:
    """Of each request: its tokens, the slot of its states, and whether it goes on from them."""
    starts = metadata.non_spec_query_start_loc.tolist()
    count = metadata.num_decodes + metadata.num_prefills
    slots = metadata.non_spec_state_indices_tensor[:count].tolist()
    resumes = [True] * count
    if metadata.num_prefills:
        resumes[metadata.num_decodes :] = metadata.has_initial_state[metadata.num_decodes : count].tolist()
    for i in range(count):
        if starts[i] < starts[i + 1]:
            yield slice(starts[i], starts[i + 1]), slots[i], bool(resumes[i])
