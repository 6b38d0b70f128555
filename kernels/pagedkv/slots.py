"""Slot arithmetic: a token of the cache is one integer, `slot = block * block_size + token_in_block`.

A slot mapping holds one slot per token of a step; a negative entry says "do not write this token" (the padding of a
captured graph, a token whose KV another worker owns).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DO_NOT_WRITE = -1
"""The slot of a token that the cache must not receive."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def to_slot(block: int, token: int, block_size: int) -> int:
    """Return the slot of `token` (0 <= token < block_size) in `block`.

    Raises:
        IndexError: if the token does not lie in the block.
    """
    if block < 0 or not 0 <= token < block_size:
        raise IndexError(f"token {token} of block {block}: expected block >= 0 and 0 <= token < {block_size}")
    return block * block_size + token


def from_slot(slot: int, block_size: int) -> tuple[int, int]:
    """Return `(block, token)` of a slot; the inverse of `to_slot`.

    Raises:
        IndexError: if the slot is negative: it names no place in the cache.
    """
    if slot < 0:
        raise IndexError(f"slot {slot} names no place in the cache; expected a slot >= 0")
    return divmod(slot, block_size)


def slot_mapping(blocks: Sequence[int], first: int, count: int, block_size: int) -> list[int]:
    """Return the slots of positions `first .. first + count - 1` of a sequence whose block-table row is `blocks`.

    Raises:
        IndexError: if the row is too short for the last position.
    """
    needed = blocks_needed(first + count, block_size)
    if needed > len(blocks):
        raise IndexError(f"positions up to {first + count - 1} need {needed} blocks; the row has {len(blocks)}")
    return [to_slot(blocks[p // block_size], p % block_size, block_size) for p in range(first, first + count)]
