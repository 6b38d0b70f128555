"""Planted faults: what the pocket hybrid's exact match becomes when its caches are damaged.

Each fault is one that a wrong kernel or a wrong layout makes, applied to transformers' cache during decoding (after the
prompt). A gate that stays green under them would be watching something else. One fault is expected to be invisible and
is kept to say so: moving K and V of a layer together, because attention does not depend on the order of its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

BLOCK = 16
"""Tokens per block of the faults that act on blocks."""


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


KV_FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "V of one layer zeroed": _zero_values,
    "K and V of one layer swapped": _swap,
    "V of one layer shifted by one block": _shift_values,
    "KV heads of V of one layer swapped": _heads_swapped,
    "one block of one layer overwritten by another": _stale_block,
    "K and V of one layer moved together (invisible to attention)": _moved_together,
}
"""Name -> (keys, values) -> damaged (keys, values); each [num_seqs, num_kv_heads, seq_len, head_size]."""

STATE_FAULT = "conv and SSM state of every layer zeroed"
FAULTS = (*KV_FAULTS, STATE_FAULT)


def plant(model: Any, fault: str) -> Callable[[], None]:
    """Make a transformers pocket hybrid suffer a fault once per answer, between prompt and first decode step.

    Args:
        model: GraniteMoeHybridForCausalLM.
        fault: A name in `FAULTS`.

    Returns:
        A function that removes the fault again.

    Raises:
        MisuseError: no such fault.
    """
    if fault not in FAULTS:
        raise MisuseError(f"no fault {fault!r}", where="hileval.pocket.corrupt", remedy=f"one of {', '.join(FAULTS)}")

    def damage(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        already = getattr(cache, "damaged", False)
        if cache is None or already or ids is None or ids.shape[1] != 1:
            return
        cache.damaged = True
        types = model.config.layer_types
        if fault == STATE_FAULT:
            layers = [layer for layer, kind in zip(cache.layers, types, strict=True) if kind == "linear_attention"]
            for states in (states for layer in layers for states in (layer.conv_states, layer.recurrent_states)):
                for state in states.values():
                    state.zero_()
        else:
            layer = cache.layers[types.index("full_attention")]
            layer.keys, layer.values = (t.contiguous() for t in KV_FAULTS[fault](layer.keys, layer.values))

    handle = model.register_forward_pre_hook(damage, with_kwargs=True)

    def remove() -> None:
        handle.remove()

    return remove
