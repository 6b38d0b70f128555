"""What a planted fault does to keys and values: pure functions on a layer's cache, and their names.

A shift or a copy moves whole blocks, as a wrong block table or a wrong stride does.

Planted faults: what a pocket model's exact match becomes when its caches are damaged.

Each fault is one that a wrong kernel or a wrong layout makes. Those of a cache are applied to transformers' cache
during decoding, once, between the prompt and the first decode step; those of a setting hold for the whole answer. A
gate that stays green under them would be watching something else. Some are expected to be invisible and are kept to
say so: moving K and V of a layer together, because attention does not depend on the order of its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

    Damage = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    "(keys, values) -> damaged (keys, values); each [num_seqs, num_kv_heads, seq_len, channels]."


BLOCK = 16
"""Tokens per block of the faults that act on blocks."""
PLAIN = 32
"""Channels of a latent model's key that come from the latent row; the others are its rope channels."""
PACK = 16
"""Elements of 16 bytes of FP8 codes."""


def _swap(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values, keys


def _zero_values(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys, values * 0


def _shift_values(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys, values.roll(BLOCK, dims=2)


def _stale_block(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _overwrite(keys), _overwrite(values)


def _overwrite(cache: torch.Tensor) -> torch.Tensor:
    damaged = cache.clone()
    damaged[:, :, BLOCK : 2 * BLOCK] = cache[:, :, :BLOCK]
    return damaged


def _heads_swapped(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys, values.flip(1)


def _moved_together(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.roll(BLOCK, dims=2), values.roll(BLOCK, dims=2)


def _read_as_native(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """V lies as [tokens / x, channels, x] in each block of 2 x tokens and is read as [channels, tokens]."""
    damaged = values.clone()
    size = 2 * PACK
    for start in range(0, values.shape[2] - size + 1, size):
        block = values[:, :, start : start + size]
        lies = block.unflatten(2, (2, PACK)).transpose(3, 4)
        damaged[:, :, start : start + size] = lies.reshape(*block.shape[:2], block.shape[3], size).transpose(2, 3)
    return keys, damaged


def _other_codes(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys / 2, values / 2


def _latent_zeroed(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([keys[..., :PLAIN] * 0, keys[..., PLAIN:]], -1), values * 0


def _latent_shifted(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([keys[..., :PLAIN].roll(BLOCK, dims=2), keys[..., PLAIN:]], -1), values.roll(BLOCK, dims=2)


def _rope_zeroed(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([keys[..., :PLAIN], keys[..., PLAIN:] * 0], -1), values


KV_FAULTS: dict[str, Damage] = {
    "V of one layer zeroed": _zero_values,
    "K and V of one layer swapped": _swap,
    "V of one layer shifted by one block": _shift_values,
    "KV heads of V of one layer swapped": _heads_swapped,
    "one block of one layer overwritten by another": _stale_block,
    "K and V of one layer moved together (invisible to attention)": _moved_together,
}
PACKED_FAULTS: dict[str, Damage] = {
    "V of one layer read in another packing": _read_as_native,
    "codes of one layer read in the other E4M3 format": _other_codes,
}
LATENT_FAULTS: dict[str, Damage] = {
    "latent rows of every layer zeroed": _latent_zeroed,
    "latent rows of every layer shifted by one block against their rope channels": _latent_shifted,
    "V of every layer shifted by one block": _shift_values,
    "one block of every layer overwritten by another": _stale_block,
    "rope channels of every layer zeroed": _rope_zeroed,
    "rows of every layer moved together (invisible to attention)": _moved_together,
}
"""Of every layer: this model looks names up in three, and one damaged layer costs it 0 to 87 points."""


def _of_another(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.roll(1, dims=0), values.roll(1, dims=0)


def _keys_of_another(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.roll(1, dims=0), values


def _block_missing(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _without_block(keys), _without_block(values)


def _without_block(cache: torch.Tensor) -> torch.Tensor:
    damaged = cache.clone()
    damaged[:, :, BLOCK : 2 * BLOCK] = 0
    return damaged


def _other_stride(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """V lies as [tokens, heads, channels] and is read as [heads, tokens, channels]."""
    return keys, values.transpose(1, 2).reshape(values.shape)


CROSS_FAULTS: dict[str, Damage] = {
    "cross V zeroed": _zero_values,
    "cross K and V swapped": _swap,
    "cross V shifted by one block against K": _shift_values,
    "cross K of another request": _keys_of_another,
    "cross K and V of another request": _of_another,
    "cross K and V of one block missing": _block_missing,
    "cross K and V of one block overwritten by another": _stale_block,
    "cross V read with the strides of another layout": _other_stride,
    "KV heads of cross V swapped": _heads_swapped,
    "cross K and V moved together (invisible to attention)": _moved_together,
}
"""Of every decoder layer of an encoder-decoder: what the encoder wrote, read by every later token."""


LAYER = 1
"""The damaged layer: the first one that matches names."""
SELF_FAULT = "self K and V read from the blocks of cross K and V"
STATE_FAULT = "conv and SSM state of every layer zeroed"
SETTINGS: dict[str, dict[str, Any]] = {
    "window of 2 tokens instead of 8": {"sliding_window": 2},
    "no window": {"sliding_window": 4096},
    "no soft cap": {"attn_logit_softcapping": None},
}
"""Fault -> what the configuration says instead."""


def faults(model: Any) -> tuple[str, ...]:
    """Names of the faults that a transformers pocket model can suffer, by its class of cache."""
    return {
        "granitemoehybrid": (*KV_FAULTS, STATE_FAULT),
        "gemma2": (*KV_FAULTS, *SETTINGS),
        "deepseek_v2": tuple(LATENT_FAULTS),
        "qwen3": (*KV_FAULTS, *PACKED_FAULTS),
        "whisper": (*CROSS_FAULTS, SELF_FAULT),
    }[model.config.model_type]


def plant(model: Any, fault: str) -> Callable[[], None]:
    """Make a transformers pocket model suffer a fault in every answer.

    Args:
        model: A pocket model.
        fault: A name in `faults(model)`.

    Returns:
        A function that removes the fault again.

    Raises:
        MisuseError: no such fault.
    """
    if fault not in faults(model):
        raise MisuseError(
            f"no fault {fault!r}", where="hileval.pocket.damage", remedy=f"one of {', '.join(faults(model))}"
        )
    if fault in SETTINGS:
        return _plant_setting(model, SETTINGS[fault])
    if model.config.is_encoder_decoder:
        return _plant_cross(model, fault)
    damage_kv = (KV_FAULTS | LATENT_FAULTS | PACKED_FAULTS).get(fault)

    def damage(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        already = getattr(cache, "damaged", False)
        if cache is None or already or ids is None or ids.shape[1] != 1:
            return
        cache.damaged = True
        if damage_kv is None:
            _zero_states(model, cache)
        else:
            for layer in cache.layers if fault in LATENT_FAULTS else [cache.layers[LAYER]]:
                layer.keys, layer.values = (t.contiguous() for t in damage_kv(layer.keys, layer.values))

    handle = model.register_forward_pre_hook(damage, with_kwargs=True)

    def remove() -> None:
        handle.remove()

    return remove


def _plant_cross(model: Any, fault: str) -> Callable[[], None]:
    """Damage what the encoder wrote once, before the second token; or the decoder's own cache before each."""

    def damage(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if cache is None or (fault != SELF_FAULT and getattr(cache, "damaged", False)):
            return
        cache.damaged = True
        own, cross = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        for mine, heard in zip(own, cross, strict=True):
            if fault == SELF_FAULT:
                length = mine.keys.shape[2]
                mine.keys, mine.values = heard.keys[:, :, :length].clone(), heard.values[:, :, :length].clone()
            else:
                heard.keys, heard.values = (t.contiguous() for t in CROSS_FAULTS[fault](heard.keys, heard.values))

    handle = model.register_forward_pre_hook(damage, with_kwargs=True)

    def remove() -> None:
        handle.remove()

    return remove


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
