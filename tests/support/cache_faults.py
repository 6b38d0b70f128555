# SPDX-License-Identifier: Apache-2.0
"""Faults of caches, states and settings, planted into pocket models that transformers runs.

Each is one that a wrong kernel or a wrong layout makes. Those of a cache are pure functions of a layer's keys and
values, applied once, between the prompt and the first decode step; a shift or a copy moves whole blocks, as a wrong
block table does. Those of a setting hold for the whole answer. Two are expected to be invisible: K and V moved
together, because attention does not depend on the order of its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Pair = tuple[torch.Tensor, torch.Tensor]
    """Keys and values, each [num_seqs, num_kv_heads, seq_len, channels]."""
    Damage = Callable[[torch.Tensor, torch.Tensor], Pair]
    """(keys, values) -> damaged (keys, values)."""
    Side = Callable[[torch.Tensor], torch.Tensor]
    """Damage of one of the two."""


BLOCK = 16
"""Tokens per block of the faults that act on blocks."""
PLAIN = 32
"""Channels of a latent model's key that come from the latent row; the others are its rope channels."""
PACK = 16
"""Elements of 16 bytes of FP8 codes."""


def _keys(side: Side) -> Damage:
    return lambda keys, values: (side(keys), values)


def _values(side: Side) -> Damage:
    return lambda keys, values: (keys, side(values))


def _both(side: Side) -> Damage:
    return lambda keys, values: (side(keys), side(values))


def _swap(keys: torch.Tensor, values: torch.Tensor) -> Pair:
    return values, keys


def _latent(side: Side) -> Damage:
    """Damage what comes from the latent row: the values, and the keys but for their rope channels."""
    return lambda keys, values: (torch.cat([side(keys[..., :PLAIN]), keys[..., PLAIN:]], -1), side(values))


def _without_rope(keys: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys[..., :PLAIN], keys[..., PLAIN:] * 0], -1)


def _zero(cache: torch.Tensor) -> torch.Tensor:
    return cache * 0


def _shift(cache: torch.Tensor) -> torch.Tensor:
    return cache.roll(BLOCK, dims=2)


def _of_another(cache: torch.Tensor) -> torch.Tensor:
    return cache.roll(1, dims=0)


def _heads_swapped(cache: torch.Tensor) -> torch.Tensor:
    return cache.flip(1)


def _overwrite(cache: torch.Tensor) -> torch.Tensor:
    damaged = cache.clone()
    damaged[:, :, BLOCK : 2 * BLOCK] = cache[:, :, :BLOCK]
    return damaged


def _without_block(cache: torch.Tensor) -> torch.Tensor:
    damaged = cache.clone()
    damaged[:, :, BLOCK : 2 * BLOCK] = 0
    return damaged


def _read_as_native(values: torch.Tensor) -> torch.Tensor:
    """V lies as [tokens / x, channels, x] in each block of 2 x tokens and is read as [channels, tokens]."""
    damaged = values.clone()
    size = 2 * PACK
    for start in range(0, values.shape[2] - size + 1, size):
        block = values[:, :, start : start + size]
        stored = block.unflatten(2, (2, PACK)).transpose(3, 4)
        damaged[:, :, start : start + size] = stored.reshape(*block.shape[:2], block.shape[3], size).transpose(2, 3)
    return damaged


def _other_stride(values: torch.Tensor) -> torch.Tensor:
    """V lies as [tokens, heads, channels] and is read as [heads, tokens, channels]."""
    return values.transpose(1, 2).reshape(values.shape)


KV_FAULTS: dict[str, Damage] = {
    "V of one layer zeroed": _values(_zero),
    "K and V of one layer swapped": _swap,
    "V of one layer shifted by one block": _values(_shift),
    "KV heads of V of one layer swapped": _values(_heads_swapped),
    "one block of one layer overwritten by another": _both(_overwrite),
    "K and V of one layer moved together (invisible to attention)": _both(_shift),
}
PACKED_FAULTS: dict[str, Damage] = {
    "V of one layer read in another packing": _values(_read_as_native),
}
LATENT_FAULTS: dict[str, Damage] = {
    "latent rows of every layer zeroed": _latent(_zero),
    "rope channels of every layer zeroed": _keys(_without_rope),
}
"""Faults of every layer: this model looks names up in three, and one damaged layer costs it 0 to 87 points."""
CROSS_FAULTS: dict[str, Damage] = {
    "cross V zeroed": _values(_zero),
    "cross K and V swapped": _swap,
    "cross V shifted by one block against K": _values(_shift),
    "cross K of another request": _keys(_of_another),
    "cross K and V of another request": _both(_of_another),
    "cross K and V of one block missing": _both(_without_block),
    "cross K and V of one block overwritten by another": _both(_overwrite),
    "cross V read with the strides of another layout": _values(_other_stride),
    "KV heads of cross V swapped": _values(_heads_swapped),
    "cross K and V moved together (invisible to attention)": _both(_shift),
}
"""Faults of every decoder layer of an encoder-decoder: what the encoder wrote, read by every later token."""
LAYER = 1
"""The damaged layer: the first one that matches names."""
SELF_FAULT = "self K and V read from the blocks of cross K and V"
STATE_FAULT = "conv and SSM state of every layer zeroed"
SETTINGS: dict[str, dict[str, Any]] = {
    "window of 2 tokens instead of 8": {"sliding_window": 2},
    "no window": {"sliding_window": 4096},
}
"""Fault -> what the configuration says instead."""


def plant(model: Any, fault: str) -> Callable[[], None]:
    """Make a transformers pocket model suffer a fault in every answer.

    Args:
        model: A pocket model.
        fault: A name in one of the tables above, that its class of cache can suffer.

    Returns:
        A function that removes the fault again.
    """
    if fault in SETTINGS:
        return _plant_setting(model, SETTINGS[fault])
    if model.config.is_encoder_decoder:
        return _plant_cross(model, fault)

    def damage(cache: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if getattr(cache, "damaged", False) or ids is None or ids.shape[1] != 1:
            return
        cache.damaged = True
        if fault == STATE_FAULT:
            _zero_states(model, cache)
        else:
            faulty = (KV_FAULTS | LATENT_FAULTS | PACKED_FAULTS)[fault]
            _damage_layers(cache.layers if fault in LATENT_FAULTS else [cache.layers[LAYER]], faulty)

    return _before_each_step(model, damage)


def _before_each_step(model: Any, damage: Callable[[Any, dict[str, Any]], None]) -> Callable[[], None]:
    """Call `damage` with the cache and the model's arguments before each forward pass that has one."""

    def hook(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if (cache := kwargs.get("past_key_values")) is not None:
            damage(cache, kwargs)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def remove() -> None:
        handle.remove()

    return remove


def _damage_layers(layers: list[Any], damage: Damage) -> None:
    for layer in layers:
        layer.keys, layer.values = (side.contiguous() for side in damage(layer.keys, layer.values))


def _plant_cross(model: Any, fault: str) -> Callable[[], None]:
    """Damage what the encoder wrote once, before the second token; or the decoder's own cache before each."""

    def damage(cache: Any, _kwargs: dict[str, Any]) -> None:
        own, cross = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        if fault == SELF_FAULT:
            for mine, other in zip(own, cross, strict=True):
                length = mine.keys.shape[2]
                mine.keys, mine.values = other.keys[:, :, :length].clone(), other.values[:, :, :length].clone()
        elif not getattr(cache, "damaged", False):
            cache.damaged = True
            _damage_layers(cross, CROSS_FAULTS[fault])

    return _before_each_step(model, damage)


def _zero_states(model: Any, cache: Any) -> None:
    for layer, kind in zip(cache.layers, model.config.layer_types, strict=True):
        if kind == "linear_attention":
            for states in (layer.conv_states, layer.recurrent_states):
                for state in states.values():
                    state.zero_()


def _plant_setting(model: Any, changes: dict[str, Any]) -> Callable[[], None]:
    """Change the configuration and the copies that the attention layers keep of it."""
    holders = [model.config, *(layer.self_attn for layer in model.model.layers)]
    before = [(one, name, getattr(one, name)) for one in holders for name in changes if getattr(one, name, None)]
    for one, name, _ in before:
        setattr(one, name, changes[name])

    def remove() -> None:
        for one, name, value in before:
            setattr(one, name, value)

    return remove
