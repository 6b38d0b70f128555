"""What a pocket model without state layers starts from: heads that look one and two tokens back, then heads that match.

An answer needs the number that stands two tokens after a name. A Mamba layer's short convolution carries the name those
two tokens along; attention alone has to find three things at once (look back, match, copy) and did not, in 3,000 steps
of any recipe tried. So the first layer starts with purely positional heads, and every later layer with keys equal to
queries, which attends to what is alike. Everything is trained from there; nothing is frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OFFSETS = (1, 2)
"""Tokens that the heads of the first layer look back, in turn; heads in turn share keys, values and output."""
CONSTANT = 0
"""Channel of the embedding that is the same for every token: what a positional head can make its query of."""
LEVEL = 8.0
"""Standard deviations of an embedding that the constant channel holds."""
SHARPNESS = 4.0
"""Of a positional query and key, per channel that turns fast."""
QUIET = 0.1
"""How much of the random start is left where something else must be heard."""
FAST = 0.05
"""Radians per token above which a pair of channels tells neighbours apart."""
MATCH = 2.0
"""Factor of a matching query."""


def structure(model: PreTrainedModel) -> None:
    """Overwrite the random start of a decoder's attention in place."""
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[:, CONSTANT] = LEVEL * table.std()
        first, *others = (layer.self_attn for layer in model.model.layers)
        latent = hasattr(first, "kv_a_proj_with_mqa")
        (_look_back_latent if latent else _look_back)(first)
        for attention in others:
            (_match_latent if latent else _match)(attention)


def angles(channels: int, theta: float) -> torch.Tensor:
    """Radians per token of each pair of channels, [channels / 2]."""
    return theta ** (-torch.arange(0, channels, 2) / channels)


def _positional(turns: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both channels of each pair of a query whose product with the key (1, 0) is largest `offset` tokens back."""
    fast = (turns > FAST) * SHARPNESS
    return fast * torch.cos(turns * offset), -fast * torch.sin(turns * offset)


def _look_back(attention: Any) -> None:
    size, per_key = attention.head_dim, attention.num_key_value_groups
    turns = angles(size, _theta(attention))
    hidden = attention.q_proj.in_features
    query = attention.q_proj.weight.view(-1, size, hidden)
    key = attention.k_proj.weight.view(-1, size, hidden)
    query *= QUIET
    key *= QUIET
    key[:, :, CONSTANT] = torch.cat(_positional(turns, 0)) / LEVEL
    for head in range(len(query)):
        query[head, :, CONSTANT] = torch.cat(_positional(turns, OFFSETS[head % len(OFFSETS)])) / LEVEL
    attention.v_proj.weight[:, CONSTANT] = 0
    out = attention.o_proj.weight.view(hidden, -1, size)
    for head in range(0, len(query), per_key):
        out[:, head : head + per_key] = out[:, head : head + 1].clone()


def _match(attention: Any) -> None:
    size, per_key = attention.head_dim, attention.num_key_value_groups
    hidden = attention.q_proj.in_features
    query = attention.q_proj.weight.view(-1, size, hidden)
    query.copy_(MATCH * attention.k_proj.weight.view(-1, size, hidden).repeat_interleave(per_key, 0))


def _look_back_latent(attention: Any) -> None:
    hidden, plain = attention.q_proj.in_features, attention.qk_nope_head_dim
    turns = angles(attention.qk_rope_head_dim, _theta(attention))
    query = attention.q_proj.weight.view(attention.num_heads, -1, hidden)
    query *= QUIET
    rope = attention.kv_a_proj_with_mqa.weight[attention.kv_lora_rank :]
    rope *= QUIET
    rope[:, CONSTANT] = torch.stack(_positional(turns, 0), -1).flatten() / LEVEL
    attention.kv_a_proj_with_mqa.weight[: attention.kv_lora_rank, CONSTANT] = 0
    out = attention.o_proj.weight.view(hidden, attention.num_heads, -1)
    values = attention.kv_b_proj.weight.view(attention.num_heads, -1, attention.kv_lora_rank)[:, plain:]
    for head in range(attention.num_heads):
        query[head, plain:, CONSTANT] = (
            torch.stack(_positional(turns, OFFSETS[head % len(OFFSETS)]), -1).flatten() / LEVEL
        )
        shared = head - head % len(OFFSETS)
        out[:, head], values[head] = out[:, shared].clone(), values[shared].clone()


def _match_latent(attention: Any) -> None:
    hidden, plain, rank = attention.q_proj.in_features, attention.qk_nope_head_dim, attention.kv_lora_rank
    query = attention.q_proj.weight.view(attention.num_heads, -1, hidden)
    up = attention.kv_b_proj.weight.view(attention.num_heads, -1, rank)[:, :plain]
    down = attention.kv_a_proj_with_mqa.weight[:rank]
    same = up @ down
    query[:, :plain] = MATCH * same * (query.std() / same.std())
    query[:, plain:] *= QUIET


def _theta(attention: Any) -> float:
    return float(attention.config.rope_parameters["rope_theta"])
