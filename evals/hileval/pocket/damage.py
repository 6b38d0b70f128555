"""What a planted fault does to keys and values: pure functions on a layer's cache, and their names.

A shift or a copy moves whole blocks, as a wrong block table or a wrong stride does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Damage = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """(keys, values) -> damaged (keys, values); each [num_seqs, num_kv_heads, seq_len, channels]."""

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
