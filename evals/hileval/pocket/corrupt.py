"""Planted faults: what a pocket model's exact match becomes when its caches are damaged.

Each fault is one that a wrong kernel or a wrong layout makes. Those of a cache are applied to transformers' cache
during decoding, once, between the prompt and the first decode step; those of a setting hold for the whole answer. A
gate that stays green under them would be watching something else. Some are expected to be invisible and are kept to
say so: moving K and V of a layer together, because attention does not depend on the order of its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hileval.pocket.damage import CROSS_FAULTS, KV_FAULTS, LATENT_FAULTS, PACKED_FAULTS
from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

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
            f"no fault {fault!r}", where="hileval.pocket.corrupt", remedy=f"one of {', '.join(faults(model))}"
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
